"""The whole validation: nodes, findings between them, jobs, the hosts that are fit, and the outcome.

Everything that can be judged becomes a `Result` of the doctor's model. This includes what the doctor cannot report
itself: a host gave no report, or test jobs blame it. So the order of statuses, the exit code and the JUnit writer are
the doctor's.

What to do is sorted, the most serious first: faults of nodes, findings between them, and failed jobs that no node
explains.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

from hybrid_ep._version import __version__
from hybrid_ep.cluster.doctor.model import Report, Result, Severity, Status
from hybrid_ep.cluster.validation.bisection import Bisection
from hybrid_ep.cluster.validation.causes import OTHER, cause_of
from hybrid_ep.cluster.validation.culprits import BISECTED, GROUP, OF_HOSTS, bisect_jobs, blame, is_explained, together
from hybrid_ep.cluster.validation.judge import Job, PairTable, Profiles, judge, judge_by_run, pair_tables
from hybrid_ep.cluster.validation.results import (
    Host,
    Inventory,
    JobFile,
    Unreachable,
    name_inside,
    read_compare,
    read_inventory,
    read_job,
    read_node,
    stems,
)
from hybrid_ep.errors import ConfigError
from hybrid_ep.report.units import shorten_names

MOST_TABLES = 3  # of pairs, where space is short: nic jobs measure every NIC by itself


@dataclass(frozen=True)
class Cluster:
    """A validated cluster.

    Attributes:
        title, started: of the inventory.
        nodes: in the order of the inventory.
        findings: what the nodes' reports show together, and what is wrong with the results folder itself.
        jobs: by name.
    """

    title: str
    started: str
    nodes: tuple[Node, ...]
    findings: Report
    jobs: tuple[Job, ...]

    @property
    def status(self) -> Status:
        """The worst of all nodes, findings and jobs; a skipped job does not count."""
        jobs = (Status(job.status) for job in self.jobs if job.status != "skipped")
        return Status.worst([*(node.report.status for node in self.nodes), self.findings.status, *jobs])

    @property
    def fit(self) -> list[Node]:
        """Nodes that are fit for test jobs."""
        return [node for node in self.nodes if node.is_fit]

    @property
    def unfit(self) -> list[Node]:
        """The others."""
        return [node for node in self.nodes if not node.is_fit]

    @property
    def headline(self) -> str:
        """How many are fit; which are not and, as long as they are few, what to do about it."""
        unfit = self.unfit
        text = f"{len(self.fit)} of {len(self.nodes)} {'node is' if len(self.nodes) == 1 else 'nodes are'} fit"
        if not unfit:
            return text
        if len(unfit) > 3:
            return f"{text}; {len(unfit)} are not: " + shorten_names([node.name for node in unfit], 8)
        return "; ".join([text, *(f"{node.name} is not: {_advice(node.problems[0])}" for node in unfit)])

    @property
    def counts(self) -> dict[str, int]:
        """How many jobs passed, failed, are unknown, were skipped."""
        counted = Counter(job.status for job in self.jobs)
        return {status: counted[status] for status in ("pass", "fail", "unknown", "skipped")}

    def to_dos(self) -> list[ToDo]:
        """What did not pass on nodes, between them and in jobs, by check and remedy; the most serious first."""
        return find_to_dos(self.nodes, self.findings.results, self.jobs, self.blamed)

    @property
    def blamed(self) -> list[str]:
        """Hosts that the test jobs speak against."""
        return [node.name for node in self.nodes if any(result.group == GROUP for result in node.report.results)]

    @cached_property
    def bisection(self) -> Bisection:
        """Of the largest job that failed without a host to blame: whom smaller ones blame, and which come next."""
        known = {
            node.name
            for node in self.nodes
            if any(result.group == GROUP and result.id != BISECTED for result in node.report.results)
        }
        return bisect_jobs(self.jobs, {node.name: node.domain for node in self.nodes}, known)

    @property
    def started_text(self) -> str:
        """When it began, for people."""
        try:
            started = datetime.fromisoformat(self.started.replace("Z", "+00:00"))
        except ValueError:
            return self.started
        return started.astimezone(timezone.utc).strftime("%-d %B %Y, %H:%M UTC")

    @cached_property
    def pair_tables(self) -> list[PairTable]:
        """Every bandwidth between two hosts; that of most pairs first."""
        return pair_tables(self.jobs)

    def to_json(self) -> dict[str, Any]:
        """What report.json holds (`report` in schemas.json): every status, and in full whatever did not pass."""
        return {
            "schema": 1,
            "hybrid_ep": __version__,
            "title": self.title,
            "started": self.started,
            "status": self.status.value,
            "exit_code": self.status.exit_code,
            "headline": self.headline,
            "nodes": [_node_json(node) for node in self.nodes],
            "to_do": [_to_do_json(to_do) for to_do in self.to_dos()],
            "findings": [_result_json(result) for result in self.findings.results],
            "jobs": [asdict(job) for job in self.jobs],
        }


def load_cluster(folder: Path) -> Cluster:
    """Reads and judges a results folder.

    Raises:
        ConfigError: the inventory is missing or malformed.
    """
    inventory = read_inventory(folder)
    platform_of = {host.name: host.platform for host in inventory.hosts}
    profiles = Profiles()
    jobs = tuple(_job(folder, name, platform_of, profiles) for name in stems(folder, "jobs"))
    jobs = judge_by_run(jobs, platform_of, profiles)
    blamed = blame(jobs, pair_tables(jobs), {host.name: host.domain for host in inventory.hosts})
    nodes = tuple(_blamed(load_node(folder, host), blamed.get(host.name, [])) for host in inventory.hosts)
    cluster = Cluster(inventory.title, inventory.started, nodes, _findings(folder, inventory, nodes), jobs)
    results = (*cluster.findings.results, *together(jobs, cluster.bisection))
    return replace(cluster, findings=replace(cluster.findings, results=results))


def _blamed(node: Node, results: list[Result]) -> Node:
    """The node with what test jobs found against it."""
    report = replace(node.report, results=(*node.report.results, *results))
    return replace(node, report=report) if results else node


def _findings(folder: Path, inventory: Inventory, nodes: tuple[Node, ...]) -> Report:
    """The comparison of nodes, and what the folder itself has too much or too little of."""
    results: list[Result] = []
    try:
        compared = read_compare(folder)
    except ConfigError as error:
        compared = None
        results.append(
            _of_folder("results.compare", Status.UNKNOWN, name_inside(folder, error), "a report", "Compare again.")
        )
    else:
        answered = sum(node.reported for node in nodes)
        if compared is None and answered > 1:
            seen = f"no compare.json, though {answered} nodes gave a report"
            remedy = "hybrid-ep doctor compare --json with the reports of all nodes that gave one."
            results.append(_of_folder("results.compare", Status.UNKNOWN, seen, "a report", remedy))
    known = {host.name for host in inventory.hosts}
    strangers = [name for name in stems(folder, "nodes") if name not in known]
    if strangers:
        seen = "in nodes/, but not in the inventory: " + shorten_names(strangers, 8)
        remedy = "Give every validation a results folder of its own, or add these hosts to the inventory."
        results.append(_of_folder("results.inventory", Status.UNKNOWN, seen, "hosts of the inventory only", remedy))
    found = compared.results if compared else ()
    return Report(__version__, "between nodes", "", "", 0.0, (*found, *results))


def _of_folder(check_id: str, status: Status, seen: str, expected: str, remedy: str) -> Result:
    title = {"results.compare": "what nodes say together", "results.inventory": "results of the inventory's hosts"}
    where = (expected, "the results folder", remedy)
    return Result(check_id, "results", title[check_id], status, Severity.ERROR, seen, *where)


def _job(folder: Path, name: str, platform_of: Mapping[str, str], profiles: Profiles) -> Job:
    try:
        return judge(read_job(folder, name), platform_of, profiles)
    except ConfigError as error:
        bad = JobFile(name, "group", (), "unknown", name_inside(folder, error), (), "")
        return judge(bad, platform_of, profiles)


def _advice(result: Result) -> str:
    return f"{result.id}: {result.remedy.rstrip('.')}"


def _node_json(node: Node) -> dict[str, Any]:
    return {
        "name": node.name,
        "platform": node.platform,
        "domain": node.domain,
        "status": node.report.status.value,
        "fit": node.is_fit,
        "profile": node.report.profile,
        "checks": {result.id: result.shown_as for result in node.report.results},
        "not_applicable": list(node.report.not_applicable),
        "problems": [_result_json(result) for result in node.problems],
    }


def _to_do_json(to_do: ToDo) -> dict[str, Any]:
    result = to_do.result
    where = {"check": result.id, "status": result.shown_as, "hosts": list(to_do.hosts)}
    return {**where, "seen": to_do.seen, "remedy": result.remedy}


def _result_json(result: Result) -> dict[str, Any]:
    return {**asdict(result), "status": result.status.value, "severity": result.severity.value}


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
