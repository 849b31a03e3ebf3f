"""The bytes that other methods would send, compared with counts by hand and in plain loops."""

import pytest
import torch

from hybrid_ep.demo.results import HopBytes, all_gather_bytes, all_to_all_bytes, tokens_per_expert
from hybrid_ep.testing.batch import make_routing
from hybrid_ep.workload import Workload

# 4 ranks in 2 domains, 8 experts, 2 on each rank.
BY_HAND = [
    torch.tensor([[0, 2, 4], [5, 5, -1]]),  # rank 0: itself, rank 1, rank 2; rank 2 twice, for two columns
    torch.tensor([[2, 3, 7]]),  # rank 1: itself twice, rank 3
    torch.tensor([[6, 7, 0]]),  # rank 2: rank 3 twice, rank 0
    torch.zeros(0, 3, dtype=torch.int64),
]


def test_all_to_all_by_hand() -> None:
    assert all_to_all_bytes(BY_HAND, 8, 2, row_bytes=10) == HopBytes(within_domain=30, between_domains=50)
    assert all_to_all_bytes(BY_HAND, 8, 4, row_bytes=10) == HopBytes(within_domain=80, between_domains=0)


def test_all_gather_by_hand() -> None:
    # 4 tokens; each goes to 1 other domain, and in each of the 2 domains to 1 other rank.
    assert all_gather_bytes([2, 1, 1, 0], 2, row_bytes=10) == HopBytes(within_domain=80, between_domains=40)
    assert all_gather_bytes([2, 1, 1, 0], 4, row_bytes=10) == HopBytes(within_domain=120, between_domains=0)


def test_tokens_per_expert_by_hand() -> None:
    assert tokens_per_expert(BY_HAND, 8) == [2, 0, 2, 1, 1, 2, 1, 2]


@pytest.mark.parametrize("num_ranks_per_domain", [1, 2, 3, 6])
def test_all_to_all_against_plain_loops(num_ranks_per_domain: int) -> None:
    workload = Workload(num_tokens=50, hidden=128, num_topk=3, num_experts=12, routing="skewed")
    topk_idx = [make_routing(workload, rank)[0] for rank in range(6)]
    within = between = 0
    for rank, routing in enumerate(topk_idx):
        for expert in routing.flatten().tolist():
            owner = expert // 2
            if owner // num_ranks_per_domain != rank // num_ranks_per_domain:
                between += 1
            elif owner != rank:
                within += 1
    assert all_to_all_bytes(topk_idx, 12, num_ranks_per_domain, 1) == HopBytes(within, between)
