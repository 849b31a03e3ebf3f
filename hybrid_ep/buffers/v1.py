"""`Buffer`: dispatch and combine with the interface of DeepEP V1.

    layout = buffer.get_dispatch_layout(topk_idx, num_experts)
    recv_x, recv_topk_idx, recv_topk_weights, counts, handle, event = buffer.dispatch(x, topk_idx=topk_idx, …)
    combined_x, _, event = buffer.combine(expert_output, handle)

Low-latency calls are for decode-sized batches: rows are packed by local expert, the host never waits, ranks may be
masked.

    recv_x, count, handle, event, hook = buffer.low_latency_dispatch(x, topk_idx, M, E, return_recv_hook=True)
    hook()                                                              # the rows are there from here on
    combined_x, event, hook = buffer.low_latency_combine(y, topk_idx, topk_weights, handle)

The engine moves the tokens. This file has the signatures, and shapes results; v1_arguments.py checks arguments.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep import env
from hybrid_ep.buffers.arguments import as_biases, check_topk, num_local_experts, rounded_up
from hybrid_ep.buffers.base import BaseBuffer
from hybrid_ep.buffers.collective import collective
from hybrid_ep.buffers.v1_arguments import (
    Tokens,
    as_given,
    check_combined,
    check_dispatched,
    check_given_scale,
    check_layout_along,
    check_low_latency_handle,
    check_return,
    check_routing,
    check_sizes,
    check_stats,
    checked,
    nvfp4_as_returned,
    parts_of,
    received_rows,
    row_format,
    rows_along,
    signals_of,
)
from hybrid_ep.buffers.v1_handle import BufferHandle, dispatch_of
from hybrid_ep.checks import MAX_BYTES, MAX_INT, MAX_TOPK, require, require_bool, require_bools, require_int
from hybrid_ep.core.calls import plain_tensors
from hybrid_ep.core.checks import packed, require_tensor
from hybrid_ep.core.config import Config
from hybrid_ep.core.event import EventHandle, EventOverlap
from hybrid_ep.core.layout import compute_layout
from hybrid_ep.core.logfmt import CHANNELS_PER_HEADER
from hybrid_ep.engine.base import Engine
from hybrid_ep.engine.calls import (
    DispatchRequest,
    LowLatencyCombineRequest,
    LowLatencyDispatchRequest,
    LowLatencyHandle,
)
from hybrid_ep.errors import ConfigError, TransportError

topk_idx_t = torch.int64

_X = TypeVar("_X", Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor])

DispatchResult = tuple[
    Tokens,
    "Tensor | None",
    "Tensor | None",
    "list[int] | None",
    "BufferHandle | None",
    EventOverlap,
]

Hook = Callable[[], None]

_LOG = logging.getLogger(__name__)
_ALIGNMENT_BYTES = 128
_CONTROL_BYTES = 16 << 10
_KINDS = ("use_fp8", "round_scale", "use_ue8m0", "use_nvfp4", "use_ue8m0_for_sf")
_NUM_BUFFERS = 2  # two micro-batches overlap


class Buffer(BaseBuffer):
    """Dispatch and combine for training, prefill and (with `low_latency_mode`) decoding.

    A call runs on the current stream. With `previous_event` or `async_finish` it runs on the communication stream. A
    receive hook runs on the stream that is current when it is called.

    The constructor is collective over the group. Every rank of the group makes the collective calls, in the same order
    and from one thread at a time; otherwise they raise ConfigError or TimeoutError. A call reads its arguments in
    stream order. So the current stream may overwrite them after the call, or after its event with `async_finish`.
    Calls with a hook say otherwise.

    On the cuda engine results are in memory of the buffer. If another stream uses a result, keep the result until that
    use has ended: `Tensor.record_stream` has no effect on it.

    Args:
        group: the process group; None = the default group, or a single rank where there is none. If torch's registry
            does not know it, as a wrapper or a group made without it, its ranks gather an address through it, and work
            on a group of gloo of their own. That lives on when the wrapped group is destroyed and made again.
        num_nvl_bytes: bytes that `get_local_buffer_tensor` gives, ≥ 0. The engine allocates what its calls need
            beside them.
        num_rdma_bytes: bytes that `get_local_buffer_tensor` gives with `use_rdma_buffer`, ≥ 0.
        low_latency_mode: allow the low-latency calls.
        num_qps_per_rank: accepted for compatibility; transports choose their own.
        allow_nvlink_for_low_latency_mode: accepted for compatibility; NVLink is used where it is there.
        allow_mnnvl: accepted for compatibility; multi-node NVLink domains are used where they are there.
        use_fabric: accepted for compatibility; memory handles are chosen by what the domain needs.
        explicitly_destroy: accepted for compatibility; `destroy()` may always be called and need not be.
        enable_shrink: allow rank masks; a rank lost in a low-latency call is then masked.
        comm: an mpi4py communicator instead of a group.
        allow_nvlink_for_normal_mode: accepted for compatibility; NVLink is used where it is there.
        is_intranode: accepted for compatibility; NVLink is used where it is there.
        engine: ``auto``, ``torch`` or ``cuda``; None = ``HYBRID_EP_ENGINE``.
        num_ranks_per_domain: size of a domain; None = ``HYBRID_EP_NUM_RANKS_PER_DOMAIN``, or else the ranks of a host
            (with ``engine="cuda"`` all ranks).
        lost_ranks: with `enable_shrink`, a low-latency call that loses a rank masks it. With ``raise`` the call raises
            too, with ``mask`` it does not. None = ``HYBRID_EP_LOST_RANKS``.
        timeout_s: seconds to wait for a rank, and for all to make the buffer (at least 1); None =
            ``HYBRID_EP_TIMEOUT_S``.

    Attributes:
        num_sms: SMs of configurations that `get_dispatch_config` and `get_combine_config` make. Calls without a
            configuration use it only after `set_num_sms`. One number for all buffers of the process.
        group: the process group; None for a single rank without one.
        rank: of this process in the group.
        group_size: its ranks.

    Raises:
        ConfigError: an argument does not fit, ranks ask for different engines or domains, or the engine or transport
            that is asked for cannot run here.
        TopologyError: the domains do not divide the ranks, or ranks of a domain cannot map each other's memory.
        TimeoutError, TransportError: a rank did not make the buffer.
        ClosedError: by each call after `close()`, after the process group was destroyed, or in a forked child.
        CudaError: by each call, if the CUDA runtime reports a failure.

    Example:
        >>> x, topk_idx = torch.ones(4, 128, dtype=torch.bfloat16), torch.tensor([[0], [1], [1], [-1]])
        >>> with hybrid_ep.Buffer(None) as buffer:
        ...     per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts=2)
        ...     recv_x, recv_idx, recv_weights, counts, handle, _ = buffer.dispatch(
        ...         x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
        ...         topk_idx=topk_idx, topk_weights=torch.ones(4, 1))
        ...     combined_x = buffer.combine(3 * recv_x, handle)[0]
        >>> recv_x.shape, counts, combined_x[:, 0].tolist()
        (torch.Size([3, 128]), [1, 2], [3.0, 3.0, 3.0, 0.0])
    """

    num_sms: int = 20
    _num_sms_without_config: int | None = None  # the engine's choice

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool | None = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        allow_nvlink_for_normal_mode: bool = True,
        is_intranode: bool = False,
        *,
        engine: str | None = None,
        num_ranks_per_domain: int | None = None,
        timeout_s: float | None = None,
        lost_ranks: str | None = None,
    ) -> None:
        self.num_nvl_bytes = require_int("num_nvl_bytes", num_nvl_bytes, minimum=0, maximum=MAX_BYTES)
        self.num_rdma_bytes = require_int("num_rdma_bytes", num_rdma_bytes, minimum=0, maximum=MAX_BYTES)
        self.low_latency_mode = require_bool("low_latency_mode", low_latency_mode)
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = require_bool("enable_shrink", enable_shrink)
        self.lost_ranks = env.LOST_RANKS.get() if lost_ranks is None else lost_ranks
        require(self.lost_ranks in ("raise", "mask"), "lost_ranks", lost_ranks, "raise or mask")
        self._local_memory: dict[bool, Tensor] = {}  # by `use_rdma_buffer`
        self._combine_buffer: tuple[LowLatencyHandle, Tensor] | None = None
        self._num_cleanings = 0
        super().__init__(group, comm, engine=engine, num_ranks_per_domain=num_ranks_per_domain, timeout_s=timeout_s)
        if enable_shrink:
            self.engine.allow_masks(only_masks_lost=self.lost_ranks == "mask")

    def options(self) -> dict[str, Any]:
        names = (
            "num_nvl_bytes",
            "num_rdma_bytes",
            "low_latency_mode",
            "explicitly_destroy",
            "enable_shrink",
            "lost_ranks",
        )
        return super().options() | {name: getattr(self, name) for name in names}

    def destroy(self) -> None:
        """Gives back what the buffer holds; the same as `close()`."""
        self.close()

    def close(self) -> None:
        self._combine_buffer = None
        self._local_memory.clear()
        super().close()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Returns whether the GPU kernels are built in."""
        return importlib.util.find_spec("hybrid_ep._cuda") is not None

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Sets the SMs of default configurations and of calls without one, for all buffers of this process.

        Args:
            new_num_sms: SMs of a call, ≥ 1; more than the GPU has counts as all.

        Raises:
            ConfigError: it is not an integer ≥ 1.
        """
        Buffer.num_sms = Buffer._num_sms_without_config = require_int("new_num_sms", new_num_sms, minimum=1)

    @staticmethod
    def capture() -> EventOverlap:
        """Returns an event on the current stream, which a call may take as `previous_event`. Local."""
        return EventOverlap(EventHandle())

    def get_comm_stream(self) -> torch.Stream:
        """Returns the communication stream; on a machine without a GPU, the CPU's. Local."""
        return self._comm_stream.get()

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Returns a configuration of `Buffer.num_sms` SMs for dispatch.

        Args:
            num_ranks: any number ≥ 1; the configuration does not depend on it.

        Raises:
            ConfigError: `num_ranks` is not an integer ≥ 1.
        """
        require_int("num_ranks", num_ranks, minimum=1)
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """Returns a configuration of `Buffer.num_sms` SMs for combine; otherwise the same as `get_dispatch_config`."""
        require_int("num_ranks", num_ranks, minimum=1)
        return Config(Buffer.num_sms)

    @plain_tensors
    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """Counts where this rank's tokens go. Local.

        Args:
            topk_idx: ``[T, K]`` int64, global expert index or −1.
            num_experts: E, a multiple of the number of ranks.
            previous_event: run after it, on the communication stream.
            async_finish: return before the current stream has waited for the result.
            allocate_on_comm_stream: accepted for compatibility; memory is safe on both streams.

        Returns:
            num_tokens_per_rank ``[R]`` int32, num_tokens_per_rdma_rank ``[D]`` int32 (None in one domain),
            num_tokens_per_expert ``[E]`` int32, is_token_in_rank ``[T, R]`` bool, and the event.

        Raises:
            ConfigError: a dtype or shape does not fit, K > 32 or K > E, E is not a multiple of the ranks, or, where
                `topk_idx` is on a CPU, an index is outside −1 … E−1. On a GPU the dispatch reports such an index.

        Example:
            >>> with hybrid_ep.Buffer(None) as buffer:
            ...     layout = buffer.get_dispatch_layout(torch.tensor([[0, 1], [1, -1]]), num_experts=4)
            >>> [counts.tolist() for counts in layout[:4] if counts is not None]
            [[2], [1, 2, 0, 0], [[True], [True]]]
        """
        _ = self.engine
        num_local_experts(self.grid, num_experts)
        check_topk(topk_idx, None, num_experts, device=None)
        sizes = num_experts, self.group_size, self.grid.num_ranks_per_domain
        with self._comm_stream.scope(previous_event, async_finish):
            layout = compute_layout(packed(topk_idx), *sizes)
        event = self._comm_stream.finish(previous_event, async_finish, (topk_idx, *layout))
        per_rank, per_domain, per_expert, in_rank = layout
        has_domains = self.grid.num_domains > 1
        return per_rank, per_domain if has_domains else None, per_expert, in_rank, event

    @overload
    def dispatch(
        self,
        x: _X,
        handle: BufferHandle | Sequence[Tensor],
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: None = None,
        topk_weights: None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[_X, None, None, None, None, EventOverlap]: ...

    @overload
    def dispatch(
        self,
        x: _X,
        handle: None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        *,
        topk_idx: Tensor,
        topk_weights: Tensor,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[_X, Tensor, Tensor, list[int], BufferHandle, EventOverlap]: ...

    @overload
    def dispatch(
        self,
        x: _X,
        handle: None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        *,
        topk_idx: Tensor,
        topk_weights: None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[_X, Tensor, None, list[int], BufferHandle, EventOverlap]: ...

    @overload
    def dispatch(
        self,
        x: Tokens,
        handle: BufferHandle | Sequence[Tensor] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> DispatchResult: ...

    @collective("dispatch")
    def dispatch(
        self,
        x: Tokens,
        handle: BufferHandle | Sequence[Tensor] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> DispatchResult:
        """Sends each token to every rank that owns one of its experts. Collective.

        Runs on the current stream; with `previous_event` or `async_finish` on the communication stream. The host waits
        for the number of rows, unless `num_worst_tokens` or `handle` is given.

        Args:
            x: ``[T, H]`` bf16, or (``[T, H]`` float8_e4m3fn, scales ``[T, H/128]`` float32 or ``[T, ceil(H/512)]``
                int32), or NVFP4: (``[T, H/2]`` uint8, scales ``[T, H/16]`` float8_e4m3fn or int8, one float32), as
                `quantize.cast_to_nvfp4` makes them, H a multiple of 64. The float32 is not sent: it must be the same on
                every rank. Or NVFP4 in words: (``[T, H/8]`` int32, scales ``[T, H/64]`` int32, ``[T]`` or ``[T, 1]``
                float32), and all three are sent.
            handle: of an earlier dispatch, or the tuple of its tensors; its routes are used. `topk_idx` and
                `topk_weights` must then be None, and `num_worst_tokens` 0 or the handle's. If a layout is given again,
                it must be the handle's. A handle may be used any number of times.
            num_tokens_per_rank: ``[R]`` int32, from `get_dispatch_layout`.
            num_tokens_per_rdma_rank: accepted for compatibility; not needed.
            is_token_in_rank: ``[T, R]`` bool, from `get_dispatch_layout`; the routing if `topk_idx` is None.
            num_tokens_per_expert: ``[E]`` int32, from `get_dispatch_layout`; its length is E.
            topk_idx: ``[T, K]`` int64, global expert index or −1.
            topk_weights: ``[T, K]`` float32.
            expert_alignment: `num_recv_tokens_per_expert` is rounded up to multiples of it; not used with `handle`.
            num_worst_tokens: the same on every rank. If > 0, the result has that many rows, and on the cuda engine the
                host does not wait. Combine then sends at most that many rows back to a rank.
            config: SMs to use; None = as `set_num_sms` says, or the engine's choice.
            previous_event: run after it, on the communication stream.
            async_finish: return before the current stream has waited for the result.
            allocate_on_comm_stream: accepted for compatibility; memory is safe on both streams.

        Returns:
            recv_x (as `x`, N rows, by source rank, then token), recv_topk_idx ``[N, K]`` int64 (local expert or −1;
            None without `topk_idx`), recv_topk_weights ``[N, K]`` float32 (None without `topk_weights`),
            num_recv_tokens_per_expert (list of LE; empty with `num_worst_tokens`), the handle, and the event. With
            `handle`, the second to fifth are None. With `num_worst_tokens`, rows after the last that arrived are
            undefined, and their recv_topk_idx is −1.

        Raises:
            ConfigError: an argument does not fit at any rank, or differs from another rank's where it must not. With
                `num_worst_tokens` or `handle` on the cuda engine, what the GPU finds is raised by a later call.
            OverflowError: more than `num_worst_tokens` rows, at any rank; on the cuda engine from a later call.
            TimeoutError, TransportError: a rank was lost; `error.peer` is that rank. Where the host does not wait,
                from a later call.

        Example:
            >>> x, topk_idx = torch.ones(4, 128, dtype=torch.bfloat16), torch.tensor([[0], [1], [1], [-1]])
            >>> with hybrid_ep.Buffer(None) as buffer:
            ...     per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts=2)
            ...     recv_x, recv_idx, _, _, handle, _ = buffer.dispatch(
            ...         hybrid_ep.quantize.cast_to_fp8(x), num_tokens_per_rank=per_rank, is_token_in_rank=in_rank,
            ...         num_tokens_per_expert=per_expert, topk_idx=topk_idx, num_worst_tokens=4)
            ...     again = buffer.dispatch(x, handle)[0]
            >>> [part.shape for part in recv_x], recv_idx.flatten().tolist(), again.shape
            ([torch.Size([4, 128]), torch.Size([4, 1])], [0, 1, 1, -1], torch.Size([4, 128]))
        """
        engine = self.engine
        sent = (x, None, None) if isinstance(x, Tensor) else parts_of(x)
        num_sms = Buffer._num_sms_without_config if config is None else _sms_of(config)
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                require(False, "topk_idx or topk_weights", "given", "None with a handle")
            route = dispatch_of(self.grid, handle)
            if num_worst_tokens not in (0, route.num_recv):
                require(False, "num_worst_tokens", num_worst_tokens, f"0 or {route.num_recv}, as with this handle")
            if is_token_in_rank is not None or num_tokens_per_rank is not None or num_tokens_per_expert is not None:
                check_layout_along(self.grid, route, is_token_in_rank, num_tokens_per_rank, num_tokens_per_expert)
            with self._comm_stream.scope(previous_event, async_finish):
                # Here, because it may copy scales.
                rows = rows_along(sent, (expert_alignment, num_worst_tokens), route, engine.device)
                received = engine.dispatch(engine.request_along(rows, route, num_sms=num_sms)).rows
            event = self._comm_stream.finish(previous_event, async_finish, (*rows, *received))
            return as_given(received, sent), None, None, None, None, event

        check_sizes(expert_alignment, num_worst_tokens)
        with self._comm_stream.scope(previous_event, async_finish):
            # Here, because it may copy scales, and make indices.
            rows = checked(sent, engine.device)
            routing = check_routing(
                self.grid, rows, topk_idx, topk_weights, is_token_in_rank, num_tokens_per_rank, num_tokens_per_expert
            )
            result = engine.dispatch(DispatchRequest(rows, routing, num_worst_tokens or None, num_sms))
            counts = result.num_tokens_per_expert
            if topk_idx is None and num_worst_tokens == 0:
                assert num_tokens_per_expert is not None
                counts = engine.exchange_expert_counts(num_tokens_per_expert)
        recv_topk_idx = None if topk_idx is None else result.topk_idx
        tensors = (*sent, topk_idx, topk_weights, *result.rows, recv_topk_idx, result.topk_weights)
        event = self._comm_stream.finish(previous_event, async_finish, tensors)
        aligned = [] if counts is None else rounded_up(counts, expert_alignment)  # None: there is a bound
        tokens = as_given(result.rows, sent)
        assert is_token_in_rank is not None
        made = BufferHandle(self, result.handle, is_token_in_rank, event.event)
        return tokens, recv_topk_idx, result.topk_weights, aligned, made, event

    @overload
    def combine(
        self,
        x: Tensor,
        handle: BufferHandle | Sequence[Tensor],
        topk_weights: None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, None, EventOverlap]: ...

    @overload
    def combine(
        self,
        x: Tensor,
        handle: BufferHandle | Sequence[Tensor],
        topk_weights: Tensor,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor, EventOverlap]: ...

    @overload
    def combine(
        self,
        x: Tensor,
        handle: BufferHandle | Sequence[Tensor],
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]: ...

    @collective("combine")
    def combine(
        self,
        x: Tensor,
        handle: BufferHandle | Sequence[Tensor],
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Brings rows back to their source tokens and sums them over ranks, without weighting. Collective.

        Runs on the current stream; with `previous_event` or `async_finish` on the communication stream. The host does
        not wait.

        Args:
            x: ``[N, H]`` bf16, in the order of `recv_x`; H may differ from the dispatch's, and is the same on every
                rank. Rows after the last that arrived are not read.
            handle: of the dispatch, or the tuple of its tensors; it may serve any number of combines.
            topk_weights: ``[N, K]`` float32, summed over ranks as rows are.
            bias: one or two ``[T, H]`` bf16, added in fp32 before the result is rounded.
            config: SMs to use; None = as `set_num_sms` says, or the engine's choice.
            previous_event: run after it, on the communication stream.
            async_finish: return before the current stream has waited for the result.
            allocate_on_comm_stream: accepted for compatibility; memory is safe on both streams.

        Returns:
            combined_x ``[T, H]`` bf16, combined_topk_weights ``[T, K]`` float32 or None, and the event.

        Raises:
            ConfigError: an argument does not fit the handle at any rank, or ranks differ.
            TimeoutError, TransportError: a rank was lost; on the cuda engine from a later call.

        Example:
            >>> x, topk_idx = torch.ones(2, 128, dtype=torch.bfloat16), torch.tensor([[0, 1], [1, 3]])
            >>> with hybrid_ep.Buffer(None) as buffer:
            ...     per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts=4)
            ...     recv_x, _, weights, _, handle, _ = buffer.dispatch(
            ...         x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
            ...         topk_idx=topk_idx, topk_weights=torch.full((2, 2), 0.5))
            ...     combined_x, summed, _ = buffer.combine(recv_x, handle, topk_weights=weights, bias=x)
            >>> combined_x[:, 0].tolist(), summed.tolist()
            ([2.0, 2.0], [[0.5, 0.5], [0.5, 0.5]])
        """
        engine = self.engine
        route = dispatch_of(self.grid, handle)
        biases = () if bias is None else as_biases(bias)
        num_sms = Buffer._num_sms_without_config if config is None else _sms_of(config)
        with self._comm_stream.scope(previous_event, async_finish):
            request = received_rows(x, topk_weights, biases, num_sms, route, self.engine.device)
            combined = engine.combine(request, route)
        tensors = (x, topk_weights, *biases, *combined)
        return *combined, self._comm_stream.finish(previous_event, async_finish, tensors)

    # DeepEP has separate calls between nodes. Here one call serves any number of domains.
    internode_dispatch = dispatch_pcie = dispatch
    internode_combine = combine_pcie = combine

    @plain_tensors
    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: torch.Size | Sequence[int] | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> Tensor:
        """Returns `num_nvl_bytes` (`num_rdma_bytes`) bytes of memory of this rank as a tensor. Local.

        No call of the buffer uses this memory: it is made, with zeros, when it is first asked for, on the GPU if there
        is one. Repeated calls return the same memory.

        With `use_rdma_buffer` in low-latency mode it is the memory in which rows of low-latency calls land, at most
        `num_rdma_bytes` of it. The cuda engine makes that at the first low-latency call; the torch engine has none.
        Callers zero it before `low_latency_clean_mask_buffer`; its contents between calls do not matter.

        Args:
            dtype: of the tensor.
            size: its shape; None = one dimension, all that is left.
            offset: where it begins, in bytes; a multiple of the size of an element.
            use_rdma_buffer: the network buffer instead of the NVLink one.

        Raises:
            ConfigError: `offset` or `size` reaches past the end, or an argument is not what it should be.
        """
        _ = self.engine
        require(isinstance(dtype, torch.dtype), "dtype", repr(dtype), "a torch.dtype")
        num_bytes = self.num_rdma_bytes if use_rdma_buffer else self.num_nvl_bytes
        require_int("offset", offset, minimum=0, maximum=MAX_BYTES, multiple_of=dtype.itemsize)
        require(offset <= num_bytes, "offset", offset, f"≤ {num_bytes} bytes")
        if use_rdma_buffer and self.low_latency_mode:
            whole = self.engine.low_latency_memory()[:num_bytes]
        else:
            if use_rdma_buffer not in self._local_memory:
                device = "cuda" if torch.cuda.is_available() else "cpu"
                self._local_memory[use_rdma_buffer] = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            whole = self._local_memory[use_rdma_buffer]
        memory = whole[offset:]
        flat = memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        if size is None:
            return flat
        is_shape = isinstance(size, Sequence) and all(isinstance(length, int) for length in size)
        require(is_shape, "size", repr(size), "a torch.Size or a sequence of integers")
        shape = torch.Size(size)
        require(min(shape, default=0) >= 0, "size", list(shape), "no negative sizes")
        require(shape.numel() <= flat.numel(), "size", list(shape), f"at most {flat.numel()} elements of {dtype}")
        return flat[: shape.numel()].view(shape)

    # Low-latency calls.

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
                makes it. A larger one clips large values. Without `use_nvfp4` it has no effect.
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
            num_local = num_local_experts(self.grid, num_experts)
            require_bools(_KINDS, kinds)
            most = MAX_INT // (num_local * self.group_size)
            if max_tokens > most:  # packed rows are counted in 32 bits
                require(False, "num_max_dispatch_tokens_per_rank", max_tokens, f"≤ {most} with {num_experts} experts")
            fmt = row_format(*kinds)
            check_dispatched(x, topk_idx, topk_weights, max_tokens, num_experts, fmt, engine.device)
            if use_nvfp4:
                check_given_scale(x_global_scale, x.device)
            check_stats(waits, "dispatch_wait_recv_cost_stats", torch.int64, self.group_size, x.device)
            check_stats(stats, "cumulative_local_expert_recv_stats", torch.int32, num_local, x.device)
            check_return(async_finish, return_recv_hook)
        except ConfigError as error:
            engine.refuse("low_latency_dispatch", error)
            raise

        with self._comm_stream.scope(None, async_finish):
            request = LowLatencyDispatchRequest(
                packed(x),
                packed(topk_idx),
                max_tokens,
                num_experts,
                fmt,
                x_global_scale if use_nvfp4 else None,
                waits,
                return_recv_hook,
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
            check_low_latency_handle(self.grid, handle)
            if require_bool("zero_copy", zero_copy):
                x = self._written_for(handle)
            require_bools(("use_logfmt", "overlap"), (use_logfmt, overlap))
            if use_logfmt and handle.hidden % CHANNELS_PER_HEADER:
                require(False, "hidden", handle.hidden, f"with use_logfmt: multiples of {CHANNELS_PER_HEADER}")
            check_combined(x, topk_idx, topk_weights, handle, out, engine.device)
            check_stats(waits, "combine_wait_recv_cost_stats", torch.int64, self.group_size, topk_idx.device)
            check_return(async_finish, return_recv_hook)
            if overlap:
                require_tensor("x", x, dtypes=(torch.bfloat16,), shape=(None, None, None), contiguous=True)
                if packed_recv_count is not None:
                    check_stats(packed_recv_count, "packed_recv_count", torch.int32, x.shape[0], x.device)
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
        check_low_latency_handle(self.grid, handle)
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
        num_local_experts(self.grid, num_experts)
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


def _sms_of(config: Config) -> int:
    """SMs that the caller asks for."""
    require(isinstance(config, Config), "config", type(config).__name__, "a Config or None")
    return config.num_sms


class _ReceiveHook:
    """The hook that receives.

    Args:
        calls: of the buffer whose call has sent.
        finish: receives; see `LowLatencyDispatched.finish`.
    """

    __slots__ = ("_calls", "_finish", "_num_calls", "_num_cleanings")

    def __init__(self, calls: Buffer, finish: Hook) -> None:
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
