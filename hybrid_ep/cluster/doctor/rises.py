"""Counters that should not rise: within a second of this run, and since the last run, which a state file remembers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybrid_ep.cluster.doctor.model import Counters, Finding, Status
from hybrid_ep.cluster.doctor.profile import Profile
from hybrid_ep.cluster.doctor.registry import shorten
from hybrid_ep.inputs import read_json_input

_SCHEMA = 1


@dataclass(frozen=True)
class Limits:
    """How fast a counter may rise; one that is named nowhere must not rise.

    Attributes:
        per_s: counters that rise on sound links, by so much a second.
        per_h: counters of which a few events an hour are no fault; within less than an hour, as many as in one.
    """

    per_s: Mapping[str, int]
    per_h: Mapping[str, int]

    @classmethod
    def of(cls, profile: Profile, section: str) -> Limits:
        """The limits of one section of the profile: ``gpu``, ``nvlink``, ``nic`` or ``host``."""
        return cls(*(profile[f"{section}.error_rise_per_{unit}"] or {} for unit in ("s", "h")))

    def allowed(self, counter: str, seconds: float) -> float:
        """The greatest rise within so many seconds that is no fault."""
        if counter in self.per_s:
            return self.per_s[counter] * seconds
        return self.per_h.get(counter, 0) * max(seconds / 3600, 1.0)

    def describe(self, counter: str) -> str:
        """``100/s``, ``10/h`` or ``0``."""
        if counter in self.per_s:
            return f"{self.per_s[counter]}/s"
        return f"{self.per_h[counter]}/h" if counter in self.per_h else "0"


@dataclass
class Memory:
    """The counters of the last run, in a file.

    Attributes:
        path: the file.
        unix_time_s: when they were read; 0 where there was no run before.
        counters: check id → what it read.
        complaint: why the file's content was not used; empty where it was, or where there is none yet.
    """

    path: Path
    unix_time_s: float = 0.0
    counters: dict[str, dict[tuple[str, str], int]] = field(default_factory=dict)
    complaint: str = ""
    _now: dict[str, Counters] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Memory:
        """Reads the file. One that is damaged is started over: a lost memory is no fault of the node."""
        try:
            tree = read_json_input(path)
            if tree["schema"] != _SCHEMA:
                raise ValueError(f"schema {tree['schema']!r}")
            counters = {
                str(check_id): {(str(thing), str(name)): int(value) for thing, name, value in rows}
                for check_id, rows in tree["counters"].items()
            }
            return cls(path, float(tree["unix_time_s"]), counters)
        except FileNotFoundError:
            return cls(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return cls(path, complaint=f"state file {path} is not used: {error!r}")

    def elapsed_s(self) -> float:
        """Seconds since the last run; 0 where there was none, or where the clock went back."""
        return max(0.0, time.time() - self.unix_time_s) if self.unix_time_s else 0.0

    def note(self, check_id: str, counters: Counters) -> None:
        """Remembers what a check read in this run."""
        self._now[check_id] = counters

    def save(self) -> None:
        """Replaces the file at once: a run that is killed leaves the old one. Checks that did not run keep theirs.

        If the file cannot be written, `complaint` says so. That is no fault of the node.
        """
        rows = {
            check_id: [[thing, name, value] for (thing, name), value in counters.items()]
            for check_id, counters in {**self.counters, **self._now}.items()
        }
        tree: dict[str, Any] = {"schema": _SCHEMA, "unix_time_s": round(time.time(), 3), "counters": rows}
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            beside.write_text(json.dumps(tree))
            beside.replace(self.path)
        except OSError as error:
            self.complaint = f"state file {self.path} cannot be written: {error.strerror}"


def judge_rise(
    limits: Limits, before: Counters, after: Counters, seconds: float, earlier: Counters, earlier_s: float
) -> tuple[Finding, Counters]:
    """Fails on a counter that rose faster than the limits allow.

    Args:
        limits: of the profile.
        before, after: two readings of this run, `seconds` apart.
        earlier: what the last run read, `earlier_s` ago; empty where nothing is remembered.

    Returns:
        The finding, and the second reading, to be remembered.
    """
    rises = {key: after[key] - value for key, value in before.items() if key in after}
    most: dict[str, int] = {}
    faults = []
    for (thing, counter), rise in rises.items():
        if rise > limits.allowed(counter, seconds):
            faults.append(_fault(thing, counter, rise, f"{seconds:.1f} s", limits))
        elif rise > 0:
            most[counter] = max(rise, most.get(counter, 0))
    if earlier_s:
        for (thing, counter), value in before.items():
            # A counter that is lower than it was started over, with the driver or the node.
            rise = value - known if value >= (known := earlier.get((thing, counter), value)) else value
            if rise > limits.allowed(counter, earlier_s):
                faults.append(_fault(thing, counter, rise, f"{earlier_s / 3600:.1f} h since the last run", limits))
    tolerated = "".join(f"; {counter} by {rise} at most, which is normal" for counter, rise in most.items())
    since = f" and in {earlier_s / 3600:.1f} h since the last run" if earlier_s else ""
    seen = f"{len(rises)} counters in {seconds:.1f} s{since}: no fault{tolerated}"
    return (Finding(Status.FAIL, shorten(faults)) if faults else Finding(Status.PASS, seen)), after


def _fault(thing: str, counter: str, rise: int, interval: str, limits: Limits) -> str:
    return f"{thing} {counter} rose by {rise} in {interval}, allowed: {limits.describe(counter)}"
