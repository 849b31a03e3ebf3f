"""Dispatches with a bound that are repeated: what follows from the shape of their tensors is found out once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from hybrid_ep import _cuda
from hybrid_ep.engine.calls import Dispatched, DispatchHandle, DispatchRequest, Routing, Rows
from hybrid_ep.engine.cuda_faults import dispatch_number
from hybrid_ep.engine.cuda_plan import DispatchPlan
from hybrid_ep.engine.cuda_route import Route, address

if TYPE_CHECKING:
    from hybrid_ep.engine.cuda_engine import CudaEngine

__all__ = ["BoundDispatch"]

_ROW_ALIGN_BYTES = _cuda.row_align_bytes


class BoundDispatch:
    """A part of `CudaEngine`: dispatches of one shape, whose rows land by source; see `Engine.repeat_of`.

    A call that takes more than one step is left to `CudaEngine.dispatch`: in a capture, without a free slot, where
    slots must grow, or with tensors that must be moved.

    Args:
        engine: of the calls.
        request: of one of them, with a bound.
        planned: its plan, which refuses nothing.
    """

    def __init__(self, engine: CudaEngine, request: DispatchRequest, planned: DispatchPlan[_cuda.DispatchPlan]) -> None:
        assert request.bound is not None
        plan = planned.native
        self._engine, self._plan, self._bound = engine, plan, request.bound
        self._slot_bytes, self._max_rows = planned.slot_bytes, planned.max_rows
        self._route_ints, self._counts_at = plan.route_ints, plan.counts_at
        # Without tensors: this may outlive them.
        self._of_routing, self._of_request = request.routing[2:], request[2:]

    def __call__(
        self, data: Tensor, scales: Tensor | None, topk_idx: Tensor, topk_weights: Tensor | None
    ) -> Dispatched:
        made = self._make(data, scales, topk_idx, topk_weights)
        if made is not None:
            return made
        routing = Routing(topk_idx, topk_weights, *self._of_routing)
        return self._engine.dispatch(DispatchRequest(Rows(data, scales), routing, *self._of_request))

    def _make(
        self, data: Tensor, scales: Tensor | None, topk_idx: Tensor, topk_weights: Tensor | None
    ) -> Dispatched | None:
        """Makes the call, or returns None."""
        engine, bound, max_rows = self._engine, self._bound, self._max_rows
        arena, rows_at, scales_at = engine._arena, data.data_ptr(), address(scales)
        if (rows_at | scales_at) % _ROW_ALIGN_BYTES or arena.slot_bytes < self._slot_bytes or arena.is_short:
            return None
        stream = engine._begin()
        piece = engine._routes.cut(self._route_ints, stream)
        if piece is None:
            return None
        chunk, route_at = piece
        tensors = arena.pool.dispatch(
            engine._communicator,
            self._plan,
            bound,
            rows_at,
            topk_idx.data_ptr(),
            address(topk_weights),
            scales_at,
            chunk.memory,
            route_at,
            stream,
        )
        if tensors is None:
            return None
        engine._num_dispatches += 1
        number = dispatch_number(engine._number, engine._num_dispatches)
        engine._end()
        rows, experts, weights, received_scales, rank_prefix, _, _ = tensors
        if scales is not None:
            rows = rows.view(data.dtype)
        route = Route(chunk, route_at, self._counts_at, bound, max_rows, max_rows, 0, 0, number)
        num_tokens, num_topk = topk_idx.shape
        handle = DispatchHandle(rank_prefix, num_tokens, bound, self._of_routing[0], num_topk, engine.grid, route)
        return Dispatched(Rows(rows, received_scales), experts, weights, None, handle)
