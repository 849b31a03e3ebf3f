"""The cuda engine passes the cases without a GPU: its kernels run on emulated warps (README.md beside this file)."""

from __future__ import annotations

import pytest

import hybrid_ep
from tests.battery.cases import CASES, LOW_LATENCY_CASES, Case, select
from tests.emulation import streams_and_faults
from tests.emulation.conftest import UNREAD, RunEmulated

# More ranks take long, for they share two cores; of eight there is the case with the most different ones. Cases of as
# many ranks follow each other, for every other number starts new ranks.
_CASES = sorted(
    (case for case in select(CASES, one_domain=True) if case.num_ranks <= 4 or case.id == "ragged"),
    key=lambda case: case.num_ranks,
)
# Each case of at most four ranks with one format, and each format with a case.
_FORMATS = {
    "one_rank": "fp8",
    "zero_tokens_everywhere": "nvfp4",
    "hidden_640": "nvfp4_ue8m0",
    "hidden_7168": "fp8_rounded",
    "hidden_16384": "nvfp4",
    "top_32": "bf16",
    "ragged": "bf16",
    "holes": "fp8_ue8m0",
    "duplicates": "bf16",
}
_LOW_LATENCY_CASES = {case.id: case for case in LOW_LATENCY_CASES}
# Tensors have values that are not checked: a rank without tokens, and rows that are all −1.
_UNREAD = Case("unread", 3, (11, 0, 14), num_experts=12, routing="holes")


def _cases(*names: str) -> pytest.MarkDecorator:
    chosen = [case for case in _CASES if not names or case.id in names]
    return pytest.mark.parametrize("case", chosen, ids=lambda case: case.id)


@_cases()
def test_normal(run_emulated: RunEmulated, case: Case) -> None:
    for check in ("check_round_trip", "check_cached", "check_bound"):
        run_emulated(case.num_ranks, f"battery.normal.{check}", case)


@pytest.mark.parametrize("num_ranks", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_changing_sizes(run_emulated: RunEmulated, num_ranks: int) -> None:
    run_emulated(num_ranks, "battery.changing_sizes.check_changing_sizes", num_ranks)


def test_a_dispatch_grows_slots(run_emulated: RunEmulated) -> None:
    case = Case("many_rows", 2, 150, hidden=8192, topk=2)
    for check in ("check_round_trip", "check_bound"):
        run_emulated(2, "emulation.small_slots.check_with_small_slots", f"battery.normal.{check}", case)


@pytest.mark.parametrize(
    ("check", "num_ranks"),
    [
        ("check_bounds_that_differ", 2),
        ("check_calls_of_two_threads", 1),
        ("check_dropped_copies", 2),
        ("check_dropped_copies", 3),
        ("check_growth_of_other_ranks", 2),
    ],
)
def test_bounds(run_emulated: RunEmulated, check: str, num_ranks: int) -> None:
    run_emulated(num_ranks, UNREAD, f"battery.bounds.{check}")


@pytest.mark.parametrize("ranks_per_domain", [2, 1])
def test_rows_beyond_a_bound_are_zeros_in_a_combine(run_emulated: RunEmulated, ranks_per_domain: int) -> None:
    run_emulated(2, "battery.bounds.check_dropped_rows", ranks_per_domain)


def test_combine_with_a_window(run_emulated: RunEmulated) -> None:
    """Enough SMs to fill the wire, and rows of which a warp has several chunks."""
    case = Case("many_sms", 2, 130, hidden=4096, topk=2)
    run_emulated(2, "emulation.devices.check_with_sms", 14, "battery.normal.check_round_trip", case)


@_cases("holes", "hidden_7168")
def test_normal_quantised(run_emulated: RunEmulated, case: Case) -> None:
    for check in ("check_fp8", "check_nvfp4"):
        run_emulated(case.num_ranks, f"battery.normal.{check}", case)


@_cases("duplicates", "top_32")
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4))])
def test_paces(run_emulated: RunEmulated, case: Case, seed: int) -> None:
    """Copies at other paces and in other orders, and threads in other turns, change no bit."""
    run_emulated(case.num_ranks, "battery.normal.check_round_trip", case, seed=seed)


@_cases(
    "one_rank",
    "holes",
    "duplicates",
    "zero_tokens_on_one_rank",
    "experts_not_a_power_of_two",
    "hidden_7168",
    "hidden_16384_experts_2048",  # rings do not fit beside the counters
)
def test_hybrid(run_emulated: RunEmulated, case: Case) -> None:
    for check in ("check_plain", "check_permuted", "check_permuted_cached", "check_overflow"):
        run_emulated(case.num_ranks, f"battery.hybrid.{check}", case)


