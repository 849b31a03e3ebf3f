"""The cuda engine between domains, on emulated warps: a link joins the domains, and every bit is the torch engine's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid_ep.testing.cluster import RankError
from tests.battery.cases import Case
from tests.emulation.conftest import RunEmulated
from tests.emulation.engine import run
from tests.emulation.steps import STEPS, Step
from tests.rank_pool import RankPool, needs_fabric

# Every other number of ranks starts new ones, so that cases of as many follow each other.
CASES = [
    Case("2x1", 2, 40, num_ranks_per_domain=1),
    Case("2x1_more_chunks_than_slots", 2, (2100, 70), hidden=16, num_ranks_per_domain=1),
    Case("4x1_groups", 4, 30, routing="groups", num_ranks_per_domain=1),
    Case("2x2", 4, 40, num_ranks_per_domain=2),
    Case("2x2_holes", 4, 40, routing="holes", num_ranks_per_domain=2),
    Case("2x2_hot", 4, 48, routing="hot", num_ranks_per_domain=2),
    Case("2x2_empty", 4, 9, routing="empty", num_ranks_per_domain=2),
    Case("2x2_zero_tokens", 4, 0, num_ranks_per_domain=2),
    Case("2x2_nothing_crosses", 4, 21, routing="local", num_ranks_per_domain=2),
    Case("2x2_hidden_16384", 4, 6, hidden=16384, num_ranks_per_domain=2),
    Case("2x2_hidden_8", 4, 20, hidden=8, num_ranks_per_domain=2),
    Case("2x2_top_32", 4, 11, topk=32, num_experts=64, num_ranks_per_domain=2),
    Case("3x2_duplicates", 6, 20, num_experts=12, routing="duplicates", num_ranks_per_domain=2),
    Case("2x4_ragged", 8, (5, 0, 17, 1, 30, 2, 0, 9), num_experts=32, num_ranks_per_domain=4),
]
_BY_ID = {case.id: case for case in CASES}
_CHECKS = "check_round_trip", "check_cached", "check_bound"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_normal(run_emulated: RunEmulated, case: Case) -> None:
    for check in _CHECKS:
        run_emulated(case.num_ranks, f"battery.normal.{check}", case)


@pytest.mark.parametrize(
    ("case_id", "transport"),
    [
        ("2x1_more_chunks_than_slots", "tcp"),
        ("2x2_holes", "tcp"),
        # Each case over one of two providers.
        *(
            pytest.param(case.id, f"libfabric/{provider}", marks=needs_fabric)
            for case, provider in zip(CASES, itertools.cycle(["tcp", "shm"]))
        ),
    ],
)
def test_over_a_proxy(run_emulated: RunEmulated, case_id: str, transport: str) -> None:
    case = _BY_ID[case_id]
    for check in _CHECKS:
        run_emulated(case.num_ranks, "emulation.domains.check_over", transport, f"battery.normal.{check}", case)


@pytest.mark.parametrize("case_id", ["2x1_more_chunks_than_slots", "3x2_duplicates"])
def test_over_nvshmem(run_emulated: RunEmulated, case_id: str) -> None:
    """Puts are complete late, and in any order."""
    case = _BY_ID[case_id]
    for check in _CHECKS:
        run_emulated(case.num_ranks, "emulation.over_nvshmem.check", f"battery.normal.{check}", case)


@pytest.mark.parametrize(("check", "case_id"), [("check_mapped", "2x1"), ("check_some_mapped", "4x1_groups")])
def test_over_nvshmem_to_mapped_peers(run_emulated: RunEmulated, check: str, case_id: str) -> None:
    case = _BY_ID[case_id]
    for name in ("check_round_trip", "check_cached"):
        run_emulated(case.num_ranks, f"emulation.over_nvshmem.{check}", f"battery.normal.{name}", case)


@pytest.mark.parametrize(
    ("num_ranks", "check"),
    [
        (2, "check_closed_buffers_leave_their_window"),
        (4, "check_part_of_the_job"),
        (2, "check_no_kernels"),
        (3, "check_puts_without_signals"),
        (3, "check_puts_that_stop"),
        (2, "check_low_latency_puts_that_stop"),
    ],
)
def test_nvshmem_at_its_limits(emulated_module: Path, num_ranks: int, check: str) -> None:
    pool = RankPool(variables={"HYBRID_EP_ENGINE": "cuda", "HYBRID_EP_TIMEOUT_S": "60"})
    pool.run(num_ranks, run, str(emulated_module), 0, f"emulation.over_nvshmem.{check}")
    pool.close()


@pytest.mark.parametrize(
    ("case_id", "seed"), [("2x2_holes", 0), ("3x2_duplicates", 1), ("2x1_more_chunks_than_slots", 2)]
)
def test_chunks_that_overtake_each_other(run_emulated: RunEmulated, case_id: str, seed: int) -> None:
    case, check = _BY_ID[case_id], "battery.normal.check_round_trip"
    run_emulated(case.num_ranks, "emulation.faulty_links.check_on_slow_link", check, seed, case, seed=seed)


def test_lost_chunks_are_an_error_that_names_a_rank(run_emulated: RunEmulated) -> None:
    run_emulated(4, "emulation.faulty_links.check_lost_chunks", Case("lost", 4, 8, num_ranks_per_domain=2))


@pytest.mark.parametrize("check", ["check_other_calls", "check_other_reports_of_dropped_rows"])
def test_ranks_that_disagree_are_told_so(run_emulated: RunEmulated, check: str) -> None:
    run_emulated(4, "emulation.domains.check_in_domains", 2, f"battery.other_calls.{check}")


def test_dispatches_with_weights_along_other_handles_are_refused(run_emulated: RunEmulated) -> None:
    run_emulated(
        4, "emulation.domains.check_in_domains", 2, "battery.elastic.check_other_handles", Case("consumer", 4, 12)
    )


@pytest.mark.parametrize(("num_ranks", "size"), [(3, 1), (4, 2)])
def test_a_dispatch_beside_a_combine(run_emulated: RunEmulated, num_ranks: int, size: int) -> None:
    run_emulated(num_ranks, "battery.other_calls.check_dispatch_beside_combine", size)


def test_ranks_agree_before_memory_grows(run_emulated: RunEmulated) -> None:
    check = ("emulation.small_slots.check_with_small_slots", "battery.other_calls.check_combines_that_grow_memory")
    run_emulated(4, "emulation.domains.check_in_domains", 2, *check)


def test_ranks_compare_the_memory_that_they_use(run_emulated: RunEmulated) -> None:
    run_emulated(4, "emulation.small_slots.check_memory_of_a_graph", 2)


def test_domains_with_other_numbers_of_slots_are_told_so(run_emulated: RunEmulated) -> None:
    run_emulated(4, "multi_process.test_load_balance.check_other_slots")


def test_combines_that_are_refused_in_a_row(run_emulated: RunEmulated) -> None:
    check = ("emulation.devices.check_with_stalls", "battery.other_calls.check_refused_combines_in_a_row")
    run_emulated(4, "emulation.domains.check_in_domains", 2, *check)


@pytest.mark.parametrize("check", ["check_bad_expert", "check_too_many_tokens", "check_bound_beyond_common_bound"])
def test_what_one_rank_gets_wrong_all_are_told(run_emulated: RunEmulated, check: str) -> None:
    run_emulated(4, "emulation.domains.check_in_domains", 2, f"multi_gpu.refusals.{check}")


@pytest.mark.parametrize("check", ["check_errors_keep_no_slot", "check_handles_of_others", "check_misaligned_scales"])
def test_refusals(run_emulated: RunEmulated, check: str) -> None:
    run_emulated(2, "emulation.domains.check_in_domains", 1, f"multi_gpu.refusals.{check}")


@pytest.mark.parametrize(
    "check",
    [
        "multi_gpu.capacity.check_empty_cache",
        "multi_gpu.capacity.check_growth",
        "multi_gpu.capacity.check_handles_hold_no_slot",
        "multi_gpu.capacity.check_pool",
        "multi_gpu.refusals.check_common_bounds_that_differ",
    ],
)
def test_small_slots_grow(run_emulated: RunEmulated, check: str) -> None:
    small_slots = "emulation.small_slots.check_with_small_slots"
    run_emulated(4, "emulation.domains.check_in_domains", 2, small_slots, check)


def test_slots_too_small_for_sums(run_emulated: RunEmulated) -> None:
    run_emulated(6, "emulation.domains.check_in_domains", 3, "emulation.small_slots.check_too_small_for_sums")


def test_late_errors(run_emulated: RunEmulated) -> None:
    for check in ("check_overflow", "check_error_of_the_last_call"):
        run_emulated(4, "emulation.domains.check_in_domains", 2, f"multi_gpu.late_errors.{check}")


def test_rows_are_not_complete_where_a_rank_was_given_up(run_emulated: RunEmulated) -> None:
    run_emulated(4, "emulation.domains.check_rank_that_others_have_given_up", 6.0)


def test_auto(run_emulated: RunEmulated) -> None:
    run_emulated(2, "emulation.domains.check_auto")


@pytest.mark.parametrize(("case_id", "num_tensors"), [("2x1", 1), ("2x2", 2)])
def test_scratch_of_combine(run_emulated: RunEmulated, case_id: str, num_tensors: int) -> None:
    case = _BY_ID[case_id]
    run_emulated(case.num_ranks, "emulation.domains.check_scratch_of_combine", case, num_tensors)


@pytest.mark.parametrize("transport", ["loopback", "tcp", pytest.param("libfabric/tcp", marks=needs_fabric)])
def test_ranks_that_read_chunks_of_their_peers_in_other_orders(run_emulated: RunEmulated, transport: str) -> None:
    check = "emulation.domains.check_sums_in_other_orders"
    run_emulated(3, "emulation.domains.check_over", transport, check, 20.0)


@pytest.mark.parametrize("transport", ["loopback", "tcp"])
def test_link_alone(run_emulated: RunEmulated, transport: str) -> None:
    case = Case("link", 4, 20, num_ranks_per_domain=2)
    run_emulated(4, "emulation.domains.check_over", transport, "emulation.domains.check_link_alone", case)


def test_quantised(run_emulated: RunEmulated) -> None:
    for check in ("check_fp8", "check_nvfp4"):
        run_emulated(4, f"battery.normal.{check}", Case("quantised", 4, 20, num_ranks_per_domain=2))


def test_hybrid(run_emulated: RunEmulated) -> None:
    for check in ("check_plain", "check_permuted", "check_permuted_cached", "check_overflow"):
        run_emulated(4, f"battery.hybrid.{check}", Case("hybrid", 4, 20, num_ranks_per_domain=2))


def test_grouped_rows_beyond_their_bound_are_told_to_all(run_emulated: RunEmulated) -> None:
    run_emulated(4, "emulation.domains.check_in_domains", 2, "battery.grouped.check_too_few_rows")


def test_tokens_with_many_experts(run_emulated: RunEmulated) -> None:
    case = Case("wide", 4, 6, hidden=128, topk=40, num_experts=160, num_ranks_per_domain=2)
    for check in ("check_plain", "check_wide"):
        run_emulated(4, f"battery.hybrid.{check}", case)


def test_elastic_buffer(run_emulated: RunEmulated) -> None:
    for check in ("check_compact", "check_expanded", "check_gradients"):
        run_emulated(4, f"battery.elastic.{check}", Case("elastic", 4, 20, num_ranks_per_domain=2))


def test_copied_handles(run_emulated: RunEmulated) -> None:
    run_emulated(2, "battery.copied_handles.check_copied_handles", Case("copied", 2, 12, num_ranks_per_domain=1))


def test_numbers_of_sms(run_emulated: RunEmulated) -> None:
    run_emulated(4, "battery.hybrid.check_sms", Case("sms", 4, 20, num_ranks_per_domain=2))


@pytest.mark.parametrize("check", ["normal", "hybrid"])
def test_two_buffers(run_emulated: RunEmulated, check: str) -> None:
    case = Case("two_buffers", 4, 20, num_ranks_per_domain=2)
    run_emulated(4, f"battery.{check}.check_two_buffers", case)


# More of them: test_kernels.py, and all of them on the torch engine.
@pytest.mark.parametrize(
    "check",
    [
        "check_refused_combines",
        "check_refused_dispatches",
        "check_refused_dispatches_along_handles",
        "check_refused_rows_of_kernels",
        "check_refused_while_captured",
    ],
)
def test_what_one_rank_refuses_all_are_told(run_emulated: RunEmulated, check: str) -> None:
    run_emulated(4, "emulation.domains.check_in_domains", 2, f"battery.refused_normal.{check}")


@pytest.fixture(scope="module")
def run_briefly(emulated_module: Path) -> Iterator[RunEmulated]:
    """The same, and a rank that waits in vain does not wait long."""
    pool = RankPool(variables={"HYBRID_EP_ENGINE": "cuda", "HYBRID_EP_TIMEOUT_S": "20"}, one_at_a_time=True)

    def run_check(num_ranks: int, check: str, *args: Any, seed: int = 0) -> None:
        pool.run(num_ranks, run, str(emulated_module), seed, check, *args)

    yield run_check
    pool.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "check", dict.fromkeys(step.check for step in STEPS), ids=lambda check: f"{check[0]}-{check[1]}"
)
def test_with_all_steps(run_briefly: RunEmulated, check: tuple[Any, ...]) -> None:
    num_ranks, *rest = check
    run_briefly(num_ranks, "emulation.steps.check_without", "", *rest)


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name.replace(" ", "_"))
def test_a_step_that_is_left_out_is_noticed(run_briefly: RunEmulated, step: Step) -> None:
    # On a busy machine threads may take turns in an order in which the step is not needed.
    num_ranks, *rest = step.check
    num_runs = 3
    for _ in range(num_runs):
        try:
            run_briefly(num_ranks, "emulation.steps.check_without", step.name, *rest)
        except RankError:
            return
    pytest.fail(f"The check has passed {num_runs} times without the step: {step.name}.")


def test_a_link_with_the_rate_of_a_nic(run_emulated: RunEmulated) -> None:
    case = Case("rate", 2, 100, hidden=1024, num_ranks_per_domain=1)
    run_emulated(2, "emulation.domains.check_rate", case, 0.0001)


def test_too_many_domains_of_one_host(run_emulated: RunEmulated) -> None:
    run_emulated(2, "emulation.domains.check_too_many_mapped_domains")
