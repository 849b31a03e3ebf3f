"""The state that the cuda engine keeps of a dispatch between domains: csrc/layout/between_layout.h has the layout."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_ep import _cuda
from hybrid_ep.engine.cuda.route import Chunk


class RouteSizes(NamedTuple):
    """Sizes that the layout of a route follows from."""

    num_domains: int
    ranks_per_domain: int
    num_tokens: int
    num_topk: int
    num_experts: int

    @property
    def num_ranks(self) -> int:
        return self.num_domains * self.ranks_per_domain

    def num_ints(self, held_capacity: int) -> int:
        """Returns the int32 of a route that can hold so many records of other domains."""
        return int(_cuda.between_route_ints(**self._asdict(), held_capacity=held_capacity))


class BetweenRoute(NamedTuple):
    """The state of the engine in a DispatchHandle.

    Attributes:
        chunk: the memory that the route is a piece of.
        address: of the piece.
        sizes: of the dispatch that made it.
        held_capacity: records of other domains that it can hold.
        num_recv: rows of the result: what arrived, or the bound.
        max_recv: most rows of the result at any rank; what the slots of a cached dispatch must hold.
        max_sums: most rows that any rank sums in a combine; what the slots of a combine must hold.
        sent: rows that this rank sends within its domain and between domains; 0 where the host did not learn it.
        number: of the dispatch that made it, equal at all ranks.
    """

    chunk: Chunk
    address: int
    sizes: RouteSizes
    held_capacity: int
    num_recv: int
    max_recv: int
    max_sums: int
    sent: tuple[int, int]
    number: int

    # Each is on the current stream, as the kernel wrote it.

    def rank_prefix_matrix(self) -> Tensor:
        """``[R, R]`` int32, rows that ranks 0…i send to j; ``[0, 0]`` above 256 ranks, where no rank has them all."""
        num_ranks = self.sizes.num_ranks
        if num_ranks > _cuda.max_matrix_ranks:
            return self.chunk.memory.new_empty((0, 0), dtype=torch.int32)
        return self._ints(_cuda.between_rank_prefix(**self.sizes._asdict()), num_ranks, num_ranks)

    def rows_to_ranks(self) -> Tensor:
        """``[R, G]`` int32, rows that each rank sends to each rank of this domain."""
        at, _ = _cuda.between_counts(**self.sizes._asdict())
        return self._ints(at, self.sizes.num_ranks, self.sizes.ranks_per_domain)

    def tokens_per_expert(self) -> Tensor:
        """``[LE]`` int32."""
        _, at = _cuda.between_counts(**self.sizes._asdict())
        return self._ints(at, self.sizes.num_experts // self.sizes.num_ranks)

    def _ints(self, at: int, *shape: int) -> Tensor:
        return self.chunk.ints(self.address, at, math.prod(shape)).view(shape)
