"""What calls of one shape have in common: worked out by the first of them, looked up by those that follow.

A plan is a pure function of sizes and types: it holds no memory, and serves every cuda engine of the process.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from hybrid_ep import _cuda
from hybrid_ep.engine.agreement import ABSENT, dtype_code, too_many_tokens
from hybrid_ep.engine.base import Rows
from hybrid_ep.errors import ConfigError

__all__ = [
    "ELEMENT_TYPES",
    "DispatchPlan",
    "ScaleKind",
    "find_refusal",
    "plan_cached_dispatch",
    "plan_combine",
    "plan_dispatch",
    "refusal_of",
    "row_bytes_of",
    "scale_kind",
]

# Plans of each kind of call; one takes a few hundred bytes, and one that is missing costs its call 10 µs.
_MAX_PLANS = 1024

# (code, bits) of DLPack. Not every version of it has a code for e4m3, so those travel as bytes.
ELEMENT_TYPES = {
    torch.bfloat16: (4, 16),
    torch.float8_e4m3fn: (1, 8),
    torch.uint8: (1, 8),
    torch.float32: (2, 32),
    torch.int32: (0, 32),
}

ScaleKind = tuple[int, torch.dtype]  # columns and dtype of the scales of rows


def scale_kind(rows: Rows) -> ScaleKind | None:
    """What a plan must know of the scales."""
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


class DispatchPlan(NamedTuple):
    """What dispatches of one shape have in common.

    Attributes:
        native: what the kernels take.
        refusal: what is wrong with this rank's arguments: the call is made nevertheless, so that all ranks learn it;
            None where nothing is.
    """

    native: _cuda.DispatchPlan
    refusal: str | None


class Refusal(NamedTuple):
    """What is wrong with this rank's arguments: the call is made nevertheless, so that all ranks learn it.

    Attributes:
        kind: NONE where nothing is.
        value: the argument.
        text: of the error; None where nothing is wrong.
    """

    kind: _cuda.FaultKind
    value: int
    text: str | None


def find_refusal(rank: int, num_tokens: int, bound: int | None, common_bound: int | None, max_tokens: int) -> Refusal:
    """Looks at the arguments of a dispatch that only this rank's host sees; they are those of `plan_dispatch`."""
    if num_tokens > max_tokens:
        kind, value, allowed = _cuda.FaultKind.TOO_MANY_TOKENS, num_tokens, max_tokens
    elif bound is not None and common_bound is not None and bound > common_bound:
        kind, value, allowed = _cuda.FaultKind.BAD_BOUND, bound, common_bound
    else:
        return Refusal(_cuda.FaultKind.NONE, 0, None)
    return Refusal(kind, value, refusal_of(kind, rank, value, allowed))


def refusal_of(kind: _cuda.FaultKind, rank: int, value: int, allowed: int) -> str:
    """Says which argument of a rank is wrong, in the same words at every rank."""
    if kind == _cuda.FaultKind.TOO_MANY_TOKENS and allowed < _cuda.max_tokens:
        return too_many_tokens(rank, value, allowed)
    if kind == _cuda.FaultKind.TOO_MANY_TOKENS:
        return f"tokens of rank {rank} are {value}; allowed with the cuda engine: ≤ {allowed}"
    if kind == _cuda.FaultKind.BAD_BOUND:
        return f"num_dispatched_tokens of rank {rank} is {value}; allowed: ≤ {allowed}, what all ranks can send"
    return f"topk_idx of rank {rank} has {value}; allowed: −1 … {allowed - 1}"


