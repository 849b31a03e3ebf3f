"""What `make` runs, and in which order."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def dry_run(*arguments: str) -> str:
    """What make would run."""
    command = ["make", "--dry-run", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_system_packages_come_before_the_build_and_the_build_before_the_tests() -> None:
    """The build leaves out a module whose library is not there yet, so a package that comes later needs a build."""
    ran = dry_run("test")
    steps = ["ci/system_packages.sh", "ci/build_inplace.sh", "ci/test.sh"]
    places = [ran.index(step) for step in steps]
    assert places == sorted(places), ran


def test_the_empty_debian_is_root_s_unless_asked_otherwise() -> None:
    """Variables of make's own, such as AS, are never empty."""
    assert dry_run("test-bare") == "ci/bare_root_test.sh short root\n"
    assert dry_run("test-bare", "MODE=full", "WHO=user") == "ci/bare_root_test.sh full user\n"
