"""The cases that every engine must pass, and the inputs of any rank, which every rank can make."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_ep.testing.reference import Copy, Reference


@dataclass(frozen=True)
class Case:
    """One shape and routing.

    Attributes:
        id: readable name.
        num_ranks: R.
        tokens: of every rank, or one number for each rank.
        hidden: H.
        topk: K.
        num_experts: E.
        routing: ``uniform``, ``hot`` (one expert takes every token), ``holes`` (half of the entries are −1, some rows
            all −1), ``duplicates`` (rows name an expert more than once), ``merged`` (these, with one column for each
            expert), ``local`` (every token stays), ``groups`` (experts of half of the domains for each token),
            ``front`` (only the first tokens of a rank have experts, and none of the last rank) or ``empty`` (all −1).
        num_ranks_per_domain: None = one domain.
        seed: of the inputs.
    """

    id: str
    num_ranks: int
    tokens: int | tuple[int, ...]
    hidden: int = 256
    topk: int = 4
    num_experts: int = 16
    routing: str = "uniform"
    num_ranks_per_domain: int | None = None
    seed: int = 0

    def tokens_of(self, rank: int) -> int:
        return self.tokens if isinstance(self.tokens, int) else self.tokens[rank]

    @property
    def max_tokens(self) -> int:
        return max(1, *(self.tokens_of(rank) for rank in range(self.num_ranks)))

    @property
    def per_domain(self) -> int:
        return self.num_ranks_per_domain or self.num_ranks

    def topk_idx(self, rank: int) -> Tensor:
        """``[T, K]`` int64 of any rank."""
        generator = torch.Generator().manual_seed(7919 * self.seed + 31 * rank + 1)
        num_tokens, num_local = self.tokens_of(rank), self.num_experts // self.num_ranks
        scores = torch.rand(num_tokens, self.num_experts, generator=generator)
        if self.routing == "hot":
            scores[:, self.num_experts // 2] = 2
        if self.routing == "local":
            scores[:, rank * num_local : (rank + 1) * num_local] += 1
        if self.routing == "groups":
            num_domains = self.num_ranks // self.per_domain
            chosen = torch.rand(num_tokens, num_domains, generator=generator).topk(max(1, num_domains // 2), dim=1)
            in_group = torch.zeros(num_tokens, num_domains).scatter_(1, chosen.indices, 1)
            scores += in_group.repeat_interleave(self.num_experts // num_domains, dim=1)
        topk = scores.topk(self.topk, dim=1).indices
        if self.routing == "holes":
            topk[torch.rand(topk.shape, generator=generator) < 0.5] = -1
            topk[::5] = -1
        if self.routing in ("duplicates", "merged"):
            again = torch.randint(self.topk, topk.shape, generator=generator)
            topk = topk.gather(1, again)
        if self.routing == "merged":
            merged = [[-1 if e in row[:k] else e for k, e in enumerate(row)] for row in topk.tolist()]
            topk = torch.tensor(merged, dtype=torch.int64).reshape(topk.shape)
        if self.routing == "front":
            topk[0 if rank == self.num_ranks - 1 else num_tokens // (rank + 2) :] = -1
        if self.routing == "empty":
            topk.fill_(-1)
        return topk

    def inputs(self, rank: int) -> Inputs:
        """Tokens, routing and weights of any rank; the caller may write into them."""
        return Inputs(*(tensor.clone() for tensor in _inputs(self, rank)))

    def as_map(self) -> Case:
        """What the routing is as a dense map, which has one weight for each expert of a token."""
        return replace(self, routing="merged") if self.routing == "duplicates" else self

    def reference(self) -> Reference:
        return _reference(self)


class Inputs(NamedTuple):
    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor


@lru_cache(256)
def _inputs(case: Case, rank: int) -> Inputs:
    generator = torch.Generator().manual_seed(104729 * case.seed + 37 * rank + 2)
    num_tokens = case.tokens_of(rank)
    x = torch.randn(num_tokens, case.hidden, generator=generator).to(torch.bfloat16)
    weights = torch.rand(num_tokens, case.topk, generator=generator)
    if case.routing == "merged":
        named = replace(case, routing="duplicates").topk_idx(rank)
        for row, its_weights in zip(named.tolist(), weights, strict=True):
            for k, e in enumerate(row):
                its_weights[k] = sum(float(w) for other, w in zip(row[k:], its_weights[k:], strict=True) if other == e)
    return Inputs(x, case.topk_idx(rank), weights)


@lru_cache(16)
def _reference(case: Case) -> Reference:
    topk_idx = [case.topk_idx(rank) for rank in range(case.num_ranks)]
    return Reference(topk_idx, case.num_experts, case.per_domain)


@lru_cache(4096)
def row_of(seed: int, rank: int, src_rank: int, token: int, size: int) -> Tensor:
    """The bf16 row that `rank`'s experts return for a token: the same wherever it is made, and different everywhere.

    Half of the values are ±2^24: beside them float32 loses the others, so that a sum in another order, or one that is
    rounded in between, gives other bits.
    """
    generator = torch.Generator().manual_seed(((seed * 73 + rank) * 73 + src_rank) * 100_003 + token)
    row = torch.randn(size, generator=generator)
    chosen = torch.rand(size, generator=generator)
    row[chosen < 0.25] = 2.0**24
    row[chosen > 0.75] = -(2.0**24)
    return row.to(torch.bfloat16)


def expert_row(case: Case, copy: Copy) -> Tensor:
    """The bf16 row that an expert returns for a copy: another one for each column that names the expert."""
    return row_of(case.seed, copy.expert + copy.column * case.num_experts, copy.src_rank, copy.token, case.hidden)


CASES = [
    Case("one_rank", 1, 33, num_experts=7, topk=3),
    Case("two_ranks", 2, 64),
    Case("four_ranks", 4, 40),
    Case("eight_ranks", 8, 32, num_experts=32),
    Case("three_ranks", 3, 29, num_experts=15),
    Case("six_ranks", 6, 17, num_experts=18),
    Case("zero_tokens_on_one_rank", 4, (12, 0, 31, 5)),
    Case("zero_tokens_everywhere", 4, 0),
    Case("only_one_rank_sends", 4, (0, 0, 25, 0)),
    Case("hot_expert", 4, 48, routing="hot"),
    Case("holes", 4, 40, routing="holes"),
    Case("all_holes", 4, 9, routing="empty"),
    Case("last_tokens_go_nowhere", 4, 37, routing="front"),
    Case("duplicates", 4, 40, routing="duplicates"),
    Case("nothing_crosses", 4, 21, routing="local"),
    Case("ragged", 8, (1, 2, 3, 50, 0, 7, 31, 16), num_experts=64, topk=8),
    Case("top_1", 2, 40, topk=1),
    Case("top_32", 4, 11, topk=32, num_experts=64),
    Case("every_expert", 2, 13, topk=6, num_experts=6),
    Case("experts_not_a_power_of_two", 4, 30, num_experts=52, topk=5),
    Case("hidden_128", 4, 30, hidden=128),
    Case("hidden_3584", 2, 60, hidden=3584),
    Case("hidden_7168", 2, 12, hidden=7168, num_experts=32, topk=8),
    Case("hidden_12288", 2, (7, 1), hidden=12288),  # rings of a row that is ahead and three on their way
    Case("hidden_16384", 2, 6, hidden=16384),
    Case("hidden_16384_experts_2048", 2, 6, hidden=16384, num_experts=2048),
    Case("hidden_8", 2, 20, hidden=8),
    Case("two_domains", 4, 40, num_ranks_per_domain=2),
    Case("four_domains_of_two", 8, 24, num_experts=32, num_ranks_per_domain=2),
    Case("domains_of_one", 4, 20, num_ranks_per_domain=1),
    Case("two_domains_ragged", 8, (5, 0, 17, 1, 30, 2, 0, 9), num_experts=32, num_ranks_per_domain=4),
    Case("two_domains_holes", 4, 40, routing="holes", num_ranks_per_domain=2),
    Case("three_domains_duplicates", 6, 20, num_experts=12, routing="duplicates", num_ranks_per_domain=2),
]

LOW_LATENCY_CASES = [
    Case("one_rank", 1, 40, num_experts=6, topk=3),
    Case("four_ranks", 4, 36),
    Case("eight_ranks", 8, 34, num_experts=32, topk=8),
    Case("few_tokens", 4, 5),
    Case("ragged", 4, (0, 7, 32, 45)),
    Case("zero_tokens_everywhere", 2, 0),
    Case("hot_expert", 4, 40, routing="hot"),
    Case("holes", 4, 40, routing="holes"),
    Case("duplicates", 4, 40, routing="duplicates"),
    Case("hidden_7168", 2, 33, hidden=7168, num_experts=36, topk=8),
    Case("hidden_640", 2, 40, hidden=640),
    Case("hidden_16384", 2, 6, hidden=16384),
    Case("top_32", 2, 33, topk=32, num_experts=64),
]


def select(cases: list[Case], *, num_ranks: int | None = None, one_domain: bool = False) -> list[Case]:
    """The cases that fit a machine: at most `num_ranks` ranks; `one_domain` leaves out those with several domains."""
    return [
        case
        for case in cases
        if (num_ranks is None or case.num_ranks <= num_ranks) and not (one_domain and case.num_ranks_per_domain)
    ]
