"""What only several nodes together show: one set of versions, one clique per domain, complete domains, one clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_ep._version import __version__
from hybrid_ep.cluster.doctor.model import Finding, Report, Result, Severity, Status
from hybrid_ep.errors import ConfigError
from hybrid_ep.report.units import shorten_names

_Values = dict[str, list[str]]  # value → hosts that have it


@dataclass(frozen=True)
class Comparison:
    """One cross-node check.

    Attributes:
        id, title, expectation, remedy, severity: as in `hybrid_ep.cluster.doctor.model.Check`.
        judge: looks at all reports.
    """

    id: str
    title: str
    expectation: str
    remedy: str
    judge: Callable[[Sequence[Report]], Finding]
    severity: Severity = Severity.ERROR


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
        fields = (finding.status, item.severity, finding.seen, item.expectation, "the nodes' reports", remedy)
        results.append(Result(item.id, "compare", item.title, *fields))
    profiles = "/".join(sorted({report.profile for report in reports}))
    return Report(__version__, f"{len(reports)} nodes", profiles, "the nodes' reports", 0.0, tuple(results))


def _one_value(reports: Sequence[Report], read: Callable[[Report], Any]) -> Finding:
    """Passes when every node gives the same value; a node that gives none makes it unknown."""
    values: _Values = defaultdict(list)
    silent: list[str] = []
    for report in reports:
        value = read(report)
        (silent if value in (None, []) else values[str(value)]).append(report.host)
    if len(values) > 1:
        return Finding(
            Status.FAIL, "; ".join(f"{value}: {shorten_names(hosts)}" for value, hosts in sorted(values.items()))
        )
    if silent:
        return Finding(Status.UNKNOWN, f"not known on {shorten_names(silent)}")
    return Finding(Status.PASS, next(iter(values)))


def _gpu_nodes(reports: Sequence[Report]) -> list[Report]:
    return [report for report in reports if report.profile != "cpu"]


def _driver(reports: Sequence[Report]) -> Finding:
    nodes = _gpu_nodes(reports)
    return (
        _one_value(nodes, lambda report: report.facts.get("driver")) if nodes else Finding(Status.PASS, "no GPU node")
    )


def _packages(reports: Sequence[Report]) -> Finding:
    """Compares package by package, so that the report names the one that differs."""
    names = sorted({name for report in reports for name in report.facts.get("packages") or {}})
    unknown = [report.host for report in reports if report.facts.get("packages") is None]
    faults = []
    for name in names:
        values: _Values = defaultdict(list)
        for report in reports:
            packages = report.facts.get("packages")
            if packages is not None:
                values[packages.get(name, "missing")].append(report.host)
        if len(values) > 1:
            versions = (f"{version} on {shorten_names(hosts)}" for version, hosts in sorted(values.items()))
            faults.append(f"{name}: {', '.join(versions)}")
    if faults:
        return Finding(Status.FAIL, "; ".join(faults))
    if unknown:
        return Finding(Status.UNKNOWN, f"not known on {shorten_names(unknown)}")
    return Finding(Status.PASS, f"{len(names)} packages agree")


def _domains(reports: Sequence[Report]) -> dict[tuple[str, int], list[tuple[Report, int]]]:
    """(cluster UUID, clique) → nodes with the number of their GPUs in it."""
    domains: dict[tuple[str, int], list[tuple[Report, int]]] = defaultdict(list)
    for report in reports:
        counts: dict[tuple[str, int], int] = defaultdict(int)
        for gpu in report.facts.get("gpus") or []:
            if gpu["cluster_uuid"] and gpu["cluster_uuid"].strip("0"):
                counts[gpu["cluster_uuid"], gpu["clique"]] += 1
        for key, count in counts.items():
            domains[key].append((report, count))
    return domains


def _multi_node(reports: Sequence[Report]) -> list[Report]:
    return [report for report in reports if report.facts.get("domain_gpus")]


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
        + ", ".join(f"clique {clique} on {shorten_names(hosts)}" for clique, hosts in sorted(found.items()))
        for uuid, found in cliques.items()
        if len(found) > 1
    ]
    faults += [f"in no domain: {shorten_names(outside)}"] if outside else []
    return Finding.judge(faults, f"{len(domains)} domains, one clique each")


def _complete(reports: Sequence[Report]) -> Finding:
    nodes = _multi_node(reports)
    if not nodes:
        return Finding(Status.PASS, "no multi-node domain")
    faults = []
    for (uuid, clique), members in _domains(nodes).items():
        want = members[0][0].facts.get("domain_gpus")
        have = sum(count for _, count in members)
        if have != want:
            faults.append(f"cluster {uuid} clique {clique}: {have} of {want} GPUs on {len(members)} nodes")
    return Finding.judge(faults, f"{len(_domains(nodes))} domains complete")


def _gpus(reports: Sequence[Report]) -> Finding:
    """Number, model, memory to the GiB, and power limit of the GPUs."""

    def describe(report: Report) -> str:
        kinds: dict[str, int] = defaultdict(int)
        for gpu in report.facts.get("gpus") or []:
            size = f" {gpu['memory_bytes'] / 2**30:.0f} GiB" if gpu.get("memory_bytes") else ""
            power = f" {gpu['power_limit'] / 1000:.0f} W" if gpu.get("power_limit") else ""
            kinds[f"{gpu['name']}{size}{power}"] += 1
        return ", ".join(f"{count}× {kind}" for kind, count in sorted(kinds.items()))

    nodes = _gpu_nodes(reports)
    return _one_value(nodes, lambda report: describe(report) or None) if nodes else Finding(Status.PASS, "no GPU node")


def _network(reports: Sequence[Report]) -> Finding:
    """Link layer, rate, MTU and kind of GID of the GPUs' NICs."""

    def describe(report: Report) -> str:
        kinds: dict[str, int] = defaultdict(int)
        for port in report.facts.get("ports") or []:
            parts = (
                port["link_layer"],
                f"{port['rate_gbps']:g} Gb/s",
                port["mtu"] and f"MTU {port['mtu']}",
                port["gid"],
            )
            kinds[" ".join(str(part) for part in parts if part)] += 1
        return ", ".join(f"{count}× {kind}" for kind, count in sorted(kinds.items())) or "no NIC"

    return _one_value(reports, describe)


