"""The symmetric memory of low-latency calls of the cuda engine, and which of its buffers are in use."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybrid_ep import _cuda
from hybrid_ep.engine.symmetric import SymmetricMemory
from hybrid_ep.errors import ConfigError

__all__ = ["Buffers", "Region", "set_last_call"]


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


@dataclass
class Buffers:
    """Which buffers of one kind are in use: sent into and not yet received from."""

    next_idx: int = 0
    in_flight: list[bool] = field(default_factory=lambda: [False] * _cuda.low_latency_buffers)

    @property
    def are_in_flight(self) -> bool:
        """Whether no call can be sent."""
        return self.in_flight[self.next_idx]

    def next(self, what: str) -> int:
        """The buffer that the next call sends into."""
        if self.are_in_flight:
            most = len(self.in_flight)
            raise ConfigError(f"{what} calls whose hook has not been called are {most + 1}; allowed: at most {most}")
        return self.next_idx

    def note_sent(self) -> None:
        """Only once the launch has succeeded: the numbers of calls on the device count launches."""
        self.in_flight[self.next_idx] = True
        self.next_idx = (self.next_idx + 1) % len(self.in_flight)

    def note_received(self, idx: int) -> None:
        self.in_flight[idx] = False


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
