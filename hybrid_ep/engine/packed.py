"""The layout of a low-latency dispatch's output: rows by local expert, scales in the order that matrix units load."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_ep.checks import CHANNELS_PER_SCALE
from hybrid_ep.engine.calls import Rows
from hybrid_ep.quantize import CHANNELS_PER_BLOCK, SCALES_PER_WORD, Nvfp4Format, RowFormat

_ROWS_PER_TILE, _LANES_PER_TILE = 128, 32


class PackedLayout(NamedTuple):
    """Shapes and strides of packed rows and of their scales; C = M×R rows of an expert.

    Attributes:
        rows, row_strides, row_type: ``[LE, C, H]``, row-major; of NVFP4 ``[LE, C, H/2]``.
        scales, scale_strides, scale_type: ``[LE, C, W]``, column-major. Of NVFP4 ``[LE, ceil(C/128), W, 32, 4, 4]``:
            row r of a tile of 128 rows and four blocks is at ``[r % 32, r // 32]``. None of bf16.
    """

    rows: tuple[int, int, int]
    row_strides: tuple[int, int, int]
    row_type: torch.dtype
    scales: tuple[int, ...] | None = None
    scale_strides: tuple[int, ...] = ()
    scale_type: torch.dtype = torch.float32

    @classmethod
    def of(cls, num_local: int, capacity: int, hidden: int, fmt: RowFormat | None) -> PackedLayout:
        width = hidden // 2 if isinstance(fmt, Nvfp4Format) else hidden  # of a row, in elements
        rows, strides = (num_local, capacity, width), (capacity * width, width, 1)
        if fmt is None:
            return cls(rows, strides, torch.bfloat16)
        if isinstance(fmt, Nvfp4Format):
            tiles, words = -(-capacity // _ROWS_PER_TILE), hidden // CHANNELS_PER_BLOCK // SCALES_PER_WORD
            scales = num_local, tiles, words, _LANES_PER_TILE, _ROWS_PER_TILE // _LANES_PER_TILE, SCALES_PER_WORD
            scale_strides = tuple(torch.empty(scales, device="meta").stride())
            scale_type = torch.int8 if fmt.ue8m0 else torch.float8_e4m3fn
            return cls(rows, strides, torch.uint8, scales, scale_strides, scale_type)
        words = hidden // CHANNELS_PER_SCALE
        if fmt.ue8m0:
            words = -(-words // SCALES_PER_WORD)
        return cls(
            rows,
            strides,
            torch.float8_e4m3fn,
            (num_local, capacity, words),
            (words * capacity, 1, capacity),
            torch.int32 if fmt.ue8m0 else torch.float32,
        )

    def empty(self, device: torch.device) -> Rows:
        """Uninitialised rows."""
        # One operator for both: after a barrier, caches of the host are cold, but for the second call of an operator.
        rows = torch.empty_strided(self.rows, self.row_strides, dtype=self.row_type, device=device)
        if self.scales is None:
            return Rows(rows)
        return Rows(rows, torch.empty_strided(self.scales, self.scale_strides, dtype=self.scale_type, device=device))

    def store_scales(self, scales: Tensor, expert: Tensor, row: Tensor, values: Tensor) -> None:
        """Writes scales, `values` ``[n, W]`` of 4 bytes, of rows ``[n]`` of experts ``[n]``."""
        if len(scales.shape) == 3:
            scales[expert, row] = values.view(scales.dtype)
            return
        tile, in_tile = row // _ROWS_PER_TILE, row % _ROWS_PER_TILE
        words = scales.view(torch.int32).squeeze(-1)
        words[expert, tile, :, in_tile % _LANES_PER_TILE, in_tile // _LANES_PER_TILE] = values.view(torch.int32)
