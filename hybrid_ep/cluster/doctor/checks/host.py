"""The host underneath: PCIe routing, memory limits, clock and CPU settings that RDMA depends on."""

from __future__ import annotations

import re

from hybrid_ep.cluster.doctor.model import Counters, Finding, Severity, Status
from hybrid_ep.cluster.doctor.node import Node
from hybrid_ep.cluster.doctor.profile import Profile
from hybrid_ep.cluster.doctor.registry import check, counters, shorten, survey
from hybrid_ep.cluster.doctor.roles import assign_roles
from hybrid_ep.cluster.doctor.xid import fault_lines
from hybrid_ep.topology import PciDevice
from hybrid_ep.watched import Unreadable

_EXTENDED_CAPABILITIES = 0x100
_ACS_CAPABILITY = 0x000D
_ACS_CONTROL = 6
# Source validation and P2P request, completion and upstream redirection: each sends peer traffic through the root.
_ACS_REDIRECTS = 0b11101


def _acs_control(config: bytes) -> int | None:
    """The ACS control register of a bridge's configuration space, or None where it has no ACS."""
    if len(config) < 4096:
        raise Unreadable(f"extended configuration space needs root (got {len(config)} of 4096 bytes)")
    offset = _EXTENDED_CAPABILITIES
    while offset:
        header = int.from_bytes(config[offset : offset + 4], "little")
        if header & 0xFFFF == _ACS_CAPABILITY:
            return int.from_bytes(config[offset + _ACS_CONTROL : offset + _ACS_CONTROL + 2], "little")
        following = header >> 20
        if following <= offset:
            return None
        offset = following
    return None


@check(
    "host.acs",
    title="PCIe access control services",
    source="configuration space of PCIe bridges; /proc/cpuinfo (hypervisor)",
    expectation="off on every bridge above a GPU or a GPU's NIC (bare metal; a hypervisor needs it)",
    remedy="Disable ACS in the BIOS, or at each boot: setpci -s BRIDGE ECAP_ACS+6.w=0000.",
    wants="host.acs_off",
    privilege="root, to read extended configuration space",
)
def host_acs(node: Node, profile: Profile) -> Finding:
    if node.is_guest:
        return Finding(Status.PASS, "a virtual machine: the hypervisor decides")
    peers = _peers(node, profile)
    if len(peers) < 2:
        return Finding(Status.PASS, _ALONE)
    on_path = {address for device in peers for address in device.path}
    bridges = [device.address for device in node.topology.pci if device.is_bridge and device.address in on_path]

    def fault(address: str) -> str | None:
        control = _acs_control(node.read_bytes(f"/sys/bus/pci/devices/{address}/config"))
        return f"ACS is on ({control:#06x})" if control and control & _ACS_REDIRECTS else None

    return survey(bridges, str, fault, f"off on {len(bridges)} bridges", if_none="no bridge above a GPU or its NIC")


_ALONE = "no two devices that could talk to each other"


def _peers(node: Node, profile: Profile) -> list[PciDevice]:
    """GPUs and their NICs on PCI: what peer-to-peer traffic runs between."""
    nics = {nic.pci_address for nic in assign_roles(node, profile).compute}
    return [device for device in node.topology.pci if device.is_gpu or device.address in nics]


@check(
    "host.iommu",
    title="IOMMU",
    source="/sys/kernel/iommu_groups/*/type of the groups of GPUs and their NICs",
    expectation="{host.iommu}",
    remedy="Boot with iommu=pt, or switch the IOMMU off; translation costs bandwidth on every DMA between GPU and NIC.",
    wants="host.iommu",
)
def host_iommu(node: Node, profile: Profile) -> Finding:
    if len(_peers(node, profile)) < 2:
        return Finding(Status.PASS, _ALONE)
    groups = node.names_or_none("/sys/kernel/iommu_groups")
    if not groups:
        mode = "off"
    else:
        links = (node.link(f"/sys/bus/pci/devices/{device.address}/iommu_group") for device in _peers(node, profile))
        of_peers = sorted({group for group in links if group in groups})
        kinds = {node.read(f"/sys/kernel/iommu_groups/{group}/type") for group in of_peers}
        mode = "off" if not kinds else "passthrough" if kinds == {"identity"} else "translated"
    return Finding(Status.PASS if mode in profile["host.iommu"] else Status.FAIL, mode)


