"""`ElasticBuffer` and `EPBuffer`: dispatch and combine with the interfaces of DeepEP 2.1 and 2.5.

    recv_x, recv_topk_idx, recv_topk_weights, handle, event = buffer.dispatch(x, topk_idx, topk_weights, num_experts=E)
    combined_x, combined_topk_weights, event = buffer.combine(expert_output, handle)

The two differ in signatures only. `ElasticCalls` has what they do: a dispatch of the engine by source or, with
`do_expand`, by expert.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep import env
from hybrid_ep.buffers.allocator import BufferAllocator
from hybrid_ep.buffers.arguments import (
    check_bias,
    check_grid,
    check_rows,
    check_topk,
    check_weights,
    num_local_experts,
    rounded_up,
)
from hybrid_ep.buffers.base import BaseBuffer, resolve_group
from hybrid_ep.buffers.collective import collective
from hybrid_ep.buffers.elastic_handle import Counts, EPHandle
from hybrid_ep.checks import MAX_BYTES, MAX_TOPK, require, require_bool, require_int, unsupported
from hybrid_ep.core.checks import packed, require_tensor
from hybrid_ep.core.event import EventHandle, EventOverlap, as_overlap
from hybrid_ep.core.streams import is_capturing
from hybrid_ep.engine.calls import CombineRequest, DispatchRequest, Routing, Rows
from hybrid_ep.errors import ConfigError

Event = EventOverlap | EventHandle
DispatchResult = tuple["Tensor | tuple[Tensor, Tensor]", "Tensor | None", "Tensor | None", EPHandle, EventOverlap]
CombineResult = tuple[Tensor, "Tensor | None", EventOverlap]

_BUFFER_ALIGNMENT_BYTES = 2 << 20  # as DeepEP's size hints
_CHANNELS_PER_SCALE = 32  # the most scales that a peer's hint reckons with
_SCALES_PER_TMA_COLUMN = 4  # 16 bytes
_DEFAULT_GPU_TIMEOUT_S = 100


class DispatchOptions(NamedTuple):
    """Arguments of a dispatch beside its tensors, as `ElasticBuffer.dispatch` explains them."""

    num_experts: int | None
    num_max_tokens_per_rank: int | None
    expert_alignment: int | None
    num_sms: int
    num_qps: int
    previous_event: Event | None
    previous_event_before_epilogue: Event | None
    async_with_compute_stream: bool
    do_handle_copy: bool
    do_cpu_sync: bool | None
    do_expand: bool
    do_zero_padding: bool
    use_tma_aligned_col_major_sf: bool


class _Absent:
    """A call of DeepEP that is not implemented: raises NotImplementedError, which names it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        name = self._name

        def absent(*args: Any, **kwargs: Any) -> NoReturn:
            raise NotImplementedError(f"{name} is not supported; allowed: dispatch, combine, barrier and lb_*")

        return absent


