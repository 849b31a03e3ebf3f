"""The README's requirements are enough: a clone sets itself up in an empty Debian, with all that tests need."""

from __future__ import annotations

import os

import pytest

from tests.deploy.commands import run
from tests.deploy.conftest import ROOT
from tests.prerequisites import require, require_programs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


def test_setup_in_an_empty_debian() -> None:
    require(os.geteuid() == 0, "root (namespaces and mounts)")
    require_programs("mmdebstrap", "unshare", "git")
    done = run("env", "CI=true", ROOT / "ci" / "bare_root_test.sh", "short", "root")
    assert done.returncode == 0, done.stdout[-5000:]
    # Without libibverbs first, and with it once the packages are there.
    said = [line for line in done.stdout.splitlines() if line.startswith("hybrid_ep ") and ": built " in line]
    assert "_verbs" not in said[0].partition(";")[0]
    assert "_verbs" in said[-1].partition(";")[0]
