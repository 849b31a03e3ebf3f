"""The cuda engine passes every case that the torch engine passes, bit for bit, on one process per GPU."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
import torch

import hybrid_ep
from hybrid_ep.core.layout import compute_layout
from hybrid_ep.testing.cluster import VirtualCluster
from tests.battery import changing_sizes, grouped, hybrid, normal, other_calls, refused_low_latency, refused_normal
from tests.battery.cases import CASES, Case
from tests.battery.cases import select as select_cases
from tests.battery.fuzz import check_seeds, seed_blocks
from tests.conftest import RunRanks
from tests.emulation.layout import check_probs
from tests.emulation.small_slots import check_with_small_slots
from tests.multi_gpu import behaviour, capacity, late_errors, refusals, subgroups

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS == 0, reason="no GPU is visible")]

FITTING = select_cases(CASES, num_ranks=max(NUM_GPUS, 1), one_domain=True)
every_case = pytest.mark.parametrize("case", FITTING, ids=lambda case: case.id)
fp8_cases = pytest.mark.parametrize("case", [c for c in FITTING if c.hidden % 128 == 0], ids=lambda case: case.id)


@pytest.mark.parametrize("check", [normal.check_round_trip, normal.check_cached, normal.check_bound])
@every_case
def test_normal(run_gpus: RunRanks, case: Case, check: Callable[..., None]) -> None:
    run_gpus(case.num_ranks, check, case, "cuda")


@fp8_cases
@pytest.mark.parametrize("check", [normal.check_fp8, normal.check_nvfp4])
def test_normal_quantised(run_gpus: RunRanks, case: Case, check: Callable[..., None]) -> None:
    run_gpus(case.num_ranks, check, case, "cuda")


@pytest.mark.parametrize(
    "check", [hybrid.check_plain, hybrid.check_permuted, hybrid.check_permuted_cached, hybrid.check_overflow]
)
@every_case
def test_hybrid(run_gpus: RunRanks, case: Case, check: Callable[..., None]) -> None:
    run_gpus(case.num_ranks, check, case, "cuda")


@fp8_cases
def test_hybrid_repeated(run_gpus: RunRanks, case: Case) -> None:
    run_gpus(case.num_ranks, hybrid.check_again, case, "cuda")


def test_numbers_of_sms(run_gpus: RunRanks) -> None:
    run_gpus(NUM_GPUS, hybrid.check_sms, Case("sms", NUM_GPUS, 60, num_experts=8 * NUM_GPUS), "cuda")


def test_probs() -> None:
    check_probs(64, "cuda")


def test_layouts_in_a_graph() -> None:
    """A replay counts anew, as calls between replays do."""
    draws = [torch.randint(-1, 24, (600, 3)) for _ in range(5)]
    topk_idx = draws[0].cuda()
    with hybrid_ep.Buffer(None) as buffer:
        for _ in range(3):
            buffer.get_dispatch_layout(topk_idx, 24)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            in_graph = buffer.get_dispatch_layout(topk_idx, 24)
        for drawn in draws:
            want = compute_layout(drawn, 24, 1, 1)
            topk_idx.copy_(drawn)
            graph.replay()
            for found in (buffer.get_dispatch_layout(topk_idx, 24), in_graph):
                normal.equal(found[0], want.num_tokens_per_rank, "tokens per rank")
                normal.equal(found[2], want.num_tokens_per_expert, "tokens per expert")
                normal.equal(found[3], want.is_token_in_rank, "is_token_in_rank")


def test_tokens_with_many_experts(run_gpus: RunRanks) -> None:
    case = Case("wide", NUM_GPUS, 50, hidden=7168, topk=min(64, 36 * NUM_GPUS), num_experts=36 * NUM_GPUS)
    run_gpus(NUM_GPUS, hybrid.check_wide, case, "cuda")
    run_gpus(NUM_GPUS, hybrid.check_plain, case, "cuda")


@pytest.mark.parametrize("check", [normal.check_two_buffers, hybrid.check_two_buffers])
def test_two_buffers(run_gpus: RunRanks, check: Callable[..., None]) -> None:
    run_gpus(NUM_GPUS, check, Case("two_buffers", NUM_GPUS, 20, num_experts=8 * NUM_GPUS), "cuda")


@pytest.mark.skipif(NUM_GPUS < 2, reason="a rank does not disagree with itself")
@pytest.mark.parametrize(
    "check",
    [
        other_calls.check_other_calls,
        other_calls.check_other_low_latency_calls,
        other_calls.check_other_global_scales,
        other_calls.check_other_logfmt,
        other_calls.check_other_reports_of_dropped_rows,
        other_calls.check_combine_along_other_low_latency_handles,
        other_calls.check_too_many_low_latency_tokens,
        other_calls.check_refused_calls_leave_nothing_to_do,
        other_calls.check_refused_combines_in_a_row,
        grouped.check_too_few_rows,
        *refused_low_latency.CHECKS,
        *refused_normal.CHECKS,
        refused_normal.check_refused_rows_of_kernels,
    ],
)
def test_ranks_that_disagree_are_told_so(run_gpus: RunRanks, check: Callable[[str], None]) -> None:
    run_gpus(2, check, "cuda")


@pytest.mark.skipif(NUM_GPUS < 4, reason="two groups of two ranks need 4 GPUs")
@pytest.mark.parametrize("members", [[[0, 1], [2, 3]], [[0, 2], [3, 1]]], ids=["neighbours", "interleaved"])
@pytest.mark.parametrize("check", [subgroups.check_groups_apart, subgroups.check_groups_and_all])
def test_subgroups(run_gpus: RunRanks, members: list[list[int]], check: Callable[..., None]) -> None:
    run_gpus(4, check, members)


@seed_blocks(12, 200)
def test_plans(run_gpus: RunRanks, seeds: range) -> None:
    run_gpus(NUM_GPUS, check_seeds, seeds, "cuda")


@pytest.mark.parametrize(
    "check", [behaviour.check_graph, behaviour.check_graph_by_expert, behaviour.check_graph_by_map]
)
def test_graph_replay(run_gpus: RunRanks, check: Callable[[int], None]) -> None:
    run_gpus(NUM_GPUS, check, 40)


@pytest.mark.parametrize(
    "check",
    [
        behaviour.check_kept_handles,
        behaviour.check_long_earlier_work,
        behaviour.check_async,
        behaviour.check_captured_streams,
        behaviour.check_other_streams,
        behaviour.check_other_threads,
        behaviour.check_scales_on_a_stream,
        behaviour.check_bad_arguments,
        late_errors.check_overflow,
        late_errors.check_error_of_the_last_call,
        late_errors.check_error_of_a_replay,
        capacity.check_empty_cache,
        capacity.check_growth,
        capacity.check_handles_hold_no_slot,
        capacity.check_exact_counts,
        capacity.check_most_tokens,
        capacity.check_pool,
        capacity.check_pool_grows,
        capacity.check_full_memory,
        capacity.check_graph_slots,
        capacity.check_no_slots,
        refusals.check_errors_keep_no_slot,
        refusals.check_misaligned_scales,
    ],
)
def test_behaviour(run_gpus: RunRanks, check: Callable[..., None]) -> None:
    run_gpus(NUM_GPUS, check)


@pytest.mark.skipif(NUM_GPUS < 2, reason="one rank cannot disagree with itself")
@pytest.mark.parametrize(
    "check",
    [
        refusals.check_bad_expert,
        refusals.check_bound_beyond_common_bound,
        refusals.check_handles_of_others,
        refusals.check_same_bytes,
        refusals.check_too_many_tokens,
    ],
)
def test_what_one_rank_gets_wrong_all_are_told(run_gpus: RunRanks, check: Callable[[], None]) -> None:
    run_gpus(NUM_GPUS, check)


def test_many_calls(run_gpus: RunRanks) -> None:
    run_gpus(NUM_GPUS, capacity.check_many_calls, 10_000)


def test_changing_sizes(run_gpus: RunRanks) -> None:
    run_gpus(NUM_GPUS, changing_sizes.check_changing_sizes, NUM_GPUS, "cuda")


@pytest.mark.parametrize(
    ("check", "num_ranks"), [("check_common_bounds_that_differ", 2), ("check_combine_beyond_bound", 3)]
)
def test_small_slots(run_gpus: RunRanks, check: str, num_ranks: int) -> None:
    if num_ranks > NUM_GPUS:
        pytest.skip(f"{num_ranks} ranks need as many GPUs")
    run_gpus(NUM_GPUS, check_with_small_slots, f"multi_gpu.refusals.{check}")


@pytest.mark.skipif(NUM_GPUS < 2, reason="a rank cannot lose itself")
def test_killed_rank() -> None:
    """A rank is killed; every survivor names it within its time."""
    timeout_s, lost = 2.0, NUM_GPUS - 1
    with VirtualCluster(NUM_GPUS, device="cuda") as cluster:
        cluster.run(behaviour.make_shared_buffer, timeout_s, limit_s=60)
        os.kill(cluster.process_id(lost), signal.SIGKILL)
        survivors = list(range(NUM_GPUS - 1))
        cluster.run(behaviour.use_without_peer, lost, timeout_s, ranks=survivors, limit_s=60)
