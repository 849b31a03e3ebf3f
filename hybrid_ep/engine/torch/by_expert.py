"""Rows by local expert in PyTorch, from rows by source and back: the engines without a kernel for that use it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybrid_ep.core.layout import Permutation, permutation_by_expert
from hybrid_ep.engine.calls import CombineRequest, Dispatched, DispatchRequest, PermuteHandle, Rows, state_of
from hybrid_ep.errors import OverflowError


def rows_by_expert(
    request: DispatchRequest, received: Dispatched, find_overflow: Callable[[int, int, torch.device], str | None]
) -> Dispatched:
    """Sorts the rows of a dispatch by local expert.

    Args:
        request: of the dispatch, whose bound is of rows by expert.
        received: all rows, by source.
        find_overflow: takes the rows by expert of this rank and their bound. Returns what is wrong where any rank has
            more than its bound. Collective.

    Raises:
        OverflowError: rows would be dropped at any rank, without `drops_rows`.
    """
    assert received.topk_idx is not None
    num_local = received.handle.num_experts // received.handle.grid.num_ranks
    permutation = permutation_by_expert(received.topk_idx, num_local, request.pad_multiple)
    counts, device = permutation.num_tokens_per_expert, received.topk_idx.device
    num_rows = int(counts.sum())
    size = num_rows if request.bound is None else request.bound
    overflow = None if request.bound is None else find_overflow(num_rows, size, device)
    if overflow is not None and not request.drops_rows:
        raise OverflowError(overflow)
    flag = torch.full((1,), int(overflow is not None), dtype=torch.int32, device=device)
    handle = PermuteHandle(received.handle, counts, size, request.pad_multiple, permutation, flag)
    weights = None
    if received.topk_weights is not None:
        weights = _permute(received.topk_weights, handle, weights=True)
    return Dispatched(permute_rows(received.rows, handle), None, weights, counts, received.handle, handle)


def sum_copies(request: CombineRequest, handle: PermuteHandle) -> CombineRequest:
    """Returns the combine of rows by source that one of rows by expert becomes: the copies of each row are summed."""
    data, probs, dispatch = request.data, request.weights, handle.dispatch
    permutation = state_of(handle, Permutation)
    kept = permutation.dst_row < handle.num_permuted
    row, column, dst_row = permutation.row[kept], permutation.column[kept], permutation.dst_row[kept]
    # A row's copies in ascending order of their rows: by local expert, then column.
    sums = data.new_zeros(dispatch.num_recv, data.shape[1], dtype=torch.float32)
    dst_rows = torch.full((dispatch.num_recv, dispatch.num_topk), handle.num_permuted, device=data.device)
    dst_rows[row, column] = dst_row
    for nth in dst_rows.sort(1).values.unbind(1):
        has_nth = nth < handle.num_permuted
        sums[has_nth] += data[nth[has_nth]].float()
    weights = None
    if probs is not None:
        weights = probs.new_zeros(dispatch.num_recv, dispatch.num_topk)
        weights[row, column] = probs[dst_row]
    return request._replace(data=sums.to(data.dtype), weights=weights)


def _permute(received: Tensor, handle: PermuteHandle, *, weights: bool = False) -> Tensor:
    """``[N, …]`` received rows → ``[P, …]`` (or, for weights, ``[N, K]`` → ``[P]``); padding stays zero."""
    permutation = state_of(handle, Permutation)
    kept = permutation.dst_row < handle.num_permuted
    row, dst_row = permutation.row[kept], permutation.dst_row[kept]
    copies = received[row, permutation.column[kept]] if weights else received[row]
    as_bytes = copies.view(torch.uint8) if copies.dtype.itemsize == 1 else copies
    permuted = as_bytes.new_zeros(handle.num_permuted, *copies.shape[1:])
    permuted[dst_row] = as_bytes
    return permuted.view(received.dtype)


def permute_rows(received: Rows, handle: PermuteHandle) -> Rows:
    """Returns ``[P, H]`` rows by expert from ``[N, H]`` rows by source; padding is zero."""
    scales = None if received.scales is None else _permute(received.scales, handle)
    return Rows(_permute(received.data, handle), scales)
