"""Builds `_cuda` and `_nvshmem` for the CPU: the sources of csrc/, with the emulator's headers for CUDA's."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11

from tests.emulation.steps import ENDS, STEPS, can_leave_out

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"

_DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];")


def as_cpp(source: str) -> str:
    """CUDA C++ as C++: dynamic shared memory is asked for, tensors are on the CPU, and Python knows the streams."""
    source = source.replace("{dlpack::kCuda, device}", "{1, 0}").replace(
        "if (api == nullptr) return stream_of", "return stream_of"
    )
    return _DYNAMIC.sub(r"auto* \2 = reinterpret_cast<\1*>(emulated::dynamic_shared());", source)


def _transport_sources() -> list[Path]:
    """The transports with memory of the host; verbs where its headers are."""
    has_verbs = Path("/usr/include/infiniband/verbs.h").exists()
    absent = {"verbs_absent"} if has_verbs else {"verbs_api", "verbs_device", "verbs_link"}
    sources = sorted(CSRC.glob("transport/*.cpp"))
    return [path for path in sources if not path.stem.endswith("_cuda") and path.stem not in absent]


def build(out: Path) -> Path:
    """Compiles into a folder and returns the path of `_cuda`; `_nvshmem` lies beside it."""
    out.mkdir(parents=True, exist_ok=True)

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
        *_transport_sources(),
        CSRC / "layout/link_layout.cpp",
        CSRC / "bindings/sizes.cpp",
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

    def compile_one(source: Path, *more: str) -> Path:
        # What is made in `out` by its name alone, so that a compiler cache finds what another folder has built.
        name = source.name if source.parent == out else str(source)
        target = f"{source.stem}.o"
        includes_of = (f"-I{i}" for i in includes)
        # Bindings take most of the time to compile, and none to run.
        level = "-O0" if "bindings_" in source.name else "-O1"
        subprocess.run(["g++", *flags, level, *more, *includes_of, "-c", name, "-o", target], cwd=out, check=True)
        return out / target

    with ThreadPoolExecutor(2) as pool:
        objects = {
            "_cuda": pool.map(compile_one, [emulator, *sources["_cuda"]]),
            "_nvshmem": pool.map(lambda source: compile_one(source, "-DHYBRID_EP_NVSHMEM"), sources["_nvshmem"]),
        }
        linked = {name: list(map(str, found)) for name, found in objects.items()}
    linked["_nvshmem"].append(linked["_cuda"][0])  # a module has an emulator of its own
    paths = {name: out / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}" for name in linked}
    for name, found in linked.items():
        subprocess.run(["g++", "-shared", "-pthread", *found, "-o", str(paths[name])], check=True)
    return paths["_cuda"]


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