def _memory(reports: Sequence[Report]) -> Finding:
    """The hosts' memory, in steps of 2 % of the largest: kernels differ in what they keep for themselves."""
    sizes = [float(found) for report in reports if (found := report.facts.get("memory_gib"))]
    most = max(sizes, default=1.0)

    def size(report: Report) -> str | None:
        gib = report.facts.get("memory_gib")
        return None if gib is None else f"{most:.0f} GiB" if gib >= 0.98 * most else f"{gib:.0f} GiB"

    return _one_value(reports, size)


def _vbios(reports: Sequence[Report]) -> Finding:
    def versions(report: Report) -> str | None:
        found = {str(gpu["vbios"]) for gpu in report.facts.get("gpus") or [] if gpu.get("vbios")}
        return ", ".join(sorted(found)) or None

    nodes = _gpu_nodes(reports)
    return _one_value(nodes, versions) if nodes else Finding(Status.PASS, "no GPU node")


def _pkeys(reports: Sequence[Report]) -> Finding:
    """Partition keys at index 0, of InfiniBand ports; the highest bit, full membership, is nic.pkey's."""

    def ports(report: Report) -> list[dict[str, Any]]:
        return [port for port in report.facts.get("ports") or [] if port["link_layer"] == "InfiniBand"]

    def keys(report: Report) -> str | None:
        found = [port.get("pkey") for port in ports(report)]
        known = {f"{int(key, 16) & 0x7FFF:#06x}" for key in found if key is not None}
        return None if None in found else ", ".join(sorted(known))

    nodes = [report for report in reports if ports(report)]
    return _one_value(nodes, keys) if nodes else Finding(Status.PASS, "no InfiniBand port")


