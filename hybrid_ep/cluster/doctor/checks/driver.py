"""The driver, NVML and CUDA: whether they answer and are new enough."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pynvml
import yaml

from hybrid_ep.cluster.doctor.model import Finding, Status
from hybrid_ep.cluster.doctor.node import Node
from hybrid_ep.cluster.doctor.profile import Profile
from hybrid_ep.cluster.doctor.registry import check, shorten
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
    "driver.cuda_start",
    title="CUDA starts, and every idle GPU gives a context",
    source="cuInit and cuDevicePrimaryCtxRetain of libcuda.so.1, in a process of its own with a deadline of 60 s",
    expectation="code 0 of both, and as many GPUs as NVML shows",
    remedy="Look for the code in NVIDIA's manual (cuda.h, CUresult) and for the driver's words in dmesg.",
    wants="driver.min_cuda",
    quick=False,
)
def driver_cuda_start(node: Node, profile: Profile) -> Finding:
    """GPUs in use are left alone: a context takes memory, and its job may have asked to be alone."""
    gpus = list(node.nvml.gpus)
    if not gpus:
        return Finding(Status.UNKNOWN, "no GPU to start, see gpu.count")
    idle = [gpu_idx for gpu_idx in gpus if _is_idle(node, gpu_idx, profile["gpu.idle_memory_mib"] or 0)]
    found = node.cuda_start(idle)
    if found.library:
        return Finding(Status.FAIL, found.library, _cuda_codes()["library"])
    asked = {"cuInit": found.init} | {f"context on GPU {gpu_idx}": found.contexts.get(gpu_idx) for gpu_idx in idle}
    codes = {call: code for call, code in asked.items() if code}
    faults = [f"{call}: code {code}, {_words_of(code)[0]}" for call, code in codes.items()]
    silent = [call for call, code in asked.items() if code is None]
    if found.lost:
        faults.append(f"{silent[0] if silent else 'CUDA'}: {found.lost}")
    elif not codes and silent:
        raise Unreadable(f"{silent[0]}: no code")
    elif not codes and found.devices != len(gpus):
        faults, codes = [f"{found.devices} GPUs by CUDA, {len(gpus)} by NVML"], {"": 101}
    if faults:
        remedies = [_words_of(code)[1] for code in codes.values()] or [_cuda_codes()["lost"]]
        return Finding(Status.FAIL, shorten(faults), remedies[0])
    in_use = f", {len(gpus) - len(idle)} more are in use" if idle != gpus else ""
    return Finding(Status.PASS, f"contexts on {len(idle)} GPUs{in_use}")


def _is_idle(node: Node, gpu_idx: int, idle_mib: int) -> bool:
    try:
        used = int(node.nvml.gpu(gpu_idx, "memory_used_bytes")) >> 20
        return used <= idle_mib and int(node.nvml.gpu(gpu_idx, "num_processes")) == 0
    except Unreadable as error:
        return bool(error.nvml_code == pynvml.NVML_ERROR_NOT_SUPPORTED)


def _words_of(code: int) -> tuple[str, str]:
    """What a CUresult means, and what to do about it."""
    entry = _cuda_codes().get(code, {"what": "not in our table", "remedy": ""})
    return entry["what"], entry["remedy"]


@cache
def _cuda_codes() -> dict[str | int, Any]:
    """cuda_codes.yaml: code → ``what`` and ``remedy``; two words for what has no code."""
    found: dict[str | int, Any] = yaml.safe_load((Path(__file__).parents[1] / "cuda_codes.yaml").read_text())
    return found


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
