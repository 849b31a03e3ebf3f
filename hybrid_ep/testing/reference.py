"""The oracle: the results of every rank, computed from all ranks' inputs at once, without an engine.

It loops over tokens and experts in plain Python on purpose: slow, short, and without code shared with an engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class Copy(NamedTuple):
    """One token as it stands with one of its experts, for one column of its top-k.

    Attributes:
        src_rank: where it comes from.
        token: its index there.
        column: the top-k column that names the expert.
        expert: global index.
    """

    src_rank: int
    token: int
    column: int
    expert: int


@dataclass(frozen=True)
class Reference:
    """A routing of all ranks.

    Attributes:
        topk_idx: for each rank, ``[T_r, K]`` int64.
        num_experts: E.
        num_ranks_per_domain: ranks of a domain.
    """

    topk_idx: list[Tensor]
    num_experts: int
    num_ranks_per_domain: int

    @property
    def num_ranks(self) -> int:
        return len(self.topk_idx)

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.num_ranks

    @cached_property
    def _copies(self) -> list[list[Copy]]:
        found: list[list[Copy]] = [[] for _ in range(self.num_ranks)]
        for src_rank, topk in enumerate(self.topk_idx):
            for token, row in enumerate(topk.tolist()):
                for expert, column in sorted((expert, k) for k, expert in enumerate(row) if expert >= 0):
                    found[expert // self.num_local_experts].append(Copy(src_rank, token, column, expert))
        return found

    def copies(self, rank: int) -> list[Copy]:
        """Every column whose expert lives on `rank`: by source rank, token, expert, then column."""
        return self._copies[rank]

    def received(self, rank: int) -> list[tuple[int, int]]:
        """(source rank, token) of each row that `rank` receives, in order."""
        return list(dict.fromkeys((copy.src_rank, copy.token) for copy in self.copies(rank)))

    def received_topk(self, rank: int) -> Tensor:
        """``[N, K]`` int64: local expert of each received row's columns, or −1."""
        rows = self.received(rank)
        place = {row: n for n, row in enumerate(rows)}
        result = torch.full((len(rows), self.topk_idx[0].shape[1]), -1, dtype=torch.int64, device="cpu")
        for copy in self.copies(rank):
            result[place[copy.src_rank, copy.token], copy.column] = copy.expert - rank * self.num_local_experts
        return result

    def permuted(self, rank: int, pad_multiple: int = 1) -> list[Copy | None]:
        """The copy in each row of the permuted tensor of `rank`; None for padding."""
        copies = self.copies(rank)
        rows: list[Copy | None] = []
        for expert in range(rank * self.num_local_experts, (rank + 1) * self.num_local_experts):
            rows += [copy for copy in copies if copy.expert == expert]
            rows += [None] * (-len(rows) % pad_multiple)
        return rows

    def tokens_per_expert(self, rank: int) -> list[int]:
        """How many copies each local expert of `rank` receives."""
        experts = Counter(copy.expert for copy in self.copies(rank))
        return [experts[rank * self.num_local_experts + e] for e in range(self.num_local_experts)]

    def combined(
        self,
        rank: int,
        hidden: int,
        row: Callable[[int, int, int], Tensor],
        bias: tuple[Tensor, ...] = (),
        dtype: torch.dtype = torch.bfloat16,
    ) -> Tensor:
        """Returns the result of combine on `rank`, by the arithmetic contract of `engine/base.py`, bit for bit.

        Args:
            rank: the source rank.
            hidden: H.
            row: (expert rank, source rank, token) → the ``[H]`` row that comes back.
            bias: added in float32 before the last rounding.
            dtype: of rows on the wire and of the result (float32 for weights).
        """
        topk = self.topk_idx[rank].tolist()
        result = torch.zeros(len(topk), hidden, dtype=dtype, device="cpu")
        num_domains = self.num_ranks // self.num_ranks_per_domain
        for token, experts in enumerate(topk):
            ranks = sorted({expert // self.num_local_experts for expert in experts if expert >= 0})
            total = torch.zeros(hidden, device="cpu")
            for domain in range(num_domains):
                members = [r for r in ranks if r // self.num_ranks_per_domain == domain]
                partial = torch.zeros(hidden, device="cpu")
                for member in members:
                    partial += row(member, rank, token).float()
                total += partial.to(dtype).float() if num_domains > 1 else partial
            for term in bias:
                total += term[token].float()
            result[token] = total.to(dtype)
        return result


def dense_moe(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """A mixture of experts in float64 on one process, without any dispatch.

    Args:
        x: ``[T, H]``, any float dtype.
        topk_idx: ``[T, K]`` int64, global expert or −1.
        topk_weights: ``[T, K]``.
        expert: (global expert, ``[n, H]`` float64) → ``[n, H']`` float64.

    Returns:
        ``[T, H']`` float64: Σ_k weight × expert(x).
    """
    x = x.double()
    probe = expert(0, x[:0])
    total = torch.zeros(x.shape[0], probe.shape[1], dtype=torch.float64, device="cpu")
    for index in sorted({int(e) for e in topk_idx.flatten().tolist() if e >= 0}):
        weight = torch.where(topk_idx == index, topk_weights.double(), 0.0).sum(1)
        tokens = torch.nonzero((topk_idx == index).any(1)).flatten()
        total[tokens] += expert(index, x[tokens]) * weight[tokens].unsqueeze(1)
    return total
