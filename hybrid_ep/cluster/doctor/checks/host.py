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
    if re.search(r"^flags\s*:.*\bhypervisor\b", node.read("/proc/cpuinfo"), re.MULTILINE):
        return Finding(Status.PASS, "a virtual machine: the hypervisor decides")
    on_path = {address for device in _peers(node, profile) for address in device.path}
    bridges = [device.address for device in node.topology.pci if device.is_bridge and device.address in on_path]

    def fault(address: str) -> str | None:
        control = _acs_control(node.read_bytes(f"/sys/bus/pci/devices/{address}/config"))
        return f"ACS is on ({control:#06x})" if control and control & _ACS_REDIRECTS else None

    return survey(bridges, str, fault, f"off on {len(bridges)} bridges", if_none="no bridge above a GPU or its NIC")


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
    source="/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor",
    expectation="{host.governor}",
    remedy="cpupower frequency-set -g performance, and make it permanent.",
    wants="host.governor",
)
def host_governor(node: Node, profile: Profile) -> Finding:
    cpus = "/sys/devices/system/cpu"
    found: dict[str, int] = {}
    for name in node.names(cpus):
        folder = f"{cpus}/{name}/cpufreq"
        if re.fullmatch(r"cpu\d+", name) and node.exists(folder):
            governor = node.read(f"{folder}/scaling_governor")
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
    total = re.search(r"^MemTotal:\s+(\d{1,15}) kB", node.read("/proc/meminfo"), re.MULTILINE)
    if limit[1].isdigit() and total and int(limit[1]) >= 1024 * int(total[1]):
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
    if size:
        mib = int(size[1]) // 1024
    else:  # tmpfs takes half of the memory where nothing is said
        total = re.search(r"^MemTotal:\s+(\d{1,15}) kB", node.read("/proc/meminfo"), re.MULTILINE)
        if total is None:
            return Finding(Status.UNKNOWN, "/proc/meminfo has no MemTotal")
        mib = int(total[1]) // 2048
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
    title="faults of PCIe, NICs, IOMMU, CPUs and host memory since the boot",
    source="kernel log, as gpu.xid",
    expectation="no uncorrected error of PCIe, CPU or host memory; no DMA that the IOMMU refused; no fault of NIC "
    "firmware, power, temperature or transceiver",
    remedy="PCIe: reseat the device at the address, check riser and retimer firmware. NIC: update its firmware, check "
    "cooling, transceiver and cable; replace it when it comes back. IOMMU: boot with iommu=pt, and update the device's "
    "driver. CPU and host memory: the BMC's event log names the module; replace it.",
    wants="gpu.xids",
    privilege="as gpu.xid",
    quick=False,
)
def host_kernel_log(node: Node, profile: Profile) -> Finding:
    gap = ""
    try:
        lines = node.kernel_log()
    except Unreadable as error:
        lines, gap = list(error.log), str(error)
    seen: dict[tuple[str, str], int] = {}
    for line in lines:
        for pattern, what in fault_lines():
            if pattern.search(line.message):
                address = re.search(r"\b[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b", line.message)
                key = (what, address[0] if address else "")
                seen[key] = seen.get(key, 0) + 1
                break
    faults = [
        f"{what} {address}".rstrip() + (f", {count} times" if count > 1 else "")
        for (what, address), count in seen.items()
    ]
    if faults:
        return Finding(Status.FAIL, shorten(faults))
    return Finding(Status.UNKNOWN, gap) if gap else Finding(Status.PASS, "none")


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
