"""Multi-node NVLink: cluster, clique, and the IMEX service that lets nodes import each other's memory."""

from __future__ import annotations

import json
import re

from hybrid_ep.cluster.doctor.model import Finding, Status
from hybrid_ep.cluster.doctor.node import Node
from hybrid_ep.cluster.doctor.profile import Profile
from hybrid_ep.cluster.doctor.registry import check
from hybrid_ep.watched import Unreadable

_CHANNELS = "/dev/nvidia-caps-imex-channels"
_DRA_PLUGIN = "/var/lib/kubelet/plugins/compute-domain.nvidia.com"
_IMEX_UNIT = "/etc/systemd/system/nvidia-imex.service"


def _waits_for_claim(node: Node) -> str:
    """Why this node has neither daemon nor channel yet: the DRA driver makes both with a job's claim; else empty.

    That driver asks for the node's own service to be masked (kubernetes-sigs/dra-driver-nvidia-gpu, issue 524).
    """
    if node.is_seen(_CHANNELS) and node.names(_CHANNELS):
        return ""
    masked = node.is_seen(_IMEX_UNIT) and node.link(_IMEX_UNIT) == "null"
    managed = masked or node.is_seen(_DRA_PLUGIN)
    return "none yet: the DRA driver makes daemon and channel with a job's ComputeDomain claim" if managed else ""


@check(
    "mnnvl.clique",
    title="cluster UUID and clique",
    source="NVML DeviceGetGpuFabricInfoV",
    expectation="a non-zero cluster UUID, one UUID and one clique on all GPUs of the node",
    remedy="Check the partitions of the NVLink switch controller (NMX); all GPUs of a tray belong to one partition.",
    wants="mnnvl.domain_gpus",
)
def mnnvl_clique(node: Node, profile: Profile) -> Finding:
    where: dict[tuple[str, int], list[int]] = {}
    for gpu_idx in node.nvml.gpus:
        key = (str(node.nvml.gpu(gpu_idx, "fabric.cluster_uuid")), int(node.nvml.gpu(gpu_idx, "fabric.clique")))
        where.setdefault(key, []).append(gpu_idx)
    seen = [f"cluster {uuid} clique {clique}" for uuid, clique in where]
    faults = (
        [] if len(where) == 1 else [f"{name}: GPUs {gpus}" for name, gpus in zip(seen, where.values(), strict=True)]
    )
    faults += [f"GPUs {gpus} have no cluster UUID" for (uuid, _), gpus in where.items() if not uuid.strip("0")]
    return Finding.judge(faults, "; ".join(seen))


@check(
    "mnnvl.imex_daemon",
    title="IMEX daemon and domain",
    source="nvidia-imex-ctl -N -j",
    expectation="all nodes of the domain READY ({mnnvl.domain_gpus} GPUs, {gpu.count} of each node; in a container, "
    "those of its job), the domain UP",
    remedy="systemctl restart nvidia-imex on every node of the domain; all need the same nodes_config.cfg.",
    wants="mnnvl.imex",
    quick=False,
)
def mnnvl_imex_daemon(node: Node, profile: Profile) -> Finding:
    if waits := _waits_for_claim(node):
        return Finding(Status.PASS, waits)
    text = node.command("nvidia-imex-ctl", "-N", "-j")
    try:
        answer = json.loads(text)
        domain = str(answer["status"])
        nodes = {str(item["host"]): str(item["status"]) for item in answer["nodes"].values()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Unreadable(f"nvidia-imex-ctl said {text.strip()[:120]!r}") from None
    faults = [f"{host} is {status}" for host, status in nodes.items() if status != "READY"]
    faults += [] if domain == "UP" else [f"the domain is {domain}"]
    want = profile["mnnvl.domain_gpus"], profile["gpu.count"]
    if isinstance(want[0], int) and isinstance(want[1], int) and want[1] and not node.container().inside:
        num_nodes = want[0] // want[1]
        faults += [f"{len(nodes)} of {num_nodes} nodes in nodes_config.cfg"] if len(nodes) < num_nodes else []
    return Finding.judge(faults, f"domain UP, {len(nodes)} nodes READY")


@check(
    "mnnvl.imex_channel",
    title="IMEX channel",
    source=f"{_CHANNELS}, /proc/devices",
    expectation="a character device with the major number of nvidia-caps-imex-channels",
    remedy="Load the driver with NVreg_CreateImexChannel0=1, or let the container runtime (DRA ComputeDomain) add one.",
    wants="mnnvl.imex",
)
def mnnvl_imex_channel(node: Node, profile: Profile) -> Finding:
    major = re.search(r"^\s*(\d+) nvidia-caps-imex-channels$", node.read("/proc/devices"), re.MULTILINE)
    if major is None:
        return Finding(Status.FAIL, "/proc/devices has no nvidia-caps-imex-channels")
    if waits := _waits_for_claim(node):
        return Finding(Status.PASS, waits)
    channels = node.names_or_none(_CHANNELS)
    if not channels and node.container().inside:
        return Finding(
            Status.UNKNOWN, "a container has only the channels that it was given, as by a ComputeDomain claim"
        )
    found = {name: node.char_device(f"{_CHANNELS}/{name}") for name in channels}
    if not found:
        return Finding(Status.FAIL, f"no channel in {_CHANNELS}")
    wrong = [f"{name} is {device}" for name, device in found.items() if device is None or device[0] != int(major[1])]
    return Finding.judge(wrong, f"{', '.join(found)} with major {major[1]}")


@check(
    "mnnvl.fabric_handle",
    title="memory can be exported to other nodes",
    source="CUDA attribute HANDLE_TYPE_FABRIC_SUPPORTED (the export and import itself is a test job on two nodes)",
    expectation="supported",
    remedy="Needs a driver with MNNVL, a completed fabric and an IMEX channel that this user can open.",
    wants="mnnvl.imex",
)
def mnnvl_fabric_handle(node: Node, profile: Profile) -> Finding:
    if node.cuda().fabric_handles:
        return Finding(Status.PASS, "supported")
    if waits := _waits_for_claim(node):
        return Finding(Status.PASS, waits)
    return Finding(Status.FAIL, "not supported")