def test_grouped_rows_beyond_their_bound_are_told_to_all(run_emulated: RunEmulated) -> None:
    run_emulated(3, "battery.grouped.check_too_few_rows")


def test_an_overflow_along_a_map_is_told_to_all(run_emulated: RunEmulated) -> None:
    run_emulated(3, "battery.hybrid.check_overflow_of_a_map", Case("map", 3, 12, num_experts=12))


def test_tokens_with_many_experts(run_emulated: RunEmulated) -> None:
    case = Case("wide", 2, (9, 7), hidden=128, topk=40, num_experts=80)
    run_emulated(2, "battery.hybrid.check_wide", case)
    run_emulated(2, "battery.hybrid.check_plain", case)


@_cases("holes", "zero_tokens_on_one_rank", "all_holes")
def test_elastic_buffer(run_emulated: RunEmulated, case: Case) -> None:
    for check in ("check_compact", "check_expanded", "check_masked_decode"):
        run_emulated(case.num_ranks, f"battery.elastic.{check}", case)


def test_elastic_calls_of_consumers(run_emulated: RunEmulated) -> None:
    checks = "check_scales", "check_gradients", "check_deferred"
    refusals = "check_too_many_tokens", "check_other_most_tokens", "check_other_handles"
    for check in (*checks, *refusals):
        run_emulated(2, f"battery.elastic.{check}", Case("consumer", 2, 30))


@pytest.mark.parametrize("case_id", _FORMATS)
def test_low_latency(run_emulated: RunEmulated, case_id: str) -> None:
    case = _LOW_LATENCY_CASES[case_id]
    run_emulated(case.num_ranks, "battery.low_latency.check_low_latency", case, _FORMATS[case_id])
    run_emulated(case.num_ranks, "battery.low_latency.check_mixed_hooks", case)
    run_emulated(case.num_ranks, "battery.low_latency.check_sums_over_rows", case)


def test_unread_values(run_emulated: RunEmulated) -> None:
    for check, *args in (
        ("low_latency.check_other_values",),
        ("low_latency.check_low_latency", "fp8"),
        ("normal.check_bound",),
    ):
        run_emulated(3, UNREAD, f"battery.{check}", _UNREAD, *args)


def test_low_latency_calls_of_varying_sizes(run_emulated: RunEmulated) -> None:
    run_emulated(3, UNREAD, "battery.low_latency.check_varying_sizes")


def test_unread_values_of_hybrid_ep(run_emulated: RunEmulated) -> None:
    case = Case("unread", 3, (11, 0, 14), num_experts=12, routing="duplicates")
    run_emulated(3, UNREAD, "battery.hybrid.check_again", case)


@pytest.mark.parametrize("kind", [hybrid_ep.ElasticBuffer, hybrid_ep.EPBuffer], ids=lambda kind: kind.__name__)
def test_unread_values_of_elastic_buffers(run_emulated: RunEmulated, kind: type) -> None:
    run_emulated(3, UNREAD, "battery.elastic.check_other_values", _UNREAD, "cpu", kind)


def test_copied_handles(run_emulated: RunEmulated) -> None:
    run_emulated(2, UNREAD, "battery.copied_handles.check_copied_handles", Case("copied", 2, 12))


def test_default_device(run_emulated: RunEmulated) -> None:
    run_emulated(2, "battery.default_device.check_under_default_device", Case("default", 2, (9, 12)))


@pytest.mark.parametrize(
    "check",
    [
        *(f"streams_and_faults.{name}" for name in streams_and_faults.__all__ if name.startswith("check_")),
    ],
)
def test_streams_and_faults(run_emulated: RunEmulated, check: str) -> None:
    run_emulated(2, f"emulation.{check}")


@pytest.mark.parametrize("case_id", ["hidden_640", "hidden_16384"])
def test_low_latency_logfmt(run_emulated: RunEmulated, case_id: str) -> None:
    case = _LOW_LATENCY_CASES[case_id]
    run_emulated(case.num_ranks, "battery.low_latency.check_logfmt", case)


def test_low_latency_logfmt_of_sums(run_emulated: RunEmulated) -> None:
    run_emulated(2, "battery.low_latency.check_logfmt", Case("sums", 2, 40, hidden=1152, topk=4, num_experts=8))


