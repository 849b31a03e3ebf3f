"""A part of `CudaEngine`: combines of received rows, and of rows by expert."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybrid_ep import _cuda
from hybrid_ep.engine.calls import Combined, CombineRequest, DispatchHandle, PermuteHandle, state_of
from hybrid_ep.engine.cuda.plan import (
    MAX_PLANS,
    CombineShape,
    combine_shape_of,
    combine_shape_of_experts,
    plan_combine,
)
from hybrid_ep.engine.cuda.route import PermuteState, Route, aligned

if TYPE_CHECKING:
    from hybrid_ep.engine.cuda.engine import CudaEngine

__all__ = ["combine", "combine_permuted", "results_of"]


def combine(engine: CudaEngine, request: CombineRequest, handle: DispatchHandle) -> Combined:
    """See `Engine.combine`."""
    route = state_of(handle, Route)
    stream = engine._begin()
    data, weights, bias, _, _ = request
    return _combine(engine, combine_shape_of(request, handle), aligned(data), weights, bias, route, stream)


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
    experts = data, data.shape[0], probs, state.address
    return _combine(engine, shape, sums, weights, request.bias, route, stream, experts)


def _combine(
    engine: CudaEngine,
    shape: CombineShape,
    data: Tensor,
    weights: Tensor | None,
    bias: tuple[Tensor, ...],
    route: Route,
    stream: int,
    experts: tuple[Tensor | None, int | None, Tensor | None, int] = (None, None, None, 0),
) -> Combined:
    """Launches a combine and returns its results.

    Args:
        engine: of the call.
        shape: of the call.
        data, weights, bias: as in a request; from experts, data and weights are written first.
        route: of the handle.
        stream: what `CudaEngine._begin` has returned.
        experts: from experts, their rows, how many, their probabilities and the address of the PermuteState.
    """
    route.chunk.note_use(stream)
    plan, arena = plan_combine(shape), engine._arena
    num_bytes = plan.slot_bytes_for(route.max_sent)
    if not arena.holds(num_bytes):
        arena.ensure(num_bytes, lambda: _compare(engine, shape, route.number, stream))
    arena.note_use(stream)
    make_out, make_weights = results_of(shape, engine.device)
    out, out_weights = make_out(), None if weights is None else make_weights()
    bias_0, bias_1 = (*map(aligned, bias), None, None)[:2] if bias else (None, None)
    engine._communicator.combine(
        plan,
        data,
        data.shape[0],
        weights,
        bias_0,
        bias_1,
        out,
        out_weights,
        route.address,
        *experts,
        route.number,
        stream,
    )
    engine.num_calls += 1
    if route.num_from_away:
        engine.traffic.within_domain += route.num_from_away * plan.record_bytes
    engine._end()
    return Combined(out, out_weights)


@functools.lru_cache(MAX_PLANS)
def results_of(shape: CombineShape, device: torch.device) -> tuple[_cuda.NewTensor, _cuda.NewTensor]:
    """What makes the rows and the weights of a result."""
    num_tokens, hidden, num_weights = shape.num_tokens, shape.hidden, shape.num_weights
    make_out = _cuda.NewTensor((num_tokens, hidden), (hidden, 1), shape.dtype, device)
    return make_out, _cuda.NewTensor((num_tokens, num_weights), (num_weights, 1), torch.float32, device)


def _compare(engine: CudaEngine, shape: CombineShape, number: int, stream: int) -> None:
    """Compares the combines of the ranks, before slots grow for them: see compare.py."""
    plan, communicator = plan_combine(shape.compared()), engine._communicator
    no_rows = torch.zeros(engine.grid.num_ranks**2, dtype=torch.int32, device=engine.device)
    engine._compare(lambda: communicator.combine(plan, 0, 0, 0, 0, 0, 0, 0, no_rows, 0, None, 0, 0, number, stream))
