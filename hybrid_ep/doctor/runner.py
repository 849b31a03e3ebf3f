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
from hybrid_ep.doctor.unreadable import Unreadable
from hybrid_ep.errors import ConfigError

__all__ = ["Selection", "examine"]

_SAMPLE_INTERVAL_S = 1.0
Readings = Mapping[str, "Counters | Unreadable"]


@dataclass(frozen=True)
class Selection:
    """Which checks to run.

    Attributes:
        groups: only these groups; empty = all.
        ids: only these checks; empty = all.
        quick: only checks that need neither a second reading nor another program.

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
        if self.ids:
            return check.id in self.ids
        return (not self.groups or check.group in self.groups) and (check.quick or not self.quick)


def examine(
    node: Node,
    profile: Profile,
    profile_source: str,
    selection: Selection | None = None,
    *,
    pause: Callable[[float], None] = time.sleep,
) -> Report:
    """Runs the chosen checks.

    Args:
        node: what to examine.
        profile: what to expect.
        profile_source: why this profile, for the report.
        selection: None = every check.
        pause: waits so many seconds before counters are read again.
    """
    started = time.monotonic()
    chosen = [check for check in all_checks() if (selection or Selection()).takes(check)]
    applicable = [check for check in chosen if _applies(check, profile)]
    before = _read_counters(node, profile, applicable)
    first_reading = time.monotonic()
    findings = {check.id: _examine(check, node, profile) for check in applicable if check.examine is not None}
    if before:
        pause(max(0.0, _SAMPLE_INTERVAL_S - (time.monotonic() - first_reading)))
        after = _read_counters(node, profile, applicable)
        for check in applicable:
            if check.sample is not None:
                allowed = int(profile[check.allowed_rise])
                findings[check.id] = _judge_rise(before[check.id], after[check.id], allowed)
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


def _judge_rise(before: Counters | Unreadable, after: Counters | Unreadable, allowed: int) -> Finding:
    for reading in (before, after):
        if isinstance(reading, Unreadable):
            return Finding(Status.UNKNOWN, str(reading))
    assert not isinstance(before, Unreadable)
    assert not isinstance(after, Unreadable)
    rises = {name: after[name] - value for name, value in before.items() if name in after}
    risen = [f"{name} rose by {rise}" for name, rise in rises.items() if rise > allowed]
    return Finding.judge(risen, f"{len(rises)} counters, none rose by more than {allowed}")


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
