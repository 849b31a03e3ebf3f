"""Low-latency calls that repeat an earlier one, each as one call of C++ (csrc/bindings/cuda/low_latency_calls.cpp).

`CudaLowLatency` opens this path when a call has ended without a fault. A look for faults, masks that the device has not
yet, and a change of the calls' memory close it. While it is closed, `CudaLowLatency` makes the call in steps. So it
does where a kernel has reported a fault, or the call is captured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hybrid_ep import _cuda
from hybrid_ep.engine.calls import (
    LowLatencyCombineRequest,
    LowLatencyDispatchRequest,
    LowLatencyFields,
    LowLatencyHandle,
)
from hybrid_ep.engine.cuda.plan import LowLatencyPlan
from hybrid_ep.engine.cuda.route import Chunk

if TYPE_CHECKING:
    from hybrid_ep.engine.cuda.low_latency import CudaLowLatency

__all__ = ["LowLatencyState", "RepeatedCombine", "RepeatedDispatch"]


@dataclass(slots=True)
class LowLatencyState:
    """The state of the cuda engine in a LowLatencyHandle.

    Attributes:
        plan: of the dispatch.
        num_tokens: T.
        chunk: the memory that its results beside the rows are a piece of.
        results: address of the piece.
        stream: that the dispatch was sent on.
        is_received: whether its `finish` has run.
    """

    plan: LowLatencyPlan
    num_tokens: int
    chunk: Chunk
    results: int
    stream: int
    is_received: bool = False

    def tables(self) -> tuple[Tensor, Tensor]:
        """`src_info` and `layout_range` of the handle."""
        memory = self.chunk.memory
        return self.plan.native.tables(memory, self.results, memory.device.index)


class RepeatedDispatch:
    """Dispatches of one shape; see `Engine.repeat_of_low_latency`.

    Args:
        calls: of the buffer.
        request: of one of them. No tensors are kept, because this object may outlive them.
        plan: of the shape.
    """

    def __init__(self, calls: CudaLowLatency, request: LowLatencyDispatchRequest, plan: LowLatencyPlan) -> None:
        self._calls, self._plan, self._has_hook = calls, plan, request.return_recv_hook
        packed, device, scales = plan.packed, calls._device, None
        rows = _cuda.NewTensor(packed.rows, packed.row_strides, packed.row_type, device)
        if packed.scales is not None:
            scales = _cuda.NewTensor(packed.scales, packed.scale_strides, packed.scale_type, device)
        num_tokens = request.topk_idx.shape[0]
        self._dispatch = _cuda.RepeatedLowLatencyDispatch(
            calls._repeated,
            calls,
            self._has_hook,
            plan.native,
            num_tokens,
            plan.num_ints,
            rows,
            scales,
            calls._results,
            functools.partial(LowLatencyState, plan, num_tokens),
        ).__call__

    def __call__(
        self, data: Tensor, topk_idx: Tensor, global_scale: Tensor | None, wait_stats: Tensor | None
    ) -> LowLatencyFields:
        calls, plan = self._calls, self._plan
        made = self._dispatch(data, topk_idx, global_scale, wait_stats)
        if made is None:
            return calls.dispatch_in_steps(plan, self._has_hook, data, topk_idx, global_scale, wait_stats)
        rows, scales, counts, memory, state, finish = made
        return (rows, scales), counts, LowLatencyHandle(state.tables, *plan.sizes, calls._grid, memory, state), finish


class RepeatedCombine:
    """Combines of one shape, without signals; see `Engine.repeat_of_low_latency_combine`.

    Args:
        calls: of the buffer.
        request: of one of them; no tensors are kept.
    """

    def __init__(self, calls: CudaLowLatency, request: LowLatencyCombineRequest) -> None:
        self._calls, self._shape = calls, request.topk_idx.shape
        self._use_logfmt, self._has_hook = request.use_logfmt, request.return_recv_hook
        out = request.out
        self._make_out = _cuda.NewTensor(out.shape, (out.shape[1], 1), out.dtype, out.device)
        self._combine = _cuda.RepeatedLowLatencyCombine(
            calls._repeated, calls, self._has_hook, self._make_out, self._use_logfmt, request.min_tokens_to_sum
        ).__call__

    def __call__(
        self,
        data: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        out: Tensor | None,
        wait_stats: Tensor | None,
        handle: LowLatencyHandle,
    ) -> tuple[Tensor, Callable[[], None] | None]:
        state, made = handle.state, None
        if isinstance(state, LowLatencyState) and state.is_received:
            plan, num_tokens = state.plan, state.num_tokens
            if self._shape == (num_tokens, plan.num_topk):
                made = self._combine(
                    plan.native,
                    data,
                    state.results,
                    topk_idx,
                    topk_weights,
                    out,
                    num_tokens,
                    wait_stats,
                    state.stream,
                    state,
                )
        if made is None:
            return self.in_steps(self._calls.combine, data, topk_idx, topk_weights, out, wait_stats, handle)
        return made

    def in_steps(
        self,
        combine: Callable[[LowLatencyCombineRequest, LowLatencyHandle], Callable[[], None] | None],
        *arguments: Any,
    ) -> tuple[Tensor, Callable[[], None] | None]:
        """Makes the call by `combine`, that of an engine. `arguments` are those of `__call__`."""
        data, topk_idx, topk_weights, out, wait_stats, handle = arguments
        if out is None:
            out = self._make_out()
        tensors = data, topk_idx, topk_weights, out
        request = LowLatencyCombineRequest(*tensors, self._use_logfmt, wait_stats, None, self._has_hook)
        return out, combine(request, handle)
