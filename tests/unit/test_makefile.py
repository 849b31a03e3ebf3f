"""What `make` runs, and in which order."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_system_packages_come_before_the_build_and_the_build_before_the_tests() -> None:
    """The build leaves out a module whose library is not there yet, so a package that comes later needs a build."""
    command = ["make", "--dry-run", "--no-print-directory", "test"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    steps = ["ci/system_packages.sh", "ci/build_inplace.sh", "ci/test.sh"]
    places = [ran.stdout.index(step) for step in steps]
    assert places == sorted(places), ran.stdout
