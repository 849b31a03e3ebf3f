"""The low-latency calls of `Buffer`: decode-sized batches, packed by local expert, no host sync, rank masks.

recv_x, count, handle, event, hook = buffer.low_latency_dispatch(x, topk_idx, M, E, return_recv_hook=True)
hook()                                                              # the rows are there from here on
combined_x, event, hook = buffer.low_latency_combine(y, topk_idx, topk_weights, handle)
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybrid_ep.buffers.low_latency_arguments import LowLatencyArguments, nvfp4_as_returned, row_format, signals_of
from hybrid_ep.checks import MAX_INT, MAX_TOPK, require, require_bool, require_bools, require_int
from hybrid_ep.core.calls import plain_tensors
from hybrid_ep.core.checks import packed, require_tensor
from hybrid_ep.core.event import EventOverlap
from hybrid_ep.core.logfmt import CHANNELS_PER_HEADER
from hybrid_ep.engine.base import Engine
from hybrid_ep.engine.calls import (
    LowLatencyCombineRequest,
    LowLatencyDispatchRequest,
    LowLatencyHandle,
)
from hybrid_ep.errors import ConfigError, TransportError

if TYPE_CHECKING:
    Hook = Callable[[], None]

__all__ = ["LowLatencyCalls"]

_LOG = logging.getLogger(__name__)
_ALIGNMENT_BYTES = 128
_CONTROL_BYTES = 16 << 10
_KINDS = ("use_fp8", "round_scale", "use_ue8m0", "use_nvfp4", "use_ue8m0_for_sf")
_NUM_BUFFERS = 2  # two micro-batches overlap


class LowLatencyCalls(LowLatencyArguments):
    """Mixed into `Buffer`; needs `low_latency_mode=True`."""

    low_latency_mode: bool
    enable_shrink: bool
    _combine_buffer: tuple[LowLatencyHandle, Tensor] | None = None
    _num_cleanings: int = 0

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Returns bytes of buffer that suffice for low-latency calls of this size, an upper bound.

        It is the memory of the cuda engine with bf16 rows and top-k = min(E, 32), the largest there is, because the
        top-k is not among the arguments (source: docs/low_latency.md, "Memory").

        Args:
            num_max_dispatch_tokens_per_rank: M.
            hidden: H.
            num_ranks: R.
            num_experts: E, a multiple of R.

        Raises:
            ConfigError: a number is not an integer ≥ 1, or E is not a multiple of R.
        """
        tokens = require_int("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, minimum=1)
        require_int("hidden", hidden, minimum=1)
        require_int("num_ranks", num_ranks, minimum=1)
        require_int("num_experts", num_experts, minimum=1, multiple_of=num_ranks)
        num_topk = min(MAX_TOPK, num_experts)
        row_bytes, route_bytes = 2 * hidden, 16 * -(-num_topk // 8)
        routes_bytes, flags_bytes = _aligned(num_ranks * tokens * route_bytes), _aligned(num_ranks * tokens * 4)
        dispatch_bytes = routes_bytes + flags_bytes + num_ranks * tokens * _aligned(row_bytes)
        combine_bytes = _aligned(tokens * num_topk * row_bytes) + num_ranks * _aligned(tokens * num_topk * 4)
        return _CONTROL_BYTES + _NUM_BUFFERS * (dispatch_bytes + combine_bytes)

    @plain_tensors
    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        *,
        topk_weights: Tensor | None = None,
        x_global_scale: Tensor | None = None,
        use_nvfp4: bool = False,
        use_ue8m0_for_sf: bool = False,
    ) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor, LowLatencyHandle, EventOverlap, Hook | None]:
        """Sends each token to its experts' ranks, packed by local expert there. Collective, masked ranks excepted.

        The host does not wait with the cuda engine. The first call of a size maps memory, so all ranks make it. With a
        hook, the results are complete when the hook has run, and the arguments must not be written to before that.

        Args:
            x: ``[T, H]`` bf16, T ≤ M; H a multiple of 128 with FP8, of 64 with NVFP4.
            topk_idx: ``[T, K]`` int64, global expert index or −1. It must not be written to before the combine.
            num_max_dispatch_tokens_per_rank: M ≥ 1, the same on every rank. LE × M × R is at most 2³¹ − 1.
            num_experts: E, a multiple of the number of ranks.
            cumulative_local_expert_recv_stats: ``[LE]`` int32, contiguous; the rows that each expert receives are added
                to it.
            dispatch_wait_recv_cost_stats: ``[R]`` int64, contiguous; the microseconds of waiting for each rank are
                added to it.
            use_fp8: quantise to e4m3 with a scale for each 128 channels.
            round_scale: scales are powers of two. Without `use_fp8` it has no effect.
            use_ue8m0: scales are packed UE8M0 (needs `round_scale`). Without `use_fp8` it has no effect.
            async_finish: return before the current stream has waited for the result.
            return_recv_hook: only send; the returned hook receives, once. Not together with `async_finish`.
            topk_weights: ``[T, K]`` float32, accepted for compatibility: combine takes the weights.
            x_global_scale: one float32, the same on every rank, needed with `use_nvfp4`; as `quantize.global_scale_of`
                makes it. A larger one clips large values.
            use_nvfp4: quantise to NVFP4, whatever the arguments for FP8 say.
            use_ue8m0_for_sf: scales of blocks are UE8M0 and not e4m3. Without `use_nvfp4` it does nothing.

        Returns:
            packed_recv_x ``[LE, M×R, H]`` bf16, or (float8_e4m3fn, scales ``[LE, M×R, H/128]`` float32 or
            ``[LE, M×R, ceil(H/512)]`` int32, strided column-major), or NVFP4 (``[M×R, H/2, LE]`` uint8, scales ``[32,
            4, ceil(M×R/128), 4, H/64, LE]`` float8_e4m3fn or int8, both strided by expert; `quantize.block_scales_of`
            gives them in the order of rows); packed_recv_count ``[LE]`` int32; the handle
            (source token index ``[LE, M×R]`` int32, layout ``[LE, R]`` int64 of ``(begin << 32) | count``, …); the
            event; the hook (None unless asked for). Rows are sorted by source rank, token, then column: each column
            of `topk_idx` that names an expert is a row of it. Those after the count are undefined.

        Raises:
            ConfigError: an argument does not fit at this or at another rank, ranks differ, the buffer is not in
                low-latency mode, two earlier hooks have not been called yet, or a hook is called twice or after a
                cleaning of the buffer.
            OverflowError: tokens name an expert in several columns, and it has more than M×R rows; at every rank. The
                cuda engine raises it in the combine, or by `raise_pending` where the expert is.
            TimeoutError, TransportError: a rank was lost; with `enable_shrink` it is masked and the next call goes on
                without it. With ``lost_ranks="mask"`` that is not raised.

        Example:
            >>> x, topk_idx = torch.ones(2, 128, dtype=torch.bfloat16), torch.tensor([[0, 1], [1, 3]])
            >>> with hybrid_ep.Buffer(None, low_latency_mode=True) as buffer:
            ...     rows, counts, handle, _, receive = buffer.low_latency_dispatch(
            ...         x, topk_idx, num_max_dispatch_tokens_per_rank=8, num_experts=4, use_fp8=False,
            ...         return_recv_hook=True)
            ...     receive()
            >>> rows.shape, counts.tolist()
            (torch.Size([4, 8, 128]), [1, 2, 0, 1])
        """
        engine = self._low_latency_engine()
        max_tokens = num_max_dispatch_tokens_per_rank
        kinds = (use_fp8, round_scale, use_ue8m0, use_nvfp4, use_ue8m0_for_sf)
        stats, waits = cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats
        try:
            require_int("num_max_dispatch_tokens_per_rank", max_tokens, minimum=1)
            num_local = self._num_local_experts(num_experts)
            require_bools(_KINDS, kinds)
            most = MAX_INT // (num_local * self.group_size)
            if max_tokens > most:  # packed rows are counted in 32 bits
                require(False, "num_max_dispatch_tokens_per_rank", max_tokens, f"≤ {most} with {num_experts} experts")
            fmt = row_format(*kinds)
            self._check_dispatched(x, topk_idx, topk_weights, max_tokens, num_experts, fmt)
            self._check_global_scale(x_global_scale, use_nvfp4, x.device)
            self._check_stats(waits, "dispatch_wait_recv_cost_stats", torch.int64, self.group_size, x.device)
            self._check_stats(stats, "cumulative_local_expert_recv_stats", torch.int32, num_local, x.device)
            self._check_return(async_finish, return_recv_hook)
        except ConfigError as error:
            engine.refuse("low_latency_dispatch", error)
            raise

        with self._comm_stream.scope(None, async_finish):
            request = LowLatencyDispatchRequest(
                packed(x), packed(topk_idx), max_tokens, num_experts, fmt, x_global_scale, waits, return_recv_hook
            )
            rows, counts, handle, finish = engine.low_latency_dispatch(request)
            if stats is not None:
                finish = _then_add(finish, counts, stats)
            hook = None if finish is None else self._receive_or_return(finish, return_recv_hook)
        used = x, topk_idx, stats, waits, topk_weights, x_global_scale, *rows, handle.memory
        event = self._comm_stream.finish(None, async_finish, used)
        return _as_returned(rows, use_nvfp4), counts, handle, event, hook

    @plain_tensors
    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
        *,
        overlap: bool = False,
        src_signals: Tensor | None = None,
        src_signal_expect_value: int = 0,
        packed_recv_count: Tensor | None = None,
        comp_signal: Tensor | None = None,
        block_m: int = 64,
        threshold: int = 0,
        num_sms: int = 3,
    ) -> tuple[Tensor, EventOverlap, Hook | None]:
        """Brings the experts' rows back and sums them, weighted, in fp32. Collective, masked ranks excepted.

        The host does not wait with the cuda engine. With a hook, `out` is complete when the hook has run, and the
        arguments must not be written to before that.

        Args:
            x: ``[LE, M×R, H]`` bf16, placed as `low_latency_dispatch` placed its rows.
            topk_idx: ``[T, K]`` int64, as dispatched.
            topk_weights: ``[T, K]`` float32.
            handle: of the dispatch.
            use_logfmt: rows cross as LogFMT-10, ten bits a channel, which loses at most 2.18 % of a channel (the bound
                is in docs/low_latency.md). H a multiple of 128. The same on every rank. The torch engine computes what
                would arrive, and sends bf16.
            zero_copy: take the rows from `get_next_low_latency_combine_buffer(handle)` instead of `x`.
            async_finish: return before the current stream has waited for the result.
            return_recv_hook: only send; the returned hook receives, once. Not together with `async_finish`. Without
                it, the rows that this rank's experts have of one token are summed and rounded to bf16 before they
                cross, if the token's rank has 32 tokens or more and is in this domain; the send waits for that rank's
                weights.
            out: ``[T, H]`` bf16, contiguous, to write to; None = a new tensor.
            combine_wait_recv_cost_stats: ``[R]`` int64, contiguous; the microseconds of waiting for each rank are added
                to it.
            overlap: start while the experts still write `x`, on another stream. Rows of a block are sent once its
                signal has been raised, and none are summed before they cross. `x` must be contiguous. Without it, the
                arguments below have no effect. Signals count up and are not reset here: set them to zero before the
                experts begin, in a captured graph too.
            src_signals: ``[LE]`` uint32 or int32, a counter for each local expert: all its rows are written once it has
                reached `src_signal_expect_value`. With `overlap`: either this or `comp_signal`.
            src_signal_expect_value: ≥ 1.
            packed_recv_count: ``[LE]`` int32, as dispatch returned it; accepted for compatibility.
            comp_signal: int32, a counter for each block of rows of a local expert, in the order of experts:
                ``comp_signal[expert × ceil(M×R / block_m) + row // block_m]``. The rows of a block are written once
                it has reached `threshold`. It may be longer.
            block_m: rows of a block, ≥ 1.
            threshold: ≥ 1.
            num_sms: SMs that the send takes from the experts, ≥ 1. With `src_signals` it takes at least 32, the number
                that the experts of SGLang leave. The torch engine uses none.

        Returns:
            combined_x ``[T, H]`` bf16, the event, and the hook (None unless asked for).

        Raises:
            ConfigError: at this or at another rank an argument does not fit the handle, `topk_idx` is another routing
                than the handle's (torch engine), or the dispatch's hook has not been called. Ranks differ, or this
                call's hook is called twice.
            OverflowError: the handle's dispatch has dropped rows, as described there.
            TimeoutError, TransportError: a rank was lost; masked as in `low_latency_dispatch`. With `overlap`
                TimeoutError also where a signal has not been raised within half of the timeout: at every rank.

        Example:
            >>> x, topk_idx = torch.ones(2, 128, dtype=torch.bfloat16), torch.tensor([[0, 1], [1, 3]])
            >>> with hybrid_ep.Buffer(None, low_latency_mode=True) as buffer:
            ...     rows, _, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, 8, 4, use_fp8=False)
            ...     combined_x, _, _ = buffer.low_latency_combine(rows, topk_idx, torch.full((2, 2), 1.5), handle)
            >>> combined_x[:, 0].tolist()
            [3.0, 3.0]
        """
        engine = self._low_latency_engine()
        waits, signals = combine_wait_recv_cost_stats, None
        try:
            self._check_low_latency_handle(handle)
            if require_bool("zero_copy", zero_copy):
                x = self._written_for(handle)
            require_bools(("use_logfmt", "overlap"), (use_logfmt, overlap))
            if use_logfmt and handle.hidden % CHANNELS_PER_HEADER:
                require(False, "hidden", handle.hidden, f"with use_logfmt: multiples of {CHANNELS_PER_HEADER}")
            self._check_combined(x, topk_idx, topk_weights, handle, out)
            self._check_stats(waits, "combine_wait_recv_cost_stats", torch.int64, self.group_size, topk_idx.device)
            self._check_return(async_finish, return_recv_hook)
            if overlap:
                require_tensor("x", x, dtypes=(torch.bfloat16,), shape=(None, None, None), contiguous=True)
                if packed_recv_count is not None:
                    self._check_stats(packed_recv_count, "packed_recv_count", torch.int32, x.shape[0], x.device)
                signals = signals_of(
                    handle, x.device, src_signals, src_signal_expect_value, comp_signal, block_m, threshold, num_sms
                )
        except ConfigError as error:
            engine.refuse("low_latency_combine", error)
            raise
        if out is None:
            out = torch.empty(topk_idx.shape[0], handle.hidden, dtype=torch.bfloat16, device=x.device)
        with self._comm_stream.scope(None, async_finish):
            request = LowLatencyCombineRequest(
                packed(x), packed(topk_idx), packed(topk_weights), out, use_logfmt, waits, signals, return_recv_hook
            )
            finish = engine.low_latency_combine(request, handle)
            hook = None if finish is None else self._receive_or_return(finish, return_recv_hook)
        used = x, topk_idx, topk_weights, handle.memory, out, waits, signals and signals.raised
        return out, self._comm_stream.finish(None, async_finish, used), hook

    @plain_tensors
    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> Tensor:
        """Returns ``[LE, M×R, H]`` bf16 for the experts to write to, for `low_latency_combine(zero_copy=True)`. Local.

        A buffer has one such tensor: only the last one that was asked for can be combined, with the handle that it was
        asked for with.

        Args:
            handle: of the dispatch.

        Raises:
            ConfigError: it is no handle of a low-latency dispatch, or the buffer is not in low-latency mode.
        """
        self._low_latency_engine()
        self._check_low_latency_handle(handle)
        num_local = handle.num_experts // self.group_size
        shape = (num_local, handle.num_max_tokens_per_rank * self.group_size, handle.hidden)
        buffer = torch.empty(shape, dtype=torch.bfloat16, device=handle.memory.device)
        self._combine_buffer = (handle, buffer)
        return buffer

    @plain_tensors
    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Makes the buffer ready for low-latency calls of another size. Collective; waits for every rank not masked.

        A rank that was masked and comes back calls it with the others before the next call. A hook that has not been
        called raises ConfigError from now on. A rank on which this raises was not in the barrier: call it again there.

        Args:
            num_max_dispatch_tokens_per_rank: M; checked, and without effect, as the next two.
            hidden: H.
            num_experts: E, a multiple of the ranks.

        Raises:
            ConfigError: the buffer is not in low-latency mode, a size is not positive, or an earlier call has left
                an error.
            TimeoutError, TransportError: a rank was lost here or in an earlier call; masked as in
                `low_latency_dispatch`. TransportError without `peer`: between domains, rows of earlier calls are still
                on their way.
        """
        self._low_latency_engine()
        require_int("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, minimum=1)
        require_int("hidden", hidden, minimum=1)
        self._num_local_experts(num_experts)
        self._combine_buffer = None
        self._num_cleanings += 1
        self._finish(self.engine.barrier)

    @plain_tensors
    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Leaves a rank out of low-latency calls (`mask=True`) or takes it back in. Local: call it on every survivor.

        Args:
            rank_to_mask: any rank but this one.
            mask: True = leave it out, False = take it back in.

        Raises:
            ConfigError: the rank does not exist or is this one, or `enable_shrink` is False.
        """
        self._require_shrink()
        ok = isinstance(rank_to_mask, int) and 0 <= rank_to_mask < self.group_size and rank_to_mask != self.rank
        require(ok, "rank_to_mask", rank_to_mask, f"0 … {self.group_size - 1} except this rank, {self.rank}")
        self.engine.set_masked([rank_to_mask], mask)

    @plain_tensors
    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Writes 1 for each masked rank and 0 for each other to `mask_status` ``[R]`` int32. Local.

        It is written in the order of the current stream. The host does not wait if `mask_status` is on the GPU. A
        program that only replays graphs asks here which ranks a replay has lost; they stay masked.

        Args:
            mask_status: ``[R]`` int32, contiguous, on any device.

        Raises:
            ConfigError: `mask_status` does not fit, `enable_shrink` is False, or a replay has reported an error.
            OverflowError: a replay has reported that rows were dropped.
        """
        self._require_shrink()
        require_tensor("mask_status", mask_status, dtypes=(torch.int32,), shape=(self.group_size,), contiguous=True)
        mask_status.copy_(self.engine.masked())

    @plain_tensors
    def low_latency_clean_mask_buffer(self) -> None:
        """Takes every rank back in, and forgets all calls. Local; waits for this rank's work on the GPU.

        Call it on every rank, equally often. A barrier must follow before the next low-latency call:
        `clean_low_latency_buffer`, or one of the program. A hook that has not been called raises ConfigError from now
        on.

        Raises:
            ConfigError: `enable_shrink` is False, or an earlier call has left an error that is not a lost rank.
            TransportError: between domains, rows of earlier calls are still on their way.
        """
        self._require_shrink()
        self._combine_buffer = None
        self._num_cleanings += 1
        self.engine.clean()

    def raise_pending(self) -> None:
        self._finish(super().raise_pending)

    def _receive_or_return(self, finish: Hook, return_recv_hook: bool) -> Hook | None:
        """Receives, or returns the hook that does."""
        if return_recv_hook:
            return _ReceiveHook(self, finish)
        self._receive(finish)
        return None

    def _receive(self, finish: Hook) -> None:
        """Receives. If lost ranks are only masked, completes the call without them."""
        engine = self.engine
        told: set[int] = set()
        while True:
            try:
                finish()
                return
            except TransportError as error:
                self._leave_out(error.peer)
                if error.peer is None or not engine.only_masks_lost:
                    raise
                _LOG.warning("rank %d is masked: %s", error.peer, error)
                if error.peer in told:
                    if not engine.is_left_out:  # then nobody goes on: ranks cannot agree on who is left
                        raise
                    engine.set_masked((r for r in range(self.group_size) if r != self.rank), True)
                told.add(error.peer)
                if not engine.completes_lost_calls:
                    return

    def _written_for(self, handle: LowLatencyHandle) -> Tensor:
        """What `get_next_low_latency_combine_buffer` has returned for a handle.

        Raises:
            ConfigError: it was not called, or last for another handle.
        """
        if self._combine_buffer is None or self._combine_buffer[0] is not handle:
            raise ConfigError(
                "zero_copy is True without a buffer; allowed: get_next_low_latency_combine_buffer(handle) first"
            )
        return self._combine_buffer[1]

    def _finish(self, finish: Hook) -> None:
        """Runs what may find that a rank is lost."""
        try:
            finish()
        except TransportError as error:
            self._leave_out(error.peer)
            raise

    def _leave_out(self, peer: int | None) -> None:
        """Leaves a lost rank out from now on, if the buffer may shrink. None: no rank is known to be lost."""
        if self.enable_shrink and peer is not None:
            self.engine.leave_out(peer)

    def _low_latency_engine(self) -> Engine:
        """The engine, of a buffer in low-latency mode."""
        engine = self.engine
        if not self.low_latency_mode:
            require(False, "low_latency_mode", self.low_latency_mode, "True for low-latency calls")
        return engine

    def _require_shrink(self) -> None:
        self._low_latency_engine()
        require(self.enable_shrink, "enable_shrink", self.enable_shrink, "True for rank masks")


class _ReceiveHook:
    """The hook that receives.

    Args:
        calls: of the buffer whose call has sent.
        finish: receives; see `LowLatencyDispatched.finish`.
    """

    __slots__ = ("_calls", "_finish", "_num_calls", "_num_cleanings")

    def __init__(self, calls: LowLatencyCalls, finish: Hook) -> None:
        self._calls, self._finish = calls, finish
        self._num_calls, self._num_cleanings = 0, calls._num_cleanings

    @plain_tensors
    def __call__(self) -> None:
        self._num_calls += 1
        # Otherwise it would wait for what no rank sends, or take the place of a later call.
        if self._num_calls > 1:
            require(False, "calls of one receive hook", self._num_calls, "1")
        since = self._calls._num_cleanings - self._num_cleanings
        if since > 0:
            require(False, "calls of clean_low_latency_buffer since a hook's call", since, "0")
        self._calls._receive(self._finish)


def _as_returned(rows: tuple[Tensor, Tensor | None], use_nvfp4: bool) -> Tensor | tuple[Tensor, Tensor]:
    """Rows and scales as `low_latency_dispatch` returns them."""
    data, scales = rows
    if scales is None:
        return data
    return nvfp4_as_returned(data, scales) if use_nvfp4 else (data, scales)


def _then_add(finish: Hook | None, counts: Tensor, stats: Tensor) -> Hook:
    """Also adds the rows that each expert has received."""

    def receive() -> None:
        if finish is not None:
            finish()
        stats.add_(counts)

    return receive


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
