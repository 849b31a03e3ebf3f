"""Wheels: what is in them, which machines they run on, and that one works without a GPU or RDMA libraries.

The aarch64 wheel is cross-compiled; its modules are imported by Debian's arm64 Python under qemu.
"""

from __future__ import annotations

import platform
import re
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from hybrid_ep import __version__
from tests.deploy.commands import must, run
from tests.deploy.conftest import ROOT, SOURCE, BuildWheel, copy_tracked_files
from tests.prerequisites import find_python, require, require_programs

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(900)]

MACHINE = platform.machine()
NAMES = {"x86_64": "Advanced Micro Devices X86-64", "aarch64": "AArch64"}
# What every Linux of the platform tag has, and what the machine's driver and RDMA packages bring.
BASE = {"libstdc++.so.6", "libgcc_s.so.1", "libm.so.6", "libc.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
BROUGHT = {"_C": set(), "_cuda": set(), "_nvml": {"libnvidia-ml.so.1"}, "_verbs": {"libibverbs.so.1"}}
NEWEST_FLOOR = (2, 34)  # of glibc; documented in docs/building.md

# $1 = an empty folder, then a command, which sees the machine without drivers and RDMA libraries.
HIDE = """
set -euo pipefail
work=$1; shift
mount -t tmpfs none "$work"
folders=$(ldconfig -p | sed -nE 's#.* => (.*)/lib(ibverbs|cuda|nvidia-ml)\\.so.*#\\1#p' | xargs -r realpath | sort -u)
for folder in $folders; do
  layer=$(mktemp -d "$work/XXXX")
  mkdir "$layer/upper" "$layer/work"
  mount -t overlay overlay -o "lowerdir=$folder,upperdir=$layer/upper,workdir=$layer/work" "$folder"
  rm -f "$folder"/libibverbs.so* "$folder"/libcuda.so* "$folder"/libnvidia-ml.so*
done
exec "$@"
"""

WITHOUT_LIBRARIES = """
import importlib, torch, hybrid_ep, hybrid_ep._C
for name, library in (("_verbs", "libibverbs.so.1"), ("_nvml", "libnvidia-ml.so.1")):
    try:
        importlib.import_module(f"hybrid_ep.{name}")
    except ImportError as error:
        assert library in str(error), error
    else:
        raise AssertionError(f"{library} was not hidden")
with hybrid_ep.Buffer(None) as buffer:
    topk = torch.tensor([[0, 2], [1, -1]])
    x = torch.randn(2, 64).to(torch.bfloat16)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk, 4)
    recv, idx, _, counts, handle, _ = buffer.dispatch(x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank,
                                                      num_tokens_per_expert=per_expert, topk_idx=topk)
    assert counts == [1, 1, 1, 0] and torch.equal(buffer.combine(recv, handle)[0], x)
print(hybrid_ep.__file__)
"""

# Runs in a Python without torch, so it imports the modules by themselves.
IMPORT_MODULES = """
import importlib, platform, sys
assert platform.machine() == "aarch64"
for name in ("_C", "_cuda", "_verbs"):
    importlib.import_module(name)
assert sys.modules["_C"].built.split() == ["_C", "_nvml", "_verbs", "_cuda"], sys.modules["_C"].built
try:
    import _nvml
except ImportError as error:
    assert "libnvidia-ml.so.1" in str(error), error
else:
    raise AssertionError("_nvml found a driver's library in the arm64 root")
"""


@dataclass(frozen=True)
class Wheel:
    """A wheel and what is unpacked from it."""

    arch: str
    path: Path
    folder: Path

    @property
    def modules(self) -> dict[str, Path]:
        """Name → file of each extension module."""
        return {path.name.partition(".")[0]: path for path in sorted(self.folder.rglob("*.so*"))}


def _unpack(arch: str, path: Path, folder: Path) -> Wheel:
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder)
    return Wheel(arch, path, folder)


WITH_KERNELS = [MACHINE, *(["aarch64"] if MACHINE == "x86_64" else [])]
WHEELS = [
    pytest.param((MACHINE, False), id=f"{MACHINE}-without-kernels"),
    *(pytest.param((arch, True), id=arch, marks=pytest.mark.slow) for arch in WITH_KERNELS),
]


