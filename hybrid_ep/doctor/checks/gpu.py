"""The GPUs: all there, memory healthy, not slowed down."""

from __future__ import annotations

import re

import pynvml

from hybrid_ep.doctor.model import Finding, Status
from hybrid_ep.doctor.node import Node
from hybrid_ep.doctor.profile import Profile
from hybrid_ep.doctor.registry import check
from hybrid_ep.doctor.survey import survey
from hybrid_ep.doctor.unreadable import Unreadable

# Fields and reasons by NVML's names, so that no threshold can meet the wrong field.
_RECOVERY_ACTION = int(pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)
_RECOVERY_ACTIONS = {
    int(getattr(pynvml, name)): name.removeprefix("NVML_GPU_RECOVERY_ACTION_").lower()
    for name in dir(pynvml)
    if name.startswith("NVML_GPU_RECOVERY_ACTION_")
}
_SLOWDOWNS = {
    int(pynvml.nvmlClocksEventReasonHwSlowdown): "hardware slowdown",
    int(pynvml.nvmlClocksEventReasonHwThermalSlowdown): "hardware thermal slowdown",
    int(pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown): "power brake",
    int(pynvml.nvmlClocksEventReasonSwThermalSlowdown): "software thermal slowdown",
}


def _name(gpu_idx: int) -> str:
    return f"GPU {gpu_idx}"


def gpus_are_missing(node: Node, profile: Profile) -> bool:
    """Whether there are fewer GPUs than the profile counts; what belongs to those is no fault of its own."""
    want = profile["gpu.count"]
    return isinstance(want, int) and len(node.topology.gpus) < want


@check(
    "gpu.count",
    title="number of GPUs",
    source="NVML DeviceGetCount; PCI vendor 0x10de, class 0x0302 or 0x0300",
    expectation="{gpu.count}, the same by NVML and by PCI",
    remedy="A GPU that PCI shows and NVML does not has lost its driver (look for Xid 79, reset or reboot); where NVML "
    "shows none, the driver is not installed, not loaded or another than its library (dmesg, modprobe nvidia), or "
    "this container was given no GPU (--gpus all; --profile cpu where none is meant). One that PCI does not show "
    "either is unseated, unpowered or not passed through. Where fewer are meant (a virtual machine, a part of a node), "
    "say so in a profile of the site.",
    wants="gpu.count",
    zero_is_wish=True,
)
def gpu_count(node: Node, profile: Profile) -> Finding:
    on_bus = len(node.topology.pci_gpus)
    answering, silent = _answering(node)
    want = profile["gpu.count"] if profile["gpu.count"] != "any" else max(on_bus, answering, 1)
    if answering == want and not node.topology.pci:
        return Finding(Status.PASS, f"{answering} by NVML; PCI cannot be seen here")
    seen = f"{answering} by NVML, {on_bus} by PCI" + "".join(f"; {reason}" for reason in silent)
    return Finding(Status.PASS if answering == want == on_bus else Status.FAIL, seen)


def _answering(node: Node) -> tuple[int, list[str]]:
    """How many GPUs NVML reads, and why it does not read others; none where it does not start though PCI can tell."""
    try:
        gpus = node.nvml.gpus
    except Unreadable as error:
        if error.nvml_code == pynvml.NVML_ERROR_NO_PERMISSION or not node.topology.pci:
            raise
        return 0, [str(error)]
    silent = []
    for gpu_idx in gpus:
        try:
            node.nvml.gpu(gpu_idx, "uuid")
        except Unreadable as error:
            silent.append(f"GPU {gpu_idx}: {error}")
    return len(gpus) - len(silent), silent


@check(
    "gpu.ecc_mode",
    title="ECC mode",
    source="NVML DeviceGetEccMode",
    expectation="on",
    remedy="nvidia-smi -e 1, then reset the GPU or reboot.",
    wants="gpu.ecc",
)
def gpu_ecc_mode(node: Node, profile: Profile) -> Finding:
    return survey(node.nvml.gpus, _name, lambda i: None if node.nvml.gpu(i, "ecc_mode") else "ECC is off", "on")


@check(
    "gpu.ecc_errors",
    title="uncorrected ECC errors since the driver was loaded",
    source="NVML DeviceGetTotalEccErrors (uncorrected, volatile)",
    expectation="0",
    remedy="Drain the node and reset the GPU; if errors come back, replace it.",
    wants="gpu.ecc",
)
def gpu_ecc_errors(node: Node, profile: Profile) -> Finding:
    def fault(gpu_idx: int) -> str | None:
        count = node.nvml.gpu(gpu_idx, "ecc_errors.1.0")
        return f"{count} uncorrected errors" if count else None

    return survey(node.nvml.gpus, _name, fault, "0")


@check(
    "gpu.row_remap",
    title="row remapping",
    source="NVML DeviceGetRemappedRows",
    expectation="none pending, none failed",
    remedy="Pending: reset the GPU so that the remap takes effect. Failed: replace the GPU.",
    wants="gpu.ecc",
)
def gpu_row_remap(node: Node, profile: Profile) -> Finding:
    def fault(gpu_idx: int) -> str | None:
        states = ("pending", "failed")
        bad = [state for state in states if node.nvml.gpu(gpu_idx, f"row_remap_{state}")]
        return f"row remap {' and '.join(bad)}" if bad else None

    return survey(node.nvml.gpus, _name, fault, "none pending, none failed")


