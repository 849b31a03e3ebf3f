"""Builds the extension modules with CMake; everything else about the package is in pyproject.toml.

`csrc/CMakeLists.txt` decides which modules can be built here and prints one line that says what was built and what was
left out and why. This file only calls it and puts the modules beside the Python files.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def _drop_if_moved(build_dir: Path) -> None:
    """Removes a build folder that CMake made for sources elsewhere, as in a clone that was moved or copied."""
    cache = build_dir / "CMakeCache.txt"
    if cache.exists() and f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT / 'csrc'}\n" not in cache.read_text():
        shutil.rmtree(build_dir)


class CMakeBuild(build_ext):
    """One CMake project builds all modules; setuptools only has to know that there is something to build."""

    def run(self) -> None:
        package_dir = Path(self.get_ext_fullpath("hybrid_ep._C")).resolve().parent
        # In place there is one folder (setuptools gives an editable build a temporary one): only changes are compiled.
        in_place = ROOT / "build" / f"inplace-{sys.implementation.cache_tag}"
        build_dir = in_place if self.inplace else Path(self.build_temp).resolve()
        _drop_if_moved(build_dir)
        build_dir.mkdir(parents=True, exist_ok=True)
        options = {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_LIBRARY_OUTPUT_DIRECTORY": str(package_dir),
            "CMAKE_MAKE_PROGRAM": shutil.which("ninja") or "ninja",  # pip's isolated one moves
            "Python_EXECUTABLE": sys.executable,
            "pybind11_DIR": pybind11.get_cmake_dir(),
            "HYBRID_EP_VERSION": self.distribution.get_version(),
            "HYBRID_EP_BUILD_CUDA": os.environ.get("HYBRID_EP_BUILD_CUDA") or "auto",
            "HYBRID_EP_BUILD_NVML": os.environ.get("HYBRID_EP_BUILD_NVML") or "auto",
            "HYBRID_EP_BUILD_NVSHMEM": os.environ.get("HYBRID_EP_BUILD_NVSHMEM") or "auto",
            "HYBRID_EP_BUILD_VERBS": "on" if os.environ.get("HYBRID_EP_MULTINODE") == "1" else "auto",
            "HYBRID_EP_STRICT": os.environ.get("HYBRID_EP_STRICT") or "off",
            "HYBRID_EP_CUDA_ARCH_LIST": os.environ.get("TORCH_CUDA_ARCH_LIST") or "9.0 10.0",
        }
        definitions = [f"-D{name}={value}" for name, value in options.items()]
        extra = shlex.split(os.environ.get("CMAKE_ARGS", ""))
        configure = ["cmake", "-S", ROOT / "csrc", "-B", build_dir, "-G", "Ninja", *definitions, *extra]
        build = ["cmake", "--build", build_dir, "--parallel", str(self.parallel or os.cpu_count() or 1)]
        if not self.distribution.verbose:  # --quiet: warnings, errors, and the line that says what was built
            configure.append("--log-level=NOTICE")
            build += ["--", "--quiet"]
        subprocess.check_call(configure)
        subprocess.check_call(build)

    def get_outputs(self) -> list[str]:
        return [str(path) for path in Path(self.build_lib, "hybrid_ep").glob("_*.so")]


setup(ext_modules=[Extension("hybrid_ep._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
