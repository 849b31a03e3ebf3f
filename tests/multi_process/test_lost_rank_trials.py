"""A few of the trials of `lost_rank_trials`: ranks that are killed or stopped at random are named by every survivor."""

from __future__ import annotations

import pytest

from tests.multi_process import lost_rank_trials


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_survivors_name_the_lost_rank(how: str) -> None:
    count = 4
    kills, stops = (count, 0) if how == "kill" else (0, count)
    for outcome in lost_rank_trials.run(kills, stops, seed=1, at_once=2):
        assert outcome.is_right, outcome
        assert outcome.is_in_time, outcome
