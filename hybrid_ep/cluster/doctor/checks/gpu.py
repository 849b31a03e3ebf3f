"""The GPUs: all there, memory healthy, not slowed down."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from functools import partial

import pynvml

from hybrid_ep.cluster.doctor.model import Counters, Finding, Severity, Status
from hybrid_ep.cluster.doctor.node import Node
from hybrid_ep.cluster.doctor.pcie import link_faults
from hybrid_ep.cluster.doctor.profile import Profile
from hybrid_ep.cluster.doctor.registry import check, counters, shorten, survey
from hybrid_ep.cluster.doctor.xid import read_incidents
from hybrid_ep.watched import Unreadable

# Fields and reasons by NVML's names, so that no threshold can meet the wrong field.
_RECOVERY_ACTION = int(pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)
# A GPU that lacks a field, and a driver that is older than the field.
_NO_SUCH_FIELD = (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_ARGUMENT)
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


_HELD_BY_SETTING = int(pynvml.nvmlClocksEventReasonApplicationsClocksSetting)
_BUSY_PERCENT = 50


def _name(gpu_idx: int) -> str:
    return f"GPU {gpu_idx}"


def gpus_are_missing(node: Node, profile: Profile) -> bool:
    """Whether there are fewer GPUs than the profile counts. That their NICs are missing, too, is no second fault."""
    want = profile["gpu.count"]
    return isinstance(want, int) and len(node.topology.gpus) < want


def sees_few(node: Node, profile: Profile) -> bool:
    """Whether this is a container that was given some of the node's GPUs, and is judged by those."""
    return gpus_are_missing(node, profile) and node.container().may_see_few and bool(node.topology.gpus)


def _has(node: Node, gpu_idx: int, key: str) -> int | str | None:
    """A value of a GPU; None where this GPU or driver has no such thing."""
    try:
        value: int | str = node.nvml.gpu(gpu_idx, key)
    except Unreadable as error:
        if error.nvml_code == pynvml.NVML_ERROR_NOT_SUPPORTED:
            return None
        raise
    return value


def _is_optional(profile: Profile, key: str) -> bool:
    return bool(profile[key] == "if_supported")


@check(
    "gpu.count",
    title="number of GPUs",
    source="NVML DeviceGetCount; PCI vendor 0x10de, class 0x0302 or 0x0300",
    expectation="{gpu.count}, the same by NVML and by PCI; in a container, those that it was given",
    remedy="A GPU that PCI shows and NVML does not has lost its driver: look for Xid 79, reset or reboot. If NVML "
    "shows none, the driver is not installed, not loaded or another than its library (dmesg, modprobe nvidia). A GPU "
    "that PCI does not show either is unseated, unpowered or not passed through. A container that sees none was given "
    "none: use --gpus all, or --profile cpu if none is meant. If the node should have fewer (a virtual machine, a part "
    "of a node), write a profile of the site.",
    wants="gpu.count",
    zero_is_wish=True,
)
def gpu_count(node: Node, profile: Profile) -> Finding:
    on_bus, container, wanted = len(node.topology.pci_gpus), node.container(), profile["gpu.count"]
    if (refused := _not_given(node)) is not None:
        return refused
    unreadable = [device.address for device in node.topology.pci if device.may_be_gpu]
    answering, silent = _answering(node)
    want = max(on_bus, answering, 1) if wanted == "any" else wanted
    if isinstance(wanted, list):  # the sizes of a cloud's machines
        want = min((size for size in wanted if size >= max(on_bus, answering)), default=max(wanted))
    seen = f"{answering} by NVML, {on_bus} by PCI" + "".join(f"; {reason}" for reason in silent)
    if answering == want and not node.topology.pci:
        return Finding(Status.PASS, f"{answering} by NVML; PCI cannot be seen here")
    if container.may_see_few and answering < want and len(silent) <= (answering == 0):
        if answering == 0:
            return Finding(Status.UNKNOWN, f"{seen}; a container without GPUs cannot see the others")
        return Finding(Status.PASS, f"{seen}; judged by the {answering} that this container was given")
    if unreadable and on_bus + len(unreadable) >= answering:
        return Finding(Status.UNKNOWN, f"{seen}; class of {', '.join(unreadable)} cannot be read")
    return Finding(Status.PASS if answering == want == on_bus else Status.FAIL, seen)


