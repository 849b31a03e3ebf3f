"""Low-latency calls of the cuda engine: every case of the battery, bit for bit, and what they promise beyond it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hybrid_ep.testing.cluster import RankError, VirtualCluster
from tests.battery import low_latency as battery
from tests.battery import low_latency_masks, signals
from tests.battery.cases import LOW_LATENCY_CASES, Case
from tests.battery.cases import select as select_cases
from tests.conftest import RunRanks
from tests.multi_gpu import low_latency, low_latency_losses

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS == 0, reason="no GPU is visible")]
FITTING = sorted(select_cases(LOW_LATENCY_CASES, num_ranks=max(NUM_GPUS, 1)), key=lambda case: case.num_ranks)
every_case = pytest.mark.parametrize("case", FITTING, ids=lambda case: case.id)
every_kind = pytest.mark.parametrize(
    ("fp8", "hooked"), [(False, False), (True, False), (False, True)], ids=["bf16", "fp8", "hooked"]
)
needs_peer = pytest.mark.skipif(NUM_GPUS < 2, reason="a rank cannot lose itself")


@pytest.mark.parametrize("format_name", battery.FORMATS)
@every_case
def test_case(run_gpus: RunRanks, case: Case, format_name: str) -> None:
    run_gpus(case.num_ranks, battery.check_low_latency, case, format_name, "cuda")


@every_case
def test_overlapping_batches(run_gpus: RunRanks, case: Case) -> None:
    run_gpus(case.num_ranks, battery.check_overlapping_batches, case, "cuda")


@pytest.mark.parametrize("case", [case for case in FITTING if case.hidden % 128 == 0], ids=lambda case: case.id)
def test_logfmt(run_gpus: RunRanks, case: Case) -> None:
    run_gpus(case.num_ranks, battery.check_logfmt, case, "cuda")


def test_cleaned_buffers_forget(run_gpus: RunRanks) -> None:
    run_gpus(NUM_GPUS, battery.check_cleaned, Case("cleaned", NUM_GPUS, 12), "cuda")


def test_what_is_not_received(run_gpus: RunRanks) -> None:
    run_gpus(NUM_GPUS, battery.check_unreceived, "cuda")


@needs_peer
def test_a_late_rank_is_waited_for(run_gpus: RunRanks) -> None:
    run_gpus(NUM_GPUS, low_latency_masks.check_late_rank, "cuda")


@every_case
def test_mixed_hooks(run_gpus: RunRanks, case: Case) -> None:
    run_gpus(case.num_ranks, battery.check_mixed_hooks, case, "cuda")
    run_gpus(case.num_ranks, battery.check_other_values, case, "cuda")


def test_varying_sizes(run_gpus: RunRanks) -> None:
    run_gpus(NUM_GPUS, battery.check_varying_sizes, "cuda")


@pytest.mark.parametrize(
    ("kind", "use_logfmt"), [("comp_signal", False), ("comp_signal", True), ("src_signals", False)]
)
def test_combine_beside_experts(run_gpus: RunRanks, kind: str, use_logfmt: bool) -> None:
    run_gpus(NUM_GPUS, signals.check_signals, kind, use_logfmt, "cuda")


@needs_peer
def test_a_signal_of_experts_that_does_not_come(run_gpus: RunRanks) -> None:
    run_gpus(NUM_GPUS, signals.check_missing_signal, 4.0, "cuda")


@pytest.mark.parametrize(
    "check",
    [
        low_latency.check_sizes,
        low_latency.check_two_batches,
        low_latency.check_three_on_their_way,
        low_latency.check_bad_expert,
        low_latency.check_error_in_a_capture,
        low_latency.check_other_number_of_tokens,
        low_latency.check_streams,
    ],
)
def test_behaviour(run_gpus: RunRanks, check: Callable[..., None]) -> None:
    run_gpus(NUM_GPUS, check)


def test_replays(run_gpus: RunRanks) -> None:
    run_gpus(NUM_GPUS, low_latency.check_replays, 10_000)


@needs_peer
@every_kind
def test_masks_by_hand(run_gpus: RunRanks, fp8: bool, hooked: bool) -> None:
    run_gpus(NUM_GPUS, low_latency_losses.check_masks_by_hand, fp8, hooked)


@needs_peer
@pytest.mark.parametrize(
    "check",
    [
        low_latency_losses.check_given_up_on_the_device,
        low_latency_losses.check_pending_loss,
        low_latency_losses.check_named_at_close,
        low_latency_losses.check_told_at_close,
        low_latency_losses.check_told_once,
    ],
)
def test_ranks_that_do_not_come(run_gpus: RunRanks, check: Callable[[float], None]) -> None:
    run_gpus(NUM_GPUS, check, 2.0)


@needs_peer
def test_a_late_rank_comes_back(run_gpus: RunRanks) -> None:
    run_gpus(NUM_GPUS, low_latency_masks.check_late_rank_comes_back, 2.0, "cuda")


def test_too_many_rows(run_gpus: RunRanks) -> None:
    run_gpus(NUM_GPUS, battery.check_too_many_rows, "cuda")


@needs_peer
def test_masks_of_old_graphs(run_gpus: RunRanks) -> None:
    run_gpus(NUM_GPUS, low_latency_losses.check_masks_of_old_graphs)


def _without_the_last(function: Callable[..., object], *args: object) -> list[object]:
    """Runs a function in which the last rank dies; what the others return."""
    lost, survivors = NUM_GPUS - 1, list(range(NUM_GPUS - 1))
    with VirtualCluster(NUM_GPUS, device="cuda") as cluster:
        cluster.start(function, lost, 2.0, *args)
        with pytest.raises(RankError) as ended:
            cluster.collect([lost], limit_s=60)
        assert list(ended.value.errors) == [lost]
        return cluster.collect(survivors, limit_s=60)


@needs_peer
@every_kind
def test_killed_rank(fp8: bool, hooked: bool) -> None:
    """Every survivor names the rank that died, and the calls after that succeed without it."""
    assert _without_the_last(low_latency_losses.lose_a_rank, fp8, hooked) == [NUM_GPUS - 1] * (NUM_GPUS - 1)


@needs_peer
def test_killed_rank_between_replays() -> None:
    """No call tells the survivors; they ask."""
    masks = [0] * (NUM_GPUS - 1) + [1]
    assert _without_the_last(low_latency_losses.lose_a_rank_between_replays) == [masks] * (NUM_GPUS - 1)


@needs_peer
def test_a_rank_that_gave_another_up_is_not_given_up() -> None:
    """A combine in which a rank is lost ends for all, each names it, and the calls after that succeed without it."""
    with VirtualCluster(3, device="cuda", ranks_share_gpus=True) as cluster:
        first, second, _ = cluster.run(low_latency_losses.lose_a_rank_between_its_flags, 4.0, limit_s=60)
    assert first.startswith("low_latency_combine: partial rows: rank 0")
    assert second.startswith("low_latency_combine: weights: rank 1")
