"""Wheels: what is in them, which machines they run on, and that one works without a GPU or RDMA libraries.

aarch64 wheels are cross-compiled with the headers of this machine's interpreter; their modules are imported by Debian's
arm64 Python of the same version under qemu.
"""

from __future__ import annotations

import json
import platform
import re
import sys
import tempfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pybind11
import pytest

from hybrid_ep import __version__
from tests.deploy.commands import must, run
from tests.deploy.conftest import ROOT, SOURCE, BuildWheel, copy_tracked_files
from tests.prerequisites import find_python, require, require_programs

pytestmark = pytest.mark.timeout(900)

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

# Runs in a Python without torch, so it imports the modules by themselves; its arguments are those that were built.
IMPORT_MODULES = """
import importlib, platform, sys
assert platform.machine() == "aarch64"
built = sys.argv[1:]
for name in built:
    if name != "_nvml":
        importlib.import_module(name)
assert sys.modules["_C"].built.split() == built, sys.modules["_C"].built
try:
    import _nvml
except ImportError as error:
    assert "libnvidia-ml.so.1" in str(error), error
else:
    raise AssertionError("_nvml found a driver's library in the arm64 root")
"""

# GPUs of which a part is asked for, which Kubernetes has not.
POD = """
{apiVersion: v1, kind: Pod, metadata: {name: ranks}, spec: {containers: [{name: rank, image: 'a:1',
  resources: {limits: {nvidia.com/gpu: 0.5}}}]}}
"""

VERSIONS = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
# Debian's release with each Python; it has none with 3.10 or 3.12.
RELEASES = {"3.11": "bookworm", "3.13": "trixie", "3.14": "forky"}


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
    wanted = ["py.typed", "_C.pyi", "_cuda.pyi", "_nvml.pyi", "_verbs.pyi", "cluster/doctor/profiles.yaml"]
    wanted += ["cluster/doctor/profile_schema.yaml", "cluster/kubernetes/schemas.json"]
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


def test_the_operators_half_works_without_torch(
    build_wheel: BuildWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel alone, and what its extra `cluster` lists; `k8s` for the schemas of `k8s check`."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("HYBRID_EP_CHECKS_ONLY", "on")
    wheel = build_wheel(MACHINE, False)
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode()
        listed = re.findall(r"^Requires-Dist: (\S+); extra == .(?:cluster|k8s).$", lines, re.M)
    venv.create(tmp_path / "clean", with_pip=True)
    python, command = tmp_path / "clean/bin/python", tmp_path / "clean/bin/hybrid-ep"
    install = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    must(*install, "--no-deps", wheel)
    must(*install, *listed)
    there = "import importlib.util as u; print([n for n in ('torch', 'numpy', 'matplotlib') if u.find_spec(n)])"
    assert must(python, "-c", there, cwd=tmp_path).strip() == "[]"

    report = json.loads(must(command, "doctor", "--quick", "--json", "--accept-unknown", "--profile=cpu", cwd=tmp_path))
    assert report["results"]
    assert "GPU" in must(command, "topology", "--svg", tmp_path / "node.svg", cwd=tmp_path)
    (tmp_path / "results" / "nodes").mkdir(parents=True)
    host = {"name": report["host"], "platform": "cpu", "domain": None}
    inventory = {"title": "one node", "started": "2026-01-02T03:04:05Z", "hosts": [host]}
    (tmp_path / "results" / "inventory.json").write_text(json.dumps(inventory))
    (tmp_path / "results" / "nodes" / f"{report['host']}.json").write_text(json.dumps(report))
    done = run(command, "validation", "report", tmp_path / "results", cwd=tmp_path)
    assert "1 of 1 node is fit" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "results" / "report" / "report.html").exists()
    (tmp_path / "pod.yaml").write_text(POD)
    refused = run(command, "k8s", "check", tmp_path / "pod.yaml", cwd=tmp_path)
    assert refused.returncode == 1, refused.stderr
    assert "Pod/ranks" in refused.stdout
    done = run(command, "bench", cwd=tmp_path)
    expected = "hybrid-ep: torch is not installed, and this command needs it: pip install torch\n"
    assert (done.returncode, done.stderr) == (2, expected)


