"""The memory of what the cuda engine keeps of a dispatch, and the conversion of tensors to arguments of kernels."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_ep import _cuda
from hybrid_ep.core.streams import current_raw_stream
from hybrid_ep.engine.calls import Rows

_INT_BYTES = 4
_ROW_ALIGN_BYTES = _cuda.row_align_bytes


@dataclass
class PermuteState:
    """The state of the cuda engine in a PermuteHandle.

    Attributes:
        chunk: the memory that this is a piece of.
        address: of ``[N, K]`` int32, the row of each copy of a received row, or −1; then of ``[N]`` uint32, the combine
            that has last summed the copies.
        communicator: whose combine that was.
    """

    chunk: Chunk
    address: int
    communicator: _cuda.Communicator

    def __deepcopy__(self, memo: dict[int, object]) -> PermuteState:
        return self  # as Chunk

    def rows_of_copies(self, num_recv: int, num_topk: int) -> Tensor:
        """``[N, K]`` int32, as the kernel wrote it; rows that did not arrive are undefined. On the current stream."""
        return self.chunk.ints(self.address, 0, num_recv * num_topk).view(num_recv, num_topk)

    def begin_combine(self, communicator: _cuda.Communicator, num_recv: int, num_topk: int, stream: int) -> None:
        """Must be called before a combine on `stream`, the current one: each communicator numbers its own."""
        self.chunk.note_use(stream)
        if communicator is self.communicator:
            return
        begin = self.address - self.chunk.memory.data_ptr() + _INT_BYTES * num_recv * num_topk
        self.chunk.memory[begin : begin + _INT_BYTES * num_recv].zero_()
        self.communicator = communicator


class Chunk:
    """Memory that pieces are cut from. It lives as long as somebody holds it, and belongs to the stream it was made on.

    Attributes:
        memory: ``[n]`` uint8.

    Args:
        device: this rank's GPU.
        num_bytes: of the memory.
        stream: the current one.
    """

    def __init__(self, device: torch.device, num_bytes: int, stream: int) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._streams = {stream}

    def __deepcopy__(self, memo: dict[int, object]) -> Chunk:
        return self  # what handles have of it are addresses

    def ints(self, address: int, offset: int, size: int) -> Tensor:
        """Returns so many int32 of a piece, `offset` int32 from its begin, as a tensor for the current stream."""
        self.note_use(current_raw_stream(self.memory.device.index))
        begin = address - self.memory.data_ptr() + _INT_BYTES * offset
        return self.memory[begin : begin + _INT_BYTES * size].view(torch.int32)

    def note_use(self, stream: int) -> None:
        """Must be called if `stream`, the current one, uses a piece: torch keeps the memory until that use ends."""
        if stream not in self._streams:
            self.memory.record_stream(torch.cuda.current_stream(self.memory.device))
            self._streams.add(stream)


def route_memory(device: torch.device) -> _cuda.RouteMemory:
    """Returns memory of a GPU that pieces are cut from."""
    return _cuda.RouteMemory(functools.partial(Chunk, device))


class HostCounts(NamedTuple):
    """The report of a dispatch kernel to a host that waits for its counts.

    Attributes:
        needs_capacity: no rank has sent, because the slots of some rank are too small.
        num_recv: rows that arrive here.
        num_permuted: rows of the result with a row for each copy, padding included; 0 where rows are by source.
        num_sent_away: rows that this rank sends to others of its domain.
        num_kept: rows that this rank sends to itself.
        max_recv: most rows that arrive at any rank.
        max_sent: most rows that any rank sends, and sums in a combine.
        max_rows: most rows that any rank's slot must hold.
        num_sent_between: tokens that this rank sends to other domains, once for each; 0 within a domain.
        max_held: most records of other domains that any rank forwards; 0 within a domain.
    """

    needs_capacity: bool
    num_recv: int
    num_permuted: int
    num_sent_away: int
    num_kept: int
    max_recv: int
    max_sent: int
    max_rows: int
    num_sent_between: int
    max_held: int


def aligned(tensor: Tensor) -> Tensor:
    """Returns the tensor, copied if it does not begin at a multiple of 16 bytes, as bulk copies need it."""
    return tensor.clone() if tensor.data_ptr() % _ROW_ALIGN_BYTES else tensor


def aligned_rows(rows: Rows) -> Rows:
    """Returns rows and scales, each as `aligned` does."""
    data, scales = rows
    if not (data.data_ptr() | address(scales)) % _ROW_ALIGN_BYTES:
        return rows
    return Rows(aligned(data), None if scales is None else aligned(scales))


def address(tensor: Tensor | None) -> int:
    """The address that a kernel takes; 0 for no tensor, and for one without elements."""
    return 0 if tensor is None else tensor.data_ptr()
