"""A part of `CudaEngine`: dispatches that are one call of C++.

It takes a slot, launches, waits for the counts if there is no bound, and makes the tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from hybrid_ep import _cuda
from hybrid_ep.engine.agreement import ABSENT
from hybrid_ep.engine.calls import DispatchedFields, DispatchHandle, DispatchRequest, Routing, Rows
from hybrid_ep.engine.cuda.faults import dispatch_number
from hybrid_ep.engine.cuda.plan import DispatchPlan
from hybrid_ep.engine.cuda.route import Chunk, Route, as_sent

if TYPE_CHECKING:
    from hybrid_ep.engine.cuda.engine import CudaEngine

__all__ = ["RepeatedDispatch", "dispatch_at_once"]

# The fields of DispatchOutput.
Made = tuple[
    Tensor, "Tensor | None", "Tensor | None", "Tensor | None", "Tensor | None", "Tensor | None", "Tensor | None"
]


def dispatch_at_once(
    engine: CudaEngine,
    planned: DispatchPlan[_cuda.DispatchPlan],
    num_rows: int,
    tensors: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    chunk: Chunk,
    route: int,
    handle: int,
    stream: int,
) -> Made | None:
    """Makes a dispatch that does not wait, and returns its tensors; None where it takes more than one step.

    Those are calls in a capture, without a free slot, where slots must grow, or with tensors that must be moved.

    Args:
        engine: of the call.
        planned: its plan, which refuses nothing.
        num_rows: of the result.
        tensors: rows, scales, top-k indices and weights; the last two None along a known route.
        chunk, route: the memory of its route, and the address.
        handle: number of the dispatch that made the route; ABSENT where this one does.
        stream: what `CudaEngine._begin` has returned.
    """
    arena = engine._arena
    if arena.is_short:
        return None
    return arena.pool.dispatch(
        engine._communicator,
        planned.native,
        planned.slot_bytes,
        num_rows,
        *tensors,
        chunk.memory,
        route,
        handle,
        stream,
    )


class RepeatedDispatch:
    """Dispatches of one shape, whose rows land by source; see `Engine.repeat_of`.

    What follows from the shape is found out once. A call of more than one step is left to
    `CudaEngine.dispatch_in_steps`.

    Args:
        engine: of the calls.
        request: of one of them.
        planned: its plan, which refuses nothing.
    """

    def __init__(self, engine: CudaEngine, request: DispatchRequest, planned: DispatchPlan[_cuda.DispatchPlan]) -> None:
        self._engine, self._planned, self._bound = engine, planned, request.bound
        self._route_ints, self._counts_at = planned.native.route_ints, planned.native.counts_at
        # No tensors are kept, because this object may outlive them.
        self._of_routing, self._of_request = request.routing[2:], request[2:]

    def __call__(
        self, data: Tensor, scales: Tensor | None, topk_idx: Tensor, topk_weights: Tensor | None
    ) -> DispatchedFields:
        engine, bound = self._engine, self._bound
        stream = engine._begin()
        piece, made = engine._routes.cut(self._route_ints, stream), None
        counts: list[int] | None = None
        if piece is not None:
            tensors = data, scales, topk_idx, topk_weights
            if bound is None:
                made, sizes, counts = self._wait(tensors, piece, stream)
            else:
                made = dispatch_at_once(engine, self._planned, bound, tensors, *piece, ABSENT, stream)
                engine.num_calls += made is not None
                most = self._planned.max_rows
                sizes = bound, most, most, 0, 0
        if piece is None or made is None:
            routing = Routing(topk_idx, topk_weights, *self._of_routing)
            return engine.dispatch_in_steps(DispatchRequest(Rows(data, scales), routing, *self._of_request))
        number = dispatch_number(engine.number, engine.num_calls)
        engine._end()
        rows, experts, weights, received_scales, rank_prefix, _, _ = made
        assert experts is not None
        assert rank_prefix is not None
        if scales is not None:
            rows = as_sent(rows, data)
        route = Route(*piece, self._counts_at, *sizes, number)
        num_tokens, num_topk = topk_idx.shape
        handle = DispatchHandle(rank_prefix, num_tokens, sizes[0], self._of_routing[0], num_topk, engine.grid, route)
        return (rows, received_scales), experts, weights, counts, handle

    def _wait(
        self,
        tensors: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
        piece: tuple[Chunk, int],
        stream: int,
    ) -> tuple[Made | None, tuple[int, int, int, int, int], list[int] | None]:
        """Makes a dispatch without a bound.

        Returns:
            The tensors, the fields `num_recv` to `num_from_away` of the route, and the tokens of each local expert.
            Without tensors the dispatch is still to be made in several steps, at all ranks if slots must grow.
        """
        engine, arena, plan = self._engine, self._engine._arena, self._planned.native
        nothing = None, (0, 0, 0, 0, 0), None
        if arena.is_short:
            return nothing
        chunk, route = piece
        waited = arena.pool.dispatch_and_wait(engine._communicator, plan, *tensors, chunk.memory, route, ABSENT, stream)
        if waited is None:
            return nothing
        engine.num_calls += 1
        fields, counts, made = waited
        if fields is None:
            engine._raise_failed()
        if made is None:  # no rank has sent
            return nothing
        _, num_recv, _, num_sent_away, num_kept, max_recv, max_sent, _, _, _ = fields
        engine.traffic.within_domain += num_sent_away * plan.record_bytes
        return made, (num_recv, max_recv, max_sent, num_sent_away, num_recv - num_kept), counts