def import_on_aarch64(wheel: Path, version: str, modules: list[str], tmp_path: Path) -> None:
    """Imports the modules of an aarch64 wheel into the arm64 Python of the Debian release that has the version."""
    require_programs("qemu-aarch64-static")
    root, unpacked = tmp_path / "root", tmp_path / "wheel"
    packages = [f"python{version}-minimal", f"libpython{version}-minimal", f"libpython{version}-stdlib", "zlib1g"]
    packages += ["libexpat1", "libc6", "libstdc++6", "libgcc-s1", "libibverbs1", "libnl-3-200", "libnl-route-3-200"]
    must(ROOT / "ci" / "target_root.sh", "--suite", RELEASES[version], root, "arm64", *packages)
    _unpack("aarch64", wheel, unpacked)
    interpreter = ["qemu-aarch64-static", "-L", str(root), "-E", f"PYTHONPATH={unpacked / 'hybrid_ep'}"]
    command = [root / "usr" / "bin" / f"python{version}", "-S", "-c", IMPORT_MODULES, *modules]
    must(*interpreter, *command, cwd=tmp_path)


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
    version = "{}.{}".format(*sys.version_info)
    require(version in RELEASES, f"a Python that a Debian release has: {', '.join(RELEASES)}")
    import_on_aarch64(build_wheel("aarch64", True), version, ["_C", "_nvml", "_verbs", "_cuda"], tmp_path)


