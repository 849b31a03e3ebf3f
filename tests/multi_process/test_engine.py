"""The torch engine passes every case, on real processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.battery import (
    bounds,
    copied_handles,
    hybrid,
    low_latency,
    low_latency_masks,
    normal,
    other_calls,
    refused_low_latency,
    refused_normal,
    signals,
)
from tests.battery.cases import CASES, LOW_LATENCY_CASES, Case
from tests.conftest import RunRanks
from tests.emulation.domains import check_in_domains

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
_FORMATS = list(low_latency.FORMATS)


@every_case
def test_normal(run_ranks: RunRanks, case: Case) -> None:
    for check in normal.CHECKS if case.hidden % 128 == 0 else normal.CHECKS_OF_BF16:
        run_ranks(case.num_ranks, check, case)


@pytest.mark.parametrize("ranks_per_domain", [None, 1])
def test_copied_handles(run_ranks: RunRanks, ranks_per_domain: int | None) -> None:
    run_ranks(2, copied_handles.check_copied_handles, Case("copied", 2, 12, num_ranks_per_domain=ranks_per_domain))


@pytest.mark.parametrize(
    "check",
    [bounds.check_bounds_that_differ, bounds.check_dropped_copies, bounds.check_growth_of_other_ranks],
)
def test_bounds(run_ranks: RunRanks, check: Callable[[], None]) -> None:
    run_ranks(2, check)


def test_two_buffers(run_ranks: RunRanks) -> None:
    run_ranks(4, normal.check_two_buffers, Case("two_buffers", 4, 20))


@pytest.mark.parametrize(
    "check",
    [
        other_calls.check_dispatch_beside_one_along_a_handle,
        other_calls.check_other_calls,
        other_calls.check_other_low_latency_calls,
        other_calls.check_other_global_scales,
        other_calls.check_other_logfmt,
        other_calls.check_other_reports_of_dropped_rows,
        other_calls.check_combine_along_other_low_latency_handles,
        other_calls.check_too_many_low_latency_tokens,
    ],
)
def test_ranks_that_disagree_are_told_so(run_ranks: RunRanks, check: Callable[[], None]) -> None:
    run_ranks(2, check)


@pytest.mark.parametrize(
    "check",
    [
        refused_low_latency.check_refused_at_every_rank,
        refused_low_latency.check_refused_combines,
        refused_low_latency.check_refused_dispatches,
        refused_low_latency.check_refused_first_dispatch,
    ],
)
def test_what_one_rank_refuses_all_are_told(run_ranks: RunRanks, check: Callable[[], None]) -> None:
    run_ranks(3, check)


@pytest.mark.parametrize("check", [*refused_normal.CHECKS, refused_normal.check_refused_sum_of_loads])
def test_what_one_rank_refuses_of_normal_calls_all_are_told(run_ranks: RunRanks, check: Callable[[], None]) -> None:
    run_ranks(3, check)


@pytest.mark.parametrize(
    "check",
    [
        refused_normal.check_refused_combines,
        refused_normal.check_refused_dispatches,
        refused_normal.check_refused_moves_of_experts,
    ],
)
def test_ranks_of_all_domains_are_told(run_ranks: RunRanks, check: Callable[[], None]) -> None:
    run_ranks(4, check_in_domains, 2, f"battery.refused_normal.{check.__name__}")


@every_case
def test_hybrid(run_ranks: RunRanks, case: Case) -> None:
    for check in (hybrid.check_plain, hybrid.check_permuted, hybrid.check_permuted_cached, hybrid.check_overflow):
        run_ranks(case.num_ranks, check, case)
    if case.hidden % 128 == 0:
        run_ranks(case.num_ranks, _permuted_fp8, case)


def test_an_overflow_along_a_map_is_told_to_all(run_ranks: RunRanks) -> None:
    run_ranks(3, hybrid.check_overflow_of_a_map, Case("map", 3, 12, num_experts=12))


def _permuted_fp8(case: Case) -> None:
    hybrid.check_permuted(case, fp8=True)


@pytest.mark.parametrize("idx", range(len(LOW_LATENCY_CASES)), ids=lambda idx: LOW_LATENCY_CASES[idx].id)
def test_low_latency(run_ranks: RunRanks, idx: int) -> None:
    """Each case with bf16 and one other format, so that each format has two cases or more."""
    case = LOW_LATENCY_CASES[idx]
    for format_name in ("bf16", _FORMATS[1 + idx % (len(_FORMATS) - 1)]):
        run_ranks(case.num_ranks, low_latency.check_low_latency, case, format_name)
    run_ranks(case.num_ranks, low_latency.check_mixed_hooks, case)
    if case.hidden % 128 == 0:
        run_ranks(case.num_ranks, low_latency.check_logfmt, case)


@pytest.mark.parametrize("check", [low_latency.check_mixed_hooks, low_latency.check_logfmt])
def test_low_latency_sums_rows_inside_a_domain_only(run_ranks: RunRanks, check: Callable[[Case], None]) -> None:
    run_ranks(4, check, Case("two_domains", 4, 40, num_ranks_per_domain=2))


@pytest.mark.parametrize(
    "case",
    [
        Case("wide", 2, (9, 7), hidden=128, topk=40, num_experts=80),
        Case("wide_domains", 4, 6, hidden=128, topk=64, num_experts=72, num_ranks_per_domain=2),
        Case("all_experts", 2, (5, 0), hidden=128, topk=40, num_experts=40),
        Case("many_columns", 2, (3, 5), hidden=128, topk=34, num_experts=300),
    ],
    ids=lambda case: case.id,
)
def test_tokens_with_many_experts(run_ranks: RunRanks, case: Case) -> None:
    run_ranks(case.num_ranks, hybrid.check_wide, case)
    run_ranks(case.num_ranks, hybrid.check_plain, case)


@pytest.mark.parametrize(
    ("kind", "use_logfmt"), [("comp_signal", False), ("comp_signal", True), ("src_signals", False)]
)
def test_low_latency_combine_beside_experts(run_ranks: RunRanks, kind: str, use_logfmt: bool) -> None:
    run_ranks(2, signals.check_signals, kind, use_logfmt)


def test_a_signal_of_experts_that_does_not_come(run_ranks: RunRanks) -> None:
    run_ranks(3, signals.check_missing_signal, 3.0)


def test_low_latency_batches_overlap(run_ranks: RunRanks) -> None:
    run_ranks(4, low_latency.check_overlapping_batches, Case("overlap", 4, 12))


def test_low_latency_dispatches_ahead(run_ranks: RunRanks) -> None:
    run_ranks(4, low_latency.check_dispatches_ahead, Case("ahead", 4, 12))


def test_cleaned_low_latency_buffers_forget(run_ranks: RunRanks) -> None:
    run_ranks(4, low_latency.check_cleaned, Case("cleaned", 4, 12))


@pytest.mark.parametrize(
    "check", [low_latency.check_unreceived, low_latency_masks.check_late_rank, low_latency.check_too_many_rows]
)
def test_low_latency_misuse_and_delay(run_ranks: RunRanks, check: Callable[[], None]) -> None:
    run_ranks(2, check)


def test_a_late_rank_comes_back(run_ranks: RunRanks) -> None:
    run_ranks(3, low_latency_masks.check_late_rank_comes_back, 3.0)
