"""A few of the trials of `recovery_trials`: jobs that lose ranks at random go on, and every row is right."""

from __future__ import annotations

import pytest

from tests.multi_process import recovery_trials
from tests.multi_process.recovery_trials import Trial


def _numbers() -> dict[str, int]:
    """The first trial of each kind, so that each has been here."""
    found: dict[str, int] = {}
    for number in range(100):
        trial = Trial.draw(1, number)
        kind = f"{trial.how}, {trial.calls}" if len(trial.victims) == 1 else f"{trial.how}, then another"
        found.setdefault(kind, number)
    kinds = ["kill, normal", "stop, low latency", "hang, permute", "kill, then another"]
    return {kind: found[kind] for kind in kinds}


@pytest.mark.parametrize("kind", _numbers())
def test_a_job_goes_on(kind: str) -> None:
    (outcome,) = recovery_trials.run(1, seed=1, first=_numbers()[kind])
    assert not outcome.problems, outcome
    assert outcome.num_steps > 0
