"""The host underneath: PCIe routing, memory limits, clock and CPU settings that RDMA depends on."""

from __future__ import annotations

import re

from hybrid_ep.doctor.model import Finding, Severity, Status
from hybrid_ep.doctor.node import Node
from hybrid_ep.doctor.profile import Profile
from hybrid_ep.doctor.registry import check
from hybrid_ep.doctor.survey import survey
from hybrid_ep.doctor.unreadable import Unreadable

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
    source="configuration space of every PCIe bridge; /proc/cpuinfo (hypervisor)",
    expectation="off on every bridge (bare metal; a hypervisor needs it)",
    remedy="Disable ACS in the BIOS, or at each boot: setpci -s BRIDGE ECAP_ACS+6.w=0000.",
    wants="host.acs_off",
    privilege="root, to read extended configuration space",
)
def host_acs(node: Node, profile: Profile) -> Finding:
    if re.search(r"^flags\s*:.*\bhypervisor\b", node.read("/proc/cpuinfo"), re.MULTILINE):
        return Finding(Status.PASS, "a virtual machine: the hypervisor decides")
    bridges = [device.address for device in node.topology.pci if device.is_bridge]

    def fault(address: str) -> str | None:
        control = _acs_control(node.read_bytes(f"/sys/bus/pci/devices/{address}/config"))
        return f"ACS is on ({control:#06x})" if control and control & _ACS_REDIRECTS else None

    return survey(bridges, str, fault, f"off on {len(bridges)} bridges")


@check(
    "host.iommu",
    title="IOMMU",
    source="/sys/kernel/iommu_groups/*/type",
    expectation="{host.iommu}",
    remedy="Boot with iommu=pt, or switch the IOMMU off; translation costs bandwidth on every DMA between GPU and NIC.",
    wants="host.iommu",
)
def host_iommu(node: Node, profile: Profile) -> Finding:
    groups = node.names_or_none("/sys/kernel/iommu_groups")
    kinds = {node.read(f"/sys/kernel/iommu_groups/{group}/type") for group in groups}
    mode = "off" if not groups else "passthrough" if kinds == {"identity"} else "translated"
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
    source="/proc/self/limits",
    expectation="{host.memlock}",
    remedy="memlock unlimited (soft and hard) in /etc/security/limits.d, LimitMEMLOCK=infinity for services, "
    "--ulimit memlock=-1 for containers: registered memory is locked memory.",
    wants="host.memlock",
)
def host_memlock(node: Node, profile: Profile) -> Finding:
    limit = re.search(r"^Max locked memory\s+(\S+)", node.read("/proc/self/limits"), re.MULTILINE)
    if limit is None:
        return Finding(Status.UNKNOWN, "/proc/self/limits has no line for it")
    seen = limit[1] if limit[1] == "unlimited" else f"{limit[1]} bytes"
    return Finding(Status.PASS if limit[1] == profile["host.memlock"] else Status.FAIL, seen)


@check(
    "host.shm",
    title="shared memory",
    source="/proc/self/mounts, /proc/meminfo",
    expectation="/dev/shm of ≥ {host.shm_mib} MiB",
    remedy="--shm-size for containers, an emptyDir with medium Memory at /dev/shm for pods.",
    wants="host.shm_mib",
)
def host_shm(node: Node, profile: Profile) -> Finding:
    mount = re.search(r"^\S+ /dev/shm tmpfs (\S+)", node.read("/proc/self/mounts"), re.MULTILINE)
    if mount is None:
        return Finding(Status.FAIL, "/dev/shm is no tmpfs of its own")
    size = re.search(r"\bsize=(\d+)k", mount[1])
    if size:
        mib = int(size[1]) // 1024
    else:  # tmpfs takes half of the memory where nothing is said
        total = re.search(r"^MemTotal:\s+(\d+) kB", node.read("/proc/meminfo"), re.MULTILINE)
        if total is None:
            return Finding(Status.UNKNOWN, "/proc/meminfo has no MemTotal")
        mib = int(total[1]) // 2048
    return Finding(Status.PASS if mib >= profile["host.shm_mib"] else Status.FAIL, f"{mib} MiB")
