"""The handles of `HybridEPBuffer`: sequences whose entries have Hybrid-EP's positions.

Callers read some entries, which are computed when they are read. The others are private to the library.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar, overload

import torch
from torch import Tensor

from hybrid_ep.buffers.hybrid_config import HybridEpConfigInstance
from hybrid_ep.engine.calls import DispatchHandle, OfThisProcess, PermuteHandle


class _Handle(OfThisProcess, Sequence[Any]):
    """Attributes of an object as the entries of a sequence."""

    _entries: ClassVar[tuple[str, ...]]

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Any, ...]: ...
    def __getitem__(self, index: int | slice) -> Any:
        names = self._entries[index]
        return getattr(self, names) if isinstance(names, str) else tuple(getattr(self, name) for name in names)

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


class HybridHandle(_Handle):
    """The handle of `dispatch`, for `combine` and a cached `dispatch`; 7 entries, in the order of the attributes.

    Attributes:
        routing: this rank's: ``[T, K]`` int64, or ``[T, E]`` bool where a map of more than 32 columns was given.
        received: of each received row, the experts of the domain: ``[N, K]`` int64 counted from the domain's first, −1
            elsewhere; or ``[N, experts of the domain]`` bool.
        dispatch: the engine's handle.
        num_dispatched_tokens: ``[1]`` int32 on the device; rows that arrived.
        local_expert_routing_map: ``[N, LE]`` bool; which of this rank's experts a received row is for.
        num_of_tokens_per_rank: T.
        config: the sizes of the buffer when the handle was made.

    The attributes `grid`, `num_recv`, `num_topk`, `num_experts` and `is_map` (whether `routing` and `received` are
    maps) are no entries.
    """

    _entries = (
        "routing",
        "received",
        "dispatch",
        "num_dispatched_tokens",
        "local_expert_routing_map",
        "num_of_tokens_per_rank",
        "config",
    )

    def __init__(
        self, routing: Tensor, received: Tensor, dispatch: DispatchHandle, config: HybridEpConfigInstance
    ) -> None:
        self.routing, self.received, self.dispatch, self.config = routing, received, dispatch, config
        self.num_of_tokens_per_rank, self.num_recv = dispatch.num_tokens, dispatch.num_recv
        self.grid, self.num_topk, self.num_experts = dispatch.grid, dispatch.num_topk, dispatch.num_experts
        self.is_map = routing.dtype == torch.bool

    @property
    def num_dispatched_tokens(self) -> Tensor:
        return _num_dispatched(self.dispatch)

    @functools.cached_property
    def local_expert_routing_map(self) -> Tensor:
        grid = self.dispatch.grid
        num_local = self.dispatch.num_experts // grid.num_ranks
        first = (grid.rank - grid.domain.start) * num_local
        if self.is_map:
            return self.received[:, first : first + num_local]
        local = self.received - first
        return _to_map(torch.where((local >= 0) & (local < num_local), local, -1), num_local)


class PermutedHandle(_Handle):
    """The handle of `dispatch_with_permute`, for `combine_with_unpermute` and a cached dispatch; 11 entries.

    Attributes:
        topk_idx: ``[T, K]`` int64; this rank's routing. ``[T×S, K]`` where tokens have more than 32 experts: such a
            token travels as S rows, each with the next of its experts.
        permute: the engine's handle.
        dispatch: the engine's handle of the dispatch underneath.
        num_dispatched_tokens: ``[1]`` int32 on the device; rows that arrived, before they were copied for each expert.
        local_expert_routing_map: ``[N, LE]`` bool; which of this rank's experts a received row is for.
        num_permuted: rows of the result.
        rows_of_copies: ``[N, K]`` int32; the permuted row of each copy of a received row, −1 where there is none.
        tokens_per_expert: ``[LE]``, padding included, as it was returned.
        num_of_tokens_per_rank: T.
        config: the sizes of the buffer when the handle was made.
        overflow: ``[1]`` int32, 1 at every rank if at any more rows arrived than its `num_permuted_tokens`.

    The attributes `grid`, `num_topk`, `num_experts`, `pad_multiple` and `num_parts` are no entries.
    """

    _entries = (
        "topk_idx",
        "permute",
        "dispatch",
        "num_dispatched_tokens",
        "local_expert_routing_map",
        "num_permuted",
        "rows_of_copies",
        "tokens_per_expert",
        "num_of_tokens_per_rank",
        "config",
        "overflow",
    )

    def __init__(
        self,
        topk_idx: Tensor,
        permute: PermuteHandle,
        tokens_per_expert: Tensor,
        config: HybridEpConfigInstance,
        num_parts: int = 1,
    ) -> None:
        self.num_parts = num_parts  # S
        self.topk_idx, self.permute, self.tokens_per_expert, self.config = topk_idx, permute, tokens_per_expert, config
        dispatch, _, self.num_permuted, self.pad_multiple, _, self.overflow = permute
        self.dispatch, self.grid = dispatch, dispatch.grid
        self.num_topk, self.num_experts = dispatch.num_topk, dispatch.num_experts
        self.num_of_tokens_per_rank = dispatch.num_tokens // num_parts

    @property
    def num_dispatched_tokens(self) -> Tensor:
        return _num_dispatched(self.dispatch)

    @functools.cached_property
    def rows_of_copies(self) -> Tensor:
        return rows_of_copies(self.permute)

    @functools.cached_property
    def local_expert_routing_map(self) -> Tensor:
        rows = self.rows_of_copies
        ends = self.permute.num_tokens_per_expert.to(rows.device).cumsum(0, dtype=torch.int32)
        expert = torch.searchsorted(ends, rows, right=True)
        return _to_map(torch.where(rows >= 0, expert, -1), ends.numel())


def rows_of_copies(permute: PermuteHandle) -> Tensor:
    """``[N, K]`` int32; the permuted row of each copy of a received row, −1 where there is none."""
    dispatch = permute.dispatch
    rows: Tensor = permute.state.rows_of_copies(dispatch.num_recv, dispatch.num_topk)
    arrived = torch.arange(rows.shape[0], device=rows.device) < _num_dispatched(dispatch)
    return torch.where(arrived.unsqueeze(1), rows, -1)


def _num_dispatched(handle: DispatchHandle) -> Tensor:
    rank = handle.grid.rank
    return handle.rank_prefix_matrix[-1, rank : rank + 1]


def _to_map(local_experts: Tensor, num_local: int) -> Tensor:
    """``[N, K]`` local experts or −1 → ``[N, LE]`` bool."""
    columns = torch.where(local_experts < 0, num_local, local_experts).long()
    found = torch.zeros(columns.shape[0], num_local + 1, dtype=torch.bool, device=columns.device)
    return found.scatter_(1, columns, True)[:, :num_local]
