"""What only several nodes together show: one set of versions, one clique per domain, complete domains, one clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_ep._version import __version__
from hybrid_ep.doctor.model import Finding, Report, Result, Severity, Status
from hybrid_ep.errors import ConfigError

__all__ = ["COMPARISONS", "Comparison", "compare"]

_Values = dict[str, list[str]]  # value → hosts that have it


@dataclass(frozen=True)
class Comparison:
    """One cross-node check.

    Attributes:
        id, title, expectation, remedy: as in `hybrid_ep.doctor.model.Check`.
        judge: looks at all reports.
    """

    id: str
    title: str
    expectation: str
    remedy: str
    judge: Callable[[Sequence[Report]], Finding]


def compare(reports: Sequence[Report]) -> Report:
    """Sets reports of several nodes side by side.

    Returns:
        A report of the group; `host` counts the nodes.

    Raises:
        ConfigError: fewer than two reports, or two of one node.
    """
    hosts = [report.host for report in reports]
    if len(reports) < 2:
        raise ConfigError(f"compare got {len(reports)} report; allowed: two or more")
    if len(set(hosts)) < len(hosts):
        raise ConfigError(f"compare got two reports of one node: {', '.join(sorted(hosts))}")
    results = []
    for item in COMPARISONS:
        finding = item.judge(reports)
        remedy = "" if finding.status is Status.PASS else item.remedy
        fields = (finding.status, Severity.ERROR, finding.seen, item.expectation, "the nodes' reports", remedy)
        results.append(Result(item.id, "compare", item.title, *fields))
    profiles = "/".join(sorted({report.profile for report in reports}))
    return Report(__version__, f"{len(reports)} nodes", profiles, "the nodes' reports", 0.0, tuple(results))


def _hosts(hosts: list[str]) -> str:
    more = f" and {len(hosts) - 4} more" if len(hosts) > 4 else ""
    return ", ".join(hosts[:4]) + more


def _one_value(reports: Sequence[Report], read: Callable[[Report], Any]) -> Finding:
    """Passes when every node gives the same value; a node that gives none makes it unknown."""
    values: _Values = defaultdict(list)
    silent: list[str] = []
    for report in reports:
        value = read(report)
        (silent if value in (None, []) else values[str(value)]).append(report.host)
    if len(values) > 1:
        return Finding(Status.FAIL, "; ".join(f"{value}: {_hosts(hosts)}" for value, hosts in sorted(values.items())))
    if silent:
        return Finding(Status.UNKNOWN, f"not known on {_hosts(silent)}")
    return Finding(Status.PASS, next(iter(values)))


def _gpu_nodes(reports: Sequence[Report]) -> list[Report]:
    return [report for report in reports if report.profile != "cpu"]


def _driver(reports: Sequence[Report]) -> Finding:
    nodes = _gpu_nodes(reports)
    return _one_value(nodes, lambda report: report.facts["driver"]) if nodes else Finding(Status.PASS, "no GPU node")


def _packages(reports: Sequence[Report]) -> Finding:
    """Compares package by package, so that the report names the one that differs."""
    names = sorted({name for report in reports for name in report.facts["packages"] or {}})
    unknown = [report.host for report in reports if report.facts["packages"] is None]
    faults = []
    for name in names:
        values: _Values = defaultdict(list)
        for report in reports:
            if report.facts["packages"] is not None:
                values[report.facts["packages"].get(name, "missing")].append(report.host)
        if len(values) > 1:
            versions = (f"{version} on {_hosts(hosts)}" for version, hosts in sorted(values.items()))
            faults.append(f"{name}: {', '.join(versions)}")
    if faults:
        return Finding(Status.FAIL, "; ".join(faults))
    if unknown:
        return Finding(Status.UNKNOWN, f"not known on {_hosts(unknown)}")
    return Finding(Status.PASS, f"{len(names)} packages agree")


def _domains(reports: Sequence[Report]) -> dict[tuple[str, int], list[tuple[Report, int]]]:
    """(cluster UUID, clique) → nodes with the number of their GPUs in it."""
    domains: dict[tuple[str, int], list[tuple[Report, int]]] = defaultdict(list)
    for report in reports:
        counts: dict[tuple[str, int], int] = defaultdict(int)
        for gpu in report.facts["gpus"]:
            if gpu["cluster_uuid"] and gpu["cluster_uuid"].strip("0"):
                counts[gpu["cluster_uuid"], gpu["clique"]] += 1
        for key, count in counts.items():
            domains[key].append((report, count))
    return domains


def _multi_node(reports: Sequence[Report]) -> list[Report]:
    return [report for report in reports if report.facts["domain_gpus"]]


def _clique(reports: Sequence[Report]) -> Finding:
    """Every node is in one clique, and all nodes of a cluster are in the same."""
    nodes = _multi_node(reports)
    if not nodes:
        return Finding(Status.PASS, "no multi-node domain")
    domains = _domains(nodes)
    in_domain = {report.host for members in domains.values() for report, _ in members}
    outside = [report.host for report in nodes if report.host not in in_domain]
    cliques: dict[str, dict[int, list[str]]] = defaultdict(dict)
    for (uuid, clique), members in domains.items():
        cliques[uuid][clique] = [report.host for report, _ in members]
    faults = [
        f"cluster {uuid}: "
        + ", ".join(f"clique {clique} on {_hosts(hosts)}" for clique, hosts in sorted(found.items()))
        for uuid, found in cliques.items()
        if len(found) > 1
    ]
    faults += [f"in no domain: {_hosts(outside)}"] if outside else []
    return Finding.judge(faults, f"{len(domains)} domains, one clique each")


def _complete(reports: Sequence[Report]) -> Finding:
    nodes = _multi_node(reports)
    if not nodes:
        return Finding(Status.PASS, "no multi-node domain")
    faults = []
    for (uuid, clique), members in _domains(nodes).items():
        want = members[0][0].facts["domain_gpus"]
        have = sum(count for _, count in members)
        if have != want:
            faults.append(f"cluster {uuid} clique {clique}: {have} of {want} GPUs on {len(members)} nodes")
    return Finding.judge(faults, f"{len(_domains(nodes))} domains complete")


def _clock(reports: Sequence[Report]) -> Finding:
    """Two clocks differ by no more than the sum of their distances from true time."""
    loose = [report.host for report in reports if report.facts["clock"] and not report.facts["clock"]["synchronized"]]
    if loose:
        return Finding(Status.FAIL, f"not synchronised: {_hosts(loose)}")
    unknown = [report.host for report in reports if not report.facts["clock"]]
    if unknown:
        return Finding(Status.UNKNOWN, f"not known on {_hosts(unknown)}")
    errors = sorted((report.facts["clock"]["max_error_us"], report.host) for report in reports)
    skew_ms = (errors[-1][0] + errors[-2][0]) / 1000
    allowed_ms = min(
        (report.facts["clock_error_ms"] for report in reports if report.facts["clock_error_ms"]), default=0
    )
    seen = f"at most {skew_ms:.1f} ms, between {errors[-1][1]} and {errors[-2][1]}"
    return Finding(Status.FAIL if allowed_ms and skew_ms > allowed_ms else Status.PASS, seen)


COMPARISONS = (
    Comparison(
        "compare.profile",
        "platform",
        "one profile",
        "Nodes of different platforms do not belong into one group; give --profile where the proposal is wrong.",
        lambda reports: _one_value(reports, lambda report: report.profile),
    ),
    Comparison(
        "compare.driver", "NVIDIA driver version", "one version", "Install the same driver on every node.", _driver
    ),
    Comparison(
        "compare.packages",
        "Python packages",
        "one version of each",
        "Use one image or one lock file on every node.",
        _packages,
    ),
    Comparison(
        "compare.nic_firmware",
        "NIC firmware",
        "the same on every node",
        "Bring the NICs to one firmware version.",
        lambda reports: _one_value(reports, lambda report: ", ".join(report.facts["nic_firmware"]) or "none"),
    ),
    Comparison(
        "compare.clique",
        "clique of each multi-node domain",
        "one clique for each cluster UUID, every node in one",
        "Check the partitions of the NVLink switch controller and the IMEX node list.",
        _clique,
    ),
    Comparison(
        "compare.domain_complete",
        "complete multi-node domains",
        "as many GPUs as the profile's mnnvl.domain_gpus",
        "Find the missing compute trays: powered off, not registered with the fabric, or not in this group.",
        _complete,
    ),
    Comparison(
        "compare.clock",
        "clock skew",
        "all synchronised, within the profile's host.clock_error_ms",
        "Run an NTP or PTP client on every node against the same servers.",
        _clock,
    ),
)
