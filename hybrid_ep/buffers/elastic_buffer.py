"""`ElasticBuffer` and `EPBuffer`: dispatch and combine with the interfaces of DeepEP 2.1 and 2.5.

    recv_x, recv_topk_idx, recv_topk_weights, handle, event = buffer.dispatch(x, topk_idx, topk_weights, num_experts=E)
    combined_x, combined_topk_weights, event = buffer.combine(expert_output, handle)

The two differ in signatures only. What they do is in elastic_calls.py.
"""

from __future__ import annotations

import functools

import torch.distributed as dist
from torch import Tensor

from hybrid_ep.buffers.allocator import BufferAllocator
from hybrid_ep.buffers.collective import collective
from hybrid_ep.buffers.elastic_calls import (
    CombineResult,
    DispatchOptions,
    DispatchResult,
    ElasticCalls,
    Event,
)
from hybrid_ep.buffers.elastic_handle import EPHandle
from hybrid_ep.checks import MAX_BYTES, require, require_int, unsupported
from hybrid_ep.core.event import EventOverlap

__all__ = ["EPBuffer", "ElasticBuffer"]


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


def _check_defer(defer_epilogue: bool, async_with_compute_stream: bool) -> None:
    ok = not defer_epilogue or bool(async_with_compute_stream)
    require(ok, "async_with_compute_stream", async_with_compute_stream, "True with defer_epilogue")


def _deferred(event: EventOverlap, results: tuple[object, ...]) -> EventOverlap:
    """The event of a call, whose wait returns the results."""
    event.register_hook_after_wait(functools.partial(_itself, results))
    return event


def _itself(results: tuple[object, ...]) -> tuple[object, ...]:
    return results
