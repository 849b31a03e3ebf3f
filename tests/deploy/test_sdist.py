"""The source distribution has all that a build needs."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.deploy.commands import must
from tests.deploy.conftest import SOURCE, copy_tracked_files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_wheel_is_built_from_it(tmp_path: Path) -> None:
    copy_tracked_files()
    must(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, SOURCE)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(path.relative_to(SOURCE)) for path in (SOURCE / "csrc").rglob("*") if path.is_file()}
    assert sources - inside == set()
    off = ("HYBRID_EP_BUILD_CUDA=off", "HYBRID_EP_BUILD_NVML=off")
    build = (
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-build-isolation",
        "--no-deps",
        "--wheel-dir",
        tmp_path,
    )
    must("env", *off, *build, sdist)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert any(name.startswith("hybrid_ep/_C.") for name in names)
    assert {"hybrid_ep/py.typed", "hybrid_ep/_C.pyi"} <= set(names)