@check(
    "host.governor",
    title="CPU frequency governor",
    source="/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor, energy_performance_preference",
    expectation="{host.governor}, or as an energy preference where the CPU itself chooses frequencies",
    remedy="cpupower frequency-set -g performance, and make it permanent.",
    wants="host.governor",
    severity=Severity.WARNING,
)
def host_governor(node: Node, profile: Profile) -> Finding:
    cpus = "/sys/devices/system/cpu"
    found: dict[str, int] = {}
    for name in node.names(cpus):
        folder = f"{cpus}/{name}/cpufreq"
        if re.fullmatch(r"cpu\d+", name) and node.exists(folder):
            governor = node.read(f"{folder}/scaling_governor")
            # With amd-pstate-epp or intel_pstate, powersave only says that the CPU chooses; the preference says how.
            if governor == "powersave" and node.exists(f"{folder}/energy_performance_preference"):
                governor = node.read(f"{folder}/energy_performance_preference")
            found[governor] = found.get(governor, 0) + 1
    if not found:
        return Finding(Status.PASS, "the kernel does not scale frequencies here")
    wrong = [f"{governor} on {count} CPUs" for governor, count in found.items() if governor != profile["host.governor"]]
    return Finding.judge(wrong, ", ".join(found))


@check(
    "host.numa_balancing",
    title="automatic NUMA balancing",
    source="/proc/sys/kernel/numa_balancing",
    expectation="off",
    remedy="sysctl -w kernel.numa_balancing=0, and in /etc/sysctl.d; it unmaps pages under pinned buffers' neighbours.",
    wants="host.numa_balancing_off",
    severity=Severity.WARNING,
)
def host_numa_balancing(node: Node, profile: Profile) -> Finding:
    text = node.read_or_none("/proc/sys/kernel/numa_balancing")
    if text is None:
        return Finding(Status.PASS, "the kernel has none")
    return Finding(Status.PASS, "off") if text == "0" else Finding(Status.FAIL, f"on ({text})")


@check(
    "host.hugepages",
    title="2 MiB huge pages",
    source="/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages",
    expectation="≥ {host.hugepages_2m}",
    remedy="sysctl -w vm.nr_hugepages=N, and in /etc/sysctl.d (EFA's libfabric provider uses them).",
    wants="host.hugepages_2m",
)
def host_hugepages(node: Node, profile: Profile) -> Finding:
    count = node.read_int("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")
    return Finding(Status.PASS if count >= profile["host.hugepages_2m"] else Status.FAIL, str(count))


@check(
    "host.memory",
    title="memory of the host",
    source="/proc/meminfo; /sys/devices/system/edac/mc/mc*/ue_count",
    expectation="at least 95 % of {host.memory_gib} GiB, and no uncorrected error since the driver was loaded",
    remedy="The BMC's event log names the module that is missing, was mapped out, or fails: reseat or replace it.",
    wants="",
)
def host_memory(node: Node, profile: Profile) -> Finding:
    gib = node.memory_gib
    want, edac = profile["host.memory_gib"], "/sys/devices/system/edac/mc"
    faults = [f"{gib:.0f} of {want} GiB"] if want and gib < 0.95 * want else []
    controllers = node.names(edac) if node.is_seen(edac) else []
    for name in controllers:
        if name.startswith("mc") and node.is_seen(f"{edac}/{name}/ue_count"):
            count = node.read_int(f"{edac}/{name}/ue_count")
            faults += [f"{name}: {count} uncorrected errors"] if count else []
    return Finding.judge(faults, f"{gib:.0f} GiB")


@check(
    "host.cpus",
    title="CPUs",
    source="/sys/devices/system/cpu/present, online and smt/control",
    expectation="all that are present are online, but for the second threads of cores where SMT is off",
    remedy="Look for what took them away (dmesg, machine checks), or bring them back: "
    "echo 1 > /sys/devices/system/cpu/cpuN/online.",
    wants="",
)
def host_cpus(node: Node, profile: Profile) -> Finding:
    folder = "/sys/devices/system/cpu"
    present, online = (_cpus(node.read(f"{folder}/{name}")) for name in ("present", "online"))
    has_smt = node.is_seen(f"{folder}/smt/control") and "off" in node.read(f"{folder}/smt/control")
    offline = len(present - online)
    if not offline or (has_smt and 2 * offline <= len(present)):
        return Finding(Status.PASS, f"{len(online)} online" + ", SMT is off" * bool(offline))
    return Finding(
        Status.FAIL, f"{offline} of {len(present)} offline: {shorten([str(c) for c in sorted(present - online)])}"
    )


