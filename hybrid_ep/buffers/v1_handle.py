"""`BufferHandle`: the handle of `Buffer.dispatch`, with the entries of DeepEP's handle.

Programs read entries by position, and save them all as tensors for a backward pass. So a handle can be unpacked, and
the tuple of its tensors is accepted in its place: what the engine keeps of the dispatch hangs on one of them.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybrid_ep.buffers.arguments import check_grid
from hybrid_ep.checks import require
from hybrid_ep.core.event import EventHandle
from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.engine.base import Engine
from hybrid_ep.engine.calls import DispatchHandle, OfThisProcess, PermuteHandle, Rows
from hybrid_ep.errors import ClosedError

if TYPE_CHECKING:
    from hybrid_ep.buffers.base import BaseBuffer

_WORDS = 4  # 16 bytes, the least that every engine moves, and multiples of it
_MAX_BITS = 32
_KEPT = "_hybrid_ep_dispatch"  # attribute of the tensor on which the engine's handle hangs


class BufferHandle(OfThisProcess):
    """The handle of a dispatch, for `Buffer.combine` and for a dispatch along it. It can be copied and not pickled.

    As a sequence it has the entries of DeepEP's handle. In one domain these are 6 tensors:

    - ``[0]`` rank_prefix_matrix ``[R, R]`` int32: ``m[i][j]`` = rows that ranks 0…i send to rank j.
    - ``[3]`` recv_src_idx ``[N]`` int32: the source token of each received row.
    - ``[4]`` is_token_in_rank ``[T, R]`` bool, as it was passed.

    Between domains they are 10:

    - ``[0]`` is_token_in_rank.
    - ``[6]`` recv_gbl_rank_prefix_sum ``[R]`` int32: running sum of the received rows by source rank.
    - ``[7]`` recv_src_meta ``[N, 8]`` uint8: of each received row two int32, its source domain, and a bit for each of
      the first 32 ranks of this domain that have received the token.

    Rows after the last that arrived are −1 in both. The other entries are empty: engines here have no channels.

    ``[3]`` or ``[7]`` travels when it is first read, or when the handle is unpacked. So that is collective: every rank
    does it, in the same order among its calls. The tuple of all entries is accepted in place of the handle if they are
    the same tensor objects, as `save_for_backward` returns them.

    Attributes:
        num_tokens: T.
        num_recv: N, or the bound that was given.
        num_experts: E.
        num_topk: K.
        dispatch: the engine's handle.

    Example:
        >>> x, topk_idx = torch.ones(2, 128, dtype=torch.bfloat16), torch.tensor([[0, 1], [-1, -1]])
        >>> with hybrid_ep.Buffer(None) as buffer:
        ...     per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts=4)
        ...     recv_x, _, _, _, handle, _ = buffer.dispatch(
        ...         x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
        ...         topk_idx=topk_idx)
        ...     saved = tuple(handle)
        ...     combined_x = buffer.combine(recv_x, saved)[0]
        >>> len(saved), handle[3].tolist(), combined_x[:, 0].tolist()
        (6, [0], [1.0, 0.0])
    """

    __slots__ = ("_buffer", "_event", "_in_rank", "_source", "dispatch")

    def __init__(
        self, buffer: BaseBuffer, dispatch: DispatchHandle, is_token_in_rank: Tensor, event: EventHandle | None
    ) -> None:
        self.dispatch, self._in_rank, self._event = dispatch, is_token_in_rank, event
        self._buffer = weakref.ref(buffer)
        self._source: Tensor | None = None

    def __copy__(self) -> BufferHandle:
        return self  # nothing in it changes

    def __deepcopy__(self, memo: dict[int, Any]) -> BufferHandle:
        copied = object.__new__(BufferHandle)
        copied.dispatch, copied._in_rank = copy.deepcopy(self.dispatch, memo), copy.deepcopy(self._in_rank, memo)
        copied._buffer, copied._event, copied._source = self._buffer, self._event, None
        return copied

    @property
    def num_tokens(self) -> int:
        return self.dispatch.num_tokens

    @property
    def num_recv(self) -> int:
        return self.dispatch.num_recv

    @property
    def num_experts(self) -> int:
        return self.dispatch.num_experts

    @property
    def num_topk(self) -> int:
        return self.dispatch.num_topk

    def __len__(self) -> int:
        return 6 if self.dispatch.grid.num_domains == 1 else 10

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, idx: Any) -> Any:
        if isinstance(idx, slice):
            return tuple(self[i] for i in range(*idx.indices(len(self))))
        if not -len(self) <= idx < len(self):
            raise IndexError(f"index of a handle is {idx}; allowed: −{len(self)} … {len(self) - 1}")
        is_one, i = len(self) == 6, idx % len(self)
        if i == (4 if is_one else 0):
            return self._in_rank
        if i == (3 if is_one else 7):
            if self._source is None:
                self._source = self._sources()
                setattr(self._source, _KEPT, self.dispatch)
            return self._source
        self._wait()
        if is_one and i == 0:
            return self.dispatch.rank_prefix_matrix
        if not is_one and i == 6:
            return self._engine.rows_by_source(self.dispatch)
        return torch.empty(0, dtype=torch.int32, device=self._in_rank.device)

    @property
    def _engine(self) -> Engine:
        buffer = self._buffer()
        if buffer is None:
            raise ClosedError(
                "an entry of a handle was read after its buffer was dropped; allowed: while the buffer is referenced"
            )
        return buffer.engine

    def _wait(self) -> None:
        """Makes the current stream wait for the dispatch."""
        if self._event is not None:
            self._event.current_stream_wait()

    def _sources(self) -> Tensor:
        """Entry [3] or [7]. Collective."""
        engine, dispatch, in_rank, grid = self._engine, self.dispatch, self._in_rank, self.dispatch.grid
        self._wait()
        device = in_rank.device
        words = torch.arange(dispatch.num_tokens, dtype=torch.int32, device=device).unsqueeze(1)
        if grid.num_domains > 1:
            goes = in_rank.view(-1, grid.num_domains, grid.num_ranks_per_domain)[:, :, :_MAX_BITS]
            bits = (goes.long() << torch.arange(goes.shape[2], device=device)).sum(2).to(torch.int32)
            source = torch.full_like(words, grid.domain.start // grid.num_ranks_per_domain)
            words = torch.cat([source, bits], 1)
        arrived = send_words(engine, dispatch, words)
        is_row = torch.arange(len(arrived), device=device) < engine.rows_by_source(dispatch)[-1]
        if grid.num_domains == 1:
            return torch.where(is_row, arrived[:, 0], -1)
        own = grid.domain.start // grid.num_ranks_per_domain
        meta = torch.where(is_row.unsqueeze(1), arrived[:, [0, 1 + own]], -1)
        return meta.view(torch.uint8)


def dispatch_of(grid: RankGrid, handle: BufferHandle | Sequence[Tensor]) -> DispatchHandle:
    """Checks a handle, or the tensors of one; returns the engine's.

    Raises:
        ConfigError: it is neither, or of a buffer of other ranks.
    """
    if type(handle) is BufferHandle:
        found = handle.dispatch
    else:
        kept = [getattr(one, _KEPT, None) for one in handle] if isinstance(handle, (tuple, list)) else []
        dispatches = [one for one in kept if isinstance(one, DispatchHandle)]
        is_tuple = isinstance(handle, (tuple, list)) and all(isinstance(one, Tensor) for one in handle)
        what = f"{len(handle)} tensors of no dispatch, or copies" if is_tuple else type(handle).__name__
        require(len(dispatches) == 1, "handle", what, "a handle that dispatch returned, or all tensors of it")
        found = dispatches[0]
    if found.grid is not grid:
        check_grid(grid, found.grid)
    return found


def send_words(engine: Engine, handle: DispatchHandle | PermuteHandle, words: Tensor) -> Tensor:
    """Sends ``[T, W]`` int32 along the route of a handle; returns ``[N, W]``. Collective."""
    num_words = words.shape[1]
    padded = torch.nn.functional.pad(words, (0, -num_words % _WORDS)).view(torch.bfloat16)
    received = engine.dispatch(engine.request_along(Rows(padded), handle)).rows
    return received.data.view(torch.int32)[:, :num_words]
