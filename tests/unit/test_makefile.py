"""What `make` runs, and in which order."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("ci", ["true", "false"])
def test_kernels_are_built_in_ci_also_where_the_machine_has_no_nvcc(ci: str) -> None:
    ran = [line for line in dry_run("setup", f"CI={ci}").splitlines() if "nvcc.sh" in line or "build_inplace" in line]
    condition, _, command = ran[0].partition(" || ")
    assert (condition, command) == (f'[ "{ci}" != true ]', "ci/nvcc.sh .venv")
    assert "build_inplace.sh" in ran[1]


def test_an_nvcc_outside_path_is_put_into_the_environment_and_one_in_path_serves(tmp_path: Path) -> None:
    home, venv = tmp_path / "cuda", tmp_path / "venv"
    for folder in (home, venv):
        (folder / "bin").mkdir(parents=True)
    (home / "bin" / "nvcc").write_text("#!/bin/sh\necho nvcc was given $1\n")
    (home / "bin" / "nvcc").chmod(0o755)
    for path in (f"{home}/bin:/usr/bin:/bin", "/usr/bin:/bin"):
        command = ["env", f"PATH={path}", f"CUDA_HOME={home}", str(ROOT / "ci" / "nvcc.sh"), str(venv)]
        subprocess.run(command, check=True)
        assert (venv / "bin" / "nvcc").exists() == (path == "/usr/bin:/bin")
    said = subprocess.run([venv / "bin" / "nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    assert said == "nvcc was given --version\n"


def test_the_empty_debian_is_root_s_unless_asked_otherwise() -> None:
    """Variables of make's own, such as AS, are never empty."""
    assert dry_run("test-bare") == "ci/bare_root_test.sh short root\n"
    assert dry_run("test-bare", "MODE=full", "WHO=user") == "ci/bare_root_test.sh full user\n"


def test_scripts_keep_their_line_ends_in_any_clone() -> None:
    """With core.autocrlf a clone would have scripts that no shell runs."""
    if not (ROOT / ".git").exists():
        pytest.skip("no clone")
    command = ["git", "-c", f"safe.directory={ROOT}", "check-attr", "eol", "--", "ci/setup.sh", "Makefile", "setup.py"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.rpartition(": ")[2] for line in told] == ["lf"] * 3
