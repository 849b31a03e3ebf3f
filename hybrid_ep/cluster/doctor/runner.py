"""Chooses the checks and runs them. Counters are read at the start and again at the end, at least a second later.

A report also has facts of its node beside the results: the values that `compare` compares between nodes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

from hybrid_ep import env
from hybrid_ep._version import __version__
from hybrid_ep.cluster.doctor.model import Check, Counters, Finding, Report, Result, Sample, Severity, Status
from hybrid_ep.cluster.doctor.node import Node, WatchedNode
from hybrid_ep.cluster.doctor.profile import Profile
from hybrid_ep.cluster.doctor.registry import GROUPS, all_checks
from hybrid_ep.cluster.doctor.rises import Limits, Memory, judge_rise
from hybrid_ep.cluster.doctor.roles import assign_roles, is_guid, judged_ports
from hybrid_ep.errors import ConfigError
from hybrid_ep.topology.svg import draw
from hybrid_ep.watched import Unreadable

T = TypeVar("T")
_SAMPLE_INTERVAL_S = 1.0
Readings = Mapping[str, "Counters | Unreadable"]


@dataclass(frozen=True)
class Selection:
    """Which checks to run: those of the groups and those of the ids; all where neither is given.

    Attributes:
        groups: these groups.
        ids: these checks.
        quick: of whole groups only checks that need neither a second reading nor another program.

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
        of_group = check.group in self.groups or not (self.groups or self.ids)
        return check.id in self.ids or (of_group and (check.quick or not self.quick))


def _wait(since: float) -> float:
    """Sleeps until a second after `since` (of time.monotonic) and returns how many have passed."""
    time.sleep(max(0.0, since + _SAMPLE_INTERVAL_S - time.monotonic()))
    return time.monotonic() - since


def examine(
    node: Node | WatchedNode,
    profile: Profile,
    profile_source: str,
    selection: Selection | None = None,
    *,
    memory: Memory | None = None,
    wait: Callable[[float], float] = _wait,
) -> Report:
    """Runs the chosen checks. Whatever a check does, it ends in a finding: an error of ours is `unknown`, too.

    Args:
        node: what to examine; a `WatchedNode` also bounds the time that reading takes.
        profile: what to expect.
        profile_source: why this profile, for the report.
        selection: None = every check.
        memory: the counters of the last run, to see what rose since; takes those of this run, and is not saved here.
        wait: waits before counters are read again; takes when they were read first, returns the seconds since then.
    """
    started = time.monotonic()
    selection = selection or Selection()
    chosen = [check for check in all_checks() if selection.takes(check)]
    applicable = [check for check in chosen if _applies(check, profile)]
    before = _read_counters(node, profile, applicable)
    first_reading = time.monotonic()
    findings = {check.id: _examine(check, node, profile) for check in applicable if check.examine is not None}
    if before:
        interval_s = wait(first_reading)
        after = _read_counters(node, profile, applicable)
        for check in applicable:
            if check.sample is not None:
                earlier, elapsed_s = (memory.counters.get(check.id, {}), memory.elapsed_s()) if memory else ({}, 0.0)
                judge = check.judge or partial(judge_rise, Limits.of(profile, check.rise))
                first, second = before[check.id], after[check.id]
                if isinstance(first, Unreadable) or isinstance(second, Unreadable):
                    reason = first if isinstance(first, Unreadable) else second
                    findings[check.id] = Finding(Status.UNKNOWN, str(reason))
                    continue
                since_s = elapsed_s if earlier else 0.0
                findings[check.id], kept = judge(first, second, interval_s, earlier, since_s)
                if memory:
                    memory.note(check.id, kept)
    return Report(
        hybrid_ep=__version__,
        host=_known(_guard(node.run, Node.hostname)) or "unknown",
        profile=profile.name,
        profile_source=profile_source,
        duration_s=round(time.monotonic() - started, 3),
        results=tuple(_result(check, findings[check.id], profile) for check in applicable),
        not_applicable=tuple(check.id for check in chosen if check not in applicable),
        facts=_known(_guard(node.insist, collect_facts, profile)) or {},
    )


def _applies(check: Check, profile: Profile) -> bool:
    if profile.severity_of(check.id) == "off" or (check.of_jobs and env.CHECKS_ONLY.get() == "on"):
        return False
    return all(profile[key] or profile[key] == {} or (check.zero_is_wish and profile[key] == 0) for key in check.wants)


def _guard(run: Callable[..., T], task: Callable[..., T], *arguments: Any) -> T | Unreadable:
    """The one guard around everything that looks at a node; `run` is that node's `run` or `insist`."""
    try:
        return run(task, *arguments)
    except Unreadable as error:
        return error
    except Exception as error:
        what = str(error) if type(error) is RuntimeError else f"{type(error).__name__}: {error}"
        return Unreadable(f"internal error: {what}")


def _known(answer: T | Unreadable) -> T | None:
    return None if isinstance(answer, Unreadable) else answer


def _examine(check: Check, node: Node | WatchedNode, profile: Profile) -> Finding:
    assert check.examine is not None
    found: Finding | Unreadable = _guard(node.run, check.examine, profile)
    return Finding(Status.UNKNOWN, str(found)) if isinstance(found, Unreadable) else found


