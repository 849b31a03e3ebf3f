"""NVSHMEM on real GPUs: its remote path, through a transport for tests, and its world shared with torch."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hybrid_ep.testing.cluster import VirtualCluster
from tests.battery import normal
from tests.battery.cases import Case
from tests.battery.low_latency import FORMATS
from tests.conftest import RunRanks
from tests.emulation.domains import check_by_kernels, check_in_domains
from tests.multi_gpu import behaviour, low_latency_losses
from tests.multi_gpu.beside_torch import check_beside_torch
from tests.multi_gpu.transports import (
    REMOTE_NVSHMEM,
    build_copy_transport,
    check_by_copies,
    needs_nvshmem,
    ranks_over,
    variables_of,
)

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS == 0, reason="no GPU is visible"), needs_nvshmem]

# Ranks share the GPUs where there are more of them. They are started anew where their number changes.
CASES = [
    Case("2x1", 2, 600, hidden=1024, num_ranks_per_domain=1),
    Case("2x1_more_chunks_than_slots", 2, (6000, 700), hidden=128, num_ranks_per_domain=1),
    Case("2x2_holes", 4, 40, routing="holes", num_ranks_per_domain=2),
    Case("3x2_duplicates", 6, 34, num_experts=12, routing="duplicates", num_ranks_per_domain=2),
]
LOW_LATENCY_CASES = [
    Case("2x1_hidden_7168", 2, 128, hidden=7168, num_experts=64, topk=8, num_ranks_per_domain=1),
    Case("3x2_duplicates", 6, 34, num_experts=12, routing="duplicates", num_ranks_per_domain=2),
]


@pytest.fixture(scope="module")
def transport(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_copy_transport(tmp_path_factory.mktemp("transport"))


@pytest.fixture(scope="module")
def run_ranks(transport: Path) -> Iterator[RunRanks]:
    """Runs a check on ranks of which NVSHMEM gives every put to its remote transport."""
    with ranks_over("nvshmem", REMOTE_NVSHMEM) as run:
        yield lambda num_ranks, *check: run(num_ranks, check_by_copies, transport, *check)


@pytest.mark.parametrize("check", normal.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_remote_path(run_ranks: RunRanks, case: Case, check: Callable[..., None]) -> None:
    run_ranks(case.num_ranks, check, case, "cuda")


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("case", LOW_LATENCY_CASES, ids=lambda case: case.id)
def test_low_latency_by_the_remote_path(run_ranks: RunRanks, case: Case, format_name: str) -> None:
    check = "battery.low_latency.check_low_latency"
    run_ranks(case.num_ranks, check_by_kernels, check, case, format_name, "cuda")


def test_replays_by_the_remote_path(run_ranks: RunRanks) -> None:
    run_ranks(2, check_in_domains, 1, "multi_gpu.behaviour.check_graph", 100)


@pytest.mark.parametrize(
    ("make", "use"),
    [
        (behaviour.make_shared_buffer, behaviour.use_without_peer_between),
        (low_latency_losses.make_shared_buffer, low_latency_losses.use_without_peer),
    ],
    ids=["normal", "low_latency"],
)
def test_killed_rank_by_the_remote_path(transport: Path, make: Callable[..., None], use: Callable[..., object]) -> None:
    """The peer is killed between two calls; the survivor names it within its time."""
    timeout_s = 4.0
    variables = variables_of("nvshmem") | REMOTE_NVSHMEM | {"HYBRID_EP_NUM_RANKS_PER_DOMAIN": "1"}
    arguments = (1, timeout_s) if use is behaviour.use_without_peer_between else (timeout_s,)
    with VirtualCluster(2, device="cuda", variables=variables, ranks_share_gpus=NUM_GPUS < 2) as cluster:
        cluster.run(check_by_copies, transport, make, timeout_s, limit_s=60)
        os.kill(cluster.process_id(1), signal.SIGKILL)
        cluster.run(use, *arguments, ranks=[0], limit_s=60)


@pytest.mark.skipif(
    NUM_GPUS < 2 and "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in os.environ,
    reason="NVSHMEM makes torch's teams only for one process a GPU, or under MPS",
)
@pytest.mark.parametrize("torch_first", [True, False])
def test_beside_torch(torch_first: bool) -> None:
    variables = variables_of("nvshmem") | {"HYBRID_EP_NUM_RANKS_PER_DOMAIN": "1"}
    with VirtualCluster(2, device="cuda", variables=variables, ranks_share_gpus=NUM_GPUS < 2) as cluster:
        cluster.run(check_beside_torch, torch_first, limit_s=120)
