"""Builds `_cuda` and `_nvshmem` for the CPU: the sources of csrc/, with the emulator's headers for CUDA's.

The modules stay in `CACHE` under a digest of their sources, so that they are compiled once and not in every run.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11

from tests.emulation.steps import ENDS, STEPS, can_leave_out
from tests.prerequisites import CACHE as CACHE_OF_TESTS

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
CACHE = CACHE_OF_TESTS / "emulation"
_MOST_KEPT = 5
# The headers of libraries, and the sources that are left out where they are, and where they are not.
_LIBRARIES = {
    Path("/usr/include/infiniband/verbs.h"): ({"verbs_absent"}, {"verbs_api", "verbs_device", "verbs_link"}),
    Path("/usr/include/rdma/fi_rma.h"): ({"fabric_absent"}, {"fabric_device", "fabric_link"}),
}

_DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];")


def as_cpp(source: str) -> str:
    """CUDA C++ as C++: dynamic shared memory is asked for, and tensors are on the CPU."""
    source = source.replace("{dlpack::kCuda, device}", "{1, 0}")
    return _DYNAMIC.sub(r"auto* \2 = reinterpret_cast<\1*>(emulated::dynamic_shared());", source)


def _transport_sources() -> list[Path]:
    """The transports with memory of the host; verbs and libfabric where their headers are."""
    absent = set().union(*(stems[not header.exists()] for header, stems in _LIBRARIES.items()))
    sources = sorted(CSRC.glob("transport/*.cpp"))
    return [path for path in sources if not path.stem.endswith("_cuda") and path.stem not in absent]


def _headers() -> list[bool]:
    return [header.exists() for header in _LIBRARIES]


def build() -> Path:
    """Returns the path of `_cuda`, beside which `_nvshmem` lies; compiles them where `CACHE` has none of these sources.

    Processes that need modules at once wait for the first one, which compiles. A build that is killed leaves none.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    folder = CACHE / _digest()
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            work = CACHE / "work"  # always the same, so that a compiler cache finds what an earlier build has compiled
            shutil.rmtree(work, ignore_errors=True)
            modules = work / "modules"
            modules.mkdir(parents=True)
            _compile(work, modules)
            modules.rename(folder)
            shutil.rmtree(work)
        os.utime(folder)
        by_last_use = sorted(CACHE.glob("*/"), key=lambda path: path.stat().st_mtime)
        for old in by_last_use[:-_MOST_KEPT]:
            shutil.rmtree(old)
    return folder / f"_cuda{sysconfig.get_config_var('EXT_SUFFIX')}"


def _digest() -> str:
    """Names all that the modules depend on: sources, this file, the compiler, Python and pybind11."""
    compiler = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256(repr((compiler, sys.version, pybind11.__version__, _headers())).encode())
    own = [path for path in HERE.rglob("*") if path.suffix in (".cpp", ".h", ".cuh")]
    of_csrc = [path for path in CSRC.rglob("*") if path.is_file()]
    for path in sorted([*own, *of_csrc, HERE / "build.py", HERE / "steps.py"]):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(CSRC.parent)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:32]


def _compile(out: Path, modules: Path) -> None:
    """Compiles in the folder `out`, and writes the modules into another folder."""

    def translate(original: Path, prefix: str = "") -> Path:
        folder = HERE if original.parent == HERE else CSRC
        translated = out / f"{prefix}{'_'.join(original.relative_to(folder).with_suffix('').parts)}.cpp"
        source = can_leave_out(str(original.relative_to(folder)), original.read_text())
        translated.write_text(f'#line 1 "{original}"\n' + as_cpp(source))
        return translated

    emulator = translate(HERE / "emulator.cpp")
    of_cuda = (
        *sorted(CSRC.glob("kernels/*/*.cu")),
        *sorted(CSRC.glob("runtime/*.cpp")),
        *sorted(CSRC.glob("bindings/cuda/*.cpp")),
        *(CSRC / f"calls/{name}.cpp" for name in ("domain", "low_latency", "plans", "request", "slots")),
        *_transport_sources(),
        CSRC / "layout/link_layout.cpp",
        CSRC / "bindings/sizes.cpp",
        CSRC / "modules/cuda.cpp",
        CSRC / "bindings/transport.cpp",
    )
    of_nvshmem = (
        HERE / "emulated_nvshmem.cpp",
        CSRC / "bindings/nvshmem/module.cpp",
        CSRC / "runtime/nvshmem/world.cu",
        *(CSRC / f"kernels/{name}/{name}.cu" for name in ("dispatch_between", "combine_between")),
        CSRC / "kernels/between/stream_chunks.cu",
        *(CSRC / f"kernels/low_latency_between/{name}.cu" for name in ("dispatch", "combine")),
    )
    sources = {
        "_cuda": [translate(original) for original in of_cuda],
        "_nvshmem": [translate(original, "nvshmem_") for original in of_nvshmem],
    }
    headers = out / "headers"  # found before those of csrc
    for file in sorted({step.file for step in (*STEPS, *ENDS) if step.file.endswith(".cuh")}):
        target = headers / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f'#line 1 "{CSRC / file}"\n' + can_leave_out(file, (CSRC / file).read_text()))
    includes = [HERE / "include", HERE, headers, CSRC, pybind11.get_include(), sysconfig.get_path("include")]
    flags = [
        "-std=c++17",
        "-g1",
        "-fPIC",
        "-pthread",
        "-ffp-contract=off",
        "-Wno-unknown-pragmas",
        "-fvisibility=hidden",
        '-DHYBRID_EP_VERSION="emulated"',
        '-DPYBIND11_COMPILER_TYPE="_emulated"',
    ]

    def run_compiler(*args: str) -> None:
        subprocess.run(["g++", *flags, *(f"-I{i}" for i in includes), *args], cwd=out, check=True)

    # Headers of pybind11 take most of the time to compile, so that they are compiled once.
    (out / "pybind.h").write_text("#include <pybind11/pybind11.h>\n#include <pybind11/stl.h>\n")
    run_compiler("-O0", "-x", "c++-header", "pybind.h", "-o", "pybind.h.gch")

    def compile_one(source: Path, *more: str) -> Path:
        target = f"{source.stem}.o"
        if source.name.startswith(("bindings_", "calls_", "modules_", "nvshmem_bindings_")):
            more = ("-O0", "-include", "pybind.h", *more)
        else:
            more = ("-O2" if source == emulator else "-O1", *more)
        run_compiler(*more, "-c", source.name, "-o", target)
        return out / target

    with ThreadPoolExecutor(2) as pool:
        objects = {
            "_cuda": pool.map(compile_one, [emulator, *sources["_cuda"]]),
            "_nvshmem": pool.map(lambda source: compile_one(source, "-DHYBRID_EP_NVSHMEM"), sources["_nvshmem"]),
        }
        linked = {name: list(map(str, found)) for name, found in objects.items()}
    linked["_nvshmem"].append(linked["_cuda"][0])  # a module has an emulator of its own
    for name, found in linked.items():
        path = modules / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
        subprocess.run(["g++", "-shared", "-pthread", *found, "-o", str(path)], check=True)


if __name__ == "__main__":
    print(build())