def needed_of_python(wheel: Path) -> dict[str, set[str]]:
    """Module → the functions and objects of Python that it needs."""
    needed = {}
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        for member in archive.namelist():
            if member.endswith(".so"):
                symbols = must("readelf", "--dyn-syms", "--wide", archive.extract(member, folder))
                needed[Path(member).name.partition(".")[0]] = set(re.findall(r" UND (_?Py\w+)", symbols))
    return needed


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_python_has_wheels(version: str, tmp_path: Path) -> None:
    """For both architectures, without kernels, whose host code is the same for all."""
    python = find_python(version)
    if python is None and version in RELEASES:
        folder = ROOT / "build" / "debian-python" / version
        python = must(ROOT / "ci" / "debian_python.sh", RELEASES[version], version, folder).strip()
    if python is None:
        pytest.skip(f"Python {version} is not installed, and no release of Debian has it")
    copy_tracked_files()
    arches = [MACHINE, "aarch64"] if MACHINE == "x86_64" else [MACHINE]
    for arch in arches:
        must("env", "HYBRID_EP_BUILD_CUDA=off", SOURCE / "ci" / "wheel.sh", python, arch, tmp_path)
    wheels = {arch: next(tmp_path.glob(f"*_{arch}.whl")) for arch in arches}
    tag = f"cp{version.replace('.', '')}"
    for arch, wheel in wheels.items():
        floor = re.search(rf"-{tag}-{tag}-manylinux_2_(\d+)_{arch}\.whl$", wheel.name)
        assert floor, wheel.name
        assert (2, int(floor[1])) <= NEWEST_FLOOR

    clean = tmp_path / "clean"
    must(python, "-m", "venv", clean)
    must(clean / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", wheels[MACHINE])
    code = "import hybrid_ep._C, hybrid_ep._verbs; print(hybrid_ep.__version__, hybrid_ep._C.built)"
    modules = ["_C", "_nvml", "_verbs"]
    assert must(clean / "bin" / "python", "-c", code, cwd=tmp_path).split() == [__version__, *modules]
    if len(arches) == 2:
        needed = needed_of_python(wheels[MACHINE])
        assert needed.keys() == set(modules)
        assert needed == needed_of_python(wheels["aarch64"])
        if version in RELEASES:
            import_on_aarch64(wheels["aarch64"], version, modules, tmp_path)


PYTHONS = {"this": sys.executable, "system": "/usr/bin/python3"}


@pytest.mark.parametrize("which", PYTHONS)
def test_cross_compiling_takes_the_headers_of_the_interpreter(which: str, tmp_path: Path) -> None:
    """Those of Debian's own Python, too, whose Python.h looks for a pyconfig.h of the target."""
    require_programs("aarch64-linux-gnu-g++", "readelf")
    python = PYTHONS[which]
    code = "import sys, sysconfig; print(sysconfig.get_path('include'), '%d%d' % sys.version_info[:2])"
    include, version = must(python, "-c", code).split()
    if not Path(include, "Python.h").exists():
        pytest.skip(f"{python} has no headers")
    definitions = {"CMAKE_TOOLCHAIN_FILE": ROOT / "csrc" / "cmake" / "aarch64-linux.cmake", "Python_EXECUTABLE": python}
    definitions |= {f"HYBRID_EP_BUILD_{name}": "off" for name in ("CUDA", "NVML", "VERBS")}
    definitions |= {"pybind11_DIR": pybind11.get_cmake_dir(), "CMAKE_EXPORT_COMPILE_COMMANDS": "on"}
    options = [f"-D{name}={value}" for name, value in definitions.items()]
    configure = ("cmake", "-S", ROOT / "csrc", "-B", tmp_path, "-G", "Ninja", *options)
    must("env", f"HYBRID_EP_TARGET_ROOT={tmp_path}", *configure)
    assert f"_C.cpython-{version}-aarch64-linux-gnu.so:" in must("ninja", "-C", tmp_path, "-t", "targets", "all")
    listed = json.loads((tmp_path / "compile_commands.json").read_text())
    commands = {Path(entry["file"]).name: entry["command"] for entry in listed}
    assert f"-isystem {include} " in commands["sizes.cpp"]
    module = "CMakeFiles/_C.dir/bindings/sizes.cpp.o"
    must("cmake", "--build", tmp_path, "--target", module)
    assert NAMES["aarch64"] in must("readelf", "--file-header", tmp_path / module)


@pytest.mark.slow
@pytest.mark.parametrize(("version", "release"), RELEASES.items())
def test_pyconfig_of_either_architecture_gives_modules_the_same_code(
    version: str, release: str, tmp_path: Path
) -> None:
    """So the headers of an x86-64 Python serve for aarch64: the preprocessor's output is compared."""
    require_programs("apt-get", "aarch64-linux-gnu-g++")
    for arch in ("amd64", "arm64"):
        must(ROOT / "ci" / "target_root.sh", "--suite", release, tmp_path / arch, arch, f"libpython{version}-dev")
    source = tmp_path / "module.cpp"
    listed = must("git", "grep", "--no-index", "-ohE", "#include <(pybind11/.*|Python.h)>", "--", "csrc", cwd=ROOT)
    source.write_text("\n".join(sorted(set(listed.splitlines()))) + "\n")

    headers = tmp_path / "amd64" / "usr" / "include"
    own = tmp_path / "arm64" / "usr" / "include"

    def preprocessed(config: Path, *options: str) -> list[str]:
        includes = ["-include", config, "-I", headers / f"python{version}", "-I", pybind11.get_include()]
        command = ["aarch64-linux-gnu-g++", "-std=c++17", "-E", "-P", *options, *includes, "-idirafter", own, source]
        return must(*command).splitlines()

    x86 = headers / "x86_64-linux-gnu" / f"python{version}" / "pyconfig.h"
    wanted = preprocessed(own / "aarch64-linux-gnu" / f"python{version}" / "pyconfig.h")
    given = preprocessed(x86)
    assert [pair for pair in zip(wanted, given, strict=True) if pair[0] != pair[1]] == []
    assert any("PyModule_Create2" in line for line in given)
    assert preprocessed(x86, "-DPy_DEBUG") != wanted, "a difference would not be seen"


def test_what_cannot_be_built_is_refused(tmp_path: Path) -> None:
    refused = run(ROOT / "ci" / "wheel.sh", sys.executable, "riscv64", tmp_path)
    assert refused.returncode == 2
    assert "ARCH=riscv64 is not allowed; it takes x86_64 or aarch64" in refused.stderr
    assert not list(tmp_path.iterdir())
