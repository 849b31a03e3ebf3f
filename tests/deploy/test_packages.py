"""The `deep_ep` name beside the wheel, in a clean environment."""

from __future__ import annotations

import venv
from pathlib import Path

import pytest
import setuptools

from tests.deploy.commands import must, run
from tests.deploy.conftest import ROOT

pytestmark = pytest.mark.timeout(900)


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
    assert "is installed beside the real DeepEP 1.2.1" in late.stderr


@pytest.mark.parametrize(
    "trace",
    [
        "deep_ep-1.2.1.dist-info",
        "deep_ep-1.2.1+abcdef-py3.12-linux-x86_64.egg",
        "deep_ep-1.2.1-py3.12.egg-info",
        "deep_ep.egg-link",
    ],
)
def test_every_way_to_install_a_real_deep_ep_is_seen(tmp_path: Path, trace: str) -> None:
    """Its own instructions say `python setup.py install`, which leaves an egg."""
    venv.create(tmp_path)
    python = tmp_path / "bin" / "python"
    command = ("env", f"PYTHONPATH={Path(setuptools.__file__).parents[1]}", python, "setup.py", "--name")
    source = ROOT / "compat" / "deep_ep"
    must(*command, cwd=source)
    site = Path(must(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / trace).touch()
    refused = run(*command, cwd=source)
    assert refused.returncode != 0
    assert f"a real DeepEP is installed ({site / trace})" in refused.stderr