def _read_counters(node: Node | WatchedNode, profile: Profile, checks: list[Check]) -> Readings:
    """Readings by check; several that judge one sample get the same reading."""
    readings: dict[Sample, Counters | Unreadable] = {}
    found: dict[str, Counters | Unreadable] = {}
    for check in checks:
        if check.sample is not None:
            if check.sample not in readings:
                readings[check.sample] = _guard(node.run, check.sample, profile)
            found[check.id] = readings[check.sample]
    return found


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
        remedy="" if finding.status is Status.PASS else finding.remedy or check.remedy,
    )


def collect_facts(node: Node, profile: Profile) -> dict[str, Any]:
    """Collects what can be read; null where a value could not be.

    Returns:
        ``driver``, ``cuda``, ``packages``, ``gpus`` (name, uuid, cluster_uuid, clique, memory_bytes, power_limit,
        vbios), ``nic_firmware``, ``nic_guids`` by name and ``ports`` of the GPUs' NICs (link_layer, rate_gbps, mtu,
        pkey, gid), ``memory_gib`` of the host, ``kernel``, ``clock``, ``boot_id``, ``unix_time_s``, the PCIe tree by
        names that other nodes share (``tree``), the picture ``topology_svg`` and, from the profile, ``domain_gpus`` and
        ``clock_error_ms``.
    """
    return {
        "driver": _read_or_none(lambda: str(node.nvml.system("driver_version"))),
        "cuda": _read_or_none(lambda: int(node.nvml.system("cuda_driver_version"))),
        "packages": _read_or_none(node.packages),
        "gpus": _read_or_none(lambda: [_gpu(node, gpu_idx) for gpu_idx in node.nvml.gpus]) or [],
        "nic_firmware": _read_or_none(lambda: _firmware(node, profile)) or [],
        "nic_guids": _read_or_none(lambda: _guids(node, profile)),
        "ports": _read_or_none(lambda: _ports(node, profile)) or [],
        "memory_gib": _read_or_none(lambda: round(node.memory_gib, 1)),
        "kernel": _read_or_none(lambda: node.read("/proc/sys/kernel/osrelease")),
        "clock": _read_or_none(lambda: asdict(node.clock())),
        "boot_id": _read_or_none(lambda: node.read("/proc/sys/kernel/random/boot_id")),
        "unix_time_s": round(time.time(), 3),
        "tree": _read_or_none(lambda: _tree(node)),
        "topology_svg": _read_or_none(lambda: draw(node.topology)) or "",
        "domain_gpus": profile["mnnvl.domain_gpus"],
        "clock_error_ms": profile["host.clock_error_ms"],
    }


def _gpu(node: Node, gpu_idx: int) -> dict[str, Any]:
    keys = {
        "name": "name",
        "uuid": "uuid",
        "cluster_uuid": "fabric.cluster_uuid",
        "clique": "fabric.clique",
        "memory_bytes": "memory_bytes",
        "power_limit": "power_limit",
        "vbios": "vbios",
    }
    return {name: _read_or_none(partial(node.nvml.gpu, gpu_idx, key)) for name, key in keys.items()}


def _firmware(node: Node, profile: Profile) -> list[str]:
    return sorted({nic.firmware for nic in assign_roles(node, profile).compute if nic.firmware})


def _guids(node: Node, profile: Profile) -> dict[str, str]:
    """GUIDs by NIC."""
    return {nic.name: nic.node_guid for nic in assign_roles(node, profile).compute if is_guid(nic.node_guid)}


def _ports(node: Node, profile: Profile) -> list[dict[str, Any]]:
    """The ports of the GPUs' NICs, without what differs from node to node on purpose (addresses)."""
    index = profile["nic.roce_gid_index"]
    return [
        {
            "nic": nic.name,
            "port": port.port,
            "link_layer": port.link_layer,
            "rate_gbps": port.rate_gbps,
            "mtu": port.active_mtu_bytes,
            "pkey": _read_or_none(partial(_pkey, node, nic.name, port.port)),
            "gid": _read_or_none(partial(_gid_kind, node, nic.name, port.port, index)) if index is not None else None,
        }
        for nic, port in judged_ports(node, profile)
    ]


def _gid_kind(node: Node, nic: str, port: int, index: int) -> str:
    return node.read(f"/sys/class/infiniband/{nic}/ports/{port}/gid_attrs/types/{index}")


def _pkey(node: Node, nic: str, port: int) -> str:
    """The partition key that jobs take, at index 0 of the port's table."""
    return f"{node.read_int(f'/sys/class/infiniband/{nic}/ports/{port}/pkeys/0'):#06x}"


def _tree(node: Node) -> list[str]:
    """One line for each GPU and NIC: its address, NUMA node, and how far every GPU is from every NIC."""
    topology = node.topology
    lines = [f"GPU {gpu.gpu_idx} {gpu.pci_address} NUMA {gpu.numa_node}" for gpu in topology.gpus]
    lines += [f"{nic.name} {nic.pci_address} NUMA {nic.numa_node}" for nic in topology.nics]
    for gpu, row in zip(topology.gpus, topology.nic_distances, strict=True):
        near = [f"{nic.name} {distance.name}" for nic, distance in zip(topology.nics, row, strict=True)]
        lines.append(f"GPU {gpu.gpu_idx} → {', '.join(near) or 'no NIC'}")
    return [re.sub(r"\s+", " ", line) for line in lines]


def _read_or_none(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Unreadable:
        return None
