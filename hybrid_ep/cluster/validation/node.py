"""One host of the inventory: what its doctor reported, or why there is no report."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hybrid_ep.cluster.doctor.model import Report, Result, Severity, Status
from hybrid_ep.cluster.validation.causes import OTHER, cause_of
from hybrid_ep.cluster.validation.results import Host, Unreachable, name_inside, read_node
from hybrid_ep.errors import ConfigError

__all__ = ["REPORTED", "Node", "load_node"]

REPORTED = "node.report"  # id of the check that a host gave a report at all
_PROMPT = "Run hybrid-ep doctor on it by hand"


@dataclass(frozen=True)
class Node:
    """One host of the inventory.

    Attributes:
        name, platform, domain: as in the inventory.
        report: the doctor's, with `REPORTED` as its first result; only that one if there is none.
        reported: whether the doctor's results are in it.
    """

    name: str
    platform: str
    domain: str
    report: Report
    reported: bool

    @property
    def is_fit(self) -> bool:
        """Fit for jobs: it gave a report, and nothing confirmed a fault. What could not be read excludes no host."""
        return self.reported and self.report.status is not Status.FAIL

    @property
    def problems(self) -> list[Result]:
        """What did not pass: confirmed faults first, then unknowns, then warnings."""
        order = {"fail": 0, "unknown": 1, "warn": 2}
        wrong = [result for result in self.report.results if result.status is not Status.PASS]
        return sorted(wrong, key=lambda result: (result.severity is Severity.WARNING, order[result.shown_as]))


def load_node(folder: Path, host: Host) -> Node:
    """A host's report under the name of the inventory, with our own check in front."""
    try:
        found = read_node(folder, host.name)
    except ConfigError as error:
        remedy = f"{_PROMPT} and look at what it writes; then gather its result again."
        return _silent(host, Status.UNKNOWN, name_inside(folder, error), remedy)
    if found is None:
        return _silent(host, Status.FAIL, "no result", f"{_PROMPT}; find out why its result was not gathered.")
    if isinstance(found, Unreachable):
        cause = cause_of(found.reason)
        remedy = f"{_PROMPT} and look at what it writes." if cause is OTHER else cause.remedy
        remedy = f"{remedy} Then validate it again."
        return _silent(host, Status.FAIL, f"unreachable: {found.reason}", remedy)
    if not found.results:
        return _silent(host, Status.UNKNOWN, "a report without any result", f"{_PROMPT}: no check applied.")
    called = f"as {found.host}, " if found.host != host.name else ""
    seen = f"{called}{len(found.results)} checks of profile {found.profile}"
    own = _reported(Status.PASS, seen, "")
    report = replace(found, host=host.name, results=(own, *found.results))
    return Node(host.name, host.platform, host.domain, report, reported=True)


def _silent(host: Host, status: Status, seen: str, remedy: str) -> Node:
    report = Report("", host.name, host.platform, "the inventory", 0.0, (_reported(status, seen, remedy),))
    return Node(host.name, host.platform, host.domain, report, reported=False)


def _reported(status: Status, seen: str, remedy: str) -> Result:
    where = ("a report of hybrid-ep doctor", "nodes/ of the results folder", remedy)
    return Result(REPORTED, "node", "the host gave a report", status, Severity.ERROR, seen, *where)
