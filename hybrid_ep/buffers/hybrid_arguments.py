"""Checks the tokens and routings that callers of `HybridEPBuffer` pass, and brings them into the engine's form.

Routings are top-k indices or maps, with or without a handle. The checks remember the largest sizes that were passed.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from hybrid_ep.buffers.base import BaseBuffer, check_rows, check_weights
from hybrid_ep.buffers.hybrid_config import BufferConfig, Configurer, HybridEpConfigInstance
from hybrid_ep.checks import MAX_TOPK, require, require_int
from hybrid_ep.core.checks import packed, require_plain, require_tensor
from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.core.layout import (
    indices_to_map,
    map_to_indices,
    probs_in_columns,
    weights_in_columns,
    widest_token,
)
from hybrid_ep.engine.calls import DispatchHandle, Routing, Rows
from hybrid_ep.errors import ConfigError

__all__ = ["MAX_PAD", "HybridArguments", "as_given", "check_made_with"]

MAX_PAD = 1 << 16  # so that rows with padding can be counted in 32 bits
_TOKENS_MULTIPLE = 16  # as Hybrid-EP grows


class HybridArguments(BaseBuffer):
    """The checks of a HybridEPBuffer's calls."""

    configurer: Configurer
    _first_sizes: BufferConfig  # of the constructor; those of the configurer grow
    _max_experts_per_token: int

    @property
    def _max_tokens(self) -> int:
        """The most tokens that a rank sends at once; grows with the calls of this rank."""
        return self.configurer.buffer_config.max_num_of_tokens_per_rank

    @property
    def _max_local_experts(self) -> int:
        """The most experts of a rank in the calls of this rank, and in the constructor."""
        return self.configurer.buffer_config.num_of_experts_per_rank

    def _grow(self, hidden_dim: int | None, num_of_tokens_per_rank: int | None, num_local_experts: int | None) -> None:
        """Raises the buffer's sizes to those of a call; None = unchanged."""
        config = self.configurer.buffer_config
        if hidden_dim is not None:
            config.hidden_dim = max(config.hidden_dim, require_int("hidden_dim", hidden_dim, minimum=1))
        if num_of_tokens_per_rank is not None:
            tokens = require_int("num_of_tokens_per_rank", num_of_tokens_per_rank, minimum=0)
            if tokens > config.max_num_of_tokens_per_rank:
                config.max_num_of_tokens_per_rank = -(-tokens // _TOKENS_MULTIPLE) * _TOKENS_MULTIPLE
        if num_local_experts is not None:
            num_local = require_int("num_local_experts", num_local_experts, minimum=1)
            config.num_of_experts_per_rank = max(config.num_of_experts_per_rank, num_local)

    def _sizes(self, pad_multiple: int) -> HybridEpConfigInstance:
        """The sizes in force, shared by all handles that are made with them."""
        sizes = self.configurer.buffer_config
        most = sizes.max_num_of_tokens_per_rank
        return _sizes_of(sizes.hidden_dim, most, sizes.num_of_experts_per_rank, self.grid, pad_multiple)

    def _rows_and_routing(
        self,
        hidden: Tensor,
        scaling_factor: Tensor | None,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        num_experts: int | None,
        probs: Tensor | None,
        routing_map: Tensor | None,
        *,
        no_sync: bool = False,
        in_parts: bool = False,
    ) -> tuple[Rows, bool, Routing]:
        """Checks rows, as `_rows` does, and routing."""
        if num_experts is None:
            if routing_map is not None:
                require_plain("routing_map", routing_map)
                num_experts = routing_map.shape[1] if routing_map.dim() == 2 else None
            num_experts = num_experts or self._first_sizes.num_of_experts_per_rank * self.group_size
        require_int("num_of_experts", num_experts, minimum=1, multiple_of=self.group_size)
        rows, as_bytes = self._rows(hidden, scaling_factor)
        routing = self._routing(
            rows, topk_idx, topk_weights, num_experts, probs, routing_map, no_sync=no_sync, in_parts=in_parts
        )
        return rows, as_bytes, routing

    def _rows(self, hidden: Tensor, scaling_factor: Tensor | None) -> tuple[Rows, bool]:
        """Checks tokens. Also returns whether they are uint8, because results then are too."""
        data, scaling_factor, as_bytes = _as_e4m3(hidden, scaling_factor)
        rows = check_rows("hidden", data, scaling_factor, device=self.engine.device)
        num_tokens, size = rows.data.shape
        self._grow(size, num_tokens, None)
        return rows, as_bytes

    def _routing(
        self,
        rows: Rows,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        num_experts: int,
        probs: Tensor | None,
        routing_map: Tensor | None,
        *,
        no_sync: bool = False,
        in_parts: bool = False,
    ) -> Routing:
        """Checks where tokens go.

        Tokens of a map with more than 32 columns are routed by their ranks. With `in_parts`, they are routed by their
        experts, and have a row of the result for every 32.
        """
        _check_pairs(topk_idx, topk_weights, probs, routing_map)
        num_tokens, device = rows.data.shape[0], rows.data.device
        if routing_map is not None:
            shape = (num_tokens, num_experts)
            require_tensor("routing_map", routing_map, dtypes=(torch.bool,), shape=shape, device=device)
        self._grow(None, None, num_experts // self.group_size)
        if routing_map is not None:
            if probs is not None:
                check_weights("probs", probs, (num_tokens, num_experts), device)
            num_parts = 1
            if num_experts > MAX_TOPK:
                if not in_parts:
                    owners = routing_map.view(num_tokens, self.group_size, num_experts // self.group_size).any(2)
                    return self._routing_by_rank(owners, num_experts)
                widest = min(self._max_experts_per_token, num_experts)
                if not (no_sync and routing_map.is_cuda):
                    widest = int(widest_token(routing_map))
                num_parts = max(1, -(-widest // MAX_TOPK))
            topk_idx, topk_weights = map_to_indices(routing_map, probs, num_parts)
            num_tokens *= num_parts
        elif topk_idx is None:
            raise ConfigError("neither of topk_idx and routing_map is given; allowed: one of them")
        self._check_topk(topk_idx, topk_weights, num_experts, device)
        if topk_idx.shape[0] != num_tokens:
            require(False, "rows of topk_idx", topk_idx.shape[0], f"{num_tokens}, as hidden has")
        return Routing(packed(topk_idx), packed(topk_weights), num_experts)

    def _check_handle(self, handle: DispatchHandle, rows: Rows, num_parts: int = 1) -> None:
        self._check_geometry(handle.grid)
        sent = handle.num_tokens // num_parts
        require(rows.data.shape[0] == sent, "rows of hidden", rows.data.shape[0], f"{sent}, as with this handle")

    def _check_combined(self, hidden: Tensor, probs: Tensor | None, shape: tuple[int, ...]) -> None:
        """Checks the arguments of a combine.

        Args:
            hidden: the rows.
            probs: of the rows.
            shape: of `probs`; the first size is the number of rows.
        """
        check_rows("hidden", hidden, None, device=self.engine.device)
        require(hidden.shape[0] == shape[0], "rows of hidden", hidden.shape[0], f"{shape[0]}, as received")
        if probs is not None:
            check_weights("probs", probs, shape, hidden.device)

    def _weights_along(
        self,
        known_idx: Tensor,
        num_experts: int,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        probs: Tensor | None,
        routing_map: Tensor | None,
        num_parts: int = 1,
    ) -> Tensor | None:
        """Weights to send along the routes of a handle, in the columns of its `known_idx`; None where there are none.

        A routing that is given again must be the handle's. Its values are compared on a CPU only, so that no call waits
        for a GPU.
        """
        if topk_idx is None and topk_weights is None and probs is None and routing_map is None:
            return None
        _check_pairs(topk_idx, topk_weights, probs, routing_map)
        num_tokens, device = known_idx.shape[0] // num_parts, known_idx.device
        map_shape = (num_tokens, num_experts)
        if topk_idx is not None and topk_idx is not known_idx:
            self._check_topk(topk_idx, topk_weights, num_experts, device)
            if topk_idx.shape[0] != num_tokens:
                require(False, "rows of topk_idx", topk_idx.shape[0], f"{num_tokens}, as with this handle")
            if topk_idx.is_cpu:
                routing_map, _ = indices_to_map(topk_idx, None, num_tokens, num_experts)
            if topk_weights is not None:
                topk_weights = weights_in_columns(known_idx, topk_idx, topk_weights)
        if routing_map is not None:
            require_tensor("routing_map", routing_map, dtypes=(torch.bool,), shape=map_shape, device=device)
            if routing_map.is_cpu:
                of_parts, _ = indices_to_map(known_idx, None, known_idx.shape[0], num_experts)
                _require_same_routing(
                    torch.equal(routing_map, of_parts.view(num_tokens, num_parts, num_experts).any(1))
                )
        if probs is not None:
            check_weights("probs", probs, map_shape, device)
            return probs_in_columns(known_idx, probs.repeat_interleave(num_parts, 0) if num_parts > 1 else probs)
        if topk_weights is not None:
            check_weights("topk_weights", topk_weights, known_idx.shape, device)
        return packed(topk_weights)

    def _probs_along(
        self,
        known_map: Tensor,
        num_experts: int,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        probs: Tensor | None,
        routing_map: Tensor | None,
    ) -> Tensor | None:
        """Returns probabilities to send along a handle that was made with a map: ``[T, E]``, 0 outside the map."""
        if topk_idx is None and topk_weights is None and probs is None and routing_map is None:
            return None
        _check_pairs(topk_idx, topk_weights, probs, routing_map)
        num_tokens, device = known_map.shape[0], known_map.device
        if topk_idx is not None:
            self._check_topk(topk_idx, topk_weights, num_experts, device)
            routing_map, probs = indices_to_map(topk_idx, topk_weights, num_tokens, num_experts)
        elif topk_weights is not None:
            require(False, "topk_weights", "given without topk_idx", "probs, with this handle, which a map has made")
        shape = (num_tokens, num_experts)
        if routing_map is not None:
            require_tensor("routing_map", routing_map, dtypes=(torch.bool,), shape=shape, device=device)
            if routing_map.is_cpu:
                _require_same_routing(torch.equal(routing_map, known_map))
        if probs is None:
            return None
        check_weights("probs", probs, shape, device)
        return torch.where(known_map, probs, 0.0)


def _require_same_routing(is_same: bool) -> None:
    require(is_same, "routing", "another than that of the handle", "the handle's, or None")


def _check_pairs(
    topk_idx: Tensor | None, topk_weights: Tensor | None, probs: Tensor | None, routing_map: Tensor | None
) -> None:
    """`topk_weights` belong to `topk_idx`, and `probs` to `routing_map`."""
    if topk_idx is not None and routing_map is not None:
        raise ConfigError("both of topk_idx and routing_map are given; allowed: one of them")
    require(topk_idx is None or probs is None, "probs", "given with topk_idx", "None (give topk_weights)")
    require(routing_map is None or topk_weights is None, "topk_weights", "given with routing_map", "None (give probs)")
    require(topk_weights is None or probs is None, "topk_weights and probs", "both given", "one of them")


def _as_e4m3(hidden: Tensor, scaling_factor: Tensor | None) -> tuple[Tensor, Tensor | None, bool]:
    """Rows in e4m3 where they came as uint8 with scales, their scales, and whether they came so. bf16 has no scales."""
    dtype = hidden.dtype if isinstance(hidden, Tensor) else None
    if dtype == torch.bfloat16:
        return hidden, None, False
    as_bytes = scaling_factor is not None and dtype == torch.uint8
    return hidden.view(torch.float8_e4m3fn) if as_bytes else hidden, scaling_factor, as_bytes


def check_made_with(*given: tuple[str, int | None, int]) -> None:
    """Checks that arguments passed again with a handle equal those of its dispatch."""
    for name, value, made_with in given:
        if value is not None and value != made_with:
            require(False, name, value, f"{made_with}, as with this handle")


def as_given(data: Tensor, as_bytes: bool) -> Tensor:
    """Returns e4m3 rows in the dtype in which the caller passed them."""
    return data.view(torch.uint8) if as_bytes else data


@functools.lru_cache
def _sizes_of(hidden: int, tokens: int, num_local: int, grid: RankGrid, pad_multiple: int) -> HybridEpConfigInstance:
    return HybridEpConfigInstance(
        hidden, tokens, num_local, grid.num_ranks_per_domain, grid.num_domains, pad_multiple=pad_multiple
    )
