"""The package builds with CUDA toolkits that the project has not seen: their warnings are errors in CI's builds only.

Some tests build two parts of the sources: a kernel at the limit of its registers, and all that calls NVML. The others
build every module. All are slow: they download toolkits.
"""

from __future__ import annotations

import platform
import sys
from functools import cache
from pathlib import Path

import pybind11
import pytest

from tests.deploy.commands import must
from tests.deploy.conftest import ROOT
from tests.prerequisites import require_programs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
KERNEL = "CMakeFiles/_cuda.dir/kernels/low_latency/dispatch.cu.o"
NVML = "CMakeFiles/_nvml.dir/topology/nvml_probe.cpp.o"
OLDEST_NVML = "nvidia-nvml-dev-cu12==12.8.90"
KEPT = ROOT / "build" / "toolkits"


@cache
def newest() -> str:
    """The newest toolkit of PyPI."""
    return must(ROOT / "ci" / "cuda_toolkit.sh", sys.executable, KEPT / "newest", platform.machine(), "newest").strip()


@cache
def oldest(parts: str) -> str:
    """The oldest that knows sm_90, of Debian; its nvml.h is older than ours may be, and is passed over."""
    if platform.machine() != "x86_64":
        pytest.skip("Debian's nvcc 12.4 is for x86-64")
    require_programs("apt-get", "dpkg-deb")
    must("env", f"PYTHON={sys.executable}", ROOT / "ci" / "image" / "cuda12.sh", KEPT / f"oldest-{parts}", parts)
    return str(KEPT / f"oldest-{parts}" / "usr" / "local" / "cuda-12.4")


def build(folder: Path, home: str | None, *targets: str, **definitions: str | Path) -> None:
    """Builds targets with the toolkit below `home`, as an installation does: warnings are not errors."""
    variables = [f"CUDA_HOME={home}", f"CUDACXX={home}/bin/nvcc"] if home else []
    definitions = {"HYBRID_EP_BUILD_CUDA": "on" if home else "off", "HYBRID_EP_BUILD_NVML": "on"} | definitions
    definitions |= {"HYBRID_EP_BUILD_VERBS": "off", "HYBRID_EP_CUDA_ARCH_LIST": "9.0", "CMAKE_BUILD_TYPE": "Release"}
    options = [f"-D{name}={value}" for name, value in definitions.items()]
    options += [f"-Dpybind11_DIR={pybind11.get_cmake_dir()}", f"-DPython_EXECUTABLE={sys.executable}"]
    must("env", *variables, "cmake", "-S", ROOT / "csrc", "-B", folder, "-G", "Ninja", *options)
    must("cmake", "--build", folder, "--target", *targets)


def test_the_newest_toolkit_takes_kernels_and_nvml(tmp_path: Path) -> None:
    build(tmp_path, newest(), KERNEL, NVML)


def test_the_oldest_toolkit_takes_kernels(tmp_path: Path) -> None:
    build(tmp_path, oldest("compiler"), KERNEL, NVML)


def test_the_oldest_nvml_header_is_enough(tmp_path: Path) -> None:
    header = tmp_path / "header"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps")
    must(*pip, "--target", header, OLDEST_NVML)
    (include,) = header.glob("nvidia/*/include")
    build(tmp_path / "build", None, NVML, HYBRID_EP_NVML_INCLUDE=include)


@pytest.mark.parametrize("which", ["newest", "oldest"])
def test_every_module_is_built(tmp_path: Path, which: str) -> None:
    build(tmp_path, newest() if which == "newest" else oldest("all"), "all")
    said = must("env", f"PYTHONPATH={tmp_path}", sys.executable, "-c", "import _cuda, _C; print(_C.built)")
    assert said.split() == ["_C", "_nvml", "_cuda"]
