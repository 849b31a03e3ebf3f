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
from hybrid_ep.engine.cuda.plan import sizes_of_rows

if TYPE_CHECKING:
    from hybrid_ep.engine.cuda.between import CudaBetween
    from hybrid_ep.engine.cuda.engine import CudaEngine

__all__ = ["refuse_between", "refuse_within"]

_HIDDEN = 8  # as few as kernels move


def refuse_within(engine: CudaEngine, call: str, number: int) -> None:
    """Takes part in a call inside a domain.

    Args:
        engine: of the call.
        call: as in `Engine.refuse`.
        number: of the refusal.
    """
    if call in ("combine", "copy of experts"):  # which share their words
        engine._domain.refuse_combine(number)
    else:
        engine._domain.refuse_dispatch(number)


def refuse_between(engine: CudaBetween, call: str, number: int) -> None:
    """Launches a refused call between domains, where rows of a dispatch carry experts."""
    grid, stream = engine.grid, engine._begin_launch()
    sizes = RouteSizes(grid.num_domains, grid.num_ranks_per_domain, 0, 1, grid.num_ranks)
    no_rows = torch.zeros(sizes.num_ints(0), dtype=torch.int32, device=engine.device)
    if call == "combine":
        plan = _cuda.CombinePlan(num_tokens=0, hidden=_HIDDEN, num_topk=1, num_experts=grid.num_ranks, refusal=number)
        combine_without_rows(engine, plan, no_rows, ABSENT, stream)
    else:
        rows = Rows(torch.empty(0, _HIDDEN, dtype=torch.bfloat16, device=engine.device))
        shape = _cuda.DispatchShape(
            rank=grid.rank,
            num_ranks=grid.num_ranks,
            **sizes_of_rows(rows),
            num_topk=1,
            num_experts=grid.num_ranks,
            expert_range=(0, grid.num_ranks),
            bound=0,
            refusal=number,
        )
        lease = engine._arena.slots.lease(stream)
        try:
            engine._launch(shape, rows, 0, 0, no_rows.data_ptr(), 0, 0, ABSENT, lease, stream, None)
        finally:
            lease.give_back()
    engine._order.end()