def test_low_latency_batches_overlap(run_emulated: RunEmulated) -> None:
    run_emulated(4, "battery.low_latency.check_overlapping_batches", Case("overlap", 4, 12))


def test_cleaned_low_latency_buffers_forget(run_emulated: RunEmulated) -> None:
    run_emulated(4, "battery.low_latency.check_cleaned", Case("cleaned", 4, 12))


def test_low_latency_values_that_are_not_finite(run_emulated: RunEmulated) -> None:
    for format_name in ("fp8", "fp8_rounded", "fp8_ue8m0"):
        run_emulated(2, "battery.low_latency.check_values_that_are_not_finite", format_name)


@pytest.mark.parametrize(
    "check",
    ["low_latency.check_unreceived", "low_latency_masks.check_late_rank", "low_latency.check_too_many_rows"],
)
def test_low_latency_misuse_and_delay(run_emulated: RunEmulated, check: str) -> None:
    run_emulated(2, f"battery.{check}")


def test_low_latency_calls_that_are_refused(run_emulated: RunEmulated) -> None:
    run_emulated(2, "multi_gpu.low_latency.check_other_number_of_tokens")


@pytest.mark.parametrize(("fp8", "hooked"), [(True, False), (False, True)])
def test_low_latency_masks_by_hand(run_emulated: RunEmulated, fp8: bool, hooked: bool) -> None:
    run_emulated(2, UNREAD, "multi_gpu.low_latency_losses.check_masks_by_hand", fp8, hooked)


def test_low_latency_masks_that_the_device_tells_late(run_emulated: RunEmulated) -> None:
    run_emulated(2, UNREAD, "multi_gpu.low_latency_losses.check_an_answer_that_comes_late")


def test_low_latency_masks(run_emulated: RunEmulated) -> None:
    run_emulated(4, UNREAD, "battery.low_latency_masks.check_masked", Case("masks", 4, 40), "nvfp4", (0, 2))


@pytest.mark.parametrize("call", ["dispatch", "combine"])
def test_low_latency_rank_that_comes_at_the_deadline(run_emulated: RunEmulated, call: str) -> None:
    run_emulated(3, UNREAD, "emulation.deadlines.check_rank_at_the_deadline", call, 0.8)


def test_low_latency_rows_of_a_rank_that_was_given_up(run_emulated: RunEmulated) -> None:
    run_emulated(3, "emulation.deadlines.check_rows_of_a_rank_that_was_given_up", 4.0)


def test_low_latency_masks_that_differ_for_a_call(run_emulated: RunEmulated) -> None:
    run_emulated(3, UNREAD, "battery.low_latency_masks.check_masks_that_differ", 8.0)


@pytest.mark.parametrize(
    "check",
    [
        "check_given_up_on_the_device",
        "check_named_at_close",
        "check_pending_loss",
        "check_told_at_close",
        "check_told_once",
    ],
)
def test_low_latency_ranks_that_do_not_come(run_emulated: RunEmulated, check: str) -> None:
    run_emulated(2, UNREAD, f"multi_gpu.low_latency_losses.{check}", 8.0)


@pytest.mark.parametrize(("kind", "use_logfmt"), [("comp_signal", True), ("src_signals", False)])
def test_low_latency_combine_beside_experts(run_emulated: RunEmulated, kind: str, use_logfmt: bool) -> None:
    run_emulated(2, "battery.signals.check_signals", kind, use_logfmt)


def test_a_signal_of_experts_that_does_not_come(run_emulated: RunEmulated) -> None:
    run_emulated(3, "battery.signals.check_missing_signal", 4.0)


def test_a_late_rank_comes_back(run_emulated: RunEmulated) -> None:
    run_emulated(3, UNREAD, "battery.low_latency_masks.check_late_rank_comes_back", 8.0)


@pytest.mark.parametrize(
    "check",
    [
        "check_other_calls",
        "check_dispatch_beside_one_along_a_handle",
        "check_other_low_latency_calls",
        "check_other_global_scales",
        "check_other_logfmt",
        "check_other_reports_of_dropped_rows",
        "check_too_many_low_latency_tokens",
        "check_refused_calls_leave_nothing_to_do",
    ],
)
def test_ranks_that_disagree_are_told_so(run_emulated: RunEmulated, check: str) -> None:
    run_emulated(2, f"battery.other_calls.{check}")


