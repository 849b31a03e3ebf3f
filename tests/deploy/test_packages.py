"""What is shipped: the wheel, installed into a clean environment, and the `deep_ep` name beside it."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.deploy


def run(*command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)


def must(*command: str | Path, cwd: Path | None = None) -> str:
    result = run(*command, cwd=cwd)
    assert result.returncode == 0, f"{command}\n{result.stdout[-2000:]}\n{result.stderr[-3000:]}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the tracked files: what is not tracked must not be needed."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    tracked = must("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    for name in tracked:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    must(
        "env", "HYBRID_EP_BUILD_CUDA=off", sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out,
        source,
    )  # fmt: skip
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a clean environment with the wheel and its dependencies; torch is the one tested with."""
    home = tmp_path_factory.mktemp("clean")
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    version = torch.__version__.split("+")[0]
    must(
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        wheel,
        f"torch=={version}",
        "setuptools>=77",
    )
    return python


def test_the_wheel_works_without_gpu_and_rdma_libraries(python: Path, tmp_path: Path) -> None:
    code = """
import torch, hybrid_ep
with hybrid_ep.Buffer(None) as buffer:
    topk = torch.tensor([[0, 2], [1, -1]])
    x = torch.randn(2, 64).to(torch.bfloat16)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk, 4)
    recv, idx, _, counts, handle, _ = buffer.dispatch(x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank,
                                                      num_tokens_per_expert=per_expert, topk_idx=topk)
    assert counts == [1, 1, 1, 0] and torch.equal(buffer.combine(recv, handle)[0], x)
print(hybrid_ep.__file__)
"""
    where = must(python, "-c", code, cwd=tmp_path).strip()
    assert Path(where).is_relative_to(python.parents[1])


def test_the_wheel_has_the_command_types_and_no_tests(python: Path, wheel: Path, tmp_path: Path) -> None:
    assert "hybrid-ep, version" in must(python.parent / "hybrid-ep", "--version", cwd=tmp_path)
    names = must(sys.executable, "-m", "zipfile", "-l", wheel)
    for wanted in ("hybrid_ep/py.typed", "hybrid_ep/_C.pyi", "hybrid_ep/_C.cpython", "LICENSE"):
        assert wanted in names
    assert "tests/" not in names


def test_deep_ep_is_only_there_when_asked_for(python: Path, tmp_path: Path) -> None:
    assert run(python, "-c", "import deep_ep", cwd=tmp_path).returncode != 0
    site = Path(must(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    real = site / "deep_ep-1.2.1.dist-info"
    install = (
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        ROOT / "compat" / "deep_ep",
    )

    # A real DeepEP is there: refuse, and leave nothing behind.
    real.mkdir()
    (real / "METADATA").write_text("Metadata-Version: 2.1\nName: deep_ep\nVersion: 1.2.1\n")
    refused = run(*install)
    assert refused.returncode != 0
    assert "a real DeepEP is installed" in refused.stdout + refused.stderr
    (real / "METADATA").unlink()
    real.rmdir()

    must(*install)
    code = """
import deep_ep, hybrid_ep
from deep_ep import Buffer, Config, HybridEPBuffer, topk_idx_t
from deep_ep.utils import EventHandle, EventOverlap
from deep_ep.hybrid_ep_buffer import indices_to_map
assert deep_ep.Buffer is hybrid_ep.Buffer and indices_to_map is hybrid_ep.indices_to_map
"""
    must(python, "-c", code, cwd=tmp_path)

    # A real DeepEP that comes later is not shadowed in silence.
    real.mkdir()
    (real / "METADATA").write_text("Metadata-Version: 2.1\nName: deep_ep\nVersion: 1.2.1\n")
    late = run(python, "-c", "import deep_ep", cwd=tmp_path)
    assert late.returncode != 0
    assert "stands in the way of the real DeepEP 1.2.1" in late.stderr
