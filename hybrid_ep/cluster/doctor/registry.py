"""The list of checks. A check is a small function with a line of facts about it:

    @check("gpu.count", title="…", source="…", expectation="{gpu.count} GPUs", remedy="…", wants="gpu.count")
    def count(node: Node, profile: Profile) -> Finding: ...

A function that returns counters instead (`@counters`) is called twice, and the runner judges how much they rose.
`survey` applies one check to many devices: every GPU, every link, every port.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from hybrid_ep.cluster.doctor.model import Check, Examine, Finding, Judge, Sample, Severity, Status
from hybrid_ep.watched import Unreadable

# In the order of the report: what stands below must be right for what stands above it.
GROUPS = ("driver", "gpu", "nvlink", "mnnvl", "nic", "affinity", "gdr", "host", "software")

_checks: dict[str, Check] = {}


def check(
    id: str,
    *,
    title: str,
    source: str,
    expectation: str,
    remedy: str,
    wants: str = "",
    severity: Severity = Severity.ERROR,
    privilege: str = "",
    quick: bool = True,
    zero_is_wish: bool = False,
    of_jobs: bool = False,
) -> Callable[[Examine], Examine]:
    """Registers a function that reads and judges; the arguments are the fields of `Check`, `wants` split by spaces."""

    def register(examine: Examine) -> Examine:
        facts = (id, title, severity, privilege, source, expectation, remedy, tuple(wants.split()), quick)
        _add(Check(*facts, examine=examine, zero_is_wish=zero_is_wish, of_jobs=of_jobs))
        return examine

    return register


def counters(
    id: str,
    *,
    title: str,
    source: str,
    expectation: str,
    remedy: str,
    wants: str,
    rise: str = "",
    judge: Judge | None = None,
    severity: Severity = Severity.ERROR,
) -> Callable[[Sample], Sample]:
    """Registers a function that reads counters.

    `rise` is the profile's section with the rises that are no fault; or `judge` has a rule of its own.
    """

    def register(sample: Sample) -> Sample:
        facts = (id, title, severity, "", source, expectation, remedy, tuple(wants.split()))
        _add(Check(*facts, quick=False, sample=sample, rise=rise, judge=judge))
        return sample

    return register


def _add(item: Check) -> None:
    assert item.id not in _checks, item.id
    assert item.group in GROUPS, item.group
    _checks[item.id] = item


def all_checks() -> tuple[Check, ...]:
    """Every check, by group in the order of `GROUPS`, then by file and as the file lists them."""
    for file in pkgutil.iter_modules(importlib.import_module("hybrid_ep.cluster.doctor.checks").__path__):
        importlib.import_module(f"hybrid_ep.cluster.doctor.checks.{file.name}")
    return tuple(item for group in GROUPS for item in _checks.values() if item.group == group)


T = TypeVar("T")
_MOST_SHOWN = 6


def survey(
    things: Iterable[T],
    name: Callable[[T], str],
    fault: Callable[[T], str | None],
    good: str,
    *,
    if_none: str | None = None,
) -> Finding:
    """Examines each thing on its own, so that one that cannot be read does not hide the others.

    Args:
        things: what to examine.
        name: how a thing is called in the report.
        fault: what is wrong with it, or None; may raise Unreadable.
        good: what to say when nothing is wrong.
        if_none: passes with these words where there is nothing to examine; None: that is `unknown`, because a check
            that looked at nothing has confirmed nothing.

    Returns:
        `fail` with every fault, else `unknown` if anything could not be read, else `pass`.
    """
    things = list(things)
    if not things:
        return Finding(Status.UNKNOWN, "nothing to examine") if if_none is None else Finding(Status.PASS, if_none)
    faults: list[str] = []
    unreadable: list[str] = []
    for thing in things:
        try:
            found = fault(thing)
        except Unreadable as error:
            unreadable.append(f"{name(thing)}: {error}")
        else:
            if found:
                faults.append(f"{name(thing)}: {found}")
    if faults:
        return Finding(Status.FAIL, shorten(faults))
    return Finding(Status.UNKNOWN, shorten(unreadable)) if unreadable else Finding(Status.PASS, good)


def shorten(lines: Sequence[str]) -> str:
    """The first lines as one, and how many more there are."""
    more = f"; and {len(lines) - _MOST_SHOWN} more" if len(lines) > _MOST_SHOWN else ""
    return "; ".join(lines[:_MOST_SHOWN]) + more
