"""Checks of the arguments of `HybridEPBuffer`: top-k indices or maps, with or without a handle."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_ep.buffers.arguments import check_grid, check_rows, check_topk, check_weights
from hybrid_ep.checks import require
from hybrid_ep.core.checks import packed, require_tensor
from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.core.layout import indices_to_map, probs_in_columns, weights_in_columns
from hybrid_ep.engine.calls import DispatchHandle, Rows


def check_handle(grid: RankGrid, handle: DispatchHandle, rows: Rows, num_parts: int = 1) -> None:
    """Checks that rows go along a handle."""
    check_grid(grid, handle.grid)
    sent = handle.num_tokens // num_parts
    require(rows.data.shape[0] == sent, "rows of hidden", rows.data.shape[0], f"{sent}, as with this handle")


def check_combined(hidden: Tensor, probs: Tensor | None, shape: tuple[int, ...], device: torch.device | None) -> None:
    """Checks the arguments of a combine.

    Args:
        hidden: the rows.
        probs: of the rows.
        shape: of `probs`; the first size is the number of rows.
        device: where they must be; None = anywhere.
    """
    check_rows("hidden", hidden, None, device=device)
    require(hidden.shape[0] == shape[0], "rows of hidden", hidden.shape[0], f"{shape[0]}, as received")
    if probs is not None:
        check_weights("probs", probs, shape, hidden.device)


def weights_along(
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
    num_tokens, device = known_idx.shape[0] // num_parts, known_idx.device
    map_shape = (num_tokens, num_experts)
    if topk_idx is not None and topk_idx is not known_idx:
        check_topk(topk_idx, topk_weights, num_experts, device)
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
            _require_same_routing(torch.equal(routing_map, of_parts.view(num_tokens, num_parts, num_experts).any(1)))
    if probs is not None:
        check_weights("probs", probs, map_shape, device)
        return probs_in_columns(known_idx, probs.repeat_interleave(num_parts, 0) if num_parts > 1 else probs)
    if topk_weights is not None:
        check_weights("topk_weights", topk_weights, known_idx.shape, device)
    return packed(topk_weights)


def probs_along(
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
    num_tokens, device = known_map.shape[0], known_map.device
    if topk_idx is not None:
        check_topk(topk_idx, topk_weights, num_experts, device)
        routing_map, from_weights = indices_to_map(topk_idx, topk_weights, num_tokens, num_experts)
        probs = from_weights if probs is None else probs
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


def as_indices(
    topk_idx: Tensor | None, topk_weights: Tensor | None, probs: Tensor | None, routing_map: Tensor | None
) -> Tensor | None:
    """Returns `topk_idx` as int64, or None if a map is given, which has precedence; checks whose weights are given."""
    require(routing_map is None or topk_weights is None, "topk_weights", "given with routing_map", "None (give probs)")
    require(topk_weights is None or probs is None, "topk_weights and probs", "both given", "one of them")
    if routing_map is not None:
        return None
    is_short = isinstance(topk_idx, Tensor) and topk_idx.dtype in (torch.int16, torch.int32)
    return topk_idx.long() if is_short else topk_idx  # type: ignore[union-attr]


def as_e4m3(hidden: Tensor, scaling_factor: Tensor | None) -> tuple[Tensor, Tensor | None, bool]:
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
