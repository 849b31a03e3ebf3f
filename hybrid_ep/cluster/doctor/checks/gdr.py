"""GPUDirect RDMA: whether NICs may read and write GPU memory."""

from __future__ import annotations

import re

from hybrid_ep.cluster.doctor.model import Finding, Severity, Status
from hybrid_ep.cluster.doctor.node import Node
from hybrid_ep.cluster.doctor.profile import Profile
from hybrid_ep.cluster.doctor.registry import check
from hybrid_ep.cluster.doctor.roles import required_nics
from hybrid_ep.watched import Unreadable


@check(
    "gdr.peer_memory",
    title="nvidia_peermem or dma-buf",
    source="/sys/module (nvidia_peermem, or nv_peer_mem of older drivers); CUDA attribute DMA_BUF_SUPPORTED and an "
    "ibv_reg_dmabuf_mr probe",
    expectation="either",
    remedy="modprobe nvidia_peermem (after the NIC's driver), or use the open kernel modules and a NIC driver with "
    "dma-buf.",
    wants="nic.count gdr.peer_memory",
)
def gdr_peer_memory(node: Node, profile: Profile) -> Finding:
    for module in ("nvidia_peermem", "nv_peer_mem"):
        if node.exists(f"/sys/module/{module}"):
            return Finding(Status.PASS, f"{module} is loaded")
    nics = {nic.name: nic.dmabuf for nic in required_nics(node, profile)}
    try:
        gpu = node.cuda().dmabuf
    except Unreadable as error:
        return Finding(Status.UNKNOWN, f"nvidia_peermem is not loaded; dma-buf: {error}")
    if not gpu:
        return Finding(Status.FAIL, "nvidia_peermem is not loaded; the GPU exports no dma-buf")
    refusing = [name for name, registers in nics.items() if registers is False]
    if refusing:
        return Finding(Status.FAIL, f"nvidia_peermem is not loaded; no dma-buf at {', '.join(refusing)}")
    if None in nics.values():
        reason = node.topology.missing.get("verbs", "not every NIC could be asked")
        return Finding(Status.UNKNOWN, f"nvidia_peermem is not loaded; dma-buf of the NICs: {reason}")
    return Finding(Status.PASS, "dma-buf on GPU and NICs")


@check(
    "gdr.ibgda",
    title="driver parameters for NVSHMEM IBGDA",
    source="/proc/driver/nvidia/params",
    expectation="EnableStreamMemOPs: 1 and RegistryDwords with PeerMappingOverride=1",
    remedy='options nvidia NVreg_EnableStreamMemOPs=1 NVreg_RegistryDwords="PeerMappingOverride=1;" in '
    "/etc/modprobe.d, rebuild the initramfs, reboot. Without it NVSHMEM falls back to a CPU-assisted handler: slower, "
    "still correct.",
    wants="nic.count gdr.ibgda",
    severity=Severity.WARNING,
)
def gdr_ibgda(node: Node, profile: Profile) -> Finding:
    text = node.read("/proc/driver/nvidia/params")
    faults = []
    if not re.search(r"^EnableStreamMemOPs: 1$", text, re.MULTILINE):
        faults.append("EnableStreamMemOPs is not 1")
    if not re.search(r"^RegistryDwords: .*PeerMappingOverride=(0x)?0*1\b", text, re.MULTILINE):
        faults.append("PeerMappingOverride is not 1")
    return Finding.judge(faults, "both set")


@check(
    "gdr.gdrcopy",
    title="gdrcopy",
    source="/dev/gdrdrv",
    expectation="present",
    remedy="Install and load the gdrdrv module; in a container, add --device /dev/gdrdrv.",
    wants="nic.count gdr.gdrcopy",
)
def gdr_gdrcopy(node: Node, profile: Profile) -> Finding:
    device = node.char_device("/dev/gdrdrv")
    return Finding(Status.PASS, "present") if device else Finding(Status.FAIL, "no /dev/gdrdrv")
