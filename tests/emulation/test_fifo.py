"""The FIFOs between kernels and the proxy, with emulated threads as writers."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.emulation.build import CSRC, HERE
from tests.prerequisites import require_programs


def test_many_writers(tmp_path: Path) -> None:
    """128 threads of 4 CTAs share 2 FIFOs for tens of laps; every command arrives once and whole."""
    require_programs("g++")
    program = tmp_path / "fifo_writers"
    includes = [f"-I{folder}" for folder in (HERE / "include", HERE, CSRC)]
    sources = [str(HERE / name) for name in ("fifo_writers.cpp", "emulator.cpp")]
    subprocess.run(["g++", "-std=c++17", "-O1", "-pthread", *includes, *sources, "-o", str(program)], check=True)
    said = subprocess.run([str(program), "300"], capture_output=True, text=True, timeout=120, check=False)
    assert (said.returncode, said.stdout) == (0, "right\n")
