"""`EPHandle`: the handle of a dispatch of `ElasticBuffer` or `EPBuffer`, with DeepEP's attributes.

Counts are computed when a stream first reads them, from what the dispatch has written. Attributes that only DeepEP's
own programs read are computed when they are first read, too.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hybrid_ep.buffers.hybrid_handles import rows_of_copies
from hybrid_ep.buffers.v1_handle import send_words
from hybrid_ep.core.streams import current_raw_stream, is_capturing
from hybrid_ep.engine.base import Engine
from hybrid_ep.engine.calls import DispatchHandle, OfThisProcess, PermuteHandle
from hybrid_ep.errors import ClosedError, ConfigError

if TYPE_CHECKING:
    from hybrid_ep.buffers.base import BaseBuffer


class Counts(NamedTuple):
    """What arrived, as `EPHandle` explains it.

    Attributes:
        per_scaleup_rank: `psum_num_recv_tokens_per_scaleup_rank`.
        expert_ends: `psum_num_recv_tokens_per_expert`.
        per_expert: `num_unaligned_recv_tokens_per_expert`.
    """

    per_scaleup_rank: Tensor
    expert_ends: Tensor
    per_expert: Tensor

    @classmethod
    def of(
        cls, engine: type[Engine], dispatch: DispatchHandle, num_scaleout_ranks: int, alignment: int, do_expand: bool
    ) -> Counts:
        """Counts of a dispatch, on the current stream.

        Args:
            engine: the class of the engine that has made it. The engine itself may be closed by now.
            dispatch: its handle.
            num_scaleout_ranks: logical domains.
            alignment: counts are rounded up to multiples of it.
            do_expand: whether rows are by expert.
        """
        per_scaleup_rank, per_expert = engine.rows_by_source(dispatch), engine.tokens_per_expert(dispatch)
        if num_scaleout_ranks > 1:
            own = per_scaleup_rank.diff(prepend=torch.zeros_like(per_scaleup_rank[:1]))
            per_scaleup_rank = own.view(num_scaleout_ranks, -1).sum(0).cumsum(0, dtype=torch.int32)
        aligned = per_expert if alignment == 1 else (per_expert + (alignment - 1)) // alignment * alignment
        ends = aligned.cumsum(0, dtype=torch.int32)
        if do_expand and alignment > 1:
            ends = ends - (aligned - per_expert)
        return cls(per_scaleup_rank, ends, per_expert)


class EPHandle(OfThisProcess):
    """The handle of a dispatch, for `combine` and for a cached `dispatch`.

    There is one received row for each token and rank; with `do_expand`, one for each token and local expert.

    Attributes:
        do_expand: whether rows are sorted by expert.
        num_experts: E.
        expert_alignment: counts of experts are rounded up to multiples of it; with `do_expand`, blocks of rows too.
        num_max_tokens_per_rank: M.
        num_sms: SMs of the dispatch.
        topk_idx: ``[T, K]`` int64; this rank's routing.
        num_recv_tokens: N: rows that arrived, before they were copied for each expert; without a host sync the bound
            M × R.
        num_expanded_tokens: P: rows by expert with padding; without a host sync their bound; 0 without `do_expand`.
        num_recv_tokens_per_expert_list: of each local expert, rounded up; empty without a host sync.
        psum_num_recv_tokens_per_scaleup_rank: ``[scale-up ranks]`` int32; running sum of the rows that came by each
            rank of the logical domain. The last is what arrived.
        psum_num_recv_tokens_per_expert: ``[LE]`` int32; running sum of the rounded counts. With `do_expand`: where the
            expert's block begins, plus its exact count.
        num_unaligned_recv_tokens_per_expert: ``[LE]`` int32; exact counts.
        token_metadata_at_forward: None; nothing here needs it.
        channel_linked_list: None; nothing here needs it.

    Example:
        >>> x, topk_idx = torch.ones(2, 128, dtype=torch.bfloat16), torch.tensor([[0, 1], [1, -1]])
        >>> with hybrid_ep.ElasticBuffer(None, num_max_tokens_per_rank=4) as buffer:
        ...     handle = buffer.dispatch(x, topk_idx, num_experts=2)[3]
        ...     again = buffer.dispatch(2 * x, handle=handle)[0]
        >>> handle.num_recv_tokens, handle.num_recv_tokens_per_expert_list, again[:, 0].tolist()
        (2, [1, 2], [2.0, 2.0])
    """

    token_metadata_at_forward: None = None
    channel_linked_list: None = None

    def __init__(
        self,
        *,
        buffer: BaseBuffer,
        expert_alignment: int,
        num_max_tokens_per_rank: int,
        asked_num_sms: int | None,
        topk_idx: Tensor,
        num_recv_tokens: int,
        num_recv_tokens_per_expert_list: list[int],
        counts: Callable[[], Counts],
        dispatch: DispatchHandle,
        permute: PermuteHandle | None,
        recv_topk_idx: Tensor | None,
    ) -> None:
        self.do_expand = permute is not None
        self.num_experts = dispatch.num_experts
        self.expert_alignment = expert_alignment
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_sms = asked_num_sms or buffer.engine.default_num_sms
        self.topk_idx = topk_idx
        self.num_recv_tokens = num_recv_tokens
        self.num_expanded_tokens = 0 if permute is None else permute.num_permuted
        self.num_recv_tokens_per_expert_list = num_recv_tokens_per_expert_list
        # Used by the buffer alone.
        self._counts = counts
        self._counts_of_streams: dict[int | None, Counts] = {}
        self.asked_num_sms = asked_num_sms
        self.dispatch, self.permute = dispatch, permute
        self.grid, self.num_tokens, self.num_topk = dispatch.grid, dispatch.num_tokens, dispatch.num_topk
        self.num_rows = dispatch.num_recv if permute is None else permute.num_permuted
        self.recv_topk_idx = recv_topk_idx
        self._version = self._version_now()
        self._buffer = weakref.ref(buffer)

    def __deepcopy__(self, memo: dict[int, Any]) -> EPHandle:
        copied: EPHandle = super().__deepcopy__(memo)
        if self._version == self._version_now():  # the version counter of a copy begins again
            copied._version = copied._version_now()
        return copied

    @property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> Tensor:
        return self._found_counts.per_scaleup_rank

    @property
    def psum_num_recv_tokens_per_expert(self) -> Tensor:
        return self._found_counts.expert_ends

    @property
    def num_unaligned_recv_tokens_per_expert(self) -> Tensor:
        return self._found_counts.per_expert

    @property
    def _found_counts(self) -> Counts:
        device = self.topk_idx.device.index
        # Of each stream, for nothing orders one stream after what another has computed.
        stream = None if device is None else current_raw_stream(device)
        found = self._counts_of_streams.get(stream)
        if found is None:
            found = self._counts()
            if device is None or not is_capturing(device):  # a graph computes its own again at each replay
                self._counts_of_streams[stream] = found
        return found

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors that were made with it."""
        return self.topk_idx, self.recv_topk_idx

    def _version_now(self) -> int | None:
        return None if self.topk_idx.is_inference() else self.topk_idx._version

    def require_unchanged(self) -> None:
        """Checks that `topk_idx` still says where the dispatch went; torch sees no write through a raw pointer.

        Raises:
            ConfigError: it was written to.
        """
        if self._version is not None and self._version != self.topk_idx._version:
            raise ConfigError("topk_idx was written to since the dispatch; allowed: do_handle_copy=True, or no writes")

    @functools.cached_property
    def recv_src_metadata(self) -> Tensor:
        """``[N, K + 2]`` int32: the source token of each received row, as source rank × M + token; the row; and with
        `do_expand` the row by expert of each column of its top-k, −1 where there is none.

        Rows after the last that arrived are −1. Collective when it is first read: every rank of the group reads it, in
        the same order among its calls, and the source tokens travel.

        Raises:
            ClosedError: the buffer is closed.
        """
        buffer = self._buffer()
        if buffer is None:
            raise ClosedError(
                "recv_src_metadata was read after its buffer was dropped; allowed: while the buffer is referenced"
            )
        engine, dispatch = buffer.engine, self.dispatch
        device = self.psum_num_recv_tokens_per_expert.device
        num_topk = dispatch.num_topk
        metadata = torch.full((self.num_recv_tokens, num_topk + 2), -1, dtype=torch.int32, device=device)
        dst_rows = None if self.permute is None else rows_of_copies(self.permute)[: self.num_recv_tokens]
        first = dispatch.grid.rank * self.num_max_tokens_per_rank
        source = self._send_index(engine, first, dst_rows)
        num_rows = source.shape[0]  # of a bounded call on the torch engine, what arrived
        rows = torch.arange(num_rows, dtype=torch.int32, device=device)
        arrived = rows < self.psum_num_recv_tokens_per_scaleup_rank[-1]
        metadata[:num_rows, 0] = torch.where(arrived, source, -1)
        metadata[:num_rows, 1] = torch.where(arrived, rows, -1)
        if dst_rows is not None:
            metadata[:num_rows, 2:] = dst_rows
        return metadata

    def _send_index(self, engine: Engine, first: int, dst_rows: Tensor | None) -> Tensor:
        """Sends ``first + token`` along the route; returns what arrived for each row."""
        num_tokens, device = self.dispatch.num_tokens, self.topk_idx.device
        tokens = torch.arange(first, first + num_tokens, dtype=torch.int32, device=device)
        index = send_words(engine, self.permute or self.dispatch, tokens.unsqueeze(1))[:, 0]
        if dst_rows is None or index.numel() == 0:
            return index
        return index[dst_rows.amax(1).clamp_min(0).long()]

    @functools.cached_property
    def dst_buffer_slot_idx(self) -> Tensor:
        """``[T, K]`` int32; the row of each token at the expert's rank without `do_expand`; −1 where
        there is no expert.

        Raises:
            ConfigError: there are more ranks than can know it.
        """
        dispatch, grid = self.dispatch, self.dispatch.grid
        if dispatch.rank_prefix_matrix.numel() == 0:
            raise ConfigError(f"dst_buffer_slot_idx is read with {grid.num_ranks} ranks; allowed: at most 256")
        num_local = dispatch.num_experts // grid.num_ranks
        owner = self.topk_idx.div(num_local, rounding_mode="floor")
        ranks = torch.arange(grid.num_ranks, device=owner.device)
        goes = (owner.unsqueeze(2) == ranks).any(1)
        begin = dispatch.rank_prefix_matrix[grid.rank - 1] if grid.rank else torch.zeros_like(ranks)
        rows = begin + goes.cumsum(0) - 1
        return torch.where(self.topk_idx >= 0, rows.gather(1, owner.clamp_min(0)), -1).to(torch.int32)