def _not_given(node: Node) -> Finding | None:
    """A container whose NVML does not start: it was given no GPU, or it has lost those that it was given."""
    if not node.container().inside:
        return None
    try:
        node.nvml.system("gpu_count")
    except Unreadable as error:
        if node.gpu_devices and error.nvml_code in _SHUT_OUT:
            words = "Recreate the container: it may no longer open its device files, as after systemctl daemon-reload. "
            words += "On the node, use CDI, or let the runtime create /dev/char links (nvidia-ctk system)."
            return Finding(Status.FAIL, f"this container has lost {', '.join(node.gpu_devices)}: {error}", words)
        absent = error.nvml_code == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND or not node.gpu_devices
        if absent and node.driver_is_loaded:
            return Finding(Status.UNKNOWN, f"this container was given no GPU; the node's driver is loaded ({error})")
    return None


# A container whose device files are there, and may not be opened any more.
_SHUT_OUT = (pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
# What NVML says where the driver is the fault, and not our view of it.
_NO_DRIVER = (
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    pynvml.NVML_ERROR_GPU_IS_LOST,
    pynvml.NVML_ERROR_UNKNOWN,
)


def _answering(node: Node) -> tuple[int, list[str]]:
    """How many GPUs NVML reads, and why it does not read others; none if it does not start and PCI shows GPUs."""
    try:
        gpus = node.nvml.gpus
    except Unreadable as error:
        if error.nvml_code not in _NO_DRIVER or not node.topology.pci:
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
    "gpu.model",
    title="model and memory of the GPUs",
    source="NVML DeviceGetName, DeviceGetMemoryInfo",
    expectation="one model, that of the profile ({match.gpu_name}), with one size of memory, ≥ {gpu.memory_gib} GiB",
    remedy="Another board was built in: replace it. Less memory than the others have: look for remapped or retired "
    "memory (Xid 168), MIG, or a failed board. Where the profile does not fit the whole node, give another.",
    wants="gpu.count",
)
def gpu_model(node: Node, profile: Profile) -> Finding:
    names = {gpu_idx: str(node.nvml.gpu(gpu_idx, "name")) for gpu_idx in node.nvml.gpus}
    sizes = {gpu_idx: int(node.nvml.gpu(gpu_idx, "memory_bytes")) / 2**30 for gpu_idx in names}
    if not names:
        raise Unreadable("no GPU to examine, see gpu.count")
    usual = Counter(names.values()).most_common(1)[0][0]
    pattern = profile["match.gpu_name"]
    faults = [f"GPU {idx} is {name}, others are {usual}" for idx, name in names.items() if name != usual]
    faults += [f"{usual} is not of this profile"] if pattern and not re.search(pattern, usual) else []
    most = max(size for idx, size in sizes.items() if names[idx] == usual)
    least = max(most * 0.99, profile["gpu.memory_gib"] or 0)
    faults += [f"GPU {idx} has {size:.1f} GiB" for idx, size in sizes.items() if names[idx] == usual and size < least]
    return Finding.judge(faults, f"{len(names)}× {usual}, {most:.1f} GiB")