def _cpus(text: str) -> set[int]:
    """The numbers of a list such as ``0-55,112``."""
    found = re.findall(r"(\d{1,5})(?:-(\d{1,5}))?", text)
    if not found:
        raise Unreadable(f"{text!r:.40} is no list of CPUs")
    return {cpu for first, last in found for cpu in range(int(first), int(last or first) + 1)}


@check(
    "host.clock",
    title="clock",
    source="adjtimex(2)",
    expectation="synchronised, within {host.clock_error_ms} ms",
    remedy="Run chronyd or another NTP or PTP client; in a virtual machine chronyd can follow the host's clock "
    "(module ptp_kvm, refclock PHC). The node works without; logs and timeouts of several nodes cannot be compared.",
    wants="host.clock_error_ms",
    severity=Severity.WARNING,
)
def host_clock(node: Node, profile: Profile) -> Finding:
    clock = node.clock()
    if not clock.synchronized:
        return Finding(Status.FAIL, "nothing keeps the clock (the kernel says not synchronised)")
    seen = f"synchronised, within {clock.max_error_us / 1000:.1f} ms"
    return Finding(Status.PASS if clock.max_error_us <= 1000 * profile["host.clock_error_ms"] else Status.FAIL, seen)


@check(
    "host.memlock",
    title="locked memory limit",
    source="/proc/self/limits, /proc/meminfo",
    expectation="{host.memlock}, or as much as the node's memory",
    remedy="memlock unlimited (soft and hard) in /etc/security/limits.d, LimitMEMLOCK=infinity for services, "
    "--ulimit memlock=-1 for containers: registered memory is locked memory.",
    wants="host.memlock",
)
def host_memlock(node: Node, profile: Profile) -> Finding:
    limit = re.search(r"^Max locked memory\s+(\S+)", node.read("/proc/self/limits"), re.MULTILINE)
    if limit is None:
        return Finding(Status.UNKNOWN, "/proc/self/limits has no line for it")
    if limit[1] == profile["host.memlock"]:
        return Finding(Status.PASS, limit[1])
    if limit[1].isdigit() and int(limit[1]) >= node.memory_gib * 2**30:
        return Finding(Status.PASS, f"{limit[1]} bytes, no less than the node's memory")
    return Finding(Status.FAIL, f"{limit[1]} bytes")


@check(
    "host.nofile",
    title="open files limit",
    source="/proc/self/limits",
    expectation="≥ {host.nofile}",
    remedy="nofile 1048576 in /etc/security/limits.d, LimitNOFILE for services, --ulimit nofile for containers: every "
    "connection and every registered buffer takes a descriptor.",
    wants="host.nofile",
)
def host_nofile(node: Node, profile: Profile) -> Finding:
    limit = re.search(r"^Max open files\s+(\d{1,18}|unlimited)", node.read("/proc/self/limits"), re.MULTILINE)
    if limit is None:
        return Finding(Status.UNKNOWN, "/proc/self/limits has no line for it")
    enough = limit[1] == "unlimited" or int(limit[1]) >= profile["host.nofile"]
    return Finding(Status.PASS if enough else Status.FAIL, limit[1])


