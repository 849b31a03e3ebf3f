"""Plans of dispatches between domains: what follows from their sizes and dtypes."""

from __future__ import annotations

from typing import Any, NamedTuple

from hybrid_ep import _cuda
from hybrid_ep.agree.fields import dtype_code, too_many_tokens
from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.engine.calls import DispatchHandle, DispatchRequest, Routing, Rows


def refusal_of(kind: _cuda.FaultKind, rank: int, value: int, allowed: int) -> str:
    """Says which argument of a rank is wrong, in the same words at every rank."""
    if kind == _cuda.FaultKind.TOO_MANY_TOKENS and allowed < _cuda.max_tokens:
        return too_many_tokens(rank, value, allowed)
    if kind == _cuda.FaultKind.TOO_MANY_TOKENS:
        return f"tokens of rank {rank} are {value}; allowed with the cuda engine: ≤ {allowed}"
    if kind == _cuda.FaultKind.BAD_BOUND:
        return f"num_dispatched_tokens of rank {rank} is {value}; allowed: ≤ {allowed}, what all ranks can send"
    return f"topk_idx of rank {rank} has {value}; allowed: −1 … {allowed - 1}"


def sizes_of_rows(rows: Rows) -> dict[str, Any]:
    """The sizes of a plan that rows and their scales give."""
    num_tokens, hidden = rows.data.shape
    sizes = {"num_tokens": num_tokens, "hidden": hidden, "dtype": dtype_code(rows.data.dtype)}
    if rows.scales is not None:
        sizes |= {"num_scales": rows.scales.shape[1], "scale_dtype": dtype_code(rows.scales.dtype)}
    return sizes


class BetweenPlan(NamedTuple):
    """A dispatch between domains. Its rows land by source, and are permuted later.

    Attributes:
        native: what the kernels take.
        refusal: what is wrong with this rank's arguments, or None. The call is launched in any case, so that all ranks
            raise the same error.
        max_rows: the most rows that a slot must hold at any rank; 0 where the host waits for the counts.
    """

    native: _cuda.DispatchShape
    refusal: str | None
    max_rows: int

    @classmethod
    def of(cls, grid: RankGrid, rows: Rows, max_rows: int, **sizes: Any) -> BetweenPlan:
        """Makes the plan of this rank.

        Raises:
            ConfigError: more experts than the kernels take, or rows that they cannot move.
        """
        native = _cuda.DispatchShape(rank=grid.rank, num_ranks=grid.num_ranks, **sizes_of_rows(rows), **sizes)
        refusal = None
        if native.refusal is not None:
            kind, value, allowed = native.refusal
            refusal = refusal_of(kind, grid.rank, value, allowed)
        return cls(native, refusal, max_rows)

    @property
    def slot_bytes(self) -> int:
        """Size of a slot for `max_rows`."""
        return self.native.slot_bytes_for(self.max_rows)


def plan_between(request: DispatchRequest, routing: Routing, grid: RankGrid) -> BetweenPlan:
    """Plans a dispatch that makes its route; `routing` is the request's."""
    bound, replicas = request.bound, request.replicas
    slots = None if replicas is None else replicas.experts.shape
    return BetweenPlan.of(
        grid,
        request.rows,
        (bound if request.common_bound is None else request.common_bound) or 0,
        num_topk=routing.topk_idx.shape[1],
        num_experts=routing.num_experts,
        has_topk=routing.has_topk,
        has_weights=routing.topk_weights is not None,
        expert_range=request.reported_experts(routing, grid),
        pad_multiple=request.pad_multiple,
        bound=bound,
        common_bound=request.common_bound,
        num_sms=request.num_sms,
        max_tokens=routing.max_tokens,
        num_mapped_ranks=None if slots is None else slots[0],
        num_slots=None if slots is None else slots[1],
        drops_rows=request.drops_rows,
    )


def plan_between_along(request: DispatchRequest, handle: DispatchHandle, max_recv: int, grid: RankGrid) -> BetweenPlan:
    """Plans a dispatch along the route of `handle`; `max_recv` is the most that any slot must hold."""
    return BetweenPlan.of(
        grid,
        request.rows,
        max_recv,
        num_topk=handle.num_topk,
        num_experts=handle.num_experts,
        bound=max_recv,
        num_sms=request.num_sms,
    )
