"""What to do, the most serious first: faults of nodes, findings between them, and failed jobs that no node explains."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hybrid_ep.cluster.doctor.model import Result, Severity, Status
from hybrid_ep.cluster.validation.causes import OTHER, cause_of
from hybrid_ep.cluster.validation.culprits import GROUP, OF_HOSTS, is_explained
from hybrid_ep.cluster.validation.judge import Job
from hybrid_ep.cluster.validation.node import Node

__all__ = ["ToDo", "find_to_dos"]

_ORDER = {"fail": 0, "unknown": 1, "warn": 2}
_MOST_SEEN = 3


@dataclass(frozen=True)
class ToDo:
    """Results with one cause and one remedy.

    Attributes:
        result: the first of them.
        hosts: in the order of the inventory; none where a finding names no host.
        all_seen: the different things that were seen, the most frequent first.
        of_job: whether they are failed jobs that no host explains.
    """

    result: Result
    hosts: tuple[str, ...]
    all_seen: tuple[str, ...]
    of_job: bool = False

    @property
    def seen(self) -> str:
        """What was seen, in one line; of many different things the first."""
        more = len(self.all_seen) - _MOST_SEEN
        return "; or ".join(self.all_seen[:_MOST_SEEN]) + (f"; or {more} more like these" if more > 0 else "")


def find_to_dos(
    nodes: Sequence[Node], findings: Iterable[Result], jobs: Iterable[Job], blamed: Iterable[str]
) -> list[ToDo]:
    """Merges what did not pass by check and remedy; of equal seriousness, what most hosts have comes first."""
    found: dict[tuple[str, str, str], list[tuple[tuple[str, ...], Result]]] = defaultdict(list)
    for node in nodes:
        for result in node.problems:
            found[result.id, result.shown_as, result.remedy].append(((node.name,), result))
    for result in findings:
        if result.status is not Status.PASS:
            found[result.id, result.shown_as, result.remedy].append(((), result))
    for job in jobs:
        if job.status in ("fail", "unknown") and not is_explained(job, blamed):
            result = _of_job(job)
            found[result.id, result.shown_as, result.remedy].append((job.hosts, result))
    place = {node.name: index for index, node in enumerate(nodes)}
    to_dos = [_merged(items, place) for items in found.values()]
    return sorted(to_dos, key=lambda to_do: (_ORDER[to_do.result.shown_as], _place(to_do), -len(to_do.hosts)))


def _place(to_do: ToDo) -> int:
    """Hosts first, then findings between hosts, then jobs: a host or a finding may be why a job failed."""
    return 2 if to_do.of_job else 0 if to_do.hosts else 1


def _merged(items: list[tuple[tuple[str, ...], Result]], place: dict[str, int]) -> ToDo:
    hosts = sorted({host for some, _ in items for host in some}, key=lambda host: place.get(host, len(place)))
    counts: dict[str, int] = defaultdict(int)
    for _, result in items:
        counts[result.seen] += 1
    result = items[0][1]
    all_seen = tuple(sorted(counts, key=lambda seen: -counts[seen]))
    return ToDo(result, tuple(hosts), all_seen, of_job=result.group == GROUP and result.id not in OF_HOSTS)


def _of_job(job: Job) -> Result:
    """A job that did not pass as a result; its remedy is that of its cause."""
    cause = cause_of(job.reason)
    remedy = job.remedy if cause is OTHER else cause.remedy
    where = (job.expected, job.log or f"jobs/{job.name}.json", remedy)
    seen = job.reason or "no reason given"
    name = f"{GROUP}.{cause.id}"
    return Result(name, GROUP, f"{job.kind} job", Status(job.status), Severity.ERROR, seen, *where)
