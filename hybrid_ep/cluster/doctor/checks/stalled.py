"""Jobs that stand still: GPUs that are called busy, and neither work nor talk.

A rank that waits in a collective keeps its kernel running, so that NVML says 100 %. What gives it away is the power of
an idle GPU, and no byte on NVLink and the NICs.
"""

from __future__ import annotations

from hybrid_ep.cluster.doctor.model import Counters, Finding, Severity
from hybrid_ep.cluster.doctor.node import Node
from hybrid_ep.cluster.doctor.profile import Profile
from hybrid_ep.cluster.doctor.registry import counters, shorten
from hybrid_ep.cluster.doctor.roles import judged_ports, port_folder
from hybrid_ep.watched import Unreadable

_BUSY_PERCENT = 95
_IDLE_POWER = 0.2  # of the limit: idle boards of 700 W take 70 to 130 W
_QUIET_S = 600
_NVLINK_KIB = (138, 139)  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX and RX, of one link
_NIC_BYTES = ("counters/port_xmit_data", "counters/port_rcv_data", "hw_counters/tx_bytes", "hw_counters/rx_bytes")


def _judge(
    before: Counters, after: Counters, seconds: float, earlier: Counters, ago_s: float
) -> tuple[Finding, Counters]:
    kept, faults = dict(after), []
    for (who, name), traffic in after.items():
        if before.get((who, name)) != traffic:
            continue
        quiet_s = int(seconds)
        if earlier.get((who, name)) == traffic:
            quiet_s = earlier.get((who, "quiet_s"), 0) + int(ago_s)
        kept[who, "quiet_s"] = quiet_s
        if quiet_s >= _QUIET_S:
            faults.append(f"{who}: for {quiet_s // 60} min busy, with the power of an idle GPU and no traffic")
    return Finding.judge([shorten(faults)] if faults else [], "none for 10 minutes"), kept


@counters(
    "gpu.stalled",
    title="jobs that stand still",
    source="NVML DeviceGetUtilizationRates, DeviceGetPowerUsage, ComputeRunningProcesses, fields 138 "
    "and 139; counters of the NICs",
    expectation="no GPU is 95 % busy with at most 20 % of its power, and no byte on NVLink and NICs for 10 minutes. "
    "That takes several runs with --state",
    remedy="The ranks wait for one that does not come. Look at the job's log for a rank that died, take stacks with "
    "py-spy dump --pid PID, and end the job. Then look at the node that the missing rank was on.",
    wants="gpu.count",
    judge=_judge,
    severity=Severity.WARNING,
)
def gpu_stalled(node: Node, profile: Profile) -> Counters:
    found: dict[tuple[str, str], int] = {}
    for gpu_idx in node.nvml.gpus:
        try:
            power, limit = (int(node.nvml.gpu(gpu_idx, key)) for key in ("power_usage", "power_limit"))
            is_idle = power <= _IDLE_POWER * limit
            if is_idle and int(node.nvml.gpu(gpu_idx, "utilization")) >= _BUSY_PERCENT:
                found[_who(node, gpu_idx), "traffic"] = _traffic(node, profile, gpu_idx)
        except Unreadable:  # a driver that does not say so
            continue
    return found


def _who(node: Node, gpu_idx: int) -> str:
    """The GPU, and the process on it as far as this container sees it."""
    try:
        pid = int(node.nvml.gpu(gpu_idx, "first_process"))
        return f"GPU {gpu_idx}, process {pid} ({node.read(f'/proc/{pid}/comm')})" if pid else f"GPU {gpu_idx}"
    except Unreadable:
        return f"GPU {gpu_idx}"


def _traffic(node: Node, profile: Profile, gpu_idx: int) -> int:
    """What the GPU's links and the node's NICs have carried, of which only the change counts."""
    values = []
    for link in node.nvml.links(gpu_idx):
        for field in _NVLINK_KIB:
            try:
                values.append(node.nvml.field(gpu_idx, field, link))
            except Unreadable:
                break
    try:
        ports = judged_ports(node, profile)
    except Unreadable:
        ports = []
    places = [f"{port_folder(port)}/{name}" for port in ports for name in _NIC_BYTES]
    values += [node.read_int(place) for place in places if node.is_seen(place)]
    if not values:
        raise Unreadable("neither NVLink nor a NIC counts bytes")
    return sum(values)
