"""The project installs the programs that tests need. If one is missing, tests are skipped here, and fail in CI."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from hybrid_ep import _C
from tests.prerequisites import PACKAGES, missing, require, require_programs

ROOT = Path(__file__).resolve().parents[2]
ESSENTIAL = {"apt", "dpkg", "util-linux"}  # of Debian
README = (ROOT / "README.md").read_text()


def test_missing_prerequisite_is_skipped_here_and_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    require(True, "nothing")
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="needs sshd"):
        require(False, "sshd")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="CI=true, but this is missing: sshd"):
        require(False, "sshd")
    monkeypatch.setattr("tests.prerequisites.find", lambda name: None)
    with pytest.raises(pytest.fail.Exception, match=r"sshd \(package openssh-server\)"):
        require_programs("sshd")


def test_every_package_is_installed_by_a_script_or_named_in_the_readme() -> None:
    setup = (ROOT / "ci" / "setup.sh").read_text() + (ROOT / "Makefile").read_text()
    by_setup = {f"{name}, by ci/{name}.sh" for name in ("helm", "nvcc") if re.search(rf"/{name}\.sh\S* \S", setup)}
    script = (ROOT / "ci" / "system_packages.sh").read_text()
    lists = re.findall(r"packages\+?=\($(.*?)^\)$", script, re.M | re.S)
    assert len(lists) == 2, "those of make test, and those of make test-cluster"
    installed = set(re.sub(r"#.*", "", "".join(lists)).split())
    (asked_for,) = re.findall(r"apt-get install ([a-z0-9+ -]*make[a-z0-9+ -]*)", README)
    from_pypi = set(re.findall(r'"([a-z-]+)==', (ROOT / "pyproject.toml").read_text()))
    assert set(PACKAGES.values()) - installed - set(asked_for.split()) - from_pypi - by_setup - ESSENTIAL == set()


def test_tests_look_for_programs_here_only() -> None:
    """Otherwise nothing would say which package brings them."""
    own = {"prerequisites.py", Path(__file__).name}
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path.name not in own]
    assert [str(path) for path in tests if "shutil.which(" in path.read_text()] == []


def test_programs_speak_the_language_that_tests_read() -> None:
    """apt, readelf and others are translated where a developer's locale is."""
    assert (os.environ.get("LC_ALL"), os.environ.get("LANGUAGE")) == ("C.UTF-8", None)


@pytest.mark.cluster  # make test installs less
def test_all_are_there_in_ci() -> None:
    absent = missing(*PACKAGES)
    for name in ("_cuda", "_nvml", "_verbs"):
        if name not in _C.built.split():
            absent.append(f"{name} ({_C.left_out})")
    if absent and os.environ.get("CI") != "true":
        pytest.skip(f"not here: {', '.join(absent)}")
    assert absent == []
