"""Which stream waits for which: `LaunchOrder` and `SlotPool` with streams that only record what they wait for."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.emulation.build import CSRC, HERE
from tests.prerequisites import require_programs


def test_launches_of_an_engine_run_one_after_another(tmp_path: Path) -> None:
    require_programs("g++")
    program = tmp_path / "launch_orders"
    includes = [f"-I{folder}" for folder in (HERE / "include", HERE, CSRC)]
    runtime = (CSRC / f"runtime/{name}.cpp" for name in ("launch_order", "slot_pool"))
    sources = [HERE / "launch_orders.cpp", HERE / "emulator.cpp", *runtime]
    subprocess.run(["g++", "-std=c++17", "-pthread", *includes, *map(str, sources), "-o", str(program)], check=True)
    said = subprocess.run([str(program)], capture_output=True, text=True, timeout=60, check=False)
    assert (said.returncode, said.stdout) == (0, "right\n")
