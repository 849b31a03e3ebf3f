"""The cuda engine between domains on real GPUs, bit for bit: domains of one host, over loopback, tcp and NVSHMEM."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest
import torch

from hybrid_ep.testing.cluster import VirtualCluster
from tests.battery import hybrid, normal
from tests.battery.cases import Case
from tests.conftest import RunRanks
from tests.emulation.domains import check_in_domains, check_rate
from tests.multi_gpu import behaviour
from tests.multi_gpu.transports import TRANSPORTS, ranks_over, variables_of

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS == 0, reason="no GPU is visible")]

NUM_REPLAYS = 1000 if NUM_GPUS > 1 else 100  # ranks of one GPU take turns of milliseconds

# Ranks share the GPUs where there are more of them.
# Ranks are started anew where their number changes, so cases of as many follow each other, and the last parameter of a
# test is the one that changes least.
CASES = [
    Case("2x1", 2, 600, hidden=1024, num_ranks_per_domain=1),
    Case("2x1_hidden_7168", 2, 1100, hidden=7168, num_experts=64, topk=8, num_ranks_per_domain=1),
    Case("2x1_more_chunks_than_slots", 2, (6000, 700), hidden=128, num_ranks_per_domain=1),
    Case("2x2_holes", 4, 40, routing="holes", num_ranks_per_domain=2),
    Case("2x2_hot", 4, 48, routing="hot", num_ranks_per_domain=2),
    Case("2x2_zero_tokens", 4, 0, num_ranks_per_domain=2),
    Case("2x2_hidden_7168", 4, 900, hidden=7168, num_experts=64, topk=8, num_ranks_per_domain=2),
    Case("4x1_groups", 4, 90, routing="groups", num_ranks_per_domain=1),
    Case("3x2_duplicates", 6, 20, num_experts=12, routing="duplicates", num_ranks_per_domain=2),
    Case("2x4_ragged", 8, (5, 0, 17, 1, 30, 2, 0, 9), num_experts=32, num_ranks_per_domain=4),
    Case("4x2", 8, 60, num_experts=32, num_ranks_per_domain=2),
]


@pytest.fixture(scope="module", params=TRANSPORTS)
def run_ranks(request: pytest.FixtureRequest) -> Iterator[RunRanks]:
    with ranks_over(request.param) as run:
        yield run


@pytest.mark.parametrize("check", normal.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_between(run_ranks: RunRanks, case: Case, check: Callable[..., None]) -> None:
    run_ranks(case.num_ranks, check, case, "cuda")


@pytest.mark.parametrize(
    "check", [hybrid.check_permuted, hybrid.check_permuted_cached], ids=lambda check: check.__name__
)
@pytest.mark.parametrize("case", [case for case in CASES if case.max_tokens <= 100], ids=lambda case: case.id)
def test_permuted(run_ranks: RunRanks, case: Case, check: Callable[..., None]) -> None:
    run_ranks(case.num_ranks, check, case, "cuda")


@pytest.mark.parametrize(
    ("check", "args"),
    [
        ("behaviour.check_graph", (40,)),
        ("behaviour.check_kept_handles", ()),
        ("behaviour.check_async", ()),
        ("behaviour.check_captured_streams", ()),
        ("behaviour.check_other_threads", ()),
        ("behaviour.check_scales_on_a_stream", ()),
        ("behaviour.check_bad_arguments", ()),
        ("late_errors.check_overflow", ()),
        ("late_errors.check_error_of_the_last_call", ()),
        ("late_errors.check_error_of_a_replay", ()),
        ("refusals.check_bad_expert", ()),
        ("refusals.check_bound_beyond_common_bound", ()),
        ("refusals.check_handles_of_others", ()),
        ("refusals.check_misaligned_scales", ()),
        ("refusals.check_same_bytes", ()),
        ("refusals.check_too_many_tokens", ()),
        ("capacity.check_empty_cache", ()),
        ("capacity.check_growth", ()),
        ("capacity.check_handles_hold_no_slot", ()),
        ("capacity.check_pool", ()),
    ],
    ids=lambda value: value.partition(".")[2] if isinstance(value, str) else "",
)
def test_behaviour(run_ranks: RunRanks, check: str, args: tuple[int, ...]) -> None:
    run_ranks(2, check_in_domains, 1, f"multi_gpu.{check}", *args)


@pytest.mark.parametrize(
    "check", ["check_other_calls", "check_other_reports_of_dropped_rows", "check_refused_combines_in_a_row"]
)
@pytest.mark.parametrize("size", [1, 2])
def test_ranks_that_disagree_are_told_so(run_ranks: RunRanks, check: str, size: int) -> None:
    run_ranks(2 * size, check_in_domains, size, f"battery.other_calls.{check}", "cuda")


def test_replays(run_ranks: RunRanks) -> None:
    run_ranks(2, check_in_domains, 1, "multi_gpu.behaviour.check_graph", NUM_REPLAYS)


def test_a_link_with_the_rate_of_a_nic() -> None:
    with VirtualCluster(2, device="cuda", variables=variables_of("loopback"), ranks_share_gpus=NUM_GPUS < 2) as cluster:
        cluster.run(check_rate, CASES[1], 0.01, "cuda", limit_s=60)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_killed_rank(transport: str) -> None:
    """The peer is killed; the survivor names it within its time."""
    timeout_s = 4.0
    variables = variables_of(transport) | {"HYBRID_EP_NUM_RANKS_PER_DOMAIN": "1"}
    with VirtualCluster(2, device="cuda", variables=variables, ranks_share_gpus=NUM_GPUS < 2) as cluster:
        cluster.run(behaviour.make_shared_buffer, timeout_s, limit_s=60)
        os.kill(cluster.process_id(1), signal.SIGKILL)
        cluster.run(behaviour.use_without_peer_between, 1, timeout_s, ranks=[0], limit_s=60)
