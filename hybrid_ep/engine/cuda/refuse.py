"""Launches of the cuda engines by which a rank takes part in a call that it refuses.

The launch has no tokens and needs no memory but what a route takes. Its words say that this rank refuses the call, and
the number of the refusal. Then no rank sends, and every other rank reports that number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hybrid_ep import _cuda
from hybrid_ep.agree.fields import ABSENT
from hybrid_ep.engine.calls import Rows
from hybrid_ep.engine.cuda.between_combine import combine_without_rows
from hybrid_ep.engine.cuda.between_route import RouteSizes
from hybrid_ep.engine.cuda.dispatch import launch
from hybrid_ep.engine.cuda.plan import CombineShape, DispatchShape

if TYPE_CHECKING:
    from hybrid_ep.engine.cuda.between import CudaBetween
    from hybrid_ep.engine.cuda.engine import CudaEngine

__all__ = ["refuse_between", "refuse_within"]

_HIDDEN = 8  # as few as kernels move


def _dispatch_shape(num_ranks: int, number: int) -> DispatchShape:
    experts = (0, num_ranks)
    return DispatchShape(
        shape=torch.Size((0, _HIDDEN)),
        dtype=torch.bfloat16,
        scales=None,
        num_topk=1,
        num_experts=num_ranks,
        has_topk=True,
        has_weights=False,
        expert_range=experts,
        pad_multiple=0,
        bound=0,
        common_bound=None,
        num_sms=None,
        max_tokens=None,
        refusal=number,
    )


def _combine_plan(num_ranks: int, number: int) -> _cuda.CombinePlan:
    return _cuda.CombinePlan(CombineShape(0, _HIDDEN, torch.bfloat16, 1, num_ranks, 0, refusal=number))


def _no_rows(device: torch.device | None) -> Rows:
    return Rows(torch.empty(0, _HIDDEN, dtype=torch.bfloat16, device=device))


def refuse_within(engine: CudaEngine, call: str, number: int) -> None:
    """Takes part in a call inside a domain.

    Args:
        engine: of the call.
        call: as in `Engine.refuse`.
        number: of the refusal.
    """
    num_ranks, stream = engine.grid.num_ranks, engine._begin()
    if call in ("combine", "copy of experts"):  # which share their words
        no_rows = torch.zeros(num_ranks**2, dtype=torch.int32, device=engine.device)
        plan = _combine_plan(num_ranks, number)
        engine._communicator.combine(plan, 0, 0, 0, 0, 0, 0, 0, no_rows.data_ptr(), 0, None, 0, 0, 0, stream)
        engine.num_calls += 1
    else:
        planned = _cuda.DispatchPlan(_dispatch_shape(num_ranks, number), engine.grid.rank, num_ranks)
        with engine._arena.lease(stream) as lease:
            _, route = engine._routes.take(planned.route_ints, stream, alone=False)
            launch(engine, planned, _no_rows(engine.device), 0, 0, route, 0, ABSENT, lease, stream)
    engine._order.end()


def refuse_between(engine: CudaBetween, call: str, number: int) -> None:
    """Launches a refused call between domains, where rows of a dispatch carry experts."""
    grid, stream = engine.grid, engine._begin_launch()
    sizes = RouteSizes(grid.num_domains, grid.num_ranks_per_domain, 0, 1, grid.num_ranks)
    no_rows = torch.zeros(sizes.num_ints(0), dtype=torch.int32, device=engine.device)
    if call == "combine":
        plan = _combine_plan(grid.num_ranks, number)
        combine_without_rows(engine, plan, no_rows, ABSENT, stream)
    else:
        planned = _cuda.DispatchShape(_dispatch_shape(grid.num_ranks, number), grid.rank, grid.num_ranks)
        rows = _no_rows(engine.device)
        with engine._arena.lease(stream) as lease:
            engine._launch(planned, rows, 0, 0, no_rows.data_ptr(), 0, 0, ABSENT, lease, stream, None)
    engine._order.end()
