"""Plans: what calls of one shape have in common. The first call of a shape makes the plan, later calls look it up.

A plan is a pure function of sizes and types: it holds no memory, and serves every cuda engine of the process.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch

from hybrid_ep import _cuda
from hybrid_ep.agree.fields import ABSENT, dtype_code, too_many_tokens
from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.engine.calls import (
    CachedDispatchRequest,
    CombineRequest,
    DispatchHandle,
    DispatchRequest,
    Rows,
    state_of,
)
from hybrid_ep.engine.cuda.route import Route
from hybrid_ep.errors import ConfigError

__all__ = [
    "MAX_PLANS",
    "CombineShape",
    "DispatchPlan",
    "DispatchShape",
    "combine_shape_of",
    "combine_shape_of_experts",
    "plan_combine",
    "plan_dispatch",
    "plan_dispatch_between",
    "refusal_of",
    "shape_along",
    "shape_of",
]

_Native = TypeVar("_Native", bound=_cuda.DispatchShape)

# Plans kept of each kind of call. A plan takes a few hundred bytes.
MAX_PLANS = 1024

ScaleKind = tuple[int, torch.dtype]  # columns and dtype of the scales of rows


def scale_kind(rows: Rows) -> ScaleKind | None:
    """Returns the part of a shape that describes the scales."""
    return None if rows.scales is None else (rows.scales.shape[1], rows.scales.dtype)


def row_bytes_of(hidden: int, dtype: torch.dtype) -> int:
    """Bytes of a row.

    Raises:
        ConfigError: the copy engine cannot move such rows.
    """
    row_bytes = hidden * dtype.itemsize
    if row_bytes % _cuda.row_align_bytes or not 0 < row_bytes <= _cuda.max_row_bytes:
        raise ConfigError(
            f"a row of {hidden} × {dtype} has {row_bytes} bytes; allowed: multiples of "
            f"{_cuda.row_align_bytes} up to {_cuda.max_row_bytes}"
        )
    return row_bytes


class DispatchShape(NamedTuple):
    """The shape of a dispatch. Dispatches of one shape share a plan.

    Attributes:
        shape, dtype, scales: of the rows that are sent.
        num_topk, num_experts, has_topk, has_weights: of the routing.
        expert_range: (first, end) of the experts that are reported; equal at all ranks, or each rank's own. None: the
            dispatch reads a route that another has made.
        pad_multiple: 0 = rows by source; otherwise by expert, blocks padded to a multiple.
        bound: rows of the result, or that any slot must hold for a known route; None = the host waits for the counts.
        common_bound: with a bound that differs between ranks, a bound of them all, equal at all ranks.
        num_sms: SMs to use; None = the default.
        max_tokens: the most tokens of a rank, equal at all ranks; None = what the kernels take.
        replicas: shape of the mapping, if the rows are weights or gradients of experts; otherwise None.
        drops_rows: as in `DispatchRequest`.
        num_records: as in `Route`.
        refusal: number of the refusal of this rank, which then sends nothing; None = the call is not refused.
    """

    shape: torch.Size
    dtype: torch.dtype
    scales: ScaleKind | None
    num_topk: int
    num_experts: int
    has_topk: bool
    has_weights: bool
    expert_range: tuple[int, int] | None
    pad_multiple: int
    bound: int | None
    common_bound: int | None
    num_sms: int | None
    max_tokens: int | None
    replicas: torch.Size | None = None
    drops_rows: bool = False
    num_records: int = 0
    refusal: int | None = None

    # Names under which the kernels' plans take the fields.

    @property
    def num_tokens(self) -> int:
        return self.shape[0]

    @property
    def hidden(self) -> int:
        return self.shape[1]

    @property
    def dtype_code(self) -> int:
        return dtype_code(self.dtype)

    @property
    def num_scales(self) -> int:
        return 0 if self.scales is None else self.scales[0]

    @property
    def scale_dtype_code(self) -> int:
        return ABSENT if self.scales is None else dtype_code(self.scales[1])

    @property
    def num_mapped_ranks(self) -> int | None:
        return None if self.replicas is None else self.replicas[0]

    @property
    def num_slots(self) -> int | None:
        return None if self.replicas is None else self.replicas[1]


def shape_of(request: DispatchRequest, grid: RankGrid) -> DispatchShape:
    """The shape of a dispatch that makes its route."""
    rows, routing, bound, num_sms, _, common_bound, pad_multiple, _, replicas, _, drops_rows = request
    return DispatchShape(
        rows.data.shape,
        rows.data.dtype,
        scale_kind(rows),
        routing.topk_idx.shape[1],
        routing.num_experts,
        routing.has_topk,
        routing.topk_weights is not None,
        request.reported_experts(grid),
        pad_multiple,
        bound,
        common_bound,
        num_sms,
        routing.max_tokens,
        None if replicas is None else replicas.experts.shape,
        drops_rows,
        _num_records(request, grid),
    )


def _num_records(request: DispatchRequest, grid: RankGrid) -> int:
    """`DispatchShape.num_records`: with a bound of copies, every token of every rank may arrive."""
    if request.bound is None or not request.pad_multiple:
        return 0
    if request.again is not None:
        return state_of(request.again, Route).num_records
    return grid.num_ranks * min(request.routing.max_tokens or 0, _cuda.max_tokens)


def shape_along(
    request: CachedDispatchRequest, handle: DispatchHandle, pad_multiple: int, max_rows: int, num_records: int = 0
) -> DispatchShape:
    """The shape of a dispatch along the route of `handle`; `max_rows` is the most that any slot must hold."""
    rows = request.rows
    return DispatchShape(
        rows.data.shape,
        rows.data.dtype,
        scale_kind(rows),
        handle.num_topk,
        handle.num_experts,
        True,
        False,
        None,
        pad_multiple,
        max_rows,
        None,
        request.num_sms,
        None,
        num_records=num_records,
    )


@dataclass(frozen=True)
class DispatchPlan(Generic[_Native]):
    """What dispatches of one shape have in common.

    Attributes:
        native: what the kernels take.
        refusal: what is wrong with this rank's arguments, or None. The call is launched in any case, so that all ranks
            raise the same error.
        num_tokens: tokens that this rank sends; 0 if it has more than is allowed.
        max_rows: the most rows that a slot must hold at any rank; 0 where the host waits for the counts.
        slot_bytes: size of a slot for `max_rows`.
        num_records: as in `Route`.
    """

    native: _Native
    refusal: str | None
    num_tokens: int
    max_rows: int
    slot_bytes: int
    num_records: int


def refusal_of(kind: _cuda.FaultKind, rank: int, value: int, allowed: int) -> str:
    """Says which argument of a rank is wrong, in the same words at every rank."""
    if kind == _cuda.FaultKind.TOO_MANY_TOKENS and allowed < _cuda.max_tokens:
        return too_many_tokens(rank, value, allowed)
    if kind == _cuda.FaultKind.TOO_MANY_TOKENS:
        return f"tokens of rank {rank} are {value}; allowed with the cuda engine: ≤ {allowed}"
    if kind == _cuda.FaultKind.BAD_BOUND:
        return f"num_dispatched_tokens of rank {rank} is {value}; allowed: ≤ {allowed}, what all ranks can send"
    return f"topk_idx of rank {rank} has {value}; allowed: −1 … {allowed - 1}"


@functools.lru_cache(MAX_PLANS)
def plan_dispatch(rank: int, num_ranks: int, shape: DispatchShape) -> DispatchPlan[_cuda.DispatchPlan]:
    """Plans a dispatch of `rank` inside a domain.

    Raises:
        ConfigError: more experts than the kernels take, or rows that they cannot move.
    """
    return _plan(_cuda.DispatchPlan, rank, num_ranks, shape)


@functools.lru_cache(MAX_PLANS)
def plan_dispatch_between(rank: int, num_ranks: int, shape: DispatchShape) -> DispatchPlan[_cuda.DispatchShape]:
    """Plans a dispatch of `rank` between domains. Its rows land by source, and are permuted later.

    Raises:
        ConfigError: as `plan_dispatch`.
    """
    return _plan(_cuda.DispatchShape, rank, num_ranks, shape)


def _plan(make: type[_Native], rank: int, num_ranks: int, shape: DispatchShape) -> DispatchPlan[_Native]:
    if shape.num_experts > _cuda.max_experts:
        raise ConfigError(f"num_experts is {shape.num_experts}; allowed with the cuda engine: ≤ {_cuda.max_experts}")
    row_bytes_of(shape.hidden, shape.dtype)
    native = make(shape, rank, num_ranks)
    text = None
    if native.refusal is not None:
        kind, value, allowed = native.refusal
        text = refusal_of(kind, rank, value, allowed)
    max_rows = (shape.bound if shape.common_bound is None else shape.common_bound) or 0
    return DispatchPlan(native, text, native.num_tokens, max_rows, native.slot_bytes_for(max_rows), shape.num_records)


class CombineShape(NamedTuple):
    """The shape of a combine. Combines of one shape share a plan.

    Attributes:
        num_tokens: of the result.
        hidden, dtype: of the rows that are sent.
        num_topk, num_experts: of the route.
        num_weights: of a row; 0 = none.
        num_sms: SMs to use; None = the default.
        num_expert_sms: SMs that sum rows of experts, where the sums are sent; None = the default.
        refusal: as in `DispatchShape`.
    """

    num_tokens: int
    hidden: int
    dtype: torch.dtype
    num_topk: int
    num_experts: int
    num_weights: int
    num_sms: int | None = None
    num_expert_sms: int | None = None
    refusal: int | None = None

    @property
    def row_bytes(self) -> int:
        return row_bytes_of(self.hidden, self.dtype)

    def compared(self) -> CombineShape:
        """A combine without tokens, which ranks compare as if it had them."""
        return self._replace(num_tokens=0)


def combine_shape_of(request: CombineRequest, handle: DispatchHandle) -> CombineShape:
    """The shape of a combine of received rows."""
    data, weights, _, num_sms, _ = request
    return CombineShape(
        handle.num_tokens,
        data.shape[1],
        data.dtype,
        handle.num_topk,
        handle.num_experts,
        0 if weights is None else weights.shape[1],
        num_sms,
    )


def combine_shape_of_experts(request: CombineRequest, handle: DispatchHandle) -> CombineShape:
    """The shape of a combine of permuted rows."""
    return CombineShape(
        handle.num_tokens,
        request.data.shape[1],
        request.data.dtype,
        handle.num_topk,
        handle.num_experts,
        0 if request.weights is None else handle.num_topk,
        request.num_sms,
        request.num_expert_sms,
    )


@functools.lru_cache(MAX_PLANS)
def plan_combine(shape: CombineShape) -> _cuda.CombinePlan:
    """Plans a combine, inside a domain or between domains.

    Raises:
        ConfigError: rows that the kernels cannot move.
    """
    return _cuda.CombinePlan(shape)
