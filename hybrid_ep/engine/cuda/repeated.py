"""A part of `CudaEngine`: dispatches and combines that repeat an earlier one, each as one call of C++.

normal_calls.cpp and permuted_calls.cpp in csrc/bindings/cuda make them. `call` of each object is that call. It returns
None, and has done nothing, where the object makes the call in steps. Some calls take more than one step, and
`CudaEngine` makes those: calls after a fault, calls that a graph captures, that find no free slot or need larger ones,
that run on another stream than the dispatch of their handle, or whose tensors are not aligned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybrid_ep import _cuda
from hybrid_ep.core.layout import topk_probs
from hybrid_ep.engine.calls import (
    CachedDispatchRequest,
    CombineRequest,
    DispatchedFields,
    DispatchHandle,
    DispatchRequest,
    PermuteHandle,
    RepeatedCombineDense,
    RepeatedPermuted,
    RepeatedPermutedAlong,
    RepeatedUnpermute,
    Routing,
    Rows,
)
from hybrid_ep.engine.cuda.combine import results_of
from hybrid_ep.engine.cuda.plan import (
    combine_shape_of,
    combine_shape_of_experts,
    plan_combine,
    plan_dispatch,
    shape_along,
    shape_of,
)
from hybrid_ep.engine.cuda.route import PermuteState, Route

if TYPE_CHECKING:
    from hybrid_ep.engine.cuda.engine import CudaEngine

__all__ = [
    "RepeatedCombine",
    "RepeatedDispatch",
    "RepeatedDispatchAlong",
    "repeat_along",
    "repeat_combine",
    "repeat_combine_dense",
    "repeat_dispatch",
    "repeat_permuted",
    "repeat_permuted_along",
    "repeat_unpermute",
]


class RepeatedDispatch:
    """Dispatches of one shape that make their routes; see `Engine.repeat_of`.

    Args:
        engine: of the calls.
        request: of one of them. No tensors are kept, because this object may outlive them.
        native: makes them.
    """

    def __init__(self, engine: CudaEngine, request: DispatchRequest, native: _cuda.RepeatedDispatch) -> None:
        self._engine, self.call = engine, native.call
        self._of_routing, self._of_request = request.routing[2:], request[2:]

    def __call__(
        self, data: Tensor, scales: Tensor | None, topk_idx: Tensor, topk_weights: Tensor | None
    ) -> DispatchedFields:
        made = self.call(data, scales, topk_idx, topk_weights)
        if made is None:
            routing = Routing(topk_idx, topk_weights, *self._of_routing)
            return self._engine.dispatch_in_steps(DispatchRequest(Rows(data, scales), routing, *self._of_request))
        return made[:2], *made[2:6]


class RepeatedDispatchAlong:
    """Dispatches of one shape along the routes of handles; see `Engine.repeat_of_cached`.

    Args:
        engine, request, native: as in `RepeatedDispatch`.
    """

    def __init__(self, engine: CudaEngine, request: CachedDispatchRequest, native: _cuda.RepeatedDispatchAlong) -> None:
        self._engine, self._num_sms, self.call = engine, request.num_sms, native.call

    def __call__(self, data: Tensor, scales: Tensor | None, handle: DispatchHandle) -> tuple[Tensor, Tensor | None]:
        made = self.call(data, scales, handle)
        if made is None:
            request = CachedDispatchRequest(Rows(data, scales), self._num_sms)
            return self._engine.dispatch_cached_in_steps(request, handle)
        return made


class RepeatedCombine:
    """Combines of one shape; see `Engine.repeat_of_combine`.

    Args:
        engine, request, native: as in `RepeatedDispatch`.
    """

    def __init__(self, engine: CudaEngine, request: CombineRequest, native: _cuda.RepeatedCombine) -> None:
        self._engine, self._num_sms, self.call = engine, request.num_sms, native.call

    def __call__(
        self, data: Tensor, weights: Tensor | None, bias: tuple[Tensor, ...], handle: DispatchHandle
    ) -> tuple[Tensor, Tensor | None]:
        bias_0, bias_1 = (*bias, None, None)[:2]
        made = self.call(data, weights, bias_0, bias_1, handle)
        if made is None:
            return self._engine.combine_in_steps(CombineRequest(data, weights, bias, self._num_sms), handle)
        return made


# What makes the calls of a shape is kept in `engine._repeated`.


def repeat_dispatch(
    engine: CudaEngine, request: DispatchRequest, returns_topk: bool, num_received: int | None
) -> RepeatedDispatch | None:
    """See `Engine.repeat_of`."""
    # Handles and mappings have tensors, and differ from call to call.
    if request.again is not None or request.replicas is not None:
        return None
    grid, shape = engine.grid, shape_of(request, engine.grid)
    key = shape, returns_topk, num_received
    native: _cuda.RepeatedDispatch | None = engine._repeated.get(key)
    if native is None:
        planned = plan_dispatch(grid.rank, grid.num_ranks, shape)
        if planned.refusal is not None:
            return None
        plan, max_rows = planned.native, planned.max_rows
        native = _cuda.RepeatedDispatch(
            engine,
            plan,
            request.bound,
            max_rows,
            plan.counts_at,
            returns_topk,
            None if num_received is None else _topk_probs(engine, shape.num_topk, num_received),
            grid,
            Route,
            DispatchHandle,
        )
        engine._repeated.add(key, native)
    return RepeatedDispatch(engine, request, native)


def repeat_along(engine: CudaEngine, request: CachedDispatchRequest, handle: DispatchHandle) -> RepeatedDispatchAlong:
    """See `Engine.repeat_of_cached`."""
    shape = shape_along(request, handle, 0, max_rows=0)
    native: _cuda.RepeatedDispatchAlong | None = engine._repeated.get(shape)
    if native is None:
        planned = plan_dispatch(engine.grid.rank, engine.grid.num_ranks, shape)
        native = _cuda.RepeatedDispatchAlong(engine, planned.native, Route)
        engine._repeated.add(shape, native)
    return RepeatedDispatchAlong(engine, request, native)


def repeat_combine(engine: CudaEngine, request: CombineRequest, handle: DispatchHandle) -> RepeatedCombine:
    """See `Engine.repeat_of_combine`."""
    shape = combine_shape_of(request, handle)
    native: _cuda.RepeatedCombine | None = engine._repeated.get(shape)
    if native is None:
        make_out, make_weights = results_of(shape, engine.device)
        native = _cuda.RepeatedCombine(
            engine, plan_combine(shape), make_out, make_weights if shape.num_weights else None, Route
        )
        engine._repeated.add(shape, native)
    return RepeatedCombine(engine, request, native)


def repeat_combine_dense(
    engine: CudaEngine, request: CombineRequest, handle: DispatchHandle, num_received: int
) -> RepeatedCombineDense:
    """See `Engine.repeat_of_combine_dense`."""
    shape = combine_shape_of(request, handle)
    key = "dense", shape, num_received
    native: _cuda.RepeatedDenseCombine | None = engine._repeated.get(key)
    if native is None:
        received, sent = (_topk_probs(engine, shape.num_topk, num) for num in (num_received, shape.num_experts))
        native = _cuda.RepeatedDenseCombine(
            engine, plan_combine(shape), *results_of(shape, engine.device), Route, received, sent
        )
        engine._repeated.add(key, native)
    return native.call


def _topk_probs(engine: CudaEngine, num_topk: int, num_experts: int) -> _cuda.TopkProbs:
    assert engine.device is not None
    return topk_probs(num_topk, num_experts, engine.device, engine._index)


# Of which the handles of permuted dispatches are made.
_TYPES = Route, DispatchHandle, PermuteState, PermuteHandle


def _new(engine: CudaEngine, *shape: int, dtype: torch.dtype = torch.float32) -> _cuda.NewTensor:
    """What makes tensors of this shape on the GPU."""
    assert engine.device is not None
    return _cuda.NewTensor(shape, (*shape[1:], 1), dtype, engine.device)


def _new_scales(engine: CudaEngine, rows: Rows) -> _cuda.NewTensor | None:
    """What makes the scales of any number of rows."""
    return None if rows.scales is None else _new(engine, 0, rows.scales.shape[1], dtype=rows.scales.dtype)


def repeat_permuted(engine: CudaEngine, request: DispatchRequest) -> RepeatedPermuted | None:
    """See `Engine.repeat_of_permuted`."""
    grid, num_expert_sms = engine.grid, request.num_expert_sms or 0
    key = shape_of(request, grid), num_expert_sms
    native: _cuda.RepeatedPermutedDispatch | None = engine._repeated.get(key)
    if native is None:
        planned = plan_dispatch(grid.rank, grid.num_ranks, key[0])
        if planned.refusal is not None:
            return None
        native = _cuda.RepeatedPermutedDispatch(
            engine,
            planned.native,
            request.bound,
            num_expert_sms,
            None if request.routing.topk_weights is None else _new(engine, 0),
            _new_scales(engine, request.rows),
            _cuda.NewTensor((planned.native.num_local_experts,), (1,), torch.int64, torch.device("cpu")),
            grid,
            _TYPES,
        )
        engine._repeated.add(key, native)
    return native.call


def repeat_permuted_along(
    engine: CudaEngine, request: CachedDispatchRequest, handle: PermuteHandle
) -> RepeatedPermutedAlong:
    """See `Engine.repeat_of_permuted_cached`."""
    grid, num_expert_sms = engine.grid, request.num_expert_sms or 0
    key = shape_along(request, handle.dispatch, handle.pad_multiple, max_rows=0), num_expert_sms
    native: _cuda.RepeatedPermutedDispatchAlong | None = engine._repeated.get(key)
    if native is None:
        planned, make_scales = plan_dispatch(grid.rank, grid.num_ranks, key[0]), _new_scales(engine, request.rows)
        native = _cuda.RepeatedPermutedDispatchAlong(engine, planned.native, num_expert_sms, make_scales, _TYPES)
        engine._repeated.add(key, native)
    return native.call


def repeat_unpermute(
    engine: CudaEngine, request: CombineRequest, handle: PermuteHandle, is_dense: bool
) -> RepeatedUnpermute:
    """See `Engine.repeat_of_combine_permuted`."""
    shape = combine_shape_of_experts(request, handle.dispatch)
    key = "experts", shape, is_dense
    native: _cuda.RepeatedPermutedCombine | None = engine._repeated.get(key)
    if native is None:
        make_out, make_out_weights = results_of(shape, engine.device)
        has_probs = request.weights is not None
        native = _cuda.RepeatedPermutedCombine(
            engine,
            plan_combine(shape),
            _new(engine, 0, shape.hidden, dtype=shape.dtype),
            _new(engine, 0, shape.num_topk) if has_probs else None,
            make_out,
            make_out_weights if has_probs else None,
            _topk_probs(engine, shape.num_topk, shape.num_experts) if has_probs and is_dense else None,
            _TYPES,
        )
        engine._repeated.add(key, native)
    return native.call
