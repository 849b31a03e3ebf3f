"""A linear layer of many experts at once: rows by group, and one matrix for each group."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["grouped_linear"]

_ALIGNMENT = 16  # bytes of a row of each operand, as torch wants them


def grouped_linear(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiplies the rows of each group with the matrix of the group. No shape depends on `ends`, nor does the host.

    It is torch's grouped product where that takes the operands without a host sync. Otherwise every group is computed
    for all rows.

    Args:
        rows: ``[P, in]``, by group.
        weights: ``[G, out, in]``, of the dtype of the rows.
        ends: ``[G]`` int32 on the device of the rows: where the rows of each group end.

    Returns:
        ``[P, out]``; undefined after the last end.
    """
    if _has_product(rows, weights):
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    group = torch.searchsorted(ends, torch.arange(len(rows), device=rows.device, dtype=ends.dtype), right=True)
    total = rows.new_zeros(len(rows), weights.shape[1])
    for i, weight in enumerate(weights):
        total = total + torch.where((group == i).unsqueeze(1), F.linear(rows, weight), 0)
    return total


def _has_product(rows: Tensor, weights: Tensor) -> bool:
    # On a GPU torch reads the ends on the host for other dtypes.
    dtypes = (torch.bfloat16,) if rows.is_cuda else (torch.bfloat16, torch.float16, torch.float32)
    is_aligned = all(size * rows.dtype.itemsize % _ALIGNMENT == 0 for size in weights.shape[1:])
    return hasattr(F, "grouped_mm") and rows.dtype in dtypes and is_aligned
