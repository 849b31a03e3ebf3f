"""What the cuda engine keeps of a dispatch, and how tensors become what kernels take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_ep import _cuda

__all__ = ["PermuteState", "Route", "RouteMemory", "Sent", "address", "aligned"]

_INT_BYTES = 4
_CHUNK_INTS = 1 << 20  # some ten routes of 4096 tokens


class Route(NamedTuple):
    """What the cuda engine keeps in a DispatchHandle.

    Attributes:
        chunk: int32; the memory that the route is a piece of.
        address: of the piece; csrc/layout/route_layout.h tells what stands in it.
        num_recv: rows of the result: what arrived, or the bound.
        max_recv: most rows of the result at any rank; what the slots of a cached dispatch must hold.
        max_sent: most rows that any rank sends; what the slots of a combine must hold.
        num_sent_away: rows that this rank sends to others; 0 where the host did not learn it.
        num_from_away: rows that others send to this rank; likewise.
    """

    chunk: Tensor
    address: int
    num_recv: int
    max_recv: int
    max_sent: int
    num_sent_away: int
    num_from_away: int

    def tensor(self, offset: int, *shape: int) -> Tensor:
        """Returns the int32 that stand at an offset. It keeps the chunk, and is made faster than a view of it."""
        capsule = _cuda.int32_capsule(self.chunk, self.address + _INT_BYTES * offset, shape, self.chunk.get_device())
        tensor: Tensor = torch._C._from_dlpack(capsule)
        return tensor


class RouteMemory:
    """Cuts the memory of routes from chunks, for an allocation costs the host more than all the rest of a route.

    A chunk is torch's and belongs to the stream that it was made on. It lives as long as a route in it.

    Args:
        device: this rank's GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._chunks: dict[int, _Chunk] = {}

    def take(self, num_ints: int, stream: int) -> tuple[Tensor, int]:
        """Returns a chunk and the address of a piece of it, for use on the current stream."""
        num_bytes = _INT_BYTES * num_ints
        chunk = self._chunks.get(stream)
        if chunk is None or chunk.next + num_bytes > chunk.end:
            memory, begin = self.take_alone(max(num_ints, _CHUNK_INTS))
            chunk = self._chunks[stream] = _Chunk(memory, begin, begin + memory.nbytes)
        begin = chunk.next
        chunk.next += num_bytes
        return chunk.memory, begin

    def take_alone(self, num_ints: int) -> tuple[Tensor, int]:
        """Likewise, but memory of its own: what a captured graph uses, nothing else may."""
        memory = torch.empty(num_ints, dtype=torch.int32, device=self._device)
        return memory, memory.data_ptr()


@dataclass
class _Chunk:
    """Memory of one stream, and the addresses where its next piece begins and where it ends."""

    memory: Tensor
    next: int
    end: int


class PermuteState(NamedTuple):
    """What the cuda engine keeps in a PermuteHandle.

    Attributes:
        places: ``[N, K]`` int32; row of each copy of a received row, or −1.
        counts_at: where the counts with pads and without stand in the route's memory.
        waited: whether the host waited for the counts, so that there is no overflow.
    """

    places: Tensor
    counts_at: int
    waited: bool


class Sent(NamedTuple):
    """A dispatch that is on its way.

    Attributes:
        plan: of the call.
        slot_idx: where its rows land.
        route: which it makes.
        num_rows: of the result.
        reported: ``[LE]`` int32 on the host; None where the host did not wait for them.
    """

    plan: _cuda.DispatchPlan
    slot_idx: int
    route: Route
    num_rows: int
    reported: Tensor | None


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, moved where it does not begin as the copy engine needs it."""
    return tensor.clone() if tensor.data_ptr() % _cuda.row_align_bytes else tensor


def address(tensor: Tensor | None) -> int:
    """The address that a kernel takes; 0 for no tensor, and for one without elements."""
    return 0 if tensor is None else tensor.data_ptr()