def _boots(reports: Sequence[Report]) -> Finding:
    """Two nodes that share a boot id are one node, seen twice (two containers of it, or a cloned recording)."""
    hosts: _Values = defaultdict(list)
    for report in reports:
        if boot_id := report.facts.get("boot_id"):
            hosts[str(boot_id)].append(report.host)
    twice = [shorten_names(names) for names in hosts.values() if len(names) > 1]
    if twice:
        return Finding(Status.FAIL, "; ".join(f"one node under several names: {names}" for names in twice))
    unknown = [report.host for report in reports if not report.facts.get("boot_id")]
    return (
        Finding(Status.UNKNOWN, f"not known on {shorten_names(unknown)}")
        if unknown
        else Finding(Status.PASS, "all differ")
    )


def _guids(reports: Sequence[Report]) -> Finding:
    """Two NICs with one GUID: the network takes them for one device."""
    owners: _Values = defaultdict(list)
    for report in reports:
        for nic, guid in (report.facts.get("nic_guids") or {}).items():
            owners[str(guid)].append(f"{report.host} {nic}")
    twice = [f"{guid}: {shorten_names(names)}" for guid, names in sorted(owners.items()) if len(names) > 1]
    unknown = [report.host for report in reports if report.facts.get("nic_guids") is None]
    if unknown and not twice:
        return Finding(Status.UNKNOWN, f"not known on {shorten_names(unknown)}")
    return Finding.judge(twice, f"{len(owners)} GUIDs, all differ")


def _trees(reports: Sequence[Report]) -> Finding:
    """The nodes' PCIe trees, line by line; the most common one is what the others are measured by."""
    trees: _Values = defaultdict(list)
    for report in reports:
        if report.facts.get("tree"):
            trees["\n".join(report.facts["tree"])].append(report.host)
    if len(trees) > 1:
        usual, *others = sorted(trees, key=lambda tree: -len(trees[tree]))
        faults = []
        for tree in others:
            lines = [line for line in tree.split("\n") if line not in usual.split("\n")]
            missing = [line for line in usual.split("\n") if line not in tree.split("\n")]
            if any("→" not in line for line in (*lines, *missing)):  # distances follow from where the devices are
                lines, missing = ([line for line in part if "→" not in line] for part in (lines, missing))
            detail = [f"has {line}" for line in lines[:2]] + [f"lacks {line}" for line in missing[:2]]
            faults.append(f"{shorten_names(trees[tree])} {', '.join(detail)}")
        return Finding(Status.FAIL, "; ".join(faults))
    unknown = [report.host for report in reports if not report.facts.get("tree")]
    return (
        Finding(Status.UNKNOWN, f"not known on {shorten_names(unknown)}")
        if unknown
        else Finding(Status.PASS, "one tree")
    )


def _clock(reports: Sequence[Report]) -> Finding:
    """The measured offset if there was an exchange (`measured_offset`); otherwise the bounds that the nodes report."""
    clocks = {report.host: report.facts.get("clock") for report in reports}
    offsets = {report.host: found for report in reports if (found := measured_offset(report)) is not None}
    limits = [report.facts["clock_error_ms"] for report in reports if report.facts.get("clock_error_ms")]
    allowed_ms = min(limits, default=0)
    if len(offsets) == len(reports):
        ordered = sorted((low, high, host) for host, (low, high) in offsets.items())
        # The least that two clocks must differ by, whatever the exchanges took.
        first, last = min(ordered, key=lambda item: item[1]), max(ordered)
        apart_ms = max(0.0, 1000 * (last[0] - first[1]))
        seen = (
            f"at least {apart_ms:.1f} ms apart, {last[2]} ahead of {first[2]}" if apart_ms else "no difference measured"
        )
        if allowed_ms and apart_ms > allowed_ms:
            return Finding(Status.FAIL, seen)
    else:
        seen = ""
    loose = [host for host, clock in clocks.items() if clock and not clock["synchronized"]]
    if loose:
        return Finding(Status.FAIL, f"not synchronised: {shorten_names(loose)}{f'; {seen}' if seen else ''}")
    unknown = [host for host, clock in clocks.items() if not clock]
    if unknown:
        return Finding(Status.UNKNOWN, f"not known on {shorten_names(unknown)}")
    errors = sorted((clock["max_error_us"], host) for host, clock in clocks.items() if clock)
    skew_ms = (errors[-1][0] + errors[-2][0]) / 1000
    bound = f"at most {skew_ms:.1f} ms, between {errors[-1][1]} and {errors[-2][1]}, by their own bounds"
    status = Status.FAIL if allowed_ms and skew_ms > allowed_ms else Status.PASS
    return Finding(status, f"{seen}; {bound}" if seen else bound)


