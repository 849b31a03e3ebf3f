"""Damaged nodes give findings: no check raises an exception, and nothing hangs.

Every kind of file of every simulated node gets every kind of damage (tests/sim/damage.py).
"""

from __future__ import annotations

import json
import subprocess
import sys

from tests.sim.damage import FILE_DAMAGES, PLACE_DAMAGES
from tests.sim.scenario import ROOT

_SEED, _NODES, _PAIRS = 20261123, 60, 600


def test_no_damage_crashes_the_doctor() -> None:
    command = [sys.executable, "-m", "tests.sim.damage", str(_SEED), str(_NODES)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["nodes"] >= _NODES
    assert found["pairs"] >= _PAIRS
    assert found["crashes"] == []
    assert {*FILE_DAMAGES, *PLACE_DAMAGES, "NVML", "fact", "silent"} <= set(found["damages"])
    assert set(found["statuses"]) >= {"pass", "fail", "unknown"}