@check(
    "gpu.bar1",
    title="BAR1, through which NICs and other GPUs reach the memory over PCIe",
    source="NVML DeviceGetBAR1MemoryInfo, DeviceGetMemoryInfo",
    expectation="as large as the GPU's memory, where NICs or other GPUs use PCIe to reach it",
    remedy="BIOS: above-4G decoding and Resizable BAR on. Virtual machine: give it enough 64-bit MMIO space (QEMU: "
    "pci-hole64-size, or OVMF's X-PciMmio64Mb). Some boards have a mode to choose: displaymodeselector. A small BAR1 "
    "lets NICs register little of the memory.",
    wants="gpu.bar1",
)
def gpu_bar1(node: Node, profile: Profile) -> Finding:
    if profile["nic.count"] == 0 and profile["nvlink.switch"]:
        return Finding(Status.PASS, "not needed: no NIC, and NVLink joins the GPUs")
    sizes: set[float] = set()

    def fault(gpu_idx: int) -> str | None:
        size, memory = _has(node, gpu_idx, "bar1_bytes"), int(node.nvml.gpu(gpu_idx, "memory_bytes"))
        if not size:  # where CPU and GPU share memory, there may be none
            return None
        sizes.add(int(size) / 2**30)
        return f"{int(size) >> 20} MiB for {memory / 2**30:.1f} GiB" if int(size) < memory else None

    found = survey(node.nvml.gpus, _name, fault, "not reported")
    return Finding(Status.PASS, f"{min(sizes):g} GiB") if found.status is Status.PASS and sizes else found


@check(
    "gpu.ecc_mode",
    title="ECC mode",
    source="NVML DeviceGetEccMode (current and pending)",
    expectation="on, also after the next reset",
    remedy="nvidia-smi -e 1, then reset the GPU or reboot.",
    wants="gpu.ecc",
)
def gpu_ecc_mode(node: Node, profile: Profile) -> Finding:
    def fault(gpu_idx: int) -> str | None:
        mode = _has(node, gpu_idx, "ecc_mode")
        if mode is None and not _is_optional(profile, "gpu.ecc"):
            raise Unreadable("the driver says that it has no ECC")
        if mode == 0:
            return "ECC is off"
        return "ECC goes off at the next reset" if _has(node, gpu_idx, "ecc_mode_pending") == 0 else None

    return survey(node.nvml.gpus, _name, fault, "on")


@check(
    "gpu.ecc_errors",
    title="uncorrected ECC errors since the driver was loaded",
    source="NVML DeviceGetTotalEccErrors (uncorrected, volatile), DeviceGetSramEccErrorStatus (root)",
    expectation="0, and in the GPU's life no more errors of SRAM than NVIDIA's threshold",
    remedy="Drain the node and reset the GPU; if errors come back, replace it. A GPU beyond the threshold of SRAM "
    "errors has a defect that a reset does not end: run the vendor's field diagnostic, and replace it.",
    wants="gpu.ecc",
)
def gpu_ecc_errors(node: Node, profile: Profile) -> Finding:
    def fault(gpu_idx: int) -> str | None:
        count = _has(node, gpu_idx, "ecc_errors.1.0")
        if count is None and not _is_optional(profile, "gpu.ecc"):
            raise Unreadable("the driver does not count them")
        faults = [f"{count} uncorrected errors"] if count else []
        with contextlib.suppress(Unreadable):  # only root may ask, and older drivers have no answer
            faults += ["SRAM errors beyond the threshold"] * bool(_has(node, gpu_idx, "sram_threshold_exceeded"))
        return ", ".join(faults) or None

    return survey(node.nvml.gpus, _name, fault, "0")


@check(
    "gpu.row_remap",
    title="row remapping",
    source="NVML DeviceGetRemappedRows, DeviceGetRowRemapperHistogram; before Ampere, "
    "DeviceGetRetiredPagesPendingStatus",
    expectation="none pending, none failed, spare rows left in every bank; no page retirement pending",
    remedy="Pending: reset the GPU so that the remap takes effect. Failed, or no spare rows: replace the GPU.",
    wants="gpu.ecc",
)
def gpu_row_remap(node: Node, profile: Profile) -> Finding:
    def fault(gpu_idx: int) -> str | None:
        states = {state: _has(node, gpu_idx, f"row_remap_{state}") for state in ("pending", "failed")}
        if None in states.values() and not _is_optional(profile, "gpu.ecc"):
            raise Unreadable("the driver does not report it")
        bad = [state for state, value in states.items() if value]
        empty = _has(node, gpu_idx, "row_remap_banks_without_spares")
        faults = [f"row remap {' and '.join(bad)}"] if bad else []
        faults += [f"{empty} banks without spare rows"] if empty else []
        # Before Ampere, pages are retired in place of rows that are remapped.
        faults += ["page retirement pending"] if _has(node, gpu_idx, "retired_pages_pending") else []
        return ", ".join(faults) or None

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
        try:
            action = node.nvml.field(gpu_idx, _RECOVERY_ACTION)
        except Unreadable as error:
            if error.nvml_code not in _NO_SUCH_FIELD or not _is_optional(profile, "gpu.recovery_action"):
                raise
            return None
        return _RECOVERY_ACTIONS.get(action, f"action {action}") if action else None

    return survey(node.nvml.gpus, _name, fault, "none")