@pytest.fixture(scope="module", params=WHEELS)
def built(request: pytest.FixtureRequest, build_wheel: BuildWheel, tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    """The wheel of each architecture that this machine can build, and this machine's without kernels."""
    arch, has_kernels = request.param
    wheel = _unpack(arch, build_wheel(arch, has_kernels), tmp_path_factory.mktemp("unpacked"))
    assert ("_cuda" in wheel.modules) == has_kernels
    return wheel


def test_the_tag_says_which_glibc_the_modules_need(built: Wheel) -> None:
    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    tag = re.fullmatch(rf"hybrid_ep-[\d.]+-({version}-{version}-manylinux_2_(\d+)_{built.arch})\.whl", built.path.name)
    assert tag, built.path.name
    (metadata,) = built.folder.glob("*.dist-info/WHEEL")
    assert re.findall(r"^Tag: (.*)$", metadata.read_text(), re.M) == [tag[1]]
    needed = {
        (int(major), int(minor))
        for module in built.modules.values()
        for major, minor in re.findall(r"\bGLIBC_(\d+)\.(\d+)", must("readelf", "--version-info", "--wide", module))
    }
    assert max(needed) <= (2, int(tag[2])) <= NEWEST_FLOOR


def test_the_wheel_has_all_modules_and_they_need_nothing_else(built: Wheel) -> None:
    assert built.modules.keys() | {"_cuda"} == BROUGHT.keys()
    for name, path in built.modules.items():
        assert path.name == f"{name}.cpython-{sys.version_info.major}{sys.version_info.minor}-{built.arch}-linux-gnu.so"
        header = must("readelf", "--file-header", "--dynamic", path)
        assert re.search(r"Machine:\s+(.*)", header)[1] == NAMES[built.arch]  # type: ignore[index]
        needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", header))
        assert needed - BASE == BROUGHT[name]
        assert "PATH)" not in header, "a run path of the build machine"


def test_the_wheel_has_types_profiles_licence_and_no_sources(built: Wheel) -> None:
    names = [str(path.relative_to(built.folder)) for path in built.folder.rglob("*") if path.is_file()]
    wanted = ["py.typed", "_C.pyi", "_cuda.pyi", "_nvml.pyi", "_verbs.pyi", "doctor/profiles/hgx-h200.yaml"]
    wanted += ["doctor/profiles/schema.yaml", "k8s/schemas/mpijob-v2beta1.json"]
    assert {f"hybrid_ep/{name}" for name in wanted} <= set(names)
    assert sum(name.endswith("licenses/LICENSE") for name in names) == 1
    for name in names:
        assert name.startswith(("hybrid_ep/", "hybrid_ep-")), name
        assert Path(name).suffix not in {".cu", ".cuh", ".cpp", ".c", ".h", ".o", ".a", ".cmake"}, name
        assert "nvidia-ml" not in name


def test_the_wheel_works_without_gpu_and_rdma_libraries(python: Path, tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    isolate = ["unshare", "--map-root-user", "--mount", "bash", "-c", HIDE, "bash", str(hidden)]
    require(run(*isolate, "true").returncode == 0, "user namespaces and overlay mounts")
    command = python.parent / "hybrid-ep"
    where = must(*isolate, python, "-c", WITHOUT_LIBRARIES, cwd=tmp_path).strip()
    assert Path(where).is_relative_to(python.parents[1])
    assert "_C _nvml _verbs" in must(*isolate, command, "info", cwd=tmp_path)
    size = ["--ranks", "2", "--tokens", "16", "--hidden", "128", "--experts", "8", "--steps", "2"]
    assert '"ok": true' in must(*isolate, command, "demo", *size, "--json", cwd=tmp_path)


@pytest.mark.slow
def test_kernels_are_loaded_without_a_gpu(build_wheel: BuildWheel, tmp_path: Path) -> None:
    wheel = _unpack(MACHINE, build_wheel(MACHINE, True), tmp_path / "wheel")
    code = "import hybrid_ep._cuda, hybrid_ep._C; print(hybrid_ep.__file__, hybrid_ep._C.built, sep='\\n')"
    where, modules = must("env", f"PYTHONPATH={wheel.folder}", sys.executable, "-c", code, cwd=tmp_path).splitlines()
    assert Path(where).is_relative_to(wheel.folder)
    assert modules.split() == ["_C", "_nvml", "_verbs", "_cuda"]


@pytest.mark.slow
def test_aarch64_modules_are_imported_by_an_aarch64_python(build_wheel: BuildWheel, tmp_path: Path) -> None:
    require(MACHINE == "x86_64", "an x86-64 machine: elsewhere the wheel is not cross-compiled")
    require(sys.version_info[:2] == (3, 11), "Python 3.11, the one that Debian 12 has for arm64")
    require_programs("qemu-aarch64-static")
    root, unpacked = tmp_path / "root", tmp_path / "wheel"
    packages = ["python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib", "zlib1g", "libexpat1", "libc6"]
    packages += ["libstdc++6", "libgcc-s1", "libibverbs1", "libnl-3-200", "libnl-route-3-200"]
    must(ROOT / "ci" / "target_root.sh", root, "arm64", *packages)
    _unpack("aarch64", build_wheel("aarch64", True), unpacked)
    interpreter = ["qemu-aarch64-static", "-L", str(root), "-E", f"PYTHONPATH={unpacked / 'hybrid_ep'}"]
    must(*interpreter, root / "usr" / "bin" / "python3.11", "-S", "-c", IMPORT_MODULES, cwd=tmp_path)


VERSIONS = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_every_python_has_a_wheel(version: str, tmp_path: Path) -> None:
    """Without kernels, whose host code is the same for all."""
    python = find_python(version)
    if python is None:
        pytest.skip(f"Python {version} is not installed; no script of the project does that")
    copy_tracked_files()
    must("env", "HYBRID_EP_BUILD_CUDA=off", SOURCE / "ci" / "wheel.sh", python, MACHINE, tmp_path)
    (built,) = tmp_path.glob("*.whl")
    tag = f"cp{version.replace('.', '')}"
    assert f"-{tag}-{tag}-manylinux_2_" in built.name
    clean = tmp_path / "clean"
    must(python, "-m", "venv", clean)
    must(clean / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", built)
    code = "import hybrid_ep._C, hybrid_ep._verbs; print(hybrid_ep.__version__, hybrid_ep._C.built)"
    assert must(clean / "bin" / "python", "-c", code, cwd=tmp_path).split() == [__version__, "_C", "_nvml", "_verbs"]


def test_what_cannot_be_built_is_refused(tmp_path: Path) -> None:
    refused = run(ROOT / "ci" / "wheel.sh", sys.executable, "riscv64", tmp_path)
    assert refused.returncode == 2
    assert "ARCH=riscv64 is not allowed; it takes x86_64 or aarch64" in refused.stderr
    assert not list(tmp_path.iterdir())
