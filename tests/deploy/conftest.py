"""The wheel and a clean environment that it is installed into, made once for all tests of what is shipped."""

from __future__ import annotations

import filecmp
import os
import platform
import shutil
import sys
import venv
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.deploy.commands import must
from tests.prerequisites import require_programs

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "build" / "wheel-test"

BuildWheel = Callable[[str, bool], Path]


def copy_tracked_files() -> None:
    """Makes SOURCE a copy of the tracked files: what is not tracked must not be needed.

    It stays there, and only files that differ are written, so that the next run compiles just what has changed.
    """
    listed = must("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    wanted = {Path(name) for name in listed if (ROOT / name).is_file()}
    for folder, folders, files in os.walk(SOURCE):
        here = Path(folder).relative_to(SOURCE)
        if here == Path():
            folders[:] = [name for name in folders if name != "build"]
        for name in files:
            if here / name not in wanted:
                (SOURCE / here / name).unlink()
    for path in wanted:
        (SOURCE / path).parent.mkdir(parents=True, exist_ok=True)
        if not (SOURCE / path).is_file() or not filecmp.cmp(ROOT / path, SOURCE / path, shallow=False):
            shutil.copy(ROOT / path, SOURCE / path)


@pytest.fixture(scope="session")
def build_wheel(tmp_path_factory: pytest.TempPathFactory) -> BuildWheel:
    """Returns `build(arch, has_kernels)`: the wheel of ci/wheel.sh, with kernels for one GPU architecture or without.

    Kernels take most of the time, so that only slow tests ask for them.
    """
    copy_tracked_files()

    @cache
    def build(arch: str, has_kernels: bool) -> Path:
        out = tmp_path_factory.mktemp("dist")
        own = "/usr/include/infiniband/verbs.h" if arch == platform.machine() else f"{arch}-linux-gnu-g++"
        require_programs("apt-get", "readelf", "c++", own)
        unset = ("CUDA_HOME", "CUDACXX", "RDMA_CORE_HOME", "CMAKE_ARGS", "HYBRID_EP_MULTINODE", "HYBRID_EP_TARGET_ROOT")
        clean = [argument for name in unset for argument in ("-u", name)]
        kernels = ["TORCH_CUDA_ARCH_LIST=9.0", f"HYBRID_EP_BUILD_CUDA={'on' if has_kernels else 'off'}"]
        must("env", *clean, *kernels, SOURCE / "ci" / "wheel.sh", sys.executable, arch, out)
        (built,) = out.glob(f"*_{arch}.whl")
        return built

    return build


@pytest.fixture(scope="session")
def python(build_wheel: BuildWheel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a clean environment with the wheel and its dependencies; torch is the one tested with."""
    home = tmp_path_factory.mktemp("clean")
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    wheel = build_wheel(platform.machine(), False)
    torch_pin = f"torch=={torch.__version__.split('+')[0]}"
    # Few of torch's modules are imported: Python compiles those, where pip would compile all.
    install = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile")
    must(*install, wheel, torch_pin, "setuptools>=77")
    return python
