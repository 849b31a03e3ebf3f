"""The package builds with CUDA toolkits that the project has not seen: warnings of theirs stop only our own builds."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from pathlib import Path

import pybind11
import pytest

from tests.deploy.commands import must
from tests.deploy.conftest import ROOT
from tests.prerequisites import require_programs

pytestmark = [pytest.mark.deploy, pytest.mark.slow, pytest.mark.timeout(900)]
# A kernel at the limit of its registers, and all that includes nvml.h.
TARGETS = ("CMakeFiles/_cuda.dir/kernels/low_latency/dispatch.cu.o", "_nvml")
KEPT = ROOT / "build" / "toolkits"


def newest() -> str:
    """The newest toolkit of PyPI."""
    return must(ROOT / "ci" / "cuda_toolkit.sh", sys.executable, KEPT / "newest", platform.machine(), "newest").strip()


def oldest() -> str:
    """The oldest that knows sm_90, of Debian; its nvml.h is older than ours may be, and is passed over."""
    require_programs("apt-get", "dpkg-deb")
    if not (KEPT / "oldest").exists():
        must(ROOT / "ci" / "image" / "cuda12.sh", KEPT / "oldest")
    return str(KEPT / "oldest" / "usr" / "local" / "cuda-12.4")


@pytest.mark.parametrize("toolkit", [newest, oldest], ids=["newest", "oldest"])
def test_package_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, toolkit: Callable[[], str]) -> None:
    home = toolkit()
    monkeypatch.setenv("CUDA_HOME", home)
    monkeypatch.setenv("CUDACXX", f"{home}/bin/nvcc")
    definitions = {"HYBRID_EP_BUILD_CUDA": "on", "HYBRID_EP_BUILD_NVML": "on", "HYBRID_EP_BUILD_VERBS": "off"}
    definitions |= {
        "CMAKE_BUILD_TYPE": "Release",
        "HYBRID_EP_CUDA_ARCH_LIST": "9.0",
        "pybind11_DIR": pybind11.get_cmake_dir(),
    }
    options = [f"-D{name}={value}" for name, value in definitions.items()]
    must("cmake", "-S", ROOT / "csrc", "-B", tmp_path, "-G", "Ninja", *options)
    must("cmake", "--build", tmp_path, "--target", *TARGETS)
