"""Random plans of calls on emulated warps; every bit is the torch engine's (battery/fuzz.py)."""

from __future__ import annotations

import pytest

from tests.battery.fuzz import seed_blocks
from tests.emulation.conftest import UNREAD, RunEmulated


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)], ids="{}_ranks".format)
@seed_blocks(1, 65)
def test_plans_of_unread_values(run_emulated: RunEmulated, num_ranks: int, seeds: range) -> None:
    run_emulated(num_ranks, UNREAD, "battery.fuzz.check_seeds", seeds, seed=seeds[0])


@pytest.mark.parametrize("num_ranks", [4, pytest.param(1, marks=pytest.mark.slow)], ids="{}_ranks".format)
@seed_blocks(1, 32)
def test_plans(run_emulated: RunEmulated, num_ranks: int, seeds: range) -> None:
    run_emulated(num_ranks, "battery.fuzz.check_seeds", seeds, seed=seeds[0])
