"""A part of `CudaBetween`: combines of received rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybrid_ep import _cuda
from hybrid_ep.engine.calls import Combined, CombineRequest, DispatchHandle, state_of
from hybrid_ep.engine.cuda.between_route import BetweenRoute
from hybrid_ep.engine.cuda.compare import compare_calls
from hybrid_ep.engine.cuda.route import address, aligned

if TYPE_CHECKING:
    from hybrid_ep.engine.cuda.between import CudaBetween

__all__ = ["combine", "combine_without_rows"]


def combine(engine: CudaBetween, request: CombineRequest, handle: DispatchHandle) -> Combined:
    """See `Engine.combine`."""
    data, weights = aligned(request.data), request.weights
    route = state_of(handle, BetweenRoute)
    stream = engine._begin_launch()
    route.chunk.note_use(stream)
    sizes: dict[str, Any] = {
        "hidden": data.shape[1],
        "num_topk": handle.num_topk,
        "num_experts": handle.num_experts,
        "num_weights": 0 if weights is None else weights.shape[1],
        "num_sms": request.num_sms,
    }
    plan = _cuda.CombinePlan(num_tokens=handle.num_tokens, **sizes)
    # Ranks compare a combine without tokens as if it had them.
    compared = _cuda.CombinePlan(num_tokens=0, **sizes)
    engine._arena.ensure(plan.slot_bytes_for(route.max_sums), lambda: _compare(engine, compared, route, stream))
    engine._arena.slots.note_use(stream)

    def make_sums() -> tuple[Tensor, Tensor | None]:
        sums = torch.empty(handle.num_tokens, data.shape[1], dtype=data.dtype, device=data.device)
        if weights is None:
            return sums, None
        return sums, torch.empty(handle.num_tokens, weights.shape[1], dtype=torch.float32, device=data.device)

    out, out_weights = make_sums()
    # A rank that is alone in its domain has no sums over it: the kernel reads the rows of `data`.
    own_sums, own_weights = make_sums() if engine.grid.num_ranks_per_domain > 1 else (None, None)
    terms = [aligned(term) for term in request.bias]
    engine._between.combine(
        plan=plan,
        rows=data.data_ptr(),
        num_rows=data.shape[0],
        weights=address(weights),
        bias=[term.data_ptr() for term in terms],
        out=out.data_ptr(),
        out_weights=address(out_weights),
        own_sums=address(own_sums),
        own_weights=address(own_weights),
        route=route.address,
        held_capacity=route.held_capacity,
        handle=route.number,
        stream=stream,
    )
    engine._count_launch()
    engine._end_launch()
    return Combined(out, out_weights)


def combine_without_rows(
    engine: CudaBetween, plan: _cuda.CombinePlan, no_rows: Tensor, handle: int, stream: int
) -> None:
    """Launches a combine that only publishes its call; `no_rows` is a route of zeros."""
    engine._between.combine(
        plan=plan,
        rows=0,
        num_rows=0,
        weights=0,
        bias=[],
        out=0,
        out_weights=0,
        own_sums=0,
        own_weights=0,
        route=no_rows.data_ptr(),
        held_capacity=0,
        handle=handle,
        stream=stream,
    )
    engine._count_launch()


def _compare(engine: CudaBetween, plan: _cuda.CombinePlan, route: BetweenRoute, stream: int) -> None:
    """Compares the combines of the ranks, before slots grow for them: see compare.py."""
    no_rows = torch.zeros(route.sizes._replace(num_tokens=0).num_ints(0), dtype=torch.int32, device=engine.device)
    compare_calls(
        engine.device,
        engine._begin_launch,
        engine._take_fault,
        lambda: combine_without_rows(engine, plan, no_rows, route.number, stream),
    )
