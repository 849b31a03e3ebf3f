"""Chooses the checks and runs them. Counters are read at the start and again at the end, at least a second later."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hybrid_ep._version import __version__
from hybrid_ep.doctor.facts import collect_facts
from hybrid_ep.doctor.model import Check, Counters, Finding, Report, Result, Severity, Status
from hybrid_ep.doctor.node import Node
from hybrid_ep.doctor.profile import Profile
from hybrid_ep.doctor.registry import GROUPS, all_checks
from hybrid_ep.doctor.survey import shorten
from hybrid_ep.doctor.unreadable import Unreadable
from hybrid_ep.errors import ConfigError

__all__ = ["Selection", "examine"]

_SAMPLE_INTERVAL_S = 1.0
Readings = Mapping[str, "Counters | Unreadable"]


@dataclass(frozen=True)
class Selection:
    """Which checks to run: those of the groups and those of the ids; all where neither is given.

    Attributes:
        groups: these groups.
        ids: these checks.
        quick: of whole groups only checks that need neither a second reading nor another program.

    Raises:
        ConfigError: a group or check does not exist.
    """

    groups: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    quick: bool = False

    def __post_init__(self) -> None:
        known = tuple(check.id for check in all_checks())
        for kind, given, allowed in (("group", self.groups, GROUPS), ("check", self.ids, known)):
            wrong = [name for name in given if name not in allowed]
            if wrong:
                raise ConfigError(f"{kind} {wrong[0]!r} does not exist; allowed: {', '.join(allowed)}")

    def takes(self, check: Check) -> bool:
        """Whether the check is chosen."""
        of_group = check.group in self.groups or not (self.groups or self.ids)
        return check.id in self.ids or (of_group and (check.quick or not self.quick))


def _wait(since: float) -> float:
    """Sleeps until a second after `since` (of time.monotonic) and returns how many have passed."""
    time.sleep(max(0.0, since + _SAMPLE_INTERVAL_S - time.monotonic()))
    return time.monotonic() - since


def examine(
    node: Node,
    profile: Profile,
    profile_source: str,
    selection: Selection | None = None,
    *,
    wait: Callable[[float], float] = _wait,
) -> Report:
    """Runs the chosen checks.

    Args:
        node: what to examine.
        profile: what to expect.
        profile_source: why this profile, for the report.
        selection: None = every check.
        wait: waits before counters are read again; takes when they were read first, returns the seconds since then.
    """
    started = time.monotonic()
    chosen = [check for check in all_checks() if (selection or Selection()).takes(check)]
    applicable = [check for check in chosen if _applies(check, profile)]
    before = _read_counters(node, profile, applicable)
    first_reading = time.monotonic()
    findings = {check.id: _examine(check, node, profile) for check in applicable if check.examine is not None}
    if before:
        interval_s = wait(first_reading)
        after = _read_counters(node, profile, applicable)
        for check in applicable:
            if check.sample is not None:
                rise_per_s = profile[check.rise_per_s]
                findings[check.id] = _judge_rise(before[check.id], after[check.id], rise_per_s, interval_s)
    return Report(
        hybrid_ep=__version__,
        host=node.hostname(),
        profile=profile.name,
        profile_source=profile_source,
        duration_s=round(time.monotonic() - started, 3),
        results=tuple(_result(check, findings[check.id], profile) for check in applicable),
        not_applicable=tuple(check.id for check in chosen if check not in applicable),
        facts=collect_facts(node, profile),
    )


def _applies(check: Check, profile: Profile) -> bool:
    if profile.severity_of(check.id) == "off":
        return False
    return all(profile[key] or (check.zero_is_wish and profile[key] == 0) for key in check.wants)


def _examine(check: Check, node: Node, profile: Profile) -> Finding:
    assert check.examine is not None
    try:
        return check.examine(node, profile)
    except Unreadable as error:
        return Finding(Status.UNKNOWN, str(error))


def _read_counters(node: Node, profile: Profile, checks: list[Check]) -> Readings:
    readings: dict[str, Counters | Unreadable] = {}
    for check in checks:
        if check.sample is not None:
            try:
                readings[check.id] = check.sample(node, profile)
            except Unreadable as error:
                readings[check.id] = error
    return readings


def _judge_rise(
    before: Counters | Unreadable, after: Counters | Unreadable, rise_per_s: Mapping[str, int], interval_s: float
) -> Finding:
    """Fails on a counter that rose faster than the profile allows; one that it does not name must not rise at all."""
    for reading in (before, after):
        if isinstance(reading, Unreadable):
            return Finding(Status.UNKNOWN, str(reading))
    assert not isinstance(before, Unreadable)
    assert not isinstance(after, Unreadable)
    rises = {key: after[key] - value for key, value in before.items() if key in after}
    faults = []
    most: dict[str, int] = {}
    for (thing, counter), rise in rises.items():
        allowed = rise_per_s.get(counter, 0)
        if rise > allowed * interval_s:
            faults.append(f"{thing} {counter} rose by {rise} in {interval_s:.1f} s, allowed: {allowed}/s")
        elif rise > 0:
            most[counter] = max(rise, most.get(counter, 0))
    tolerated = "".join(f"; {counter} by {rise} at most, which is normal" for counter, rise in most.items())
    seen = f"{len(rises)} counters in {interval_s:.1f} s: no fault{tolerated}"
    return Finding(Status.FAIL, shorten(faults)) if faults else Finding(Status.PASS, seen)


def _result(check: Check, finding: Finding, profile: Profile) -> Result:
    return Result(
        id=check.id,
        group=check.group,
        title=check.title,
        status=finding.status,
        severity=Severity(profile.severity_of(check.id) or check.severity),
        seen=finding.seen,
        expected=profile.fill(check.expectation),
        source=check.source,
        remedy="" if finding.status is Status.PASS else check.remedy,
    )
