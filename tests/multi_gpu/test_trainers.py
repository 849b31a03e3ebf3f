"""Torch's trainers on GPUs: the cases of tests/multi_process/test_trainers.py, over both engines."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.conftest import RunRanks
from tests.multi_gpu.conftest import every_engine
from tests.multi_process import trainers
from tests.multi_process.test_trainers import STEPS, TRAINERS, compare

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS < 2, reason="fewer than 2 GPUs are visible")]
FITTING = {name: case for name, case in TRAINERS.items() if case[0] <= max(NUM_GPUS, 2)}


@every_engine
@pytest.mark.parametrize("name", FITTING)
def test_trainers_get_the_gradients_of_a_dense_mixture(run_gpus: RunRanks, name: str) -> None:
    num_ranks, trainer, args = FITTING[name]
    compare(run_gpus(num_ranks, trainers.on_each_rank, trainer, *args), STEPS.get(name, 8))


@every_engine
def test_an_exported_layer_is_the_layer(run_gpus: Callable[..., list[float]]) -> None:
    assert run_gpus(2, trainers.exported) == [0.0, 0.0]
