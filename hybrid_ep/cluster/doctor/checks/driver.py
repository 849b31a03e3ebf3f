"""The driver, NVML and CUDA: whether they answer and are new enough."""

from __future__ import annotations

import re

from hybrid_ep.cluster.doctor.model import Finding, Status
from hybrid_ep.cluster.doctor.node import Node
from hybrid_ep.cluster.doctor.profile import Profile
from hybrid_ep.cluster.doctor.registry import check
from hybrid_ep.watched import Unreadable


def _version(text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) for part in re.findall(r"\d{1,9}", text))
    if not numbers:
        raise Unreadable(f"{text!r:.40} is no version")
    return numbers


def _at_least(seen: str, least: str) -> Finding:
    return Finding(Status.PASS if _version(seen) >= _version(least) else Status.FAIL, seen)


@check(
    "driver.version",
    title="NVIDIA driver version",
    source="NVML SystemGetDriverVersion",
    expectation="≥ {driver.min_version}",
    remedy="Install an NVIDIA driver of at least that version and reboot.",
    wants="driver.min_version",
)
def driver_version(node: Node, profile: Profile) -> Finding:
    return _at_least(str(node.nvml.system("driver_version")), profile["driver.min_version"])


@check(
    "driver.nvml",
    title="NVML belongs to the loaded driver",
    source="NVML SystemGetNVMLVersion; /proc/driver/nvidia/version",
    expectation="the library's driver version is that of the kernel module",
    remedy="Library and kernel module differ after an update: reboot, or install the matching user-space driver.",
    wants="driver.min_version",
)
def driver_nvml(node: Node, profile: Profile) -> Finding:
    library = str(node.nvml.system("driver_version"))
    module = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", node.read("/proc/driver/nvidia/version"))
    if module is None:
        return Finding(Status.UNKNOWN, "/proc/driver/nvidia/version names no kernel module version")
    seen = f"library {library}, kernel module {module[1]}, NVML {node.nvml.system('nvml_version')}"
    return Finding(Status.PASS if module[1] == library else Status.FAIL, seen)


@check(
    "driver.cuda",
    title="CUDA version of the driver",
    source="NVML SystemGetCudaDriverVersion_v2",
    expectation="≥ {driver.min_cuda}",
    remedy="Install a driver that supports this CUDA version, or the forward-compatibility package.",
    wants="driver.min_cuda",
)
def driver_cuda(node: Node, profile: Profile) -> Finding:
    return _at_least(_cuda(node), profile["driver.min_cuda"])


@check(
    "driver.torch",
    title="CUDA version that torch was built for",
    source="torch/version.py, which is not imported; NVML SystemGetCudaDriverVersion_v2",
    expectation="a major version that the driver has, too",
    remedy="Update the driver (CUDA 12 needs 525, CUDA 13 needs 580), or install a torch that was built for the CUDA "
    "that it has.",
    wants="driver.min_cuda",
    of_jobs=True,
)
def driver_torch(node: Node, profile: Profile) -> Finding:
    torch, driver = node.torch_cuda(), _cuda(node)
    if torch is None:
        return Finding(Status.FAIL, "torch was built without CUDA")
    runs = _version(torch)[0] <= _version(driver)[0]
    return Finding(Status.PASS if runs else Status.FAIL, f"torch for CUDA {torch}, driver for CUDA {driver}")


def _cuda(node: Node) -> str:
    number = int(node.nvml.system("cuda_driver_version"))
    return f"{number // 1000}.{number % 1000 // 10}"