class ElasticCalls(BaseBuffer):
    """The calls; the base of both classes."""

    # Remote memory for Engram, and pipelines and all-gathers over NVLink.
    engram_write = _Absent()
    engram_fetch = _Absent()
    get_engram_storage_size_hint = _Absent()
    pp_set_config = _Absent()
    pp_send = _Absent()
    pp_recv = _Absent()
    get_pp_buffer_size_hint = _Absent()
    create_agrs_session = _Absent()
    destroy_agrs_session = _Absent()
    agrs_new_session = _Absent()
    agrs_set_config = _Absent()
    agrs_get_inplace_tensor = _Absent()
    all_gather = _Absent()
    get_agrs_num_max_session_bytes = _Absent()
    get_agrs_buffer_size_hint = _Absent()

    def _set_up(
        self,
        group: dist.ProcessGroup | None,
        *,
        num_bytes: int | None,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int,
        use_fp8_dispatch: bool,
        deterministic: bool,
        allow_hybrid_mode: bool,
        allow_multiple_reduction: bool,
        prefer_overlap_with_compute: bool,
        sl_idx: int | None,
        num_allocated_qps: int,
        num_cpu_timeout_secs: int,
        num_gpu_timeout_secs: int,
        explicitly_destroy: bool,
        engine: str | None,
        num_ranks_per_domain: int | None,
        timeout_s: float | None,
    ) -> None:
        """Checks the arguments of both constructors, and makes the engine."""
        if num_bytes is not None:
            require_int("num_bytes", num_bytes, minimum=0, maximum=MAX_BYTES)
        self.num_max_tokens_per_rank = require_int("num_max_tokens_per_rank", num_max_tokens_per_rank, minimum=0)
        require_int("hidden", hidden, minimum=0)
        require_int("num_topk", num_topk, minimum=0, maximum=MAX_TOPK)
        for name, flag in (
            ("use_fp8_dispatch", use_fp8_dispatch),
            ("deterministic", deterministic),
            ("allow_hybrid_mode", allow_hybrid_mode),
            ("allow_multiple_reduction", allow_multiple_reduction),
            ("prefer_overlap_with_compute", prefer_overlap_with_compute),
            ("explicitly_destroy", explicitly_destroy),
        ):
            setattr(self, name, require_bool(name, flag))
        if sl_idx is not None:
            require_int("sl_idx", sl_idx, minimum=0, maximum=15)
        self.num_allocated_qps = require_int("num_allocated_qps", num_allocated_qps, minimum=0)
        cpu_s = require_int("num_cpu_timeout_secs", num_cpu_timeout_secs, minimum=1)
        gpu_s = require_int("num_gpu_timeout_secs", num_gpu_timeout_secs, minimum=1)
        if timeout_s is None and not (gpu_s == _DEFAULT_GPU_TIMEOUT_S and env.TIMEOUT_S.is_set):
            timeout_s = float(min(cpu_s, gpu_s))
        super().__init__(group, engine=engine, num_ranks_per_domain=num_ranks_per_domain, timeout_s=timeout_s)
        self._sizes = {
            "num_bytes": num_bytes,
            "num_max_tokens_per_rank": num_max_tokens_per_rank,
            "hidden": hidden,
            "num_topk": num_topk,
            "use_fp8_dispatch": self.use_fp8_dispatch,
            "allow_hybrid_mode": self.allow_hybrid_mode,
        }
        self.rank_idx, self.num_ranks = self.rank, self.group_size
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(self.rank, self.num_scaleup_ranks)
        if num_bytes is None:
            num_bytes = self.get_buffer_size_hint(
                group, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch, allow_hybrid_mode
            )
        self.num_bytes = num_bytes

    use_fp8_dispatch: bool
    allow_hybrid_mode: bool

    def options(self) -> dict[str, Any]:
        return super().options() | self._sizes

    def destroy(self) -> None:
        """Gives back what the buffer holds; the same as `close()`. May be left out."""
        self.close()

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup | None,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Returns the bytes that callers pass as `num_bytes`, a multiple of 2 MiB.

        The most bytes that arrive at a rank in one dispatch or combine, with M tokens from every rank. The engine
        allocates what its calls need, whatever `num_bytes` is (docs/cuda_engine.md, "Memory").

        Args:
            group: the process group; None = the default group, or a single rank where there is none.
            num_max_tokens_per_rank: M.
            hidden: H.
            num_topk: K; 0 = the most that is allowed.
            use_fp8_dispatch: rows of a dispatch have a byte for each channel, and scales.
            allow_hybrid_mode: accepted for compatibility.
            allow_multiple_reduction: accepted for compatibility.

        Raises:
            ConfigError: a number is negative, K is above 32, or `group` is no process group.
        """
        tokens = require_int("num_max_tokens_per_rank", num_max_tokens_per_rank, minimum=0)
        require_int("hidden", hidden, minimum=0)
        topk = require_int("num_topk", num_topk, minimum=0, maximum=MAX_TOPK) or MAX_TOPK
        group = resolve_group(group)
        num_ranks = 1 if group is None else group.size()
        row_bytes = 2 * hidden
        if use_fp8_dispatch:
            row_bytes = hidden + 4 * -(-hidden // _CHANNELS_PER_SCALE)
        dispatch_bytes, combine_bytes = row_bytes + topk * (8 + 4), 2 * hidden + topk * 4
        needed = num_ranks * tokens * max(dispatch_bytes, combine_bytes)
        return -(-needed // _BUFFER_ALIGNMENT_BYTES) * _BUFFER_ALIGNMENT_BYTES

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Returns the number of domains and the number of ranks of each. Local."""
        return self.grid.num_domains, self.grid.num_ranks_per_domain

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Returns the number of logical domains and of ranks of each: those of `get_physical_domain_size` or, without
        `allow_hybrid_mode`, 1 and all ranks. Local.
        """
        return self.get_physical_domain_size() if self.allow_hybrid_mode else (1, self.group_size)

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 0,
        sm_write_gbs: float = 0,
    ) -> int:
        """Returns how many SMs a dispatch takes that does not ask for a number: the fewest that fill the wire.

        The model is measured and has no other inputs than the ranks and the GPU (docs/cuda_engine.md). All arguments
        are accepted for compatibility. On the torch engine, where SMs mean nothing, it is 20.
        """
        return self.engine.default_num_sms

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Returns how many queue pairs a link has for each peer and NIC: what `HYBRID_EP_QUEUE_PAIRS` says.

        Raises:
            ConfigError: `num_sms` is negative.
        """
        require_int("num_sms", num_sms, minimum=0)
        return env.QUEUE_PAIRS.get()

    @staticmethod
    def capture() -> EventHandle:
        """Returns an event on the current stream, which a call may take as `previous_event`. Local."""
        return EventHandle()

    def get_comm_stream(self) -> torch.Stream:
        """Returns the communication stream; on a machine without a GPU, the CPU's. Local."""
        return self._comm_stream.get()

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Returns when every rank has called it and every GPU has done its work. Collective.

        Args:
            use_comm_stream: accepted for compatibility; all streams are waited for.
            with_cpu_sync: accepted for compatibility; the host waits in any case.
            sequential: accepted for compatibility.

        Raises:
            ConfigError: a CUDA graph is being captured, or an earlier call has left an error.
            OverflowError: an earlier call has dropped rows.
            TimeoutError, TransportError: a rank was lost.
        """
        device = self.engine.device
        if device is not None and is_capturing(device.index):
            raise ConfigError("barrier is called while a CUDA graph is captured; allowed: before and after it")
        self.engine.barrier()

    def _dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        stats: Tensor | None,
        handle: EPHandle | None,
        options: DispatchOptions,
    ) -> DispatchResult:
        """A dispatch of either class."""
        engine = self.engine
        data, scales = _parts(x)
        _check_flags(options)
        before_epilogue = as_overlap("previous_event_before_epilogue", options.previous_event_before_epilogue)
        async_finish = require_bool("async_with_compute_stream", options.async_with_compute_stream)
        num_sms = require_int("num_sms", options.num_sms, minimum=0) or None
        require_int("num_qps", options.num_qps, minimum=0)
        with self._comm_stream.scope(options.previous_event, async_finish):
            # Here, because it may copy scales.
            rows = check_rows("x", data, scales, device=engine.device, opaque_scales=True)
            if handle is None:
                routing, sizes = self._routing(rows, topk_idx, topk_weights, options)
                self._check_stats(stats, routing.num_experts, rows.data.device)
                request = self._request(rows, routing, sizes, num_sms, options)
                copies_topk = bool(options.do_handle_copy)
                received, recv_idx, recv_weights, handle = self._send(request, routing.topk_idx, sizes, copies_topk)
            else:
                self._check_cached(handle, rows, topk_idx, topk_weights, options)
                self._check_stats(stats, handle.num_experts, rows.data.device)
                sms = num_sms or handle.asked_num_sms
                received, recv_idx, recv_weights = self._send_along(rows, packed(topk_weights), handle, sms)
            if stats is not None:
                stats.add_(handle.num_unaligned_recv_tokens_per_expert)
            if before_epilogue is not None:
                before_epilogue.current_stream_wait()
            if received.scales is not None and options.use_tma_aligned_col_major_sf:
                received = Rows(received.data, _column_major(received.scales))
        tensors = (*rows, topk_idx, topk_weights, stats, *received, recv_idx, recv_weights, *handle.tensors())
        event = self._comm_stream.finish(options.previous_event, async_finish, tensors)
        recv_x = received.data if received.scales is None else (received.data, received.scales)
        return recv_x, recv_idx, recv_weights, handle, event

    def _combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None,
        bias: Tensor | tuple[Tensor, Tensor] | None,
        num_sms: int,
        num_qps: int,
        previous_event: Event | None,
        previous_event_before_epilogue: Event | None,
        async_finish: bool,
    ) -> CombineResult:
        """A combine of either class."""
        engine = self.engine
        before_epilogue = as_overlap("previous_event_before_epilogue", previous_event_before_epilogue)
        require_int("num_sms", num_sms, minimum=0)
        require_int("num_qps", num_qps, minimum=0)
        async_finish = require_bool("async_with_compute_stream", async_finish)
        self._check_handle(handle)
        check_rows("x", x, None, device=engine.device)
        dispatch, permute = handle.dispatch, handle.permute
        num_rows = handle.num_rows
        if x.shape[0] != num_rows:
            require(False, "rows of x", x.shape[0], f"{num_rows}, as received with this handle")
        if topk_weights is not None:
            shape = (num_rows, dispatch.num_topk) if permute is None else (num_rows,)
            check_weights("topk_weights", topk_weights, shape, x.device)
        biases = check_bias(bias, dispatch.num_tokens, x.shape[1], x.device)
        sms = num_sms or handle.asked_num_sms
        with self._comm_stream.scope(previous_event, async_finish):
            bias_terms = tuple(packed(term) for term in biases)
            request = CombineRequest(packed(x), packed(topk_weights), bias_terms, sms)
            combined = engine.combine(request, permute or dispatch)
            if before_epilogue is not None:
                before_epilogue.current_stream_wait()
        tensors = (x, topk_weights, *biases, *combined)
        return *combined, self._comm_stream.finish(previous_event, async_finish, tensors)

    def _routing(
        self, rows: Rows, topk_idx: Tensor | None, topk_weights: Tensor | None, options: DispatchOptions
    ) -> tuple[Routing, tuple[int, int]]:
        """Checks where tokens go; returns that, and M and the alignment."""
        num_tokens = rows.data.shape[0]
        if topk_idx is None:
            raise ConfigError("topk_idx is None; allowed without a handle: the routing, [T, K]")
        if options.num_experts is None:
            raise ConfigError("num_experts is None; allowed without a handle: the number of experts of all ranks")
        num_local_experts(self.grid, options.num_experts)
        check_topk(topk_idx, topk_weights, options.num_experts, rows.data.device)
        if topk_idx.shape[0] != num_tokens:
            require(False, "rows of topk_idx", topk_idx.shape[0], f"{num_tokens}, as x has")
        most = options.num_max_tokens_per_rank
        if most is None:
            most = self.num_max_tokens_per_rank
        require_int("num_max_tokens_per_rank", most, minimum=0)
        alignment = 1 if options.expert_alignment is None else options.expert_alignment
        require_int("expert_alignment", alignment, minimum=1)
        routing = Routing(packed(topk_idx), packed(topk_weights), options.num_experts, max_tokens=most)
        return routing, (most, alignment)

    def _request(
        self, rows: Rows, routing: Routing, sizes: tuple[int, int], num_sms: int | None, options: DispatchOptions
    ) -> DispatchRequest:
        """A dispatch that makes its route. `sizes`: M and the alignment."""
        most, alignment = sizes
        does_sync = options.do_cpu_sync is None or bool(options.do_cpu_sync)
        bound = None if does_sync else most * self.group_size
        if not options.do_expand:
            return DispatchRequest(rows, routing, bound, num_sms)
        if bound is not None:
            # A token may name an expert twice, so a row can have more than min(K, LE) copies.
            num_local = routing.num_experts // self.group_size
            bound = bound * routing.topk_idx.shape[1] + (alignment - 1) * num_local
            bound = -(-bound // alignment) * alignment
        # No more rows can arrive than the bound.
        return DispatchRequest(rows, routing, bound, num_sms, pad_multiple=alignment, drops_rows=True)

    def _send(
        self, request: DispatchRequest, topk_idx: Tensor, sizes: tuple[int, int], copies_topk: bool
    ) -> tuple[Rows, Tensor | None, Tensor | None, EPHandle]:
        """Dispatches; returns rows, experts and weights that arrived, and the handle.

        Args:
            request: of the call.
            topk_idx: of its routing.
            sizes: M and the alignment.
            copies_topk: whether the handle has a copy of the routing.
        """
        (most, alignment), engine = sizes, self.engine
        received, recv_idx, recv_weights, on_host, dispatch, permute = engine.dispatch(request)
        has_bound = request.bound is not None
        counts: list[int] = []
        if not has_bound:
            assert on_host is not None
            counts = rounded_up(on_host, alignment)
        handle = EPHandle(
            buffer=self,
            expert_alignment=alignment,
            num_max_tokens_per_rank=most,
            asked_num_sms=request.num_sms,
            topk_idx=engine.sent_topk_idx(dispatch, topk_idx) if copies_topk else topk_idx,
            num_recv_tokens=most * self.group_size if has_bound else dispatch.num_recv,
            num_recv_tokens_per_expert_list=counts,
            counts=functools.partial(
                Counts.of, type(engine), dispatch, self.num_scaleout_ranks, alignment, permute is not None
            ),
            dispatch=dispatch,
            permute=permute,
            # A copy: the tensor that arrived holds its slot, and callers may write to it.
            recv_topk_idx=None if recv_idx is None else recv_idx.clone(),
        )
        return received, recv_idx, recv_weights, handle

    def _send_along(
        self, rows: Rows, weights: Tensor | None, handle: EPHandle, num_sms: int | None
    ) -> tuple[Rows, Tensor | None, Tensor | None]:
        """Dispatches along a handle; returns rows, experts and weights that arrived."""
        topk_idx = None if weights is None else handle.topk_idx
        request = self.engine.request_along(rows, handle.permute or handle.dispatch, topk_idx, weights, num_sms=num_sms)
        result = self.engine.dispatch(request)
        recv_idx = result.topk_idx
        if weights is None and handle.recv_topk_idx is not None:
            recv_idx = handle.recv_topk_idx.clone()
        return result.rows, recv_idx, result.topk_weights

    def _check_handle(self, handle: EPHandle) -> None:
        require(isinstance(handle, EPHandle), "handle", type(handle).__name__, "a handle that dispatch returned")
        check_grid(self.grid, handle.dispatch.grid)

    def _check_cached(
        self,
        handle: EPHandle,
        rows: Rows,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        options: DispatchOptions,
    ) -> None:
        """Checks what comes along a handle against it."""
        self._check_handle(handle)
        require(topk_idx is None, "topk_idx", "given", "None with a handle")
        if options.do_cpu_sync:
            require(False, "do_cpu_sync", True, "None or False with a handle, which knows the counts")
        for name, given, made_with in (
            ("num_experts", options.num_experts, handle.num_experts),
            ("num_max_tokens_per_rank", options.num_max_tokens_per_rank, handle.num_max_tokens_per_rank),
            ("expert_alignment", options.expert_alignment, handle.expert_alignment),
            ("do_expand", options.do_expand, handle.do_expand),
            ("rows of x", rows.data.shape[0], handle.dispatch.num_tokens),
        ):
            if given is not None and given != made_with:
                require(False, name, given, f"{made_with}, as with this handle")
        if topk_weights is not None:
            check_weights("topk_weights", topk_weights, handle.topk_idx.shape, rows.data.device)
            handle.require_unchanged()

    def _check_stats(self, stats: Tensor | None, num_experts: int, device: torch.device) -> None:
        if stats is not None:
            name, shape = "cumulative_local_expert_recv_stats", (num_experts // self.group_size,)
            require_tensor(name, stats, dtypes=(torch.int32,), shape=shape, device=device, contiguous=True)


class ElasticBuffer(ElasticCalls):
    """Dispatch and combine with the interface of DeepEP 2.1.

    A call runs on the current stream. With `previous_event` or `async_with_compute_stream` it runs on the communication
    stream. Results are the same on every engine, bit for bit, and in every run.

    The rules of `Buffer` hold for collective calls, for overwriting arguments and for the life of results. Its
    `async_finish` is `async_with_compute_stream` here.

    Args:
        group: the process group; None = the default group, or a single rank where there is none.
        num_bytes: accepted for compatibility, and kept; None = what `get_buffer_size_hint` says. The engine allocates
            what its calls need.
        num_cpu_bytes: not supported; it belongs to Engram.
        num_max_tokens_per_rank: M, the most tokens of a rank, for calls that do not say.
        hidden: H, for the size hint.
        num_topk: K, for the size hint.
        use_fp8_dispatch: for the size hint; `x` of each call says whether its rows are e4m3.
        deterministic: accepted for compatibility; results always are.
        allow_hybrid_mode: True: the logical domains are the NVLink domains. False: there is one logical domain, of all
            ranks. It does not change how rows travel.
        allow_multiple_reduction: accepted for compatibility; rows of one token that are on one rank are summed and
            rounded to bf16 before they cross.
        prefer_overlap_with_compute: accepted for compatibility.
        sl_idx: an RDMA service level; checked, and without effect: `HYBRID_EP_SERVICE_LEVEL` says it.
        num_allocated_qps: accepted for compatibility; transports choose their own.
        num_cpu_timeout_secs: seconds to wait for a rank; the smaller of this and `num_gpu_timeout_secs` counts.
        num_gpu_timeout_secs: see `num_cpu_timeout_secs`. `HYBRID_EP_TIMEOUT_S` overrides the default, 100.
        explicitly_destroy: accepted for compatibility; `destroy()` may always be called and need not be.
        engine: ``auto``, ``torch`` or ``cuda``; None = ``HYBRID_EP_ENGINE``.
        num_ranks_per_domain: size of a domain; None = ``HYBRID_EP_NUM_RANKS_PER_DOMAIN``, or else the ranks of a host
            (with ``engine="cuda"`` all ranks).
        timeout_s: seconds to wait for a rank, instead of the two above.

    Attributes:
        group: the process group.
        rank_idx: of this process in the group.
        num_ranks: of the group.
        num_bytes: as given, or what `get_buffer_size_hint` says.
        num_max_tokens_per_rank: as given. Each other argument is an attribute of its name.
        num_rdma_ranks: domains.
        num_nvlink_ranks: ranks of a domain.
        num_scaleout_ranks: logical domains.
        num_scaleup_ranks: ranks of a logical domain.
        scaleout_rank_idx: index of this rank's logical domain.
        scaleup_rank_idx: index of this rank in it.

    Raises:
        ConfigError, TopologyError, TimeoutError, TransportError, ClosedError, CudaError: as `Buffer`.
        NotImplementedError: `num_cpu_bytes` is given; and by calls of Engram, pipelines and all-gathers.

    Example:
        >>> x, topk_idx = torch.ones(3, 128, dtype=torch.bfloat16), torch.tensor([[0, 1], [1, 3], [1, -1]])
        >>> with hybrid_ep.ElasticBuffer(None, num_max_tokens_per_rank=4) as buffer:
        ...     rows, _, _, handle, _ = buffer.dispatch(x, topk_idx, torch.ones(3, 2), num_experts=4, do_expand=True)
        ...     combined_x = buffer.combine(rows, handle)[0]
        >>> rows.shape, handle.num_recv_tokens_per_expert_list, combined_x[:, 0].tolist()
        (torch.Size([5, 128]), [1, 3, 0, 1], [2.0, 2.0, 1.0])
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
        *,
        engine: str | None = None,
        num_ranks_per_domain: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        if num_cpu_bytes:
            unsupported(num_cpu_bytes=num_cpu_bytes)
        self._set_up(
            group,
            num_bytes=num_bytes,
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            hidden=hidden,
            num_topk=num_topk,
            use_fp8_dispatch=use_fp8_dispatch,
            deterministic=deterministic,
            allow_hybrid_mode=allow_hybrid_mode,
            allow_multiple_reduction=allow_multiple_reduction,
            prefer_overlap_with_compute=prefer_overlap_with_compute,
            sl_idx=sl_idx,
            num_allocated_qps=num_allocated_qps,
            num_cpu_timeout_secs=num_cpu_timeout_secs,
            num_gpu_timeout_secs=num_gpu_timeout_secs,
            explicitly_destroy=explicitly_destroy,
            engine=engine,
            num_ranks_per_domain=num_ranks_per_domain,
            timeout_s=timeout_s,
        )

    @collective("dispatch")
    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event | None = None,
        previous_event_before_epilogue: Event | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> DispatchResult:
        """Sends each token to every rank that owns one of its experts. Collective.

        Args:
            x: ``[T, H]`` bf16, or (``[T, H]`` float8_e4m3fn or uint8, scales ``[T, S]`` float32 or int32, of any S ≥ 1
                and any strides). Rows and scales are not interpreted, so MXFP8 and NVFP4 (``[T, H/2]``) work, too.
            topk_idx: ``[T, K]`` int64, global expert index or −1; None with `handle`.
            topk_weights: ``[T, K]`` float32, or None; with `handle` they may differ from those of its dispatch.
            cumulative_local_expert_recv_stats: ``[LE]`` int32; the rows for each local expert are added to it.
            num_experts: E, a multiple of the ranks; with `handle`, None or the handle's, as the next two.
            num_max_tokens_per_rank: M ≥ T, the same on every rank; None = the constructor's. If a rank has more tokens,
                every rank raises ConfigError.
            expert_alignment: counts of experts, and with `do_expand` their blocks, are rounded up to multiples of it;
                None = 1.
            num_sms: SMs to use; 0 = the engine's choice, or with `handle` as in its dispatch.
            num_qps: accepted for compatibility.
            previous_event: run after it, on the communication stream.
            previous_event_before_epilogue: the results are complete only after this event, too.
            async_with_compute_stream: return before the current stream has waited for the result.
            allocate_on_comm_stream: accepted for compatibility; memory is safe on both streams.
            handle: of an earlier dispatch, whose routes are used. `do_expand` must be the handle's.
            do_handle_copy: keep a copy of `topk_idx`; otherwise the caller must not write to it.
            do_cpu_sync: whether the host waits for the number of rows; None = True, or with `handle` False. If False,
                no host waits (cuda engine), and results have the most rows that can arrive: M × R, with `do_expand`
                M × R × K and the padding.
            do_expand: rows are sorted by local expert, a row for each expert of a token.
            do_zero_padding: accepted for compatibility; padding is always zero. Needs `do_expand`.
            use_tma_aligned_col_major_sf: scales of the result are column-major, columns at multiples of 16 bytes.

        Returns:
            recv_x (as `x`); recv_topk_idx ``[N, K]`` int64 (local expert or −1; None with `do_expand`);
            recv_topk_weights ``[N, K]`` float32, with `do_expand` ``[P]`` (None without weights); the handle; the
            event. Rows are sorted by source rank, then token; with `do_expand` by local expert, then source and token.
            Without `do_cpu_sync`, rows after the last are undefined. They are marked by −1 in recv_topk_idx, and have
            weights of 0 with `do_expand`.

        Raises:
            ConfigError: an argument does not fit, a rank has more than M tokens, or ranks differ in what they must have
                alike. Where the host does not wait, what the GPU finds is raised by a later call.
            TimeoutError, TransportError: a rank was lost; `error.peer` is that rank. Where the host does not wait,
                from a later call.

        Example:
            >>> x, topk_idx = torch.ones(2, 128, dtype=torch.bfloat16), torch.tensor([[0, 1], [1, -1]])
            >>> with hybrid_ep.ElasticBuffer(None, num_max_tokens_per_rank=4) as buffer:
            ...     rows, recv_idx, _, handle, _ = buffer.dispatch(x, topk_idx, num_experts=2, do_cpu_sync=False)
            ...     combined_x = buffer.combine(3 * rows, handle)[0]
            >>> recv_idx.tolist(), combined_x[:, 0].tolist()
            ([[0, 1], [1, -1], [-1, -1], [-1, -1]], [3.0, 3.0])
        """
        return self._dispatch(
            x,
            topk_idx,
            topk_weights,
            cumulative_local_expert_recv_stats,
            handle,
            DispatchOptions(
                num_experts,
                num_max_tokens_per_rank,
                expert_alignment,
                num_sms,
                num_qps,
                previous_event,
                previous_event_before_epilogue,
                async_with_compute_stream,
                do_handle_copy,
                do_cpu_sync,
                do_expand,
                do_zero_padding,
                use_tma_aligned_col_major_sf,
            ),
        )

    @collective("combine")
    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event | None = None,
        previous_event_before_epilogue: Event | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> CombineResult:
        """Brings rows back to their source tokens and sums them, without weighting. Collective.

        Args:
            x: ``[N, H]`` bf16, or ``[P, H]`` with `do_expand`, in the order of recv_x. Padding and rows after the last
                are not read.
            handle: of the dispatch.
            topk_weights: ``[N, K]`` float32, or ``[P]`` with `do_expand`; summed the same way.
            bias: one or two ``[T, H]`` bf16, added in fp32 before the result is rounded.
            num_sms: SMs to use; 0 = as in the dispatch.
            num_qps: accepted for compatibility.
            previous_event: run after it, on the communication stream.
            previous_event_before_epilogue: the results are complete only after this event, too.
            async_with_compute_stream: return before the current stream has waited for the result.
            allocate_on_comm_stream: accepted for compatibility; memory is safe on both streams.

        Returns:
            combined_x ``[T, H]`` bf16, combined_topk_weights ``[T, K]`` float32 or None, and the event.

        Raises:
            ConfigError: an argument does not fit the handle at any rank, or ranks differ.
            TimeoutError, TransportError: a rank was lost; on the cuda engine from a later call.
        """
        return self._combine(
            x,
            handle,
            topk_weights,
            bias,
            num_sms,
            num_qps,
            previous_event,
            previous_event_before_epilogue,
            async_with_compute_stream,
        )


