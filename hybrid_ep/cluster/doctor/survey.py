"""Applies one check to many devices: every GPU, every link, every port."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from hybrid_ep.cluster.doctor.model import Finding, Status
from hybrid_ep.watched import Unreadable

__all__ = ["shorten", "survey"]

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
