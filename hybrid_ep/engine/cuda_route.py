"""What the cuda engine keeps of a dispatch, and how tensors become what kernels take."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from hybrid_ep import _cuda
from hybrid_ep.engine.arena import Landing
from hybrid_ep.errors import ConfigError

__all__ = ["PermuteState", "Route", "Sent", "address", "aligned", "row_bytes_of"]


class Route(NamedTuple):
    """What the cuda engine keeps in a DispatchHandle.

    Attributes:
        memory: int32; send_slot ``[T, R]``, send_list ``[R, T]`` and, expert-major, dst_row ``[T, R]``, in this order.
        num_recv: rows of the result: what arrived, or the bound.
        max_recv: most rows of the result at any rank; what the slots of a cached dispatch must hold.
        max_sent: most rows that any rank sends; what the slots of a combine must hold.
        num_sent_away: rows that this rank sends to others; 0 where the host did not learn it.
        num_from_away: rows that others send to this rank; likewise.
    """

    memory: Tensor
    num_recv: int
    max_recv: int
    max_sent: int
    num_sent_away: int
    num_from_away: int


class PermuteState(NamedTuple):
    """What the cuda engine keeps in a PermuteHandle.

    Attributes:
        places: ``[N, K]`` int32; row of each copy of a received row, or −1.
        counts: ``[2, LE]`` int32; rows of each expert with pads, then without.
        waited: whether the host waited for the counts, so that there is no overflow.
    """

    places: Tensor
    counts: Tensor
    waited: bool


class Sent(NamedTuple):
    """A dispatch that is on its way."""

    landing: Landing
    parts: _cuda.SlotLayout
    route: Route
    num_rows: int  # of the result
    rank_prefix: Tensor
    counts: Tensor  # as PermuteState has them; a plain dispatch has only the first row
    reported: Tensor  # of the first row: on the host where the host waited for it
    overflow: Tensor | None


def row_bytes_of(data: Tensor) -> int:
    """Bytes of a row of ``[n, H]``.

    Raises:
        ConfigError: the copy engine cannot move such rows.
    """
    row_bytes = data.shape[1] * data.dtype.itemsize
    if row_bytes % _cuda.row_align_bytes or not 0 < row_bytes <= _cuda.max_row_bytes:
        raise ConfigError(
            f"a row of {data.shape[1]} × {data.dtype} has {row_bytes} bytes; allowed: multiples of "
            f"{_cuda.row_align_bytes} up to {_cuda.max_row_bytes}"
        )
    return row_bytes


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, moved where it does not begin as the copy engine needs it."""
    return tensor.clone() if tensor.data_ptr() % _cuda.row_align_bytes else tensor


def address(tensor: Tensor | None) -> int:
    """The address that a kernel takes; 0 for no tensor, and for one without elements."""
    return 0 if tensor is None else tensor.data_ptr()
