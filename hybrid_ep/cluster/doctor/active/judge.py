"""The active checks: what is measured, in which order, and what the figures mean.

A figure is compared with the profile's, or with the median of its kind in this run if the profile has none. So one GPU
or link that is slower than the others is a fault on any node. A figure with neither is `unknown`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import permutations
from statistics import median
from typing import Any

from hybrid_ep.cluster.doctor.active.gpu_direct import Written
from hybrid_ep.cluster.doctor.active.measure import Burn, Machine, TorchMachine, write_over_rdma
from hybrid_ep.cluster.doctor.model import Finding, Result, Severity, Status
from hybrid_ep.cluster.doctor.node import Node, WatchedNode
from hybrid_ep.cluster.doctor.profile import Profile
from hybrid_ep.cluster.doctor.registry import shorten
from hybrid_ep.cluster.doctor.roles import assign_roles
from hybrid_ep.topology import choose_nic
from hybrid_ep.watched import Unreadable

_LIMIT_S = 180.0  # for one measurement
_MEMORY_FRACTION = 0.8


@dataclass(frozen=True)
class ActiveCheck:
    """One active check.

    Attributes:
        id, title, expectation, remedy: as in `hybrid_ep.cluster.doctor.model.Check`.
        examine: measures and judges.
    """

    id: str
    title: str
    expectation: str
    remedy: str
    examine: Callable[[Node, Profile, Machine, float], Finding]


def judge_rates(rates: Mapping[str, float], expected: float | None, fraction: float, unit: str = "GB/s") -> Finding:
    """Fails what is slower than a share of the expectation, or of the median where nothing is expected.

    Args:
        rates: thing → what it reached.
        expected: of the profile; None = the median of `rates`.
        fraction: the share that a sound one reaches.
    """
    if not rates:
        raise Unreadable("nothing to measure")
    usual = median(rates.values())
    if expected is None and len(rates) < 2:
        raise Unreadable(f"{usual:.1f} {unit}, and neither a figure of the profile nor another one to compare with")
    goal = expected if expected is not None else usual
    whose = "the profile's" if expected is not None else "the median"
    slow = [
        f"{name}: {rate:.1f} of {goal:.1f} {unit} ({whose})" for name, rate in rates.items() if rate < fraction * goal
    ]
    lowest, highest = min(rates.values()), max(rates.values())
    return Finding.judge([shorten(slow)] if slow else [], f"{lowest:.1f} to {highest:.1f} {unit}, {whose} {goal:.1f}")


def _host(node: Node, profile: Profile, machine: Machine, seconds: float) -> Finding:
    rates = {
        f"GPU {gpu_idx} {'from' if to_gpu else 'to'} host": machine.host_copy(gpu_idx, to_gpu=to_gpu)
        for gpu_idx in range(machine.num_gpus)
        for to_gpu in (True, False)
    }
    return judge_rates(rates, profile["active.host_gbytes_per_s"], profile["active.fraction"])


def _device(node: Node, profile: Profile, machine: Machine, seconds: float) -> Finding:
    rates = {f"GPU {gpu_idx}": machine.device_copy(gpu_idx) for gpu_idx in range(machine.num_gpus)}
    return judge_rates(rates, profile["active.memory_gbytes_per_s"], profile["active.fraction"])


def _pairs(node: Node, profile: Profile, machine: Machine, seconds: float) -> Finding:
    pairs = list(permutations(range(machine.num_gpus), 2))
    if not pairs:
        return Finding(Status.PASS, "one GPU")
    rates = {f"GPU {source} → GPU {target}": machine.pair_copy(source, target) for source, target in pairs}
    return judge_rates(rates, profile["active.pair_gbytes_per_s"], profile["active.fraction"])


def _ring(node: Node, profile: Profile, machine: Machine, seconds: float) -> Finding:
    if machine.num_gpus < 2:
        return Finding(Status.PASS, "one GPU")
    alone = {i: machine.pair_copy(i, (i + 1) % machine.num_gpus) for i in range(machine.num_gpus)}
    together = machine.ring_copy()
    expected = profile["active.pair_gbytes_per_s"] or min(alone.values())
    rates = {f"GPU {i} → GPU {(i + 1) % machine.num_gpus}, all at once": rate for i, rate in enumerate(together)}
    return judge_rates(rates, expected, profile["active.fraction"])


def _burn(node: Node, profile: Profile, machine: Machine, seconds: float) -> Finding:
    return judge_burn(machine.burn(seconds), profile)


def judge_burn(burns: list[Burn], profile: Profile) -> Finding:
    """Wrong bits are silent data corruption, whatever the speed; then heat, then speed."""
    faults = []
    expected = median(burn.checksums[0] for burn in burns) if burns else 0
    for gpu_idx, burn in enumerate(burns):
        if len(burn.checksums) > 1:
            faults.append(f"GPU {gpu_idx}: {len(burn.checksums)} different results of the same product")
        elif len(burns) > 2 and burn.checksums[0] != expected:
            faults.append(f"GPU {gpu_idx}: other bits than the other GPUs")
        most = profile["active.max_celsius"]
        if most and burn.celsius is not None and burn.celsius > most:
            faults.append(f"GPU {gpu_idx}: {burn.celsius} °C, allowed: {most}")
    if len(burns) == 2 and burns[0].checksums[0] != burns[1].checksums[0]:
        faults.append("GPU 0 and GPU 1 compute different bits; one of them is wrong")
    # All GPUs run for the same time, so a slow one shows in its clock.
    clocks = {f"GPU {i}": float(burn.mhz) for i, burn in enumerate(burns) if burn.mhz}
    if len(clocks) > 1:
        found = judge_rates(clocks, None, profile["active.clock_fraction"], "MHz")
        faults += [found.seen] if found.status is Status.FAIL else []
    traces = [f"{burn.celsius} °C {burn.watts} W {burn.mhz} MHz" for burn in burns if burn.celsius is not None]
    seen = f"{burns[0].tflops:.0f} TFLOP/s, the same bits" + (f"; {', '.join(traces)}" if traces else "")
    return Finding.judge(faults, seen)


def _memory(node: Node, profile: Profile, machine: Machine, seconds: float) -> Finding:
    faults, words = [], 0
    for gpu_idx in range(machine.num_gpus):
        bad, checked = machine.count_bad_words(gpu_idx, _MEMORY_FRACTION)
        words += checked
        faults += [f"GPU {gpu_idx}: {bad} of {checked} words wrong"] if bad else []
    return Finding.judge(faults, f"{words * 8 / 2 / 2**30:.0f} GiB, every bit as 0 and as 1")


def _rdma(node: Node, profile: Profile, machine: Machine, seconds: float) -> Finding:
    return judge_rdma(node, profile, write_over_rdma)


def judge_rdma(node: Node, profile: Profile, write: Callable[..., list[Written]]) -> Finding:
    """Each GPU's NIC to the next one's: alone, both ways, all at once. `write` is `write_over_rdma`, or a test's."""
    topology = node.topology
    chosen = [(gpu.gpu_idx, choose_nic(topology, gpu.gpu_idx)) for gpu in topology.gpus]
    named = [(gpu_idx, nic.name) for gpu_idx, nic in chosen if nic is not None]
    if not named or not assign_roles(node, profile).compute:
        raise Unreadable("no GPU has a NIC that is up")
    ethernet = any(port.link_layer == "Ethernet" for nic in topology.nics for port in nic.ports)
    gid_index = profile["nic.roce_gid_index"] if ethernet else None
    pairs = [(*named[i], *named[(i + 1) % len(named)]) for i in range(len(named))]
    rate = profile["nic.rate_gbps"]
    written: dict[str, Written] = {}
    rates: dict[str, float] = {}
    for pair in pairs:
        name = f"GPU {pair[2]} {pair[3]} → GPU {pair[0]} {pair[1]}"
        written[name] = write([pair], gid_index, bidirectional=False)[0]
        written[f"{name}, both ways, each"] = both = write([pair], gid_index, bidirectional=True)[0]
        rates |= {name: written[name].gbytes_per_s, f"{name}, both ways, each": both.gbytes_per_s / 2}
    if len(pairs) > 1:
        for pair, value in zip(pairs, write(pairs, gid_index, bidirectional=False), strict=True):
            name = f"GPU {pair[2]} {pair[3]}, all at once"
            written[name], rates[name] = value, value.gbytes_per_s
    wrong = [f"{name}: {value.num_wrong} chunks with other bytes" for name, value in written.items() if value.num_wrong]
    found = judge_rates(rates, rate / 8 if rate else None, profile["active.nic_fraction"])
    by = "; ".join(sorted({value.by for value in written.values()}))
    seen = shorten([*wrong, found.seen] if found.status is Status.FAIL or not wrong else wrong)
    return Finding(Status.FAIL if wrong else found.status, f"{seen}, {by}")


