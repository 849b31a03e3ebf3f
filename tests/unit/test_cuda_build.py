"""`_cuda` has its kernels for every shipped architecture, and the hot kernels use no more registers than allowed.

`make setup` has compiled them: nothing is compiled again here. A build with HYBRID_EP_STRICT, as in CI, takes warnings
and register spills for errors.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from importlib import metadata
from pathlib import Path

import pybind11
import pytest

from tests.prerequisites import find, require, require_programs

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"

# What a CTA of each persistent kernel may use, so that one fits an SM: registers of a thread (65,536 over its threads)
# and declared shared memory (227 KiB less the rings').
LIMITS = {
    "dispatch_kernel": (128, 15 << 10),
    "combine_kernel": (168, 15 << 10),
    "return_rows_kernel": (128, 15 << 10),
    "copy_experts_kernel": (128, 27 << 10),
    "push_experts_kernel": (128, 27 << 10),
    "dispatch_tokens_kernel": (64, 15 << 10),
    "combine_rows_kernel": (128, 15 << 10),
}
# More values than the 64 registers of each of its threads.
SPILLS = """
__global__ void __launch_bounds__(1024, 1) spill(float* x) {
  float kept[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) kept[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 96; ++i) x[i * 1024 + threadIdx.x] = kept[95 - i];
}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where CMake is run: one folder, for it takes long to look at compilers that it has not seen."""
    require_programs("nvcc")
    return tmp_path_factory.mktemp("build")


def configure(out: Path, **definitions: str) -> subprocess.CompletedProcess[str]:
    """Runs CMake for a build with kernels, and without what needs other libraries."""
    definitions = {"STRICT": "off"} | definitions
    definitions |= {"BUILD_CUDA": "on", "BUILD_NVML": "off", "BUILD_VERBS": "off", "BUILD_NVSHMEM": "off"}
    options = [f"-DHYBRID_EP_{name}={value}" for name, value in definitions.items()]
    command = ["cmake", "-S", CSRC, "-B", out, "-G", "Ninja", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def dump(option: str) -> list[str]:
    """The command that shows the kernels of the module beside the Python files by cuobjdump."""
    built = list((ROOT / "hybrid_ep").glob("_cuda.*.so"))
    require(built, "hybrid_ep/_cuda: make setup builds it")
    programs = []
    for name in ("cuobjdump", "nvdisasm"):
        try:
            programs += [file for file in metadata.files(f"nvidia-cuda-{name}") or [] if file.name == name]
        except metadata.PackageNotFoundError:
            require(False, f"{name} (package nvidia-cuda-{name})")
    return [str(programs[0].locate()), option, str(*built)]


@pytest.fixture(scope="module")
def used() -> str:
    """What each kernel uses."""
    return subprocess.run(dump("--dump-resource-usage"), capture_output=True, text=True, check=True).stdout


# `.ci/run` compiles for sm_90 alone.
@pytest.mark.parametrize("arch", ["90", pytest.param("100", marks=pytest.mark.slow)])
def test_kernels_keep_to_their_registers_and_shared_memory(used: str, arch: str) -> None:
    parts = [part for part in used.split("\narch = ")[1:] if part.startswith(f"sm_{arch}\n")]
    assert len(parts) == len(list(CSRC.glob("kernels/*/*.cu"))), "a file without code for this architecture"
    measured = re.findall(r"Function (\w+):\s+REG:(\d+) .*SHARED:(\d+)", "".join(parts))
    for kernel, (max_registers, max_shared_bytes) in LIMITS.items():
        instances = [each for each in measured if kernel in each[0]]
        assert instances, f"there is no {kernel}"
        for mangled, registers, shared_bytes in instances:
            assert int(registers) <= max_registers, f"{mangled}: {registers} registers"
            assert int(shared_bytes) <= max_shared_bytes, f"{mangled}: {shared_bytes} bytes of shared memory"


def test_no_thread_arrives_twice_at_a_barrier() -> None:
    """If one thread alone uses the result of `__syncthreads_and`, ptxas 13.0 makes it arrive a second time for it.

    The first arrival then has no result, which nothing else makes the compiler do.
    """
    kernel, num_kernels, wrong = "", 0, set()
    # grep reads the millions of lines in less time than the loop would.
    command = f"set -o pipefail; {shlex.join(dump('--dump-sass'))} | grep -e 'Function :' -e 'B2R.RESULT RZ ;'"
    for line in subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout.splitlines():
        if "Function :" in line:
            kernel, num_kernels = line.split()[-1], num_kernels + 1
        else:
            wrong.add(kernel)
    assert num_kernels > 2 * len(list(CSRC.glob("kernels/*/*.cu")))
    assert not wrong


@pytest.fixture(scope="module")
def strict_flags(folder: Path) -> list[str]:
    """What CMake gives to nvcc for every kernel."""
    ran = configure(folder, STRICT="on", CUDA_ARCH_LIST="9.0 10.0")
    assert ran.returncode == 0, ran.stderr
    flags = re.findall(
        r"^build \S+\.cu\.o: .*\n(?:  .*\n)*?  FLAGS = (.*)$", (folder / "build.ninja").read_text(), re.M
    )
    assert len(flags) == len(list(CSRC.glob("kernels/*/*.cu")))
    (common,) = set(flags)
    return shlex.split(common)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (SPILLS, "spill"),
        ("__global__ void kernel() { int unused; }", "was declared but never referenced"),
        ("int kernel(int unused) { return 1; }", "unused parameter"),
    ],
    ids=["spill", "warning_in_a_kernel", "warning_on_the_host"],
)
def test_a_strict_build_refuses(strict_flags: list[str], tmp_path: Path, source: str, said: str) -> None:
    (tmp_path / "kernel.cu").write_text(source)
    command = [str(find("nvcc")), *strict_flags, "-c", "kernel.cu", "-o", "kernel.o"]
    compiled = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert compiled.returncode != 0
    assert said in compiled.stderr


@pytest.mark.parametrize("source", ["copy_transport", "copy_process"])
def test_the_transport_for_tests_compiles(source: str, tmp_path: Path) -> None:
    """Only tests on GPUs link and run it (tests/multi_gpu/test_nvshmem.py)."""
    require_programs("nvcc")
    path = ROOT / "tests" / "multi_gpu" / "copy_transport" / f"{source}.cpp"
    command = [str(find("nvcc")), "-std=c++17", "-Xcompiler=-Wall,-Wextra,-Werror,-fPIC", "-c", str(path)]
    subprocess.run([*command, "-o", str(tmp_path / "compiled.o")], check=True)


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
def test_arch_list_is_that_of_torch(folder: Path, arch_list: str, targets: set[str] | None) -> None:
    ran = configure(folder, CUDA_ARCH_LIST=arch_list)
    if targets is None:
        assert ran.returncode != 0
        assert f"HYBRID_EP_CUDA_ARCH_LIST has {arch_list}; allowed" in ran.stderr
        return
    assert ran.returncode == 0, ran.stderr
    assert set(re.findall(r"-gencode=arch=\w+,code=(\w+)", (folder / "build.ninja").read_text())) == targets


def test_inline_assembly_stays_in_its_folder() -> None:
    """PTX is written in csrc/device/ptx and nowhere else."""
    for path in [*CSRC.rglob("*.cu"), *CSRC.rglob("*.cuh"), *CSRC.rglob("*.h"), *CSRC.rglob("*.cpp")]:
        if path.parent != CSRC / "device" / "ptx":
            assert not re.search(r"\basm\b", path.read_text()), f"{path} has inline assembly"
