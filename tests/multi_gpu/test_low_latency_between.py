"""Low-latency calls between domains by their kernels on real GPUs, bit for bit: domains of one host."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest
import torch

from hybrid_ep.testing.cluster import RankError, VirtualCluster
from tests.battery.cases import Case
from tests.battery.low_latency import FORMATS
from tests.conftest import RunRanks
from tests.emulation.domains import check_by_kernels, check_in_domains
from tests.multi_gpu import lost_ranks, low_latency_losses
from tests.multi_gpu.transports import TRANSPORTS, ranks_over, variables_of

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS == 0, reason="no GPU is visible")]

# Ranks share the GPUs where there are more of them.
CASES = [  # ranks are started anew where their number changes
    Case("2x1", 2, 40, num_ranks_per_domain=1),
    Case("2x1_hidden_7168", 2, 128, hidden=7168, num_experts=64, topk=8, num_ranks_per_domain=1),
    Case("2x1_top_32", 2, 33, topk=32, num_experts=64, num_ranks_per_domain=1),
    Case("2x2_holes", 4, 40, routing="holes", num_ranks_per_domain=2),
    Case("2x2_zero_tokens", 4, 0, num_ranks_per_domain=2),
    Case("3x2_duplicates", 6, 34, num_experts=12, routing="duplicates", num_ranks_per_domain=2),
    Case("2x4_ragged", 8, (5, 0, 17, 1, 34, 2, 0, 9), num_experts=32, num_ranks_per_domain=4),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
NUM_REPLAYS = 1000 if NUM_GPUS > 1 else 100  # ranks of one GPU take turns of milliseconds


@pytest.fixture(scope="module", params=TRANSPORTS)
def run_ranks(request: pytest.FixtureRequest) -> Iterator[RunRanks]:
    with ranks_over(request.param) as run:
        yield run


@pytest.mark.parametrize("format_name", FORMATS)
@every_case
def test_case(run_ranks: RunRanks, case: Case, format_name: str) -> None:
    check = "battery.low_latency.check_low_latency"
    run_ranks(case.num_ranks, check_by_kernels, check, case, format_name, "cuda")


@pytest.mark.parametrize(
    "check", ["check_overlapping_batches", "check_dispatches_ahead", "check_mixed_hooks", "check_logfmt"]
)
@every_case
def test_hooks_and_logfmt(run_ranks: RunRanks, case: Case, check: str) -> None:
    run_ranks(case.num_ranks, check_by_kernels, f"battery.low_latency.{check}", case, "cuda")


def test_cleaned_buffers_forget(run_ranks: RunRanks) -> None:
    case = Case("cleaned", 4, 12, num_ranks_per_domain=2)
    run_ranks(4, check_by_kernels, "battery.low_latency.check_cleaned", case, "cuda")


@pytest.mark.parametrize(
    ("check", "args"),
    [
        ("battery.low_latency.check_unreceived", ("cuda",)),
        ("battery.low_latency_masks.check_late_rank", ("cuda",)),
        ("battery.low_latency.check_too_many_rows", ("cuda",)),
        ("battery.other_calls.check_other_low_latency_calls", ("cuda",)),
        ("battery.other_calls.check_other_global_scales", ("cuda",)),
        ("battery.other_calls.check_other_logfmt", ("cuda",)),
        ("battery.other_calls.check_combine_along_other_low_latency_handles", ("cuda",)),
        ("battery.other_calls.check_too_many_low_latency_tokens", ("cuda",)),
        ("battery.refused_low_latency.check_refused_combines", ("cuda",)),
        ("battery.refused_low_latency.check_refused_dispatches", ("cuda",)),
        ("battery.signals.check_signals", ("comp_signal", False, "cuda")),
        ("battery.signals.check_signals", ("comp_signal", True, "cuda")),
        ("battery.signals.check_signals", ("src_signals", False, "cuda")),
        ("emulation.domains.check_missing_signal", (4.0, "cuda")),
        ("multi_gpu.low_latency.check_sizes", ()),
        ("multi_gpu.low_latency.check_two_batches", ()),
        ("multi_gpu.low_latency.check_three_on_their_way", ()),
        ("multi_gpu.low_latency.check_bad_expert", ()),
        ("multi_gpu.low_latency.check_error_in_a_capture", ()),
        ("multi_gpu.low_latency.check_other_number_of_tokens", ()),
        ("multi_gpu.low_latency.check_replays", (NUM_REPLAYS,)),
        ("battery.low_latency_masks.check_late_rank_comes_back", (4.0, "cuda")),
        ("multi_gpu.low_latency_losses.check_given_up_on_the_device", (4.0,)),
        ("multi_gpu.low_latency_losses.check_masks_of_old_graphs", ()),
        ("multi_gpu.low_latency_losses.check_named_at_close", (4.0,)),
        ("multi_gpu.low_latency_losses.check_pending_loss", (4.0,)),
        ("multi_gpu.low_latency_losses.check_told_at_close", (4.0,)),
        ("multi_gpu.low_latency_losses.check_told_once", (4.0,)),
    ],
    ids=lambda value: value.rpartition(".")[2] if isinstance(value, str) else "_".join(map(str, value)),
)
def test_behaviour(run_ranks: RunRanks, check: str, args: tuple[object, ...]) -> None:
    run_ranks(2, check_in_domains, 1, "emulation.domains.check_by_kernels", check, *args)


@pytest.mark.parametrize(
    ("case_id", "format_name", "lost"),
    [
        ("2x1_hidden_7168", "bf16", (0,)),
        ("2x2_holes", "nvfp4", (2,)),
        ("3x2_duplicates", "fp8_ue8m0", (1, 4)),
        ("2x4_ragged", "fp8", (0, 7)),
    ],
)
def test_masks(run_ranks: RunRanks, case_id: str, format_name: str, lost: tuple[int, ...]) -> None:
    case = next(case for case in CASES if case.id == case_id)
    run_ranks(
        case.num_ranks, check_by_kernels, "battery.low_latency_masks.check_masked", case, format_name, lost, "cuda"
    )


def test_masks_that_differ_for_a_call(run_ranks: RunRanks) -> None:
    check = "emulation.domains.check_by_kernels", "battery.low_latency_masks.check_masks_that_differ"
    run_ranks(4, check_in_domains, 2, *check, 4.0, "cuda")


def _without_the_last(transport: str, function: Callable[..., object], *args: object) -> list[object]:
    """Runs a function in which the last rank of 2 × 2 dies; what the others return."""
    variables = variables_of(transport) | {"HYBRID_EP_NUM_RANKS_PER_DOMAIN": "2"}
    with VirtualCluster(4, device="cuda", ranks_share_gpus=NUM_GPUS < 4, variables=variables) as cluster:
        cluster.start(function, *args)
        with pytest.raises(RankError):
            cluster.collect([3], limit_s=90)
        return cluster.collect([0, 1, 2], limit_s=90)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("fp8", "hooked"), [(False, False), (True, True)])
def test_calls_after_a_rank_was_killed(transport: str, fp8: bool, hooked: bool) -> None:
    """Every survivor names it, and the calls after that succeed without it."""
    assert _without_the_last(transport, low_latency_losses.lose_a_rank, 3, 6.0, fp8, hooked) == [3] * 3


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_replays_after_a_rank_was_killed(transport: str) -> None:
    """No call tells the survivors; they ask."""
    assert _without_the_last(transport, low_latency_losses.lose_a_rank_between_replays, 3, 6.0) == [[0, 0, 0, 1]] * 3


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("step", ["some", "dispatch", "receive", "combine"])
def test_a_rank_is_killed_after_a_step(transport: str, step: str) -> None:
    """The others name it, meet, and go on without it."""
    assert _without_the_last(transport, lost_ranks.join_and_lose_one_after, 8.0, step, 3) == [3] * 3


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_killed_rank(transport: str) -> None:
    """The peer is killed between two calls; the survivor names it within its time."""
    variables = variables_of(transport) | {"HYBRID_EP_NUM_RANKS_PER_DOMAIN": "1"}
    with VirtualCluster(2, device="cuda", ranks_share_gpus=NUM_GPUS < 2, variables=variables) as cluster:
        cluster.run(low_latency_losses.make_shared_buffer, 4.0, limit_s=60)
        os.kill(cluster.process_id(1), signal.SIGKILL)
        assert cluster.run(low_latency_losses.use_without_peer, 4.0, ranks=[0], limit_s=60) == [1]
