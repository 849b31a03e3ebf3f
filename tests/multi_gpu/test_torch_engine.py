"""The torch engine, unchanged, on GPUs over NCCL: the same cases, domains and low-latency calls included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.battery import hybrid, low_latency, normal
from tests.battery.cases import CASES, LOW_LATENCY_CASES, Case
from tests.battery.cases import select as select_cases
from tests.conftest import RunRanks

NUM_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS == 0, reason="no GPU is visible"),
    pytest.mark.parametrize("run_gpus", ["torch"], indirect=True),
]
FITTING = select_cases(CASES, num_ranks=max(NUM_GPUS, 1))
FITTING_LOW_LATENCY = select_cases(LOW_LATENCY_CASES, num_ranks=max(NUM_GPUS, 1))


@pytest.mark.parametrize(
    "check", [normal.check_round_trip, normal.check_bound, hybrid.check_plain, hybrid.check_permuted]
)
@pytest.mark.parametrize("case", FITTING, ids=lambda case: case.id)
def test_case(run_gpus: RunRanks, case: Case, check: Callable[..., None]) -> None:
    run_gpus(case.num_ranks, check, case, "cuda")


@pytest.mark.parametrize("format_name", ["bf16", "fp8_ue8m0"])
@pytest.mark.parametrize("case", FITTING_LOW_LATENCY, ids=lambda case: case.id)
def test_low_latency(run_gpus: RunRanks, case: Case, format_name: str) -> None:
    run_gpus(case.num_ranks, low_latency.check_low_latency, case, format_name, "cuda")