def _nccl(node: Node, profile: Profile, machine: Machine, seconds: float) -> Finding:
    if machine.num_gpus < 2:
        return Finding(Status.PASS, "one GPU")
    rate, expected = machine.all_to_all(), profile["active.all_to_all_gbytes_per_s"]
    if expected is None or machine.num_gpus != profile["gpu.count"]:
        return Finding(Status.PASS, f"{rate:.1f} GB/s, a baseline: no figure for {machine.num_gpus} GPUs to hold it to")
    return judge_rates({"all-to-all": rate}, expected, profile["active.fraction"])


_SLOW_LINK = "Check gpu.pcie and nvlink.links; reset the GPU, then have riser, baseboard or NVSwitch serviced."
ACTIVE_CHECKS = (
    ActiveCheck(
        "active.host",
        "bandwidth between host and GPUs",
        "≥ {active.fraction} of {active.host_gbytes_per_s} GB/s, else of the median",
        "Check gpu.pcie, the NUMA node of the process, IOMMU and power settings; reseat GPU or riser.",
        _host,
    ),
    ActiveCheck(
        "active.device",
        "bandwidth of the GPUs' memory",
        "≥ {active.fraction} of {active.memory_gbytes_per_s} GB/s, else of the median",
        "Look for throttling (gpu.throttle, gpu.clocks) and remapped memory; reset the GPU, then replace it.",
        _device,
    ),
    ActiveCheck(
        "active.pairs",
        "bandwidth of every pair of GPUs",
        "≥ {active.fraction} of {active.pair_gbytes_per_s} GB/s, else of the median",
        _SLOW_LINK,
        _pairs,
    ),
    ActiveCheck(
        "active.links",
        "bandwidth of all GPUs at once, each to the next",
        "≥ {active.fraction} of {active.pair_gbytes_per_s} GB/s, else of the slowest alone",
        _SLOW_LINK,
        _ring,
    ),
    ActiveCheck(
        "active.burn",
        "matrix-multiply burn",
        "the same bits on every GPU and in every round; ≤ {active.max_celsius} °C; clocks ≥ {active.clock_fraction} of "
        "the median",
        "Other bits: the GPU computes wrong results; take it out of service. Heat or low clocks: check cooling, power "
        "supplies and power limits.",
        _burn,
    ),
    ActiveCheck(
        "active.memory",
        "memory pattern",
        "every word as it was written",
        "Drain the node and reset the GPU; replace it when it comes back. Look at gpu.ecc_errors and gpu.row_remap.",
        _memory,
    ),
    ActiveCheck(
        "active.rdma",
        "GPUDirect RDMA from GPU to GPU through their NICs",
        "≥ {active.nic_fraction} of {nic.rate_gbps} Gb/s: alone, both ways, all at once",
        "Slow: check nic.pcie, host.acs, host.iommu, nic.pcie_settings. Other bytes: take GPU and NIC out of service. "
        "Unknown: load nvidia-peermem, or a driver and rdma-core with dma-buf.",
        _rdma,
    ),
    ActiveCheck(
        "active.nccl",
        "NCCL all-to-all",
        "runs; ≥ {active.fraction} of {active.all_to_all_gbytes_per_s} GB/s for each of {gpu.count} GPUs",
        "Where active.pairs and active.links are good, look at NCCL's version and variables (NCCL_DEBUG=INFO).",
        _nccl,
    ),
)


