"""The errors that the emulator reports."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.emulation.build import HERE
from tests.prerequisites import require_programs


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_programs("g++")
    program = tmp_path_factory.mktemp("emulator") / "early_ends"
    sources = [str(HERE / name) for name in ("early_ends.cpp", "emulator.cpp")]
    subprocess.run(["g++", "-std=c++17", "-O1", "-pthread", *sources, "-o", str(program)], check=True)
    return program


@pytest.mark.parametrize(
    ("when", "said"),
    [
        ("before", "a thread waits in a barrier of the CTA for one that has ended"),
        ("after", "a thread has ended that others wait for in a barrier of the CTA"),
    ],
)
def test_a_thread_that_ends_without_the_barrier_of_the_others(program: Path, when: str, said: str) -> None:
    ran = subprocess.run([str(program), when], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode < 0
    assert ran.stderr == f"emulation: {said}\n"
