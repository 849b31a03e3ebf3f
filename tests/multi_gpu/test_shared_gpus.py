"""The cuda engine with more ranks than there are GPUs: eight, and more than a warp has lanes, bit for bit.

Ranks of one GPU run in turns of milliseconds, also in the middle of a wait, so that every order of arrival occurs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.battery import bounds, changing_sizes, copied_handles, hybrid, low_latency, normal, other_calls
from tests.battery.cases import CASES, LOW_LATENCY_CASES, Case
from tests.battery.cases import select as select_cases
from tests.battery.fuzz import check_seeds, seed_blocks
from tests.conftest import RunRanks
from tests.multi_gpu import subgroups
from tests.multi_process import trainers
from tests.multi_process.test_trainers import STEPS, TRAINERS, compare
from tests.rank_pool import RankPool

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS == 0, reason="no GPU is visible")]
has_a_gpu_each = pytest.mark.skipif(NUM_GPUS >= 8, reason="8 ranks have a GPU each in test_engine.py")

MORE_OF_EIGHT = [
    Case("zero_tokens_everywhere", 8, 0, num_experts=16),
    Case("only_one_rank_sends", 8, (0, 0, 0, 0, 0, 25, 0, 0)),
    Case("hot_expert", 8, 24, routing="hot"),
    Case("holes", 8, 24, num_experts=32, routing="holes"),
    Case("duplicates", 8, 24, routing="duplicates"),
    Case("top_32", 8, 9, topk=32, num_experts=64),
    Case("hidden_7168", 8, 6, hidden=7168, num_experts=256, topk=8),
    Case("experts_not_a_power_of_two", 8, 17, hidden=8, num_experts=104, topk=5),
]
MORE_LOW_LATENCY_OF_EIGHT = [
    Case("ragged", 8, (0, 7, 1, 30, 2, 0, 9, 16), num_experts=64, topk=8),
    Case("holes", 8, 16, routing="holes"),
    Case("hidden_7168", 8, 4, hidden=7168, num_experts=256, topk=8),
]
RAGGED = tuple((7 * rank) % 5 for rank in range(40))
# One lane of a warp stands for one rank up to 32 ranks; beyond, for several.
FORTY = Case("forty_ranks", 40, 5, num_experts=80, topk=8)
FORTY_RAGGED = Case("forty_ranks_ragged", 40, RAGGED, hidden=512, num_experts=120, topk=20, routing="holes")
FORTY_SUMMED = Case("forty_ranks_summed", 40, 33, hidden=128, num_experts=80, topk=8)
LARGEST = Case("seventy_two_ranks", 72, 3, hidden=128, num_experts=144, topk=8)

EIGHT = [case for case in select_cases(CASES + MORE_OF_EIGHT, one_domain=True) if case.num_ranks == 8]
EIGHT_LOW_LATENCY = [case for case in LOW_LATENCY_CASES + MORE_LOW_LATENCY_OF_EIGHT if case.num_ranks == 8]

# FSDP2 asks of a group what gloo does not do for tensors on a GPU.
TRAINERS_OVER_GLOO = [name for name in TRAINERS if "FSDP2" not in name and "TorchTitan" not in name]


@pytest.fixture(scope="module")
def run_ranks() -> Iterator[RunRanks]:
    """Returns `run(num_ranks, function, *args)` on ranks that share the GPUs, with the cuda engine forced."""
    variables = {"HYBRID_EP_ENGINE": "cuda", "HYBRID_EP_TIMEOUT_S": "30"}
    pool = RankPool(device="cuda", variables=variables, one_at_a_time=True, ranks_share_gpus=True)
    yield pool.run
    pool.close()


def _low_latency_formats(case: Case) -> None:
    for format_name in ("bf16", "fp8_ue8m0"):
        low_latency.check_low_latency(case, format_name, "cuda")


@has_a_gpu_each
@pytest.mark.parametrize(
    "check",
    [
        normal.check_round_trip,
        normal.check_cached,
        normal.check_bound,
        hybrid.check_plain,
        hybrid.check_permuted,
        hybrid.check_permuted_cached,
        hybrid.check_overflow,
    ],
)
@pytest.mark.parametrize("case", EIGHT, ids=lambda case: case.id)
def test_eight_ranks(run_ranks: RunRanks, case: Case, check: Callable[..., None]) -> None:
    run_ranks(8, check, case, "cuda")


@pytest.mark.parametrize(
    ("check", "num_ranks"),
    [
        (bounds.check_bounds_that_differ, 2),
        (bounds.check_calls_of_two_threads, 1),
        (bounds.check_dropped_copies, 2),
        (bounds.check_growth_of_other_ranks, 2),
        (bounds.check_results_freed_under_another_stream, 1),
        (bounds.check_memory_freed_in_a_capture, 2),
    ],
)
def test_bounds(run_ranks: RunRanks, check: Callable[..., None], num_ranks: int) -> None:
    run_ranks(num_ranks, check, "cuda")


@pytest.mark.parametrize("ranks_per_domain", [2, 1])
def test_rows_beyond_a_bound_are_zeros_in_a_combine(run_ranks: RunRanks, ranks_per_domain: int) -> None:
    run_ranks(2, bounds.check_dropped_rows, ranks_per_domain, "cuda")


def test_changing_sizes(run_ranks: RunRanks) -> None:
    run_ranks(2, changing_sizes.check_changing_sizes, 2, "cuda")


def test_copied_handles(run_ranks: RunRanks) -> None:
    run_ranks(2, copied_handles.check_copied_handles, Case("copied", 2, 12), "cuda")


def test_a_rank_that_is_ahead_does_not_disagree(run_ranks: RunRanks) -> None:
    run_ranks(8, other_calls.check_calls_in_turn, "cuda")


@has_a_gpu_each
@pytest.mark.parametrize("case", [case for case in EIGHT if case.hidden % 128 == 0], ids=lambda case: case.id)
def test_eight_ranks_fp8(run_ranks: RunRanks, case: Case) -> None:
    run_ranks(8, normal.check_fp8, case, "cuda")
    run_ranks(8, hybrid.check_again, case, "cuda")


@has_a_gpu_each
@pytest.mark.parametrize("case", EIGHT_LOW_LATENCY, ids=lambda case: case.id)
def test_eight_ranks_low_latency(run_ranks: RunRanks, case: Case) -> None:
    run_ranks(8, _low_latency_formats, case)
    run_ranks(8, low_latency.check_overlapping_batches, case, "cuda")


@pytest.mark.parametrize(
    "check",
    [
        normal.check_round_trip,
        normal.check_cached,
        normal.check_bound,
        normal.check_fp8,
        hybrid.check_plain,
        hybrid.check_permuted,
        hybrid.check_overflow,
        low_latency.check_overlapping_batches,
    ],
)
def test_forty_ranks(run_ranks: RunRanks, check: Callable[..., None]) -> None:
    run_ranks(40, check, FORTY, "cuda")


def test_tokens_with_many_experts(run_ranks: RunRanks) -> None:
    case = Case("wide", 8, 9, hidden=1024, topk=48, num_experts=160)
    run_ranks(8, hybrid.check_wide, case, "cuda")
    run_ranks(8, hybrid.check_plain, case, "cuda")


@pytest.mark.parametrize("name", TRAINERS_OVER_GLOO)
def test_trainers(run_ranks: Callable[..., list[dict[str, torch.Tensor]]], name: str) -> None:
    num_ranks, trainer, args = TRAINERS[name]
    compare(run_ranks(num_ranks, trainers.on_each_rank, trainer, *args), STEPS.get(name, 8))


@pytest.mark.parametrize("num_ranks", [2, 4], ids="{}_ranks".format)
@seed_blocks(4, 40)
def test_plans(run_ranks: RunRanks, num_ranks: int, seeds: range) -> None:
    run_ranks(num_ranks, check_seeds, seeds, "cuda")


def test_forty_ranks_low_latency(run_ranks: RunRanks) -> None:
    run_ranks(40, _low_latency_formats, FORTY)
    run_ranks(40, low_latency.check_low_latency, FORTY_SUMMED, "bf16", "cuda")


@pytest.mark.parametrize("check", [normal.check_round_trip, hybrid.check_permuted])
def test_forty_ragged_ranks(run_ranks: RunRanks, check: Callable[..., None]) -> None:
    run_ranks(40, check, FORTY_RAGGED, "cuda")


@pytest.mark.parametrize("check", [normal.check_round_trip, hybrid.check_permuted_cached])
def test_largest_domain(run_ranks: RunRanks, check: Callable[..., None]) -> None:
    run_ranks(72, check, LARGEST, "cuda")


def test_largest_domain_low_latency(run_ranks: RunRanks) -> None:
    run_ranks(72, low_latency.check_low_latency, LARGEST, "fp8", "cuda")


GROUPS = pytest.mark.parametrize("members", [[[0, 1], [2, 3]], [[0, 2], [3, 1]]], ids=["neighbours", "interleaved"])
CHECKS = pytest.mark.parametrize("check", [subgroups.check_groups_apart, subgroups.check_groups_and_all])


@GROUPS
@CHECKS
def test_subgroups(run_ranks: RunRanks, members: list[list[int]], check: Callable[..., None]) -> None:
    run_ranks(4, check, members)