@check(
    "gpu.xid",
    title="Xid, SXid and GPUs that the driver could not start, since the boot or the last reset",
    source="kernel log (/dev/kmsg; journalctl where that cannot be read or no longer reaches back to the boot)",
    expectation="none that wants a reset, a reboot or service by NVIDIA's catalogue; {gpu.xid_actions} overrides it",
    remedy="Do what stands behind the Xid. One that comes back after a reset: have the GPU (NVLink: baseboard, "
    "NVSwitch, cable) serviced.",
    wants="gpu.xids",
    privilege="read access to the kernel log (CAP_SYSLOG where dmesg_restrict is set; in Kubernetes a hostPath of "
    "/dev/kmsg or the journal)",
    quick=False,
)
def gpu_xid(node: Node, profile: Profile) -> Finding:
    overrides = {int(number): action for number, action in profile["gpu.xid_actions"].items()}
    gap = ""
    try:
        lines = node.kernel_log()
    except Unreadable as error:
        lines, gap = list(error.log), str(error)
    incidents = read_incidents(lines, overrides)
    faults = [str(incident) for incident in incidents if incident.action]
    if faults:
        return Finding(Status.FAIL, shorten(faults))
    if gap:
        return Finding(Status.UNKNOWN, gap)
    others = sorted({incident.name for incident in incidents})
    return Finding(Status.PASS, f"no fault; of applications: {', '.join(others)}" if others else "none")


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
    title="PCIe link and the path above it",
    source="NVML DeviceGetCurr/MaxPcieLinkWidth and Generation; /sys/bus/pci/devices of the GPU and every bridge above",
    expectation="width of the GPU, at least x{gpu.pcie_width}. Slot and GPU can do generation {gpu.pcie_generation}; "
    "a busy GPU runs at it (an idle link slows down by design). Links of switches are as wide and fast as both ends "
    "can. In a virtual machine: width of the GPU by NVML, as far as the hypervisor shows it",
    remedy="Reseat the GPU or riser, check the slot's bifurcation and retimer firmware; a narrow or slow link halves "
    "host and NIC traffic.",
    wants="gpu.count",
)
def gpu_pcie(node: Node, profile: Profile) -> Finding:
    want_width, want_generation = profile["gpu.pcie_width"], profile["gpu.pcie_generation"]
    if node.is_guest:
        return survey(node.nvml.gpus, _name, partial(_guest_width_fault, node), "full width, as far as a guest sees it")
    devices = {device.address: device for device in node.topology.pci}
    addresses = {gpu.gpu_idx: gpu.pci_address for gpu in node.topology.gpus}

    def fault(gpu_idx: int) -> str | None:
        width, most = (int(node.nvml.gpu(gpu_idx, key)) for key in ("pcie_width", "pcie_width_max"))
        device = devices.get(addresses.get(gpu_idx, ""))
        want = max(most, want_width or 0, device.link.max_width if device else 0)
        faults = [f"x{width} of x{want}"] if width < want else []
        generation, newest = (int(node.nvml.gpu(gpu_idx, key)) for key in ("pcie_generation", "pcie_generation_max"))
        if newest < (want_generation or 0):
            faults.append(f"slot and GPU together do generation {newest}, not {want_generation}")
        # A load that is nearly none leaves the link slow.
        elif generation < newest and int(node.nvml.gpu(gpu_idx, "utilization")) >= _BUSY_PERCENT:
            faults.append(f"generation {generation} of {newest} while busy")
        faults += link_faults(device, devices) if device else []
        return ", ".join(faults) or None

    return survey(node.nvml.gpus, _name, fault, "full width")


