"""How calls of `HybridEPBuffer` are repeated: see repeats.py.

`as_bytes`: rows are e4m3 that callers give, and get back, as uint8.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybrid_ep.buffers.hybrid_handles import HybridHandle, PermutedHandle
from hybrid_ep.core.repeatable import Repeat
from hybrid_ep.engine.calls import (
    RepeatedCombine,
    RepeatedCombineDense,
    RepeatedDispatch,
    RepeatedDispatchAlong,
    RepeatedPermuted,
    RepeatedPermutedAlong,
    RepeatedUnpermute,
)

if TYPE_CHECKING:
    from hybrid_ep.buffers.hybrid_arguments import HybridArguments

__all__ = [
    "SIZES",
    "as_given",
    "repeat_along",
    "repeat_combine",
    "repeat_combine_dense",
    "repeat_dispatch",
    "repeat_permuted",
    "repeat_permuted_along",
    "repeat_unpermute",
]

# Attributes of the buffer that a repeated call must have alike: the most tokens of a rank, from which the bound of all
# ranks comes, and the experts of a rank, for calls without a number of experts. Both may grow between calls.
SIZES = "_max_tokens", "_max_local_experts"


def as_given(data: Tensor, as_bytes: bool) -> Tensor:
    """Returns e4m3 rows in the dtype in which the caller passed them."""
    return data.view(torch.uint8) if as_bytes else data


def repeat_dispatch(repeat: RepeatedDispatch | None, as_bytes: bool) -> Repeat | None:
    """Of a dispatch that makes its route from top-k indices."""
    if repeat is None:
        return None
    takes = "self", "hidden", "scaling_factor", "topk_idx", "topk_weights"
    return Repeat(functools.partial(_with_handle, repeat.call, as_bytes), takes, (0, 1, 2, 3))


def _with_handle(
    call: Callable[..., Any],
    as_bytes: bool,
    buffer: HybridArguments,
    data: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
) -> tuple[Any, ...] | None:
    made = call(data, scales, topk_idx, topk_weights)
    if made is None:
        return None
    rows, row_scales, experts, probs, _, dispatch, routing = made
    if probs is None:
        experts = experts.clone()  # a handle must not hold the slot; with probabilities it is a copy
    handle = HybridHandle(routing, experts, dispatch, buffer._sizes(0))
    return as_given(rows, as_bytes), probs, row_scales, handle


def repeat_along(repeat: RepeatedDispatchAlong | None, as_bytes: bool) -> Repeat | None:
    """Of a dispatch of rows along a handle."""
    if repeat is None:
        return None
    call = functools.partial(_along, repeat.call, as_bytes)
    return Repeat(call, ("hidden", "scaling_factor", "handle"), (0, None, 1, 2))


def _along(
    call: Callable[..., Any], as_bytes: bool, data: Tensor, scales: Tensor | None, handle: HybridHandle
) -> tuple[Any, ...] | None:
    made = call(data, scales, handle.dispatch)
    return made and (as_given(made[0], as_bytes), made[1], handle)


def repeat_combine(repeat: RepeatedCombine | None) -> Repeat | None:
    """Of a combine of received rows."""
    if repeat is None:
        return None
    return Repeat(repeat.call, ("hidden", None, None, None, ("handle", "dispatch")), (0, None))


def repeat_combine_dense(call: RepeatedCombineDense | None) -> Repeat | None:
    """Of a combine of received rows and their probabilities."""
    if call is None:
        return None
    takes = "hidden", "probs", ("handle", "dispatch"), ("handle", "received"), ("handle", "routing")
    return Repeat(call, takes, (0, 1))


def repeat_permuted(call: RepeatedPermuted | None, as_bytes: bool, pad_multiple: int) -> Repeat | None:
    """Of a dispatch by expert that makes its route."""
    if call is None:
        return None
    takes = "self", "hidden", "scaling_factor", "topk_idx", "topk_weights"
    return Repeat(functools.partial(_permuted, call, as_bytes, pad_multiple), takes, (0, 1, 2, 3, 4))


def _permuted(
    call: RepeatedPermuted,
    as_bytes: bool,
    pad_multiple: int,
    buffer: HybridArguments,
    data: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
) -> tuple[Any, ...] | None:
    made = call(data, scales, topk_idx, topk_weights)
    if made is None:
        return None
    rows, row_scales, probs, counts, permute, routing = made
    handle = PermutedHandle(routing, permute, counts, buffer._sizes(pad_multiple))
    return as_given(rows, as_bytes), probs, row_scales, counts, handle


def repeat_permuted_along(call: RepeatedPermutedAlong | None, as_bytes: bool, non_blocking: bool) -> Repeat | None:
    """Of a dispatch by expert along a handle. `non_blocking`: its counts are wanted on the device."""
    if call is None:
        return None
    along = functools.partial(_along_permuted, call, as_bytes, non_blocking)
    return Repeat(along, ("hidden", "scaling_factor", "handle"), (0, None, 1, 2, 3))


def _along_permuted(
    call: RepeatedPermutedAlong,
    as_bytes: bool,
    non_blocking: bool,
    data: Tensor,
    scales: Tensor | None,
    handle: PermutedHandle,
) -> tuple[Any, ...] | None:
    made = call(data, scales, handle.permute)
    if made is None:
        return None
    rows, row_scales = made
    counts = handle.tokens_per_expert
    if non_blocking:
        counts = counts.to(data.device, non_blocking=True)
    return as_given(rows, as_bytes), row_scales, counts, handle


def repeat_unpermute(call: RepeatedUnpermute | None) -> Repeat | None:
    if call is None:
        return None
    return Repeat(call, ("hidden", "probs", ("handle", "permute"), ("handle", "topk_idx")), (0, 1))
