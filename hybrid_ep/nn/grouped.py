"""A linear layer of many experts at once: rows by group, and one matrix for each group."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_ALIGNMENT = 16  # bytes of a row of each operand, as torch wants them


def grouped_linear(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiplies the rows of each group with the matrix of the group. No shape depends on `ends`; the host does not
    read it.

    With bf16 and torch 2.10 or later it is `torch.nn.functional.grouped_mm`. Otherwise each matrix multiplies all rows,
    and the rows of other groups are masked.

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
        # Masked twice: rows of no group may be NaN forwards, and their gradients backwards.
        is_own = (group == i).unsqueeze(1)
        total = total + torch.where(is_own, F.linear(torch.where(is_own, rows, 0), weight), 0)
    return total


def _has_product(rows: Tensor, weights: Tensor) -> bool:
    # In other dtypes torch cannot compile it, and on a GPU reads the ends on the host.
    is_aligned = all(size * rows.dtype.itemsize % _ALIGNMENT == 0 for size in weights.shape[1:])
    return hasattr(F, "grouped_mm") and rows.dtype == torch.bfloat16 and is_aligned