def _guest_width_fault(node: Node, gpu_idx: int) -> str | None:
    """A hypervisor hides the slot and the bridges, and often the link; what NVML does show is the GPU's own."""
    width, most = (int(_has(node, gpu_idx, key) or 0) for key in ("pcie_width", "pcie_width_max"))
    return f"x{width} of x{most}" if 1 < width < most else None


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
        return "persistence mode is off" if _has(node, gpu_idx, "persistence_mode") == 0 else None

    return survey(node.nvml.gpus, _name, fault, "on")


@check(
    "gpu.mig",
    title="MIG mode",
    source="NVML DeviceGetMigMode (current and pending)",
    expectation="off, also after the next reset",
    remedy="nvidia-smi -mig 0, then reset the GPU: the parts of a GPU have no NVLink and no RDMA of their own.",
    wants="gpu.count",
)
def gpu_mig(node: Node, profile: Profile) -> Finding:
    def fault(gpu_idx: int) -> str | None:
        if _has(node, gpu_idx, "mig_mode"):
            return "MIG is on"
        return "MIG goes on at the next reset" if _has(node, gpu_idx, "mig_mode_pending") else None

    return survey(node.nvml.gpus, _name, fault, "off")


@check(
    "gpu.compute_mode",
    title="compute mode",
    source="NVML DeviceGetComputeMode",
    expectation="default: several processes may use a GPU",
    remedy="nvidia-smi -c 0. Prohibited lets no process in, and exclusive refuses the second one.",
    wants="gpu.count",
)
def gpu_compute_mode(node: Node, profile: Profile) -> Finding:
    modes = {1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}

    def fault(gpu_idx: int) -> str | None:
        mode = _has(node, gpu_idx, "compute_mode")
        return modes.get(int(mode), f"mode {mode}") if mode else None

    return survey(node.nvml.gpus, _name, fault, "default")


@check(
    "gpu.clocks",
    title="locked clocks and power limit",
    source="NVML DeviceGetCurrentClocksEventReasons, DeviceGetPowerManagementLimit and DefaultLimit, "
    "DeviceGetEnforcedPowerLimit",
    expectation="power limit = its default, and no lower one is enforced; clocks held by a setting on no GPU, or on "
    "all alike",
    remedy="nvidia-smi -rgc and -rac release the clocks, nvidia-smi -pl sets the power limit; look for who set them. A "
    "lower limit that is enforced comes from outside the node's system: ask the BMC or the rack's power manager.",
    wants="gpu.count",
    severity=Severity.WARNING,
)
def gpu_clocks(node: Node, profile: Profile) -> Finding:
    reasons = {i: int(_has(node, i, "clocks_event_reasons") or 0) for i in node.nvml.gpus}
    held = [gpu_idx for gpu_idx, bits in reasons.items() if bits & _HELD_BY_SETTING]

    def fault(gpu_idx: int) -> str | None:
        limit, usual = (_has(node, gpu_idx, f"power_limit{suffix}") for suffix in ("", "_default"))
        faults = ["clocks are held by a setting"] if gpu_idx in held and len(held) < len(reasons) else []
        if limit is not None and usual is not None and int(limit) < int(usual):
            faults.append(f"power limit {int(limit) // 1000} of {int(usual) // 1000} W")
        enforced = _has(node, gpu_idx, "power_limit_enforced")
        wanted = min((int(watts) for watts in (limit, usual) if watts is not None), default=0)
        if enforced is not None and int(enforced) < wanted:
            faults.append(f"{int(enforced) // 1000} W enforced, the limit is {wanted // 1000} W")
        return ", ".join(faults) or None

    return survey(node.nvml.gpus, _name, fault, "held by a setting on all GPUs" if held else "free")


