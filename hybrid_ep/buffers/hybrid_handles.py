"""The handles of `HybridEPBuffer`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from hybrid_ep.engine.base import DispatchHandle, PermuteHandle

__all__ = ["HybridHandle", "PermutedHandle"]


class HybridHandle(NamedTuple):
    """Of `dispatch`, for `combine` and for a cached `dispatch`.

    Attributes:
        topk_idx: ``[T, K]`` int64; this rank's routing.
        recv_topk_idx: ``[N, K]`` int64; experts of each received row, counted from the domain's first, −1 elsewhere.
        dispatch: the engine's handle.
        overflow: ``[1]`` int32, always 0: a plain dispatch receives all or raises.
    """

    topk_idx: Tensor
    recv_topk_idx: Tensor
    dispatch: DispatchHandle
    overflow: Tensor


class PermutedHandle(NamedTuple):
    """Of `dispatch_with_permute`, for `combine_with_unpermute` and for a cached dispatch.

    Attributes:
        topk_idx: ``[T, K]`` int64; this rank's routing.
        permute: the engine's handle.
        tokens_per_expert: ``[LE]``, pads included, as it was returned.
        overflow: ``[1]`` int32, 1 when more rows arrived than `num_permuted_tokens`.
    """

    topk_idx: Tensor
    permute: PermuteHandle
    tokens_per_expert: Tensor
    overflow: Tensor
