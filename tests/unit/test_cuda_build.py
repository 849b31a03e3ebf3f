"""The kernels compile for every architecture we ship, without warnings, and the hot ones keep to their registers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pybind11
import pytest

from tests.prerequisites import find

CSRC = Path(__file__).resolve().parents[2] / "csrc"
KERNELS = sorted(str(path.relative_to(CSRC / "kernels")) for path in (CSRC / "kernels").glob("*/*.cu"))
NVCC = find("nvcc")
pytestmark = pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")

# What a CTA of each persistent kernel may use, so that one fits an SM: registers of a thread (65,536 over its threads)
# and declared shared memory (227 KiB less the rings').
LIMITS = {
    "dispatch_kernel": (128, 15 << 10),
    "combine_kernel": (168, 15 << 10),
    "return_rows_kernel": (128, 15 << 10),
}


def compile_kernel(name: str, arch: str, out: Path) -> str:
    """Compiles one file and returns what ptxas says."""
    assert NVCC is not None
    command = [NVCC, "-O3", "-std=c++17", f"-I{CSRC}", f"-gencode=arch=compute_{arch},code=sm_{arch}", "-Xptxas=-v"]
    command += ["-Werror=all-warnings", "-Xcompiler=-Wall,-Wextra,-Werror", "-c", str(CSRC / "kernels" / name)]
    ran = subprocess.run([*command, "-o", str(out)], capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr
    return ran.stderr


@pytest.mark.parametrize("arch", ["90", "100"])
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_compiles_without_spills(tmp_path: Path, name: str, arch: str) -> None:
    report = compile_kernel(name, arch, tmp_path / "kernel.o")
    entries = report.split("Compiling entry function")[1:]
    assert entries, "ptxas reported no kernel"
    for entry in entries:
        mangled = entry.split("'")[1]
        spills = [int(n) for n in re.findall(r"(\d+) bytes spill", entry)]
        assert spills, entry
        assert not any(spills), f"{mangled}: {spills} bytes spilled"
        used = re.search(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?", entry)
        assert used is not None, entry
        for kernel, (max_registers, max_shared_bytes) in LIMITS.items():
            if kernel in mangled:
                assert int(used[1]) <= max_registers, f"{mangled}: {used[1]} registers"
                assert int(used[2]) <= max_shared_bytes, f"{mangled}: {used[2]} bytes of shared memory"


def test_every_launch_goes_through_the_helper() -> None:
    """Behind `<<<>>>` only `cudaGetLastError` tells how the launch went, and older errors of others with it."""
    sources = {path: path.read_text() for path in (CSRC / "kernels").rglob("*.cu")}
    assert sources
    assert not [path.name for path, text in sources.items() if "<<<" in text]
    launching = [path for path in CSRC.rglob("*") if path.is_file() and "cudaLaunchKernel" in path.read_text()]
    assert launching == [CSRC / "kernels" / "launch.h"]


@pytest.mark.parametrize(
    ("arch_list", "targets"),
    [
        ("9.0 10.0", {"sm_90", "sm_100"}),
        ("9.0a;10.3+PTX", {"sm_90a", "sm_103", "compute_103"}),
        ("sm_90", None),
    ],
)
def test_arch_list_is_that_of_torch(tmp_path: Path, arch_list: str, targets: set[str] | None) -> None:
    definitions = {"HYBRID_EP_CUDA_ARCH_LIST": arch_list, "HYBRID_EP_BUILD_CUDA": "on", "HYBRID_EP_BUILD_NVML": "off"}
    definitions |= {"HYBRID_EP_BUILD_VERBS": "off", "pybind11_DIR": pybind11.get_cmake_dir()}
    options = [f"-D{name}={value}" for name, value in definitions.items()]
    command = ["cmake", "-S", str(CSRC), "-B", str(tmp_path), "-G", "Ninja", *options]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if targets is None:
        assert ran.returncode != 0
        assert f"HYBRID_EP_CUDA_ARCH_LIST has {arch_list}; allowed" in ran.stderr
        return
    assert ran.returncode == 0, ran.stderr
    assert set(re.findall(r"-gencode=arch=\w+,code=(\w+)", (tmp_path / "build.ninja").read_text())) == targets


def test_assembly_stays_in_its_room() -> None:
    """PTX is written in csrc/device/ptx and nowhere else."""
    for path in [*CSRC.rglob("*.cu"), *CSRC.rglob("*.cuh"), *CSRC.rglob("*.h"), *CSRC.rglob("*.cpp")]:
        if path.parent != CSRC / "device" / "ptx":
            assert not re.search(r"\basm\b", path.read_text()), f"{path} has inline assembly"
