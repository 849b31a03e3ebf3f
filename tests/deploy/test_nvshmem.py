"""The module `_nvshmem` is built from NVIDIA's wheel, and works with the library of that wheel. No GPU is needed.

Cross-compiling for aarch64 also finds the library. `make image-test` builds the module so.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pybind11
import pytest

from tests.deploy.commands import must
from tests.deploy.conftest import ROOT
from tests.prerequisites import require_programs

pytestmark = pytest.mark.timeout(900)
VERSION = "3.4.5"  # torch 2.11 requires it
SCRIPT = """
import ctypes, sys
ctypes.CDLL(sys.argv[1])
import _nvshmem
print(len(_nvshmem.unique_id()), _nvshmem.link_kernels)
try:
    _nvshmem.join(rank=0, num_ranks=1, unique_id=b"short", device=0)
except ValueError as error:
    print(error)
"""

# csrc/nvshmem.cmake with nothing but what it uses, which needs no CUDA.
PROJECT = """
cmake_minimum_required(VERSION 3.25)
project(nvshmem LANGUAGES CXX)
set(CUDAToolkit_VERSION_MAJOR 13)
add_library(_cuda INTERFACE)
add_library(CUDA::cudart_static INTERFACE IMPORTED)
function(hybrid_ep_leave_out name switch reason)
  message(FATAL_ERROR "${reason}")
endfunction()
function(hybrid_ep_module name)
  file(TOUCH "${CMAKE_CURRENT_BINARY_DIR}/module.cpp")
  add_library(${name} STATIC "${CMAKE_CURRENT_BINARY_DIR}/module.cpp")
endfunction()
include(%s)
"""


@pytest.mark.slow
def test_module_is_built_and_loads(tmp_path: Path) -> None:
    require_programs("nvcc")
    found = re.search(r"release (\d+)\.", must("nvcc", "--version"))
    assert found is not None
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps")
    must(*pip, "--target", tmp_path / "wheel", f"nvidia-nvshmem-cu{found[1]}=={VERSION}")
    home = tmp_path / "wheel" / "nvidia" / "nvshmem"
    definitions = {name: "off" for name in ("BUILD_NVML", "BUILD_VERBS")} | {"STRICT": "on"}
    definitions |= {"BUILD_CUDA": "on", "BUILD_NVSHMEM": "on", "CUDA_ARCH_LIST": "9.0", "VERSION": "1.2.3"}
    options = [f"-DHYBRID_EP_{name}={value}" for name, value in definitions.items()]
    options += [f"-Dpybind11_DIR={pybind11.get_cmake_dir()}", f"-DPython_EXECUTABLE={sys.executable}"]
    build = tmp_path / "build"
    must("env", f"NVSHMEM_HOME={home}", "cmake", "-S", ROOT / "csrc", "-B", build, "-G", "Ninja", *options)
    must("cmake", "--build", build, "--target", "_nvshmem")
    said = must("env", f"PYTHONPATH={build}", sys.executable, "-c", SCRIPT, home / "lib" / "libnvshmem_host.so.3")
    assert said.startswith('128 <capsule object "hybrid_ep.LinkKernels 1.2.3"')
    assert "bytes of a unique id is 5; allowed: those of nvshmem_unique_id" in said


def test_cross_compiling_finds_the_library(tmp_path: Path) -> None:
    require_programs("aarch64-linux-gnu-g++")
    home, build, root = tmp_path / "nvshmem", tmp_path / "build", tmp_path / "root"
    root.mkdir()
    for name in ("include/nvshmemx.h", "lib/libnvshmem_device.a", "lib/libnvshmem_host.so.3"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).touch()
    (tmp_path / "CMakeLists.txt").write_text(PROJECT % (ROOT / "csrc" / "nvshmem.cmake"))
    variables = f"HYBRID_EP_TARGET_ROOT={root}", f"NVSHMEM_HOME={home}"
    toolchain = f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'csrc' / 'cmake' / 'aarch64-linux.cmake'}"
    must("env", *variables, "cmake", "-S", tmp_path, "-B", build, "-G", "Ninja", toolchain)
    cache = (build / "CMakeCache.txt").read_text()
    assert f"HYBRID_EP_NVSHMEM_DEVICE:FILEPATH={home}/lib/libnvshmem_device.a" in cache