def examine_actively(
    node: WatchedNode | Node, profile: Profile, *, seconds: float, make_machine: Callable[[], Machine] = TorchMachine
) -> tuple[Result, ...]:
    """Runs the active checks, one after the other; each ends in a finding, also if it fails or hangs.

    Args:
        node: a `WatchedNode` bounds the time of each measurement and keeps CUDA out of this process.
        profile: what to expect.
        seconds: how long the burn takes.
        make_machine: called once for each check, in the process that measures.
    """
    results = []
    for number, check in enumerate(ACTIVE_CHECKS):
        try:
            finding = node.run(_measure, number, profile, seconds, make_machine)
        except Unreadable as error:
            finding = Finding(Status.UNKNOWN, str(error))
        except Exception as error:
            finding = Finding(Status.UNKNOWN, f"internal error: {type(error).__name__}: {error}")
        results.append(
            Result(
                id=check.id,
                group="active",
                title=check.title,
                status=finding.status,
                severity=Severity.ERROR,
                seen=finding.seen,
                expected=profile.fill(check.expectation),
                source="measured",
                remedy="" if finding.status is Status.PASS else check.remedy,
            )
        )
    return tuple(results)


def _measure(node: Node, number: int, profile: Profile, seconds: float, make_machine: Callable[[], Machine]) -> Finding:
    check: Any = ACTIVE_CHECKS[number]
    node.watch(check.id)
    machine = make_machine()
    finding: Finding = check.examine(node, profile, machine, seconds)
    return finding
