"""Finds the hosts that test jobs blame: a host that failed jobs share, or a host that is slow with all others.

A failed job of two hosts blames neither. Several failed jobs blame a host if all of its jobs failed, while its
partners' other jobs passed. They also blame a host that died in between: its first jobs passed, and its partners failed
with no other host. A failed job of one host blames that host. What jobs of many hosts say is found by `bisection`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from hybrid_ep.cluster.doctor.model import Result, Severity, Status
from hybrid_ep.cluster.validation.bisection import Bisection, Run, bisect
from hybrid_ep.cluster.validation.causes import LATE, SLOW, cause_of
from hybrid_ep.cluster.validation.judge import Job, PairTable
from hybrid_ep.report.units import shorten_names

GROUP = "jobs"  # of the findings of test jobs about a node
BISECTED = "jobs.bisected"
OF_HOSTS = ("jobs.alone", "jobs.failed", "jobs.slow", BISECTED)
_FEWEST_FAILED = 2
_FEWEST_FAILED_BESIDE_PASSED = 3
_FEWEST_PAIRS = 3
_SLOW = 0.7  # of the median of the pairs without the host


def blame(jobs: Sequence[Job], tables: Iterable[PairTable], domain_of: Mapping[str, str]) -> dict[str, list[Result]]:
    """Host → what test jobs found against it; hosts without findings are not in it.

    Args:
        jobs: judged.
        tables: of their pairs.
        domain_of: host → NVLink domain, or nothing.
    """
    found: dict[str, list[Result]] = defaultdict(list)
    for job in jobs:
        if len(job.hosts) == 1 and job.status == "fail":
            found[job.hosts[0]].append(_alone(job))
    for kind in ("pair", "link", "nic"):  # by itself: a host can pass the one and fail the other with everybody
        of_kind = [job for job in jobs if job.kind == kind]
        for host, failed in _shared(of_kind, set(found)).items():
            found[host].append(_with_others(host, failed, of_kind))
    for host, (table, best, usual) in _slow(jobs, tables, set(found)).items():
        found[host].append(_slow_result(host, table, best, usual))
    for host in bisect_jobs(jobs, domain_of, set(found)).blamed:
        found[host].append(_bisected(host, jobs))
    return found


def bisect_jobs(jobs: Sequence[Job], domain_of: Mapping[str, str], known: set[str]) -> Bisection:
    """What the largest failed job of many hosts, and jobs of fewer of them, blame, and which come next.

    Jobs on hosts that are `known` to be at fault say nothing. Where the largest spans several NVLink domains, neither
    does a job within one: no row leaves it.
    """
    of_many = [job for job in jobs if job.kind == "group" and len(job.hosts) > 1 and job.status in ("pass", "fail")]
    of_many = [job for job in of_many if not is_explained(job, known)]
    whole = max((job.hosts for job in of_many if job.status == "fail"), key=len, default=())

    def num_domains(hosts: Iterable[str]) -> int:
        return len({domain_of.get(host) or host for host in hosts})

    runs = [
        Run(frozenset(job.hosts), job.status == "pass")
        for job in of_many
        if {*job.hosts} <= {*whole} and (num_domains(job.hosts) > 1 or num_domains(whole) == 1)
    ]
    return bisect(whole, domain_of, runs)


def together(jobs: Sequence[Job], found: Bisection) -> list[Result]:
    """Hosts that fail together and pass otherwise, and hosts that no job tells apart, as findings between hosts."""
    sets = [("jobs.together", some, "they fail together, and pass with others") for some in found.together]
    if found.undecided and len(found.undecided) > 2:
        sets.append(("jobs.undecided", found.undecided, "no job with one of them passed"))
    results = []
    for name, some, what in sets:
        reason = next((job.reason for job in jobs if job.status == "fail" and {*some} <= {*job.hosts}), "")
        seen = f"{shorten_names(some, 8)}: {what}: {reason}"
        where = ("jobs of many hosts pass", "test jobs", cause_of(reason).remedy)
        results.append(Result(name, "bisection", "jobs of many hosts", Status.FAIL, Severity.ERROR, seen, *where))
    return results


def is_explained(job: Job, blamed: Iterable[str]) -> bool:
    """Whether a failed job ran on a host that is to blame."""
    return bool(set(job.hosts) & set(blamed))


def _shared(jobs: Sequence[Job], known: set[str]) -> dict[str, list[Job]]:
    """Host → its failed jobs, the host with most partners first. Such a host passed no job with another host, or its
    partners failed with no other host.

    Jobs that a host explains are no finding against its partners.
    """
    between = [job for job in jobs if len(job.hosts) == 2 and job.status in ("pass", "fail")]
    passed = {host for job in between if not _failed(job) for host in job.hosts}
    left = [job for job in between if _failed(job) and not is_explained(job, known)]
    found: dict[str, list[Job]] = {}
    while True:
        failed_with: dict[str, set[str]] = defaultdict(set)
        for job in left:
            for host in job.hosts:
                failed_with[host] |= {*job.hosts} - {host}
        suspects = {
            host: others
            for host, others in failed_with.items()
            if host not in passed
            or (len(others) >= _FEWEST_FAILED_BESIDE_PASSED and all(failed_with[other] == {host} for other in others))
        }
        host, partners = max(suspects.items(), key=lambda item: len(item[1]), default=("", set()))
        # If no partner passed a job with another host, the cause may lie outside the hosts.
        if len(partners) < _FEWEST_FAILED or not partners & passed:
            return found
        found[host] = [job for job in between if _failed(job) and host in job.hosts]
        left = [job for job in left if host not in job.hosts]


def _failed(job: Job) -> bool:
    """Whether it failed otherwise than by being slow: for that there are figures."""
    return job.status == "fail" and cause_of(job.reason) is not SLOW


def _slow(
    jobs: Sequence[Job], tables: Iterable[PairTable], known: set[str]
) -> dict[str, tuple[PairTable, float, float]]:
    """Host → (table, its best figure, median of the pairs without it), of hosts that are slow on all of their pairs.

    A pair that did not end in time has no figure, and counts as a slow one.
    """
    found: dict[str, tuple[PairTable, float, float]] = {}
    late = [job for job in jobs if job.kind == "pair" and _failed(job) and cause_of(job.reason) is LATE]
    late = [job for job in late if not is_explained(job, known)]
    for table in tables:
        measured = dict.fromkeys(host for figure in table.figures for host in figure.job.hosts)
        for host in (host for host in measured if host not in known | found.keys()):
            own = [figure.value for figure in table.figures if host in figure.job.hosts]
            others = [figure.value for figure in table.figures if host not in figure.job.hosts]
            num_pairs = len(own) + sum(host in job.hosts for job in late)
            if own and num_pairs >= _FEWEST_PAIRS and others and max(own) < _SLOW * (usual := median(others)):
                found[host] = (table, max(own), usual)
    return found


def _alone(job: Job) -> Result:
    title, remedy = "a test job on the host alone", cause_of(job.reason).remedy
    where = ("it ends well", job.log or f"jobs/{job.name}.json", remedy)
    return Result("jobs.alone", GROUP, title, Status.FAIL, Severity.ERROR, f"{job.name}: {job.reason}", *where)


def _bisected(host: str, jobs: Sequence[Job]) -> Result:
    failed = [job for job in jobs if job.kind == "group" and host in job.hosts and job.status == "fail"]
    smallest = min(failed, key=lambda job: len(job.hosts))
    seen = f"all {len(failed)} jobs of many hosts with it failed, and the others of these hosts passed without it: "
    where = ("they pass", smallest.log or f"jobs/{smallest.name}.json", cause_of(smallest.reason).remedy)
    shown = (Status.FAIL, Severity.ERROR, seen + smallest.reason)
    return Result(BISECTED, GROUP, "jobs of many hosts", *shown, *where)


def _with_others(host: str, failed: list[Job], jobs: Sequence[Job]) -> Result:
    reasons = dict.fromkeys(job.reason for job in failed)
    partners = {other for job in failed for other in job.hosts} - {host}
    passed = sum(job.status == "pass" and len(job.hosts) == 2 and bool(partners & set(job.hosts)) for job in jobs)
    said = "; ".join(list(reasons)[:3]) + (f"; and {len(reasons) - 3} more reasons" if len(reasons) > 3 else "")
    own = sum(host in job.hosts and len(job.hosts) == 2 and job.status in ("pass", "fail") for job in jobs)
    share = f"all {own}" if own == len(failed) else f"{len(failed)} of {own}"
    seen = f"{share} {failed[0].kind} jobs with others failed, and {passed} jobs of those others passed: {said}"
    remedy = cause_of(said).remedy
    logs = ", ".join(job.log or f"jobs/{job.name}.json" for job in failed[:3])
    where = ("jobs with other hosts pass", logs, remedy)
    return Result("jobs.failed", GROUP, "test jobs with other hosts", Status.FAIL, Severity.ERROR, seen, *where)


def _slow_result(host: str, table: PairTable, best: float, usual: float) -> Result:
    pairs = sum(host in figure.job.hosts for figure in table.figures)
    seen = f"{table.metric} is at most {best:.4g} {table.unit} on all {pairs} pairs, {best / usual:.0%} of the others'"
    expected = f"≥ {_SLOW:.0%} of the median of the other pairs, {usual:.4g} {table.unit}, on one pair"
    where = (expected, "test jobs of two hosts", SLOW.remedy)
    return Result("jobs.slow", GROUP, "bandwidth with other hosts", Status.FAIL, Severity.ERROR, seen, *where)
