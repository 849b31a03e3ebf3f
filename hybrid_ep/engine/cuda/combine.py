"""A part of `CudaEngine`: combines of received rows, and of rows by expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybrid_ep.engine.calls import Combined, CombineRequest, DispatchHandle, PermuteHandle, state_of
from hybrid_ep.engine.cuda.plan import CombineShape, combine_shape_of, combine_shape_of_experts, plan_combine
from hybrid_ep.engine.cuda.route import PermuteState, Route, aligned

if TYPE_CHECKING:
    from hybrid_ep.engine.cuda.engine import CudaEngine

__all__ = ["combine", "combine_permuted"]


def combine(engine: CudaEngine, request: CombineRequest, handle: DispatchHandle) -> Combined:
    """See `Engine.combine`."""
    route = state_of(handle, Route)
    stream = engine._begin()
    data, weights, bias, _, _ = request
    return _combine(
        engine, combine_shape_of(request, handle), aligned(data), weights, bias, handle.num_tokens, route, stream
    )


def combine_permuted(engine: CudaEngine, request: CombineRequest, handle: PermuteHandle) -> Combined:
    """See `Engine.combine_permuted`."""
    data, probs, dispatch = aligned(request.data), request.weights, handle.dispatch
    state, route = state_of(handle, PermuteState), state_of(dispatch, Route)
    stream = engine._begin()
    num_recv, num_topk = dispatch.num_recv, dispatch.num_topk
    state.begin_combine(engine._communicator, num_recv, num_topk, stream)
    sums = torch.empty(num_recv, data.shape[1], dtype=data.dtype, device=data.device)
    weights = None
    if probs is not None:
        weights = torch.empty(num_recv, num_topk, dtype=torch.float32, device=data.device)
    shape = combine_shape_of_experts(request, dispatch)
    experts = data, probs, state.address
    return _combine(engine, shape, sums, weights, request.bias, dispatch.num_tokens, route, stream, experts)


def _combine(
    engine: CudaEngine,
    shape: CombineShape,
    data: Tensor,
    weights: Tensor | None,
    bias: tuple[Tensor, ...],
    num_tokens: int,
    route: Route,
    stream: int,
    experts: tuple[Tensor | None, Tensor | None, int] = (None, None, 0),
) -> Combined:
    """Launches a combine and returns its results.

    Args:
        engine: of the call.
        shape: of the call.
        data, weights, bias: as in a request; from experts, data and weights are written first.
        num_tokens: of the result.
        route: of the handle.
        stream: what `CudaEngine._begin` has returned.
        experts: from experts, their rows, their probabilities and the address of the PermuteState.
    """
    route.chunk.note_use(stream)
    plan, arena = plan_combine(shape), engine._arena
    num_bytes = plan.slot_bytes_for(route.max_sent)
    if not arena.holds(num_bytes):
        arena.ensure(num_bytes, lambda: _compare(engine, shape, route.number, stream))
    arena.note_use(stream)
    out = torch.empty(num_tokens, shape.hidden, dtype=shape.dtype, device=data.device)
    out_weights = None
    if weights is not None:
        out_weights = torch.empty(num_tokens, weights.shape[1], dtype=torch.float32, device=data.device)
    bias_0, bias_1 = (*map(aligned, bias), None, None)[:2] if bias else (None, None)
    engine._communicator.combine(
        plan, data, weights, bias_0, bias_1, out, out_weights, route.address, *experts, route.number, stream
    )
    engine.num_calls += 1
    if route.num_from_away:
        engine.traffic.within_domain += route.num_from_away * plan.record_bytes
    engine._end()
    return Combined(out, out_weights)


def _compare(engine: CudaEngine, shape: CombineShape, number: int, stream: int) -> None:
    """Compares the combines of the ranks, before slots grow for them: see compare.py."""
    plan, communicator = plan_combine(shape.compared()), engine._communicator
    no_rows = torch.zeros(engine.grid.num_ranks**2, dtype=torch.int32, device=engine.device)
    engine._compare(lambda: communicator.combine(plan, 0, 0, 0, 0, 0, 0, no_rows, 0, 0, 0, number, stream))