@check(
    "gpu.recovery_action",
    title="recovery action that the driver asks for",
    source="NVML field 230 (GET_GPU_RECOVERY_ACTION)",
    expectation="none",
    remedy="Do what the driver asks for: reset the GPU, drain it, or reboot the node.",
    wants="gpu.recovery_action",
)
def gpu_recovery_action(node: Node, profile: Profile) -> Finding:
    def fault(gpu_idx: int) -> str | None:
        action = node.nvml.field(gpu_idx, _RECOVERY_ACTION)
        return _RECOVERY_ACTIONS.get(action, f"action {action}") if action else None

    return survey(node.nvml.gpus, _name, fault, "none")


@check(
    "gpu.xid",
    title="fatal Xid and SXid since boot",
    source="kernel log (/dev/kmsg; journalctl where the log no longer reaches back to the boot)",
    expectation="none of Xid {gpu.fatal_xids}, no fatal SXid",
    remedy="Look the Xid up in NVIDIA's catalog; most of these need a GPU reset or a reboot, some a replacement.",
    wants="gpu.fatal_xids",
    privilege="read access to the kernel log (CAP_SYSLOG where dmesg_restrict is set)",
    quick=False,
)
def gpu_xid(node: Node, profile: Profile) -> Finding:
    first: int | None = None
    faults: list[str] = []
    for sequence, message in node.kernel_log():
        first = sequence if first is None else first
        fault = _fatal(message, profile["gpu.fatal_xids"])
        faults += [fault] if fault else []
    if first != 0 and not faults:
        lines = node.command("journalctl", "--dmesg", "--boot", "--output=cat", "--no-pager").splitlines()
        faults = [fault for fault in (_fatal(line, profile["gpu.fatal_xids"]) for line in lines) if fault]
    return Finding.judge(sorted(set(faults)), "none since boot")


def _fatal(message: str, fatal_xids: list[int]) -> str | None:
    """Reads "NVRM: Xid (PCI:0000:18:00): 79, …" and "nvidia-nvswitch0: SXid (PCI:…): 12028, Fatal, …"."""
    xid = re.search(r"\bXid \((PCI:[0-9a-fA-F:.]+)\): (\d+)", message)
    if xid and int(xid[2]) in fatal_xids:
        return f"Xid {xid[2]} on {xid[1]}"
    sxid = re.search(r"\bSXid \((PCI:[0-9a-fA-F:.]+)\): (\d+), Fatal", message)
    return f"fatal SXid {sxid[2]} on {sxid[1]}" if sxid else None


@check(
    "gpu.throttle",
    title="throttle reasons",
    source="NVML DeviceGetCurrentClocksEventReasons",
    expectation="no hardware or thermal slowdown, no power brake",
    remedy="Check cooling, power supplies and power-brake wiring of the node.",
    wants="gpu.count",
)
def gpu_throttle(node: Node, profile: Profile) -> Finding:
    def fault(gpu_idx: int) -> str | None:
        reasons = node.nvml.gpu(gpu_idx, "clocks_event_reasons")
        return ", ".join(name for bit, name in _SLOWDOWNS.items() if reasons & bit) or None

    return survey(node.nvml.gpus, _name, fault, "none")


@check(
    "gpu.pcie",
    title="PCIe link",
    source="NVML DeviceGetCurr/MaxPcieLinkWidth and Generation",
    expectation="width = maximum; generation = maximum while the GPU is busy (an idle link slows down on purpose)",
    remedy="Reseat the GPU or riser, check retimer firmware; a narrow link halves host and NIC traffic.",
    wants="gpu.count",
)
def gpu_pcie(node: Node, profile: Profile) -> Finding:
    def fault(gpu_idx: int) -> str | None:
        width, most = (node.nvml.gpu(gpu_idx, key) for key in ("pcie_width", "pcie_width_max"))
        if width != most:
            return f"x{width} of x{most}"
        generation, newest = (node.nvml.gpu(gpu_idx, key) for key in ("pcie_generation", "pcie_generation_max"))
        if generation != newest and node.nvml.gpu(gpu_idx, "utilization"):
            return f"generation {generation} of {newest} while busy"
        return None

    return survey(node.nvml.gpus, _name, fault, "full width")


@check(
    "gpu.persistence",
    title="persistence mode",
    source="NVML DeviceGetPersistenceMode",
    expectation="on",
    remedy="Enable nvidia-persistenced, or nvidia-smi -pm 1.",
    wants="gpu.persistence",
)
def gpu_persistence(node: Node, profile: Profile) -> Finding:
    def fault(gpu_idx: int) -> str | None:
        return None if node.nvml.gpu(gpu_idx, "persistence_mode") else "persistence mode is off"

    return survey(node.nvml.gpus, _name, fault, "on")
