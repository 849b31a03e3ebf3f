"""A part of `CudaEngine`: dispatches and combines that repeat an earlier one, each as one call of C++.

csrc/bindings/cuda/normal_calls.cpp makes them. Some calls take more than one step, and `CudaEngine` makes those: calls
after a fault, calls that a graph captures, that find no free slot or need larger ones, that run on another stream than
the dispatch of their handle, or whose tensors are not aligned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from hybrid_ep import _cuda
from hybrid_ep.engine.calls import (
    CachedDispatchRequest,
    CombineRequest,
    DispatchedFields,
    DispatchHandle,
    DispatchRequest,
    Routing,
    Rows,
)

if TYPE_CHECKING:
    from hybrid_ep.engine.cuda.engine import CudaEngine

__all__ = ["RepeatedCombine", "RepeatedDispatch", "RepeatedDispatchAlong"]


class RepeatedDispatch:
    """Dispatches of one shape that make their routes; see `Engine.repeat_of`.

    Args:
        engine: of the calls.
        request: of one of them. No tensors are kept, because this object may outlive them.
        native: makes them.
    """

    def __init__(self, engine: CudaEngine, request: DispatchRequest, native: _cuda.RepeatedDispatch) -> None:
        self._engine, self._native = engine, native
        self._of_routing, self._of_request = request.routing[2:], request[2:]

    def __call__(
        self, data: Tensor, scales: Tensor | None, topk_idx: Tensor, topk_weights: Tensor | None
    ) -> DispatchedFields:
        engine, made = self._engine, None
        slots = engine.slots_now
        if slots is not None:
            made = self._native(slots, data, scales, topk_idx, topk_weights)
        if made is None:
            routing = Routing(topk_idx, topk_weights, *self._of_routing)
            return engine.dispatch_in_steps(DispatchRequest(Rows(data, scales), routing, *self._of_request))
        return made


class RepeatedDispatchAlong:
    """Dispatches of one shape along the routes of handles; see `Engine.repeat_of_cached`.

    Args:
        engine, request, native: as in `RepeatedDispatch`.
    """

    def __init__(self, engine: CudaEngine, request: CachedDispatchRequest, native: _cuda.RepeatedDispatchAlong) -> None:
        self._engine, self._num_sms, self._native = engine, request.num_sms, native

    def __call__(self, data: Tensor, scales: Tensor | None, handle: DispatchHandle) -> tuple[Tensor, Tensor | None]:
        engine, made = self._engine, None
        slots = engine.slots_now
        if slots is not None:
            made = self._native(slots, data, scales, handle)
        if made is None:
            return engine.dispatch_cached_in_steps(CachedDispatchRequest(Rows(data, scales), self._num_sms), handle)
        return made


class RepeatedCombine:
    """Combines of one shape; see `Engine.repeat_of_combine`.

    Args:
        engine, request, native: as in `RepeatedDispatch`.
    """

    def __init__(self, engine: CudaEngine, request: CombineRequest, native: _cuda.RepeatedCombine) -> None:
        self._engine, self._num_sms, self._native = engine, request.num_sms, native

    def __call__(
        self, data: Tensor, weights: Tensor | None, bias: tuple[Tensor, ...], handle: DispatchHandle
    ) -> tuple[Tensor, Tensor | None]:
        engine, made = self._engine, None
        slots = engine.slots_now
        if slots is not None:
            bias_0, bias_1 = (*bias, None, None)[:2] if bias else (None, None)
            made = self._native(slots, data, weights, bias_0, bias_1, handle)
        if made is None:
            return engine.combine_in_steps(CombineRequest(data, weights, bias, self._num_sms), handle)
        return made
