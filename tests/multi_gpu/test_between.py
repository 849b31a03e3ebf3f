"""The cuda engine between domains on real GPUs, bit for bit: domains of one host, over loopback and over tcp."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.battery import hybrid, normal
from tests.battery.cases import Case
from tests.rank_pool import RankPool

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS == 0, reason="no GPU is visible")]

# Ranks share the GPUs where there are more of them.
CASES = [
    Case("2x1", 2, 600, hidden=1024, num_ranks_per_domain=1),
    Case("2x1_hidden_7168", 2, 1100, hidden=7168, num_experts=64, topk=8, num_ranks_per_domain=1),
    Case("2x2_holes", 4, 40, routing="holes", num_ranks_per_domain=2),
    Case("2x4_ragged", 8, (5, 0, 17, 1, 30, 2, 0, 9), num_experts=32, num_ranks_per_domain=4),
    Case("4x2", 8, 60, num_experts=32, num_ranks_per_domain=2),
    Case("3x2_duplicates", 6, 20, num_experts=12, routing="duplicates", num_ranks_per_domain=2),
]
CHECKS = [
    normal.check_round_trip,
    normal.check_cached,
    normal.check_bound,
    normal.check_fp8,
    hybrid.check_permuted,
    hybrid.check_permuted_cached,
]

RunRanks = Callable[..., object]


@pytest.fixture(scope="module", params=["loopback", "tcp"])
def run_ranks(request: pytest.FixtureRequest) -> Iterator[RunRanks]:
    """Returns `run(num_ranks, function, *args)` on ranks that share the GPUs, with the cuda engine forced."""
    variables = {
        "HYBRID_EP_ENGINE": "cuda",
        "HYBRID_EP_TIMEOUT_S": "30",
        "HYBRID_EP_TRANSPORT": request.param,
        "HYBRID_EP_TCP_ADDRESS": "127.0.0.1",
    }
    pool = RankPool(device="cuda", variables=variables, one_at_a_time=True, ranks_share_gpus=True)
    yield pool.run
    pool.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_between(run_ranks: RunRanks, case: Case, check: Callable[..., None]) -> None:
    run_ranks(case.num_ranks, check, case, "cuda")
