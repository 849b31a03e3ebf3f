"""`Buffer`: dispatch and combine with the interface of DeepEP V1.

    layout = buffer.get_dispatch_layout(topk_idx, num_experts)
    recv_x, recv_topk_idx, recv_topk_weights, counts, handle, event = buffer.dispatch(x, topk_idx=topk_idx, …)
    combined_x, _, event = buffer.combine(expert_output, handle)

The engine moves the tokens. This file checks arguments and shapes results.
"""

from __future__ import annotations

import importlib.util
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep import env
from hybrid_ep.buffers.base import as_biases, rounded_up
from hybrid_ep.buffers.collective import collective
from hybrid_ep.buffers.load_balance import LoadBalanceCalls
from hybrid_ep.buffers.local_memory import LocalMemory
from hybrid_ep.buffers.low_latency import LowLatencyCalls
from hybrid_ep.buffers.normal_arguments import (
    NormalArguments,
    Tokens,
    as_given,
    check_sizes,
    checked,
    parts_of,
)
from hybrid_ep.checks import MAX_BYTES, require, require_bool, require_int
from hybrid_ep.core.calls import plain_tensors
from hybrid_ep.core.checks import packed
from hybrid_ep.core.config import Config
from hybrid_ep.core.event import EventHandle, EventOverlap
from hybrid_ep.core.layout import compute_layout
from hybrid_ep.engine.calls import DispatchHandle, DispatchRequest

__all__ = ["Buffer", "topk_idx_t"]

topk_idx_t = torch.int64

_X = TypeVar("_X", Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor])

DispatchResult = tuple[
    Tokens,
    "Tensor | None",
    "Tensor | None",
    "list[int] | None",
    "DispatchHandle | None",
    EventOverlap,
]


class Buffer(NormalArguments, LocalMemory, LoadBalanceCalls, LowLatencyCalls):
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
        group: the process group; None = the default group, or a single rank where there is none.
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
        use_fabric: bool = False,
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
        self._local_memory: dict[bool, Tensor] = {}
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
        self._num_local_experts(num_experts)
        self._check_topk(topk_idx, None, num_experts, device=None)
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
        handle: DispatchHandle,
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
    ) -> tuple[_X, Tensor, Tensor, list[int], DispatchHandle, EventOverlap]: ...

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
    ) -> tuple[_X, Tensor, None, list[int], DispatchHandle, EventOverlap]: ...

    @overload
    def dispatch(
        self,
        x: Tokens,
        handle: DispatchHandle | None = None,
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
        handle: DispatchHandle | None = None,
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
                every rank.
            handle: of an earlier dispatch, whose routes are used. `topk_idx` and `topk_weights` must then be None, and
                `num_worst_tokens` 0 or the handle's. If a layout is given again, it must be the handle's. A handle may
                be used any number of times.
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
            self._check_handle(handle)
            if num_worst_tokens not in (0, handle.num_recv):
                require(False, "num_worst_tokens", num_worst_tokens, f"0 or {handle.num_recv}, as with this handle")
            if is_token_in_rank is not None or num_tokens_per_rank is not None or num_tokens_per_expert is not None:
                self._check_layout_along(handle, is_token_in_rank, num_tokens_per_rank, num_tokens_per_expert)
            with self._comm_stream.scope(previous_event, async_finish):
                # Here, because it may copy scales.
                rows = self._rows_along(sent, (expert_alignment, num_worst_tokens), handle)
                received = engine.dispatch(engine.request_along(rows, handle, num_sms=num_sms)).rows
            event = self._comm_stream.finish(previous_event, async_finish, (*rows, *received))
            return as_given(received, sent), None, None, None, None, event

        check_sizes(expert_alignment, num_worst_tokens)
        with self._comm_stream.scope(previous_event, async_finish):
            # Here, because it may copy scales, and make indices.
            rows = checked(sent, engine.device)
            routing = self._routing(
                rows, topk_idx, topk_weights, is_token_in_rank, num_tokens_per_rank, num_tokens_per_expert
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
        return tokens, recv_topk_idx, result.topk_weights, aligned, result.handle, event

    @overload
    def combine(
        self,
        x: Tensor,
        handle: DispatchHandle,
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
        handle: DispatchHandle,
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
        handle: DispatchHandle,
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
        handle: DispatchHandle,
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
            handle: of the dispatch; it may serve any number of combines.
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
        self._check_handle(handle)
        biases = () if bias is None else as_biases(bias)
        num_sms = Buffer._num_sms_without_config if config is None else _sms_of(config)
        with self._comm_stream.scope(previous_event, async_finish):
            request = self._received(x, topk_weights, biases, num_sms, handle)
            combined = engine.combine(request, handle)
        tensors = (x, topk_weights, *biases, *combined)
        return *combined, self._comm_stream.finish(previous_event, async_finish, tensors)

    # DeepEP has separate calls between nodes. Here one call serves any number of domains.
    internode_dispatch = dispatch_pcie = dispatch
    internode_combine = combine_pcie = combine


def _sms_of(config: Config) -> int:
    """SMs that the caller asks for."""
    require(isinstance(config, Config), "config", type(config).__name__, "a Config or None")
    return config.num_sms
