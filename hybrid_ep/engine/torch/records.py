"""Rows as bytes: the columns of a token that travel together are packed into one record per row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RecordFormat:
    """The columns of a record, in order: (dtype, elements per row) each."""

    columns: tuple[tuple[torch.dtype, int], ...]

    @classmethod
    def of(cls, tensors: list[Tensor]) -> RecordFormat:
        """The format of ``[n, width]`` tensors side by side."""
        return cls(tuple((tensor.dtype, tensor.shape[1]) for tensor in tensors))

    @property
    def num_bytes(self) -> int:
        """Bytes of one record."""
        return sum(dtype.itemsize * width for dtype, width in self.columns)

    def pack(self, tensors: list[Tensor]) -> Tensor:
        """``[n, width]`` tensors → ``[n, bytes]`` uint8."""
        num_rows = tensors[0].shape[0]
        parts = [
            tensor.reshape(-1).view(torch.uint8).view(num_rows, width * dtype.itemsize)
            for tensor, (dtype, width) in zip(tensors, self.columns, strict=True)
        ]
        return torch.cat(parts, 1)

    def unpack(self, records: Tensor) -> list[Tensor]:
        """``[n, bytes]`` uint8 → the ``[n, width]`` tensors, contiguous."""
        widths = [width * dtype.itemsize for dtype, width in self.columns]
        return [
            part.reshape(-1).clone().view(dtype).view(records.shape[0], width)
            for part, (dtype, width) in zip(records.split(widths, 1), self.columns, strict=True)
        ]
