"""The link's verbs over NCCL's device API compile with the headers of the newest wheel: docs/reasons.md."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.prerequisites import find, require_programs

ROOT = Path(__file__).resolve().parents[2]
SPIKE = ROOT / "benchmarks" / "nccl_gin"
WHEEL = "nvidia-nccl-cu13>=2.31"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's headers; pip keeps what it has loaded once."""
    require_programs("nvcc")
    folder = tmp_path_factory.mktemp("nccl")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    loaded = subprocess.run(command, capture_output=True, text=True, check=False)
    if loaded.returncode:
        pytest.skip(f"{WHEEL} cannot be had: {loaded.stderr.strip().splitlines()[-1]}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if "/include/" in name])
    wheel.unlink()
    return folder / "nvidia" / "nccl" / "include"


def compile_spike(headers: Path, source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    includes = (f"-I{folder}" for folder in (ROOT / "csrc", headers, SPIKE))
    # One way to the network of those that NCCL has: it compiles in a fraction of the time of all.
    others = ("GDAKI", "GPI", "EFA_GDA")
    flags = ["-std=c++17", "-arch=sm_90", *(f"-DNCCL_GIN_{name}_ENABLE=0" for name in others)]
    command = [str(find("nvcc")), *flags, *includes, "-c", str(source), "-o", str(out / f"{source.stem}.o")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def symbols(file: Path) -> str:
    return subprocess.run(["nm", str(file)], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("name", ["link_alone", "dispatch", "combine"])
def test_a_kernel_compiles_over_gin(headers: Path, tmp_path: Path, name: str) -> None:
    done = compile_spike(headers, SPIKE / f"{name}.cu", tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "GinLink" in symbols(tmp_path / f"{name}.o")


def test_a_link_without_a_verb_does_not_compile(headers: Path, tmp_path: Path) -> None:
    for file in SPIKE.iterdir():
        (tmp_path / file.name).write_text(file.read_text().replace("poll_credit(", "asks_credit("))
    done = compile_spike(headers, tmp_path / "link_alone.cu", tmp_path)
    assert done.returncode != 0
    assert "poll_credit" in done.stderr
