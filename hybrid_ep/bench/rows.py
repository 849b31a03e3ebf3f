"""How many rows cross to each rank."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep.core.layout import compute_layout

__all__ = ["RowCounts", "count_rows", "owners"]


class RowCounts(NamedTuple):
    """Rows that one rank receives in one dispatch, or sends back in one combine.

    Attributes:
        total: all of them, those of its own tokens included.
        remote: those of other ranks' tokens.
    """

    total: int
    remote: int


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