def measured_offset(report: Report) -> tuple[float, float] | None:
    """Bounds of the node's clock against the caller's in seconds; None where there was no exchange.

    A node starts after it was asked, so its offset is at most start − question (``--asked-at``). Its report arrives
    after it was made, so the offset is at least report − arrival (``received_s``, which who collects reports writes).
    """
    asked, received = report.facts.get("asked_s"), report.facts.get("received_s")
    started, made = report.facts.get("started_s"), report.facts.get("unix_time_s")
    if asked is None or started is None or made is None:
        return None
    high = float(started) - float(asked)
    low = float(made) - float(received) if received is not None else high - _SLOWEST_START_S
    return low, high


# How long a node may take from the request to the doctor's start, if the time of the answer was not recorded.
_SLOWEST_START_S = 60.0


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
        "compare.gpus",
        "number, model, memory and power limit of the GPUs",
        "the same on every node",
        "Another model or memory size: it does not belong into this group. Another power limit: nvidia-smi -pl.",
        _gpus,
    ),
    Comparison(
        "compare.network",
        "link layer, rate, MTU and GID of the GPUs' NICs",
        "the same on every node",
        "InfiniBand and RoCE do not reach each other; bring MTU, GID and rate of all nodes and switches together.",
        _network,
    ),
    Comparison(
        "compare.pkeys",
        "partition keys of the GPUs' InfiniBand ports, at index 0",
        "the same on every port of every node",
        "Ports in different partitions do not reach each other: correct the subnet manager's partitions.",
        _pkeys,
    ),
    Comparison(
        "compare.memory",
        "memory of the hosts",
        "the same on every node, within 2 %",
        "A memory module is missing or was mapped out: the BMC's event log names it.",
        _memory,
    ),
    Comparison(
        "compare.vbios",
        "VBIOS of the GPUs",
        "one version",
        "Bring all boards to one firmware with the vendor's update.",
        _vbios,
        Severity.WARNING,
    ),
    Comparison(
        "compare.kernel",
        "kernel",
        "one release",
        "Boot all nodes from one image.",
        lambda reports: _one_value(reports, lambda report: report.facts.get("kernel")),
        Severity.WARNING,
    ),
    Comparison(
        "compare.boot",
        "boot id",
        "another on every node",
        "The same node answered under two names: check the list of hosts, and how many workers a node gets.",
        _boots,
    ),
    Comparison(
        "compare.guids",
        "GUIDs of the GPUs' NICs",
        "another for every NIC of every node",
        "Cloned virtual machines: give each NIC its own GUID, as the remedy of nic.guid says.",
        _guids,
    ),
    Comparison(
        "compare.tree",
        "PCIe tree, NUMA nodes and distances",
        "the same on every node",
        "A card in another slot, a missing one, or another BIOS setting: compare `hybrid-ep topology` of the nodes.",
        _trees,
        Severity.WARNING,
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
        lambda reports: _one_value(reports, lambda report: ", ".join(report.facts.get("nic_firmware") or []) or "none"),
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
        "measured and by the nodes' own bounds within the profile's host.clock_error_ms, all synchronised",
        "Run an NTP or PTP client on every node against the same servers.",
        _clock,
        Severity.WARNING,  # as host.clock: the nodes work without
    ),
)
