"""Whether each GPU has its NIC near by."""

from __future__ import annotations

from hybrid_ep.cluster.doctor.checks.gpu import gpus_are_missing
from hybrid_ep.cluster.doctor.model import Finding, Status
from hybrid_ep.cluster.doctor.node import Node
from hybrid_ep.cluster.doctor.profile import Profile
from hybrid_ep.cluster.doctor.registry import check
from hybrid_ep.cluster.doctor.roles import blind_devices, required_nics, wanted_nics
from hybrid_ep.topology import Distance


@check(
    "affinity.gpu_nic",
    title="distance between GPUs and NICs",
    source="PCI paths and NUMA nodes in /sys",
    expectation="every GPU has a NIC, and every NIC a GPU, at {affinity.max_distance} or nearer; not judged in a "
    "virtual machine that hides the PCIe tree",
    remedy="Check the slots. In a virtual machine that shows only a part of the tree: pass the rest through, or give "
    "NCCL a topology file and set HYBRID_EP_NICS.",
    wants="nic.count affinity.max_distance",
)
def affinity_gpu_nic(node: Node, profile: Profile) -> Finding:
    most = Distance[profile["affinity.max_distance"]]
    topology = node.topology
    wanted = {nic.name for nic in required_nics(node, profile)}
    columns = [column for column, nic in enumerate(topology.nics) if nic.name in wanted]
    if not topology.gpus:
        return Finding(Status.UNKNOWN, "no GPU to measure from, see gpu.count")
    if node.is_guest and min(min(row, default=Distance.SYS) for row in topology.nic_distances) > Distance.PXB:
        return Finding(Status.PASS, "a virtual machine that hides the PCIe tree: NCCL needs the cloud's topology file")
    faults = []
    # Something that is missing is named by its own count; what is left over without a partner is no second fault.
    if len(columns) >= (wanted_nics(node, profile) or 0):
        for gpu, row in zip(topology.gpus, topology.nic_distances, strict=True):
            nearest = min(row[column] for column in columns)
            faults += [f"GPU {gpu.gpu_idx}: nearest NIC at {nearest.name}"] if nearest > most else []
    if not gpus_are_missing(node, profile):
        for column in columns:
            nearest = min(row[column] for row in topology.nic_distances)
            name = topology.nics[column].name
            faults += [f"{name}: nearest GPU at {nearest.name}"] if nearest > most else []
    if faults and (blind := blind_devices(node)):
        return Finding(Status.UNKNOWN, f"class or NUMA node of {', '.join(blind)} cannot be read")
    return Finding.judge(faults, f"all at {most.name} or nearer")