# Every refusal, of every rank and call: tests/multi_process, on the torch engine. Here, one for each kernel whose words
# tell of it, and what only the kernels refuse.
@pytest.mark.parametrize(
    "check", ["check_handle_of_a_larger_buffer", "check_refused_combines", "check_refused_first_dispatch"]
)
def test_what_one_rank_refuses_all_are_told(run_emulated: RunEmulated, check: str) -> None:
    run_emulated(2, f"battery.refused_low_latency.{check}")


@pytest.mark.parametrize(
    "check",
    [
        "check_refused_combines",
        "check_refused_dispatches",
        "check_refused_dispatches_along_handles",
        "check_refused_moves_of_experts",
        "check_refused_online_dispatch",
        "check_refused_permuted_calls",
        "check_refused_rows_of_kernels",
        "check_refused_while_captured",
    ],
)
def test_what_one_rank_refuses_of_normal_calls_all_are_told(run_emulated: RunEmulated, check: str) -> None:
    run_emulated(3, f"battery.refused_normal.{check}")


def test_ranks_compare_the_low_latency_memory_that_they_use(run_emulated: RunEmulated) -> None:
    run_emulated(3, "battery.refused_low_latency.check_memory_of_a_graph", 4.0)


def test_ranks_agree_before_memory_grows(run_emulated: RunEmulated) -> None:
    """What one rank alone would make grow is refused at all ranks, and later growth succeeds."""
    small = "emulation.small_slots.check_with_small_slots"
    run_emulated(4, small, "battery.other_calls.check_combines_that_grow_memory")
    run_emulated(4, small, "emulation.experts.check_copies_that_grow_memory")
    run_emulated(4, "battery.other_calls.check_low_latency_calls_that_grow_memory")


def test_ranks_compare_the_memory_that_they_use(run_emulated: RunEmulated) -> None:
    run_emulated(2, "emulation.small_slots.check_memory_of_a_graph", 2)


def test_combines_along_other_handles_are_refused_at_once(run_emulated: RunEmulated) -> None:
    run_emulated(3, "battery.other_calls.check_combine_along_other_handles")


def test_low_latency_combines_along_other_handles_are_refused(run_emulated: RunEmulated) -> None:
    run_emulated(3, "battery.other_calls.check_combine_along_other_low_latency_handles")


@pytest.mark.parametrize(
    ("num_ranks", "check"),
    [
        (2, "battery.other_calls.check_refused_combines_in_a_row"),
        (3, "battery.other_calls.check_calls_in_turn"),
        (3, "emulation.experts.check_ranks_that_disagree"),
    ],
)
def test_ranks_get_ahead_of_ctas_that_stall(run_emulated: RunEmulated, num_ranks: int, check: str) -> None:
    run_emulated(num_ranks, "emulation.devices.check_with_stalls", check)


def test_late_errors(run_emulated: RunEmulated) -> None:
    for check in ("check_overflow", "check_error_of_the_last_call"):
        run_emulated(3, f"multi_gpu.late_errors.{check}")


@pytest.mark.parametrize(
    "check",
    [
        "check_bound_beyond_common_bound",
        "check_errors_keep_no_slot",
        "check_misaligned_scales",
        "check_same_bytes",
    ],
)
def test_what_one_rank_gets_wrong_all_are_told(run_emulated: RunEmulated, check: str) -> None:
    run_emulated(2, f"multi_gpu.refusals.{check}")


@pytest.mark.parametrize(
    "check",
    [
        "capacity.check_empty_cache",
        "capacity.check_growth",
        "capacity.check_pool",
        "capacity.check_pool_grows",
        "capacity.check_full_memory",
        "refusals.check_common_bounds_that_differ",
    ],
)
def test_small_slots_grow(run_emulated: RunEmulated, check: str) -> None:
    run_emulated(2, "emulation.small_slots.check_with_small_slots", f"multi_gpu.{check}")


def test_handles_hold_no_slot(run_emulated: RunEmulated) -> None:
    run_emulated(2, UNREAD, "multi_gpu.capacity.check_handles_hold_no_slot")


def test_a_combine_beyond_its_bound_is_told_to_all(run_emulated: RunEmulated) -> None:
    check = "multi_gpu.refusals.check_combine_beyond_bound"
    run_emulated(3, "emulation.small_slots.check_with_small_slots", check)


def test_a_rank_that_is_missing_at_the_first_low_latency_call(run_emulated: RunEmulated) -> None:
    run_emulated(3, "emulation.missing_ranks.check_missing_at_the_first_low_latency_call")