@check(
    "gpu.memory_use",
    title="memory that no process holds",
    source="NVML DeviceGetMemoryInfo, DeviceGetComputeRunningProcesses",
    expectation="≤ {gpu.idle_memory_mib} MiB where no process uses the GPU",
    remedy="A process that was killed has left its memory behind: look for zombies and for containers that still run, "
    "then reset the GPU. A container does not see the processes of others: ask on the node.",
    wants="gpu.idle_memory_mib",
    severity=Severity.WARNING,
)
def gpu_memory_use(node: Node, profile: Profile) -> Finding:
    users: dict[int, int] = {}

    def fault(gpu_idx: int) -> str | None:
        used, processes = _has(node, gpu_idx, "memory_used_bytes"), _has(node, gpu_idx, "num_processes")
        if used is None or processes is None:
            return None
        if processes:
            users[gpu_idx] = int(processes)
            return None
        mib = int(used) >> 20
        return f"{mib} MiB in use, and no process" if mib > profile["gpu.idle_memory_mib"] else None

    found = survey(node.nvml.gpus, _name, fault, "none")
    if found.status is Status.FAIL and node.container().inside:
        return Finding(Status.UNKNOWN, f"{found.seen}; other containers' processes cannot be seen here")
    in_use = ", ".join(f"GPU {gpu_idx} by {count}" for gpu_idx, count in users.items())
    return Finding(Status.PASS, f"in use: {in_use}") if found.status is Status.PASS and users else found


@check(
    "gpu.firmware",
    title="VBIOS and InfoROM",
    source="NVML DeviceGetVbiosVersion, DeviceGetInforomImageVersion",
    expectation="one version of each on all GPUs, and no InfoROM that is corrupted",
    remedy="Bring all GPUs to one firmware with the vendor's update (for HGX the whole baseboard). A GPU whose InfoROM "
    "is corrupted keeps no record of its faults: have it serviced.",
    wants="gpu.count",
    severity=Severity.WARNING,
)
def gpu_firmware(node: Node, profile: Profile) -> Finding:
    faults, seen = [], []
    for what, key in (("VBIOS", "vbios"), ("InfoROM", "inforom")):
        versions: dict[str, list[int]] = {}
        for gpu_idx in node.nvml.gpus:
            try:
                version = _has(node, gpu_idx, key)
            except Unreadable as error:
                if error.nvml_code != pynvml.NVML_ERROR_CORRUPTED_INFOROM:
                    raise
                faults.append(f"GPU {gpu_idx}: its InfoROM is corrupted")
                continue
            if version is not None:
                versions.setdefault(str(version), []).append(gpu_idx)
        listed = "; ".join(f"{what} {version} on GPUs {gpus}" for version, gpus in versions.items())
        faults += [listed] if len(versions) > 1 else []
        seen += [f"{what} {version}" for version in versions]
    return Finding.judge(faults, ", ".join(seen) or "this driver does not report it")


@counters(
    "gpu.errors",
    title="counters of memory and PCIe errors, read twice",
    source="NVML DeviceGetTotalEccErrors (corrected, volatile), DeviceGetRemappedRows, DeviceGetPcieReplayCounter",
    expectation="no counter rises, but for these and so much an hour on one GPU: {gpu.error_rise_per_h}",
    remedy="Corrected ECC errors or remapped rows in such a number: drain the node, reset the GPU, and replace it when "
    "they come back. PCIe replays: reseat the GPU or riser.",
    wants="gpu.error_rise_per_h",
    rise="gpu",
)
def gpu_errors(node: Node, profile: Profile) -> Counters:
    keys = {
        "ecc_corrected": "ecc_errors.0.0",
        "rows_remapped_corrected": "row_remap_corrected",
        "rows_remapped_uncorrected": "row_remap_uncorrected",
        "pcie_replay": "pcie_replay",
    }
    found: dict[tuple[str, str], int] = {}
    reason = "the driver has none of these counters"
    for gpu_idx in node.nvml.gpus:
        for name, key in keys.items():
            try:
                value = _has(node, gpu_idx, key)
            except Unreadable as error:  # of one counter; the others count all the same
                reason = str(error)
                continue
            if value is not None:
                found[_name(gpu_idx), name] = int(value)
    if not found:
        raise Unreadable(reason)
    return found