class EPBuffer(ElasticCalls):
    """Dispatch and combine with the interface of DeepEP 2.5. The rules of `ElasticBuffer` hold.

    Args:
        lb_allocation_plan_or_num_bytes: a `BufferAllocator` whose tensors get their memory here, or bytes, which are
            accepted for compatibility: `lb_prefetch_weights` and `lb_reduce_grads` take any tensors. They are fastest
            with those of a plan.
        sl_idx: as in `ElasticBuffer`, or None.

    The other arguments are those of `ElasticBuffer`, without `num_cpu_bytes`.

    Attributes:
        num_lb_bytes: of the plan, or as given.

    Raises:
        ConfigError: as `ElasticBuffer`, or the plan has its memory already.
        TopologyError, TimeoutError, TransportError, ClosedError, CudaError: as `ElasticBuffer`.

    Example:
        >>> x, topk_idx = torch.ones(2, 128, dtype=torch.bfloat16), torch.tensor([[0, 1], [1, -1]])
        >>> with hybrid_ep.EPBuffer(None, num_max_tokens_per_rank=4) as buffer:
        ...     rows, recv_idx, _, handle, _ = buffer.dispatch(x, topk_idx, num_experts=2)
        >>> rows.shape, recv_idx.tolist()
        (torch.Size([2, 128]), [[0, 1], [1, -1]])
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_bytes: int | None = None,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        lb_allocation_plan_or_num_bytes: BufferAllocator | int = 0,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int | None = None,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
        *,
        engine: str | None = None,
        num_ranks_per_domain: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        plan = lb_allocation_plan_or_num_bytes
        if isinstance(plan, BufferAllocator):
            plan.require_open()
            self.num_lb_bytes = plan.num_bytes
        else:
            self.num_lb_bytes = require_int("lb_allocation_plan_or_num_bytes", plan, minimum=0, maximum=MAX_BYTES)
        self._set_up(
            group,
            num_bytes=num_bytes,
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            hidden=hidden,
            num_topk=num_topk,
            use_fp8_dispatch=use_fp8_dispatch,
            deterministic=deterministic,
            allow_hybrid_mode=allow_hybrid_mode,
            allow_multiple_reduction=allow_multiple_reduction,
            prefer_overlap_with_compute=prefer_overlap_with_compute,
            sl_idx=sl_idx,
            num_allocated_qps=num_allocated_qps,
            num_cpu_timeout_secs=num_cpu_timeout_secs,
            num_gpu_timeout_secs=num_gpu_timeout_secs,
            explicitly_destroy=explicitly_destroy,
            engine=engine,
            num_ranks_per_domain=num_ranks_per_domain,
            timeout_s=timeout_s,
        )
        if isinstance(plan, BufferAllocator):
            plan.materialize(self)

    @collective("dispatch")
    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = False,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
        defer_epilogue: bool = False,
    ) -> DispatchResult | EventOverlap:
        """Does as `ElasticBuffer.dispatch`, but its handle never copies `topk_idx`.

        Args:
            do_handle_copy: must be False: the caller must not write to `topk_idx` while the handle is used.
            defer_epilogue: return the event alone, whose `current_stream_wait()` returns recv_x, recv_topk_idx,
                recv_topk_weights and the handle. Needs `async_with_compute_stream`. A wait of the host is not deferred.

        Raises:
            ConfigError: as `ElasticBuffer.dispatch`; `do_handle_copy` is True, or `defer_epilogue` is without
                `async_with_compute_stream`.
            TimeoutError, TransportError: as `ElasticBuffer.dispatch`.
        """
        require(not do_handle_copy, "do_handle_copy", do_handle_copy, "False")
        _check_defer(defer_epilogue, async_with_compute_stream)
        result = self._dispatch(
            x,
            topk_idx,
            topk_weights,
            cumulative_local_expert_recv_stats,
            handle,
            DispatchOptions(
                num_experts,
                num_max_tokens_per_rank,
                expert_alignment,
                num_sms,
                num_qps,
                previous_event,
                None,
                async_with_compute_stream,
                False,
                do_cpu_sync,
                do_expand,
                do_zero_padding,
                use_tma_aligned_col_major_sf,
            ),
        )
        return _deferred(result[-1], result[:-1]) if defer_epilogue else result

    @collective("combine")
    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        defer_epilogue: bool = False,
    ) -> CombineResult | EventOverlap:
        """Does as `ElasticBuffer.combine`.

        Args:
            defer_epilogue: return the event alone, whose `current_stream_wait()` returns combined_x and
                combined_topk_weights. Needs `async_with_compute_stream`.

        Raises:
            ConfigError: as `ElasticBuffer.combine`, or `defer_epilogue` is without `async_with_compute_stream`.
            TimeoutError, TransportError: as `ElasticBuffer.combine`.
        """
        _check_defer(defer_epilogue, async_with_compute_stream)
        result = self._combine(
            x, handle, topk_weights, bias, num_sms, num_qps, previous_event, None, async_with_compute_stream
        )
        return _deferred(result[-1], result[:-1]) if defer_epilogue else result


def _parts(x: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Rows, and their scales where there are any."""
    if not isinstance(x, tuple):
        return x, None
    num_parts: int = len(x)
    require(num_parts == 2, "x", f"a tuple of {num_parts}", "a tensor, or a tensor and its scales")
    return x