def test_a_rank_that_is_missing_after_another_was_late(run_emulated: RunEmulated) -> None:
    run_emulated(3, "emulation.missing_ranks.check_missing_after_another_was_late")


def test_dropped_buffers_give_their_memory_back(run_emulated: RunEmulated) -> None:
    run_emulated(2, "emulation.dropped_buffers.check_dropped_buffers")
    run_emulated(2, "emulation.dropped_buffers.check_tables_of_a_dropped_buffer")


@pytest.mark.parametrize("check", ["check_past_the_last_number", "check_low_latency_past_the_last_number"])
def test_numbers_of_calls_wrap(run_emulated: RunEmulated, check: str) -> None:
    run_emulated(2, f"emulation.late_epochs.{check}")


@pytest.mark.parametrize("check", ["normal.check_two_buffers", "hybrid.check_two_buffers"])
def test_two_buffers(run_emulated: RunEmulated, check: str) -> None:
    run_emulated(3, f"battery.{check}", Case("two_buffers", 3, 20, num_experts=24))


def test_numbers_of_sms(run_emulated: RunEmulated) -> None:
    run_emulated(2, "battery.hybrid.check_sms", Case("sms", 2, 20, num_experts=16))


def test_layout(run_emulated: RunEmulated) -> None:
    run_emulated(1, "emulation.layout.check_layout", 40)
    run_emulated(1, "emulation.layout.check_layouts_of_a_buffer")
    run_emulated(1, "emulation.layout.check_many_layouts")


def test_host_work(run_emulated: RunEmulated) -> None:
    run_emulated(2, "emulation.host_work.check_host_work")


def test_probs(run_emulated: RunEmulated) -> None:
    run_emulated(1, "emulation.layout.check_probs", 64)


def test_balance(run_emulated: RunEmulated) -> None:
    run_emulated(1, "emulation.balance.check_plan", 40)
    run_emulated(1, "emulation.balance.check_map_topk", 20)
    run_emulated(1, "emulation.balance.check_map_online", 40)
    run_emulated(1, "emulation.balance.check_routes", 40)
    run_emulated(1, "emulation.balance.check_take", 20)
    run_emulated(2, "emulation.balance.check_layer")


@pytest.mark.parametrize(("num_ranks", "seed"), [(1, 0), (4, 2), pytest.param(4, 3, marks=pytest.mark.slow)])
def test_copies_of_experts(run_emulated: RunEmulated, num_ranks: int, seed: int) -> None:
    run_emulated(num_ranks, "emulation.experts.check_copies", seed=seed)


@pytest.mark.parametrize(
    ("num_ranks", "check"),
    [
        (2, "check_copies_past_the_last_number"),
        (2, "check_several_launches"),
        (3, "check_copies_in_turn"),
        (3, "check_ranks_that_disagree"),
        (3, "check_other_numbers_of_launches"),
    ],
)
def test_copies_of_experts_in_special_cases(run_emulated: RunEmulated, num_ranks: int, check: str) -> None:
    run_emulated(num_ranks, f"emulation.experts.{check}")


@pytest.mark.parametrize(
    ("num_ranks", "check"),
    [
        (1, "check_pushes"),
        (4, "check_pushes"),
        (3, "check_pushes_in_turn"),
        (2, "check_pushes_past_the_last_number"),
        (2, "check_several_launches"),
        (3, "check_ranks_that_disagree"),
        (2, "check_other_plans"),
    ],
)
def test_experts_that_are_pushed(run_emulated: RunEmulated, num_ranks: int, check: str) -> None:
    run_emulated(num_ranks, f"emulation.pushed_experts.{check}")


@pytest.mark.parametrize(("has_expert", "has_plan"), [(False, True), (True, False)])
def test_a_rank_that_does_not_come_to_copy_experts(run_emulated: RunEmulated, has_expert: bool, has_plan: bool) -> None:
    run_emulated(3, "emulation.experts.check_missing_rank", has_expert, has_plan)


@pytest.mark.parametrize("check", ["normal.check_round_trip", "low_latency.check_mixed_hooks"])
def test_more_ranks_than_a_warp_has_lanes(run_emulated: RunEmulated, check: str) -> None:
    """A lane stands for several ranks."""
    tokens = tuple(5 * rank % 4 for rank in range(34))
    run_emulated(34, f"battery.{check}", Case("wide", 34, tokens, hidden=128, topk=6, num_experts=68))
