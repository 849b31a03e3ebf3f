"""The bytes that other methods would send for the same tokens, counted exactly from the same routing.

They are counted as the library counts its own traffic: bytes that a rank sends to other ranks, within the domain and
between domains. For the alternatives only rows and fp8 scales are counted. The library's measured bytes also have its
metadata (routing, weights, counts). So the comparison favours the alternatives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["HopBytes", "all_gather_bytes", "all_to_all_bytes", "tokens_per_expert"]


@dataclass(frozen=True)
class HopBytes:
    """Bytes sent by all ranks together.

    Attributes:
        within_domain: to ranks of the same domain.
        between_domains: to ranks of other domains.
    """

    within_domain: int
    between_domains: int


def all_to_all_bytes(topk_idx: list[Tensor], num_experts: int, num_ranks_per_domain: int, row_bytes: int) -> HopBytes:
    """A plain all-to-all: one copy of a row for each column of its top-k, straight to the expert's rank.

    Args:
        topk_idx: for each rank, ``[T, K]`` int64, global expert or −1.
        num_experts: E, a multiple of the ranks.
        num_ranks_per_domain: divides the ranks.
        row_bytes: bytes of one row.

    Returns:
        Σ over ranks r and copies of (row_bytes where the expert's rank ≠ r), by domain. Combine sends as much back,
        with the bytes of its own rows.
    """
    num_local_experts = num_experts // len(topk_idx)
    within = between = 0
    for rank, routing in enumerate(topk_idx):
        owner = routing[routing >= 0] // num_local_experts
        same_domain = owner // num_ranks_per_domain == rank // num_ranks_per_domain
        within += int((same_domain & (owner != rank)).sum())
        between += int((~same_domain).sum())
    return HopBytes(within * row_bytes, between * row_bytes)


def all_gather_bytes(num_tokens: list[int], num_ranks_per_domain: int, row_bytes: int) -> HopBytes:
    """An all-gather at its best: every row goes once to every other domain, and from there to all ranks within it.

    Args:
        num_tokens: of each rank.
        num_ranks_per_domain: divides the ranks.
        row_bytes: bytes of one row.

    Returns:
        (D − 1) crossings between domains and D × (R/D − 1) within them for each token. The way back, a reduce-scatter,
        sends as much, with the bytes of its own rows.
    """
    num_domains = len(num_tokens) // num_ranks_per_domain
    total = sum(num_tokens) * row_bytes
    return HopBytes(total * num_domains * (num_ranks_per_domain - 1), total * (num_domains - 1))


def tokens_per_expert(topk_idx: list[Tensor], num_experts: int) -> list[int]:
    """How often the tokens of all ranks choose each expert."""
    chosen = torch.cat([routing.flatten() for routing in topk_idx])
    counts: list[int] = torch.bincount(chosen[chosen >= 0], minlength=num_experts).tolist()
    return counts