def _check_flags(options: DispatchOptions) -> None:
    for name in ("do_handle_copy", "do_expand", "do_zero_padding", "use_tma_aligned_col_major_sf"):
        require_bool(name, getattr(options, name))
    if options.do_cpu_sync is not None:
        require_bool("do_cpu_sync", options.do_cpu_sync)
    require(not options.do_zero_padding or bool(options.do_expand), "do_zero_padding", True, "False without do_expand")


def _column_major(scales: Tensor) -> Tensor:
    """Returns ``[N, S]`` in column-major order. Columns begin at multiples of 16 bytes, as a GEMM's TMA loads need."""
    num_rows, num_scales = scales.shape
    length = -(-num_rows // _SCALES_PER_TMA_COLUMN) * _SCALES_PER_TMA_COLUMN
    columns = torch.empty(num_scales, length, dtype=scales.dtype, device=scales.device)
    return columns.t()[:num_rows].copy_(scales)


def _check_defer(defer_epilogue: bool, async_with_compute_stream: bool) -> None:
    ok = not defer_epilogue or bool(async_with_compute_stream)
    require(ok, "async_with_compute_stream", async_with_compute_stream, "True with defer_epilogue")


def _deferred(event: EventOverlap, results: tuple[object, ...]) -> EventOverlap:
    """The event of a call, whose wait returns the results."""
    event.register_hook_after_wait(functools.partial(_itself, results))
    return event


def _itself(results: tuple[object, ...]) -> tuple[object, ...]:
    return results
