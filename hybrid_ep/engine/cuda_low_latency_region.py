"""The symmetric memory of low-latency calls of the cuda engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_ep import _cuda
from hybrid_ep.engine.symmetric import SymmetricMemory

__all__ = ["Region", "set_last_call"]


@dataclass(frozen=True)
class Region:
    """Symmetric memory, and the calls of so many ranks that go through it."""

    memory: SymmetricMemory
    capacity: _cuda.LowLatencyCapacity
    native: _cuda.LowLatencyRegion
    num_ranks: int

    @property
    def masks(self) -> Tensor:
        """``[R]`` int32, 1 = the kernels leave the rank out."""
        begin = _cuda.low_latency_masks_offset
        end = begin + self.num_ranks * torch.int32.itemsize
        return self.memory.local[begin:end].view(torch.int32)


def set_last_call(memory: Tensor, number: int) -> None:
    """Writes a number of calls (1 … 2³² − 1) to all that counts calls in a region, as if that call were the last.

    Flags that are compared for equality may stay as they are.

    Args:
        memory: the region of this rank, ``[n]`` uint8.
        number: of the call.
    """
    size, offsets = _cuda.low_latency_channel_bytes, _cuda.low_latency_channel_offsets
    number -= (number >> 31) << 32  # as int32
    for channel in range(2 * _cuda.low_latency_buffers):
        words = memory[channel * size : (channel + 1) * size].view(torch.int32)
        for name, stride in (("begun", 4), ("sent", 4), ("weights_epoch", 1), ("free_epoch", 1)):
            begin = offsets[name] // torch.int32.itemsize
            words[begin : begin + stride * _cuda.max_ranks : stride] = number
        for name in ("send", "receive"):
            words[offsets[name] // torch.int32.itemsize] = number