@check(
    "host.shm",
    title="shared memory",
    source="/proc/self/mounts (the last mount counts), /proc/meminfo, free space",
    expectation="/dev/shm that can be written, of ≥ {host.shm_mib} MiB, and as much of it free",
    remedy="--shm-size for containers, an emptyDir with medium Memory at /dev/shm for pods. Where it is full: remove "
    "what killed jobs left in /dev/shm. Where it is read-only: mount -o remount,rw /dev/shm.",
    wants="host.shm_mib",
)
def host_shm(node: Node, profile: Profile) -> Finding:
    mounts = re.findall(r"^\S+ /dev/shm (\S+) (\S+)", node.read("/proc/self/mounts"), re.MULTILINE)
    if not mounts or mounts[-1][0] != "tmpfs":
        return Finding(Status.FAIL, "/dev/shm is no tmpfs of its own")
    if "ro" in mounts[-1][1].split(","):
        return Finding(Status.FAIL, "/dev/shm is mounted read-only")
    size = re.search(r"\bsize=(\d{1,15})k", mounts[-1][1])
    # tmpfs takes half of the memory where nothing is said.
    mib = int(size[1]) // 1024 if size else int(node.memory_gib * 512)
    least = profile["host.shm_mib"]
    if mib < least:
        return Finding(Status.FAIL, f"{mib} MiB")
    try:
        free = node.free_mib("/dev/shm")
    except Unreadable:
        return Finding(Status.PASS, f"{mib} MiB")
    return Finding(Status.PASS if free >= least else Status.FAIL, f"{mib} MiB, {free} free")


@check(
    "host.kernel",
    title="kernel",
    source="/proc/sys/kernel/osrelease",
    expectation="≥ {host.min_kernel}",
    remedy="Boot a newer kernel.",
    wants="host.min_kernel",
)
def host_kernel(node: Node, profile: Profile) -> Finding:
    release = node.read("/proc/sys/kernel/osrelease")
    numbers = [int(part) for part in re.findall(r"\d{1,9}", release.partition("-")[0])]
    if not numbers:
        raise Unreadable(f"{release!r:.40} is no version")
    least = [int(part) for part in profile["host.min_kernel"].split(".")]
    numbers += [0] * (len(least) - len(numbers))  # 6.8 is 6.8.0
    return Finding(Status.PASS if numbers >= least else Status.FAIL, release)


@check(
    "host.kernel_log",
    title="faults of the host, and of GPUs, their NICs and the bridges above them, since the boot",
    source="kernel log, as gpu.xid",
    expectation="no uncorrected error of CPU or host memory, no oops and no CPU that locked up. Of GPUs, their NICs "
    "and the bridges above: no uncorrected PCIe error and no DMA that the IOMMU refused. Of the NICs no fault of "
    "firmware, power, temperature, transceiver or transmit queue. Other devices do not count",
    remedy="PCIe: reseat the device at the address, check riser and retimer firmware. NIC: update its firmware, check "
    "cooling, transceiver and cable; replace it when it comes back. IOMMU: boot with iommu=pt, and update the device's "
    "driver. CPU and host memory: the BMC's event log names the module; replace it. Oops or lockup: reboot, and update "
    "the driver that the trace names.",
    wants="gpu.xids",
    privilege="as gpu.xid",
    quick=False,
)
def host_kernel_log(node: Node, profile: Profile) -> Finding:
    return _judge_log(node, profile, Severity.ERROR)


@check(
    "host.kernel_stalls",
    title="tasks that hung and CPUs that were too hot, since the boot",
    source="kernel log, as gpu.xid",
    expectation="none",
    remedy="Hung tasks: look for what they waited for (often a file system or the GPU driver) in the trace behind the "
    "line. Heat: check fans, filters and the temperature of the room.",
    wants="gpu.xids",
    privilege="as gpu.xid",
    severity=Severity.WARNING,
    quick=False,
)
def host_kernel_stalls(node: Node, profile: Profile) -> Finding:
    return _judge_log(node, profile, Severity.WARNING)


_ADDRESS = re.compile(r"(?<![0-9a-f:])(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])\b")
_NETDEV = re.compile(r"NETDEV WATCHDOG: (?:CPU: \d+: )?(\S+) \(")


def _devices_in(message: str) -> list[str]:
    """The devices that a line names: PCI addresses as /sys writes them, and network interfaces."""
    addresses = [f"{int(domain or '0', 16):04x}:{rest}" for domain, rest in _ADDRESS.findall(message)]
    return addresses + _NETDEV.findall(message)


