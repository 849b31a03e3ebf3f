"""How many rows cross to each rank."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.core.layout import compute_layout

__all__ = ["RowCounts", "count_crossings", "count_rows", "owners"]


class RowCounts(NamedTuple):
    """Rows that one rank receives in one dispatch, or sends back in one combine.

    Attributes:
        total: all of them, those of its own tokens included.
        remote: those of other ranks' tokens.
        crossing: rows between this rank and its peers in other domains, in the direction that has more of them.
    """

    total: int
    remote: int
    crossing: int = 0


def owners(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    """``[T, K]`` int64: the rank of each expert."""
    return topk_idx // (num_experts // num_ranks)


def count_rows(topk_idx: Tensor, num_experts: int, *, once_per_expert: bool) -> RowCounts:
    """Counts what crosses to this rank: once for each rank of a token, or once for each expert. Collective."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if once_per_expert:
        sent = torch.bincount(owners(topk_idx, num_experts, num_ranks).flatten(), minlength=num_ranks)
    else:
        sent = compute_layout(topk_idx, num_experts, num_ranks, num_ranks).num_tokens_per_rank.to(torch.int64)
    every = [torch.empty_like(sent) for _ in range(num_ranks)]
    dist.all_gather(every, sent)
    received = [int(counts[rank]) for counts in every]
    return RowCounts(sum(received), sum(received) - received[rank])


def count_crossings(topk_idx: Tensor, num_experts: int, grid: RankGrid) -> int:
    """Counts the rows that this rank sends to its peers, and those that it receives; returns the larger number.

    A token crosses once to each other domain with an expert of it. Combine sends the same rows back. Collective.
    """
    domains = compute_layout(topk_idx, num_experts, grid.num_ranks, grid.num_ranks_per_domain).num_tokens_per_domain
    sent = domains.to(torch.int64)
    every = [torch.empty_like(sent) for _ in range(grid.num_ranks)]
    dist.all_gather(every, sent)
    others = [idx for idx in range(grid.num_domains) if idx != grid.domain_idx]
    num_sent = sum(int(sent[idx]) for idx in others)
    num_received = sum(int(every[grid.peers[idx]][grid.domain_idx]) for idx in others)
    return max(num_sent, num_received)