@functools.lru_cache(_MAX_PLANS)
def plan_dispatch(
    rank: int,
    num_ranks: int,
    shape: torch.Size,
    dtype: torch.dtype,
    scales: ScaleKind | None,
    num_topk: int,
    num_experts: int,
    has_topk: bool,
    has_weights: bool,
    expert_range: tuple[int, int],
    pad_multiple: int,
    bound: int | None,
    common_bound: int | None,
    num_sms: int | None,
    max_tokens: int | None = None,
) -> DispatchPlan:
    """Plans a dispatch that makes its route.

    Args:
        rank, num_ranks: of the domain.
        shape, dtype, scales: of the rows that are sent.
        num_topk, num_experts, has_topk, has_weights: of the routing.
        expert_range: (first, end) of the experts that are reported; equal at all ranks, or each rank's own.
        pad_multiple: 0 = rows by source; otherwise by expert, blocks padded to a multiple.
        bound: rows of the result; None = the host waits for the counts.
        common_bound: with a bound that differs between ranks, a bound of them all, equal at all ranks.
        num_sms: SMs to use; None = the default.
        max_tokens: that a rank may have, alike at all ranks; None = what the kernels take.

    Raises:
        ConfigError: more experts than the kernels take, or rows that they cannot move.
    """
    num_tokens, hidden = shape
    max_tokens = _cuda.max_tokens if max_tokens is None else min(max_tokens, _cuda.max_tokens)
    refusal = find_refusal(rank, num_tokens, bound, common_bound, max_tokens)
    if refusal.kind == _cuda.FaultKind.TOO_MANY_TOKENS:
        num_tokens = 0
    if num_experts > _cuda.max_experts:
        raise ConfigError(f"num_experts is {num_experts}; allowed with the cuda engine: ≤ {_cuda.max_experts}")
    row_bytes_of(hidden, dtype)
    num_local = num_experts // num_ranks
    first, end = expert_range
    # Every rank asks in the same way: for its own experts, or for one range that is equal at all ranks.
    asks_for_own = end - first == num_local and first == rank * num_local
    num_scales, scale_dtype = scales or (0, torch.float32)
    native = _cuda.DispatchPlan(
        makes_route=True,
        num_ranks=num_ranks,
        num_tokens=num_tokens,
        num_topk=num_topk,
        num_experts=num_experts,
        has_weights=has_weights,
        hidden=hidden,
        row_type=ELEMENT_TYPES[dtype],
        num_scales=num_scales,
        scale_type=ELEMENT_TYPES[scale_dtype],
        range_first=0 if asks_for_own else first,
        range_step=num_local if asks_for_own else 0,
        range_size=end - first,
        pad_multiple=pad_multiple,
        row_limit=bound or 0,
        waits_for_counts=bound is None,
        num_sms=num_sms or 0,
        dtype=dtype_code(dtype),
        scale_dtype=ABSENT if scales is None else dtype_code(scale_dtype),
        has_topk=has_topk,
        num_worst_tokens=bound if bound is not None and common_bound is None and pad_multiple == 0 else ABSENT,
        common_bound=ABSENT if bound is None else bound if common_bound is None else common_bound,
        refusal=refusal.kind,
        refused_value=refusal.value,
        max_tokens=max_tokens,
    )
    return DispatchPlan(native, refusal.text)


@functools.lru_cache(_MAX_PLANS)
def plan_cached_dispatch(
    num_ranks: int,
    shape: torch.Size,
    dtype: torch.dtype,
    scales: ScaleKind | None,
    num_topk: int,
    num_experts: int,
    pad_multiple: int,
    max_rows: int,
    num_sms: int | None,
) -> _cuda.DispatchPlan:
    """Plans a dispatch that reads its route, of `num_topk` and `num_experts` when it was made; `max_rows` is the most
    that any slot must hold, the rest as above.
    """
    num_tokens, hidden = shape
    row_bytes_of(hidden, dtype)
    num_scales, scale_dtype = scales or (0, torch.float32)
    return _cuda.DispatchPlan(
        makes_route=False,
        num_ranks=num_ranks,
        num_tokens=num_tokens,
        num_topk=num_topk,
        num_experts=num_experts,
        has_weights=False,
        hidden=hidden,
        row_type=ELEMENT_TYPES[dtype],
        num_scales=num_scales,
        scale_type=ELEMENT_TYPES[scale_dtype],
        range_first=0,
        range_step=0,
        range_size=0,
        pad_multiple=pad_multiple,
        row_limit=max_rows,
        waits_for_counts=False,
        num_sms=num_sms or 0,
        dtype=dtype_code(dtype),
        scale_dtype=ABSENT if scales is None else dtype_code(scale_dtype),
        has_topk=True,
        num_worst_tokens=ABSENT,
        common_bound=max_rows,
        refusal=_cuda.FaultKind.NONE,
        refused_value=0,
        max_tokens=_cuda.max_tokens,
    )


@functools.lru_cache(_MAX_PLANS)
def plan_combine(
    num_tokens: int,
    num_rows: int,
    hidden: int,
    dtype: torch.dtype,
    num_weights: int,
    num_sms: int | None,
    num_topk: int = 0,
    num_expert_rows: int = 0,
    num_expert_sms: int | None = None,
) -> _cuda.CombinePlan:
    """Plans a combine of rows into `num_tokens` tokens.

    Args:
        num_tokens, num_rows, hidden, dtype: of the result, and of the rows that are sent.
        num_weights: of a row; 0 = none.
        num_sms: as in `Engine.combine`.
        num_topk, num_expert_rows: from experts, as many rows are first summed, at most `num_topk` to one; 0 = none are.
        num_expert_sms: SMs that do that; None = the default.
    """
    return _cuda.CombinePlan(
        num_tokens=num_tokens,
        num_rows=num_rows,
        row_bytes=row_bytes_of(hidden, dtype),
        num_weights=num_weights,
        num_sms=num_sms or 0,
        num_topk=num_topk,
        num_expert_rows=num_expert_rows,
        num_expert_sms=num_expert_sms or 0,
    )