def _judge_log(node: Node, profile: Profile, severity: Severity) -> Finding:
    gap = ""
    try:
        lines = node.kernel_log()
    except Unreadable as error:
        lines, gap = list(error.log), str(error)
    known, judged = _judged_devices(node, profile)
    seen: dict[tuple[str, str], int] = {}
    for line in lines:
        what, of = next(((entry.what, entry.severity) for entry in fault_lines() if entry.matches(line)), ("", ""))
        if of != severity.value:
            continue
        named = _devices_in(line.message)
        # A device that is no longer there may have been ours.
        if named and not any(device in judged or device not in known for device in named):
            continue
        key = (what, named[0] if named else "")
        seen[key] = seen.get(key, 0) + 1
    faults = [
        f"{what} {address}".rstrip() + (f", {count} times" if count > 1 else "")
        for (what, address), count in seen.items()
    ]
    if faults:
        return Finding(Status.FAIL, shorten(faults))
    return Finding(Status.UNKNOWN, gap) if gap else Finding(Status.PASS, "none")


def _judged_devices(node: Node, profile: Profile) -> tuple[set[str], set[str]]:
    """Devices that are there, and of these GPUs, their NICs and the bridges above; none where PCI cannot be seen."""
    try:
        known = set(node.names("/sys/bus/pci/devices"))
        paths = {address for device in _peers(node, profile) for address in device.path}
    except Unreadable:
        return set(), set()
    functions = {address.rpartition(".")[0] for address in paths}  # of a card, any function
    judged = {address for address in known if address.rpartition(".")[0] in functions}
    netdevs = {netdev for nic in assign_roles(node, profile).compute for netdev in nic.netdevs}
    known.update(node.names("/sys/class/net") if node.is_seen("/sys/class/net") else ())
    return known, judged | netdevs


@counters(
    "host.aer",
    title="PCIe error counters (AER), read twice",
    source="/sys/bus/pci/devices/*/aer_dev_correctable, aer_dev_nonfatal, aer_dev_fatal of GPUs, their NICs and the "
    "bridges above",
    expectation="no counter rises, but for these and so much an hour on one device: {host.error_rise_per_h}",
    remedy="Reseat the device or riser, check cable, retimer and BIOS; a port that goes on counting needs service.",
    wants="host.error_rise_per_h",
    rise="host",
)
def host_aer(node: Node, profile: Profile) -> Counters:
    peers = _peers(node, profile)
    on_path = {address for device in peers for address in device.path}
    found: dict[tuple[str, str], int] = {}
    for device in node.topology.pci:
        if device.address not in on_path:
            continue
        folder = f"/sys/bus/pci/devices/{device.address}"
        there = node.names(folder)
        for kind, total in (("correctable", "COR"), ("nonfatal", "NONFATAL"), ("fatal", "FATAL")):
            if f"aer_dev_{kind}" in there:
                count = re.search(
                    rf"^TOTAL_ERR_{total} (\d{{1,18}})$", node.read(f"{folder}/aer_dev_{kind}"), re.MULTILINE
                )
                if count:
                    found[device.address, kind] = int(count[1])
    return found  # empty where the firmware keeps AER to itself, as most virtual machines do


@check(
    "host.container_toolkit",
    title="NVIDIA container toolkit",
    source="/etc/nvidia-container-runtime/config.toml, /usr/local/nvidia/toolkit/.config/nvidia-container-runtime/",
    expectation="mode is one of {host.container_modes}, cgroups are not switched off",
    remedy="nvidia-ctk config --in-place --set nvidia-container-runtime.mode=MODE; no-cgroups = false but for rootless "
    "containers: without cgroups, a container loses its GPUs when systemd reloads.",
    wants="host.container_modes",
)
def host_container_toolkit(node: Node, profile: Profile) -> Finding:
    for path in _TOOLKIT_FILES:
        try:
            text = node.read(path)
        except Unreadable:
            continue
        mode = re.search(r'^\s*mode\s*=\s*"([^"]*)"', text, re.MULTILINE)
        seen = mode[1] if mode else "auto"
        faults = [] if seen in profile["host.container_modes"] else [f"mode {seen}"]
        if re.search(r"^\s*no-cgroups\s*=\s*true", text, re.MULTILINE):
            faults.append("no-cgroups = true")
        return Finding.judge(faults, f"mode {seen}")
    return Finding(Status.PASS, "not configured on this system")


_TOOLKIT_FILES = (
    "/etc/nvidia-container-runtime/config.toml",
    "/usr/local/nvidia/toolkit/.config/nvidia-container-runtime/config.toml",
)
