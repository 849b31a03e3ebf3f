"""The symmetric memory of low-latency calls of the cuda engine."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_ep import _cuda
from hybrid_ep.agree.board import Board, StoreLostError
from hybrid_ep.engine.cuda.symmetric import SymmetricMemory


@dataclass(frozen=True)
class Region:
    """Symmetric memory, and the calls of so many ranks that go through it. `number` is equal at all ranks."""

    memory: SymmetricMemory
    capacity: _cuda.LowLatencyCapacity
    native: _cuda.LowLatencyRegion
    num_ranks: int
    number: int

    @property
    def masks(self) -> Tensor:
        """``[R]`` int32, 1 = the kernels leave the rank out."""
        begin = _cuda.low_latency_masks_offset
        end = begin + self.num_ranks * torch.int32.itemsize
        return self.memory.local[begin:end].view(torch.int32)

    def awaits(self, peer: int) -> bool:
        """Whether this rank has sent a call here that the peer has not. Waits for the device."""
        size, offsets = _cuda.low_latency_channel_bytes, _cuda.low_latency_channel_offsets
        words = self.memory.local[: 2 * _cuda.low_latency_buffers * size].cpu().view(torch.int32).view(-1, size // 4)
        sent = words[:, offsets["send"] // 4]
        told = [words[:, offsets[name] // 4 + 4 * peer] for name in ("begun", "sent")]
        num_dispatches = _cuda.low_latency_buffers
        theirs = torch.cat([told[0][:num_dispatches], told[1][num_dispatches:]])
        return bool((sent - theirs > 0).any())  # numbers of calls wrap, as their differences do


class RegionsInUse:
    """Notes in the store: the region in which a rank has waited in vain for another one.

    A CUDA graph keeps the region of its capture. Ranks that use different regions wait for each other in vain.

    Args:
        board: of the calls since the ranks last met; None without a group.
        rank: this rank.
    """

    def __init__(self, board: Board | None, rank: int) -> None:
        self._board, self._rank = board, rank

    def tell(self, regions: Sequence[Region], peer: int) -> int | None:
        """Writes and returns the number of the region in which this rank has lost a peer; None if all use one."""
        if self._board is None or len(regions) < 2:
            return None
        number = next((region.number for region in regions if region.awaits(peer)), None)
        if number is not None:
            with contextlib.suppress(StoreLostError):
                self._board.write(f"region of {self._rank}", str(number))
        return number

    def of(self, peer: int) -> int | None:
        """Returns the number that a peer has written; None: it has written none."""
        note = None
        if self._board is not None:
            with contextlib.suppress(StoreLostError):
                note = self._board.read(f"region of {peer}")
        return None if note is None else int(note)


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
