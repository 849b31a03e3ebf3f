"""How calls of `ElasticBuffer` and `EPBuffer` are repeated: see repeats.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from hybrid_ep.buffers.elastic_handle import Counts, EPHandle
from hybrid_ep.buffers.repeats import parts_of_repeat, up_to
from hybrid_ep.buffers.repeats import repeat_combine as repeat_combine_by_source
from hybrid_ep.core.checks import packed
from hybrid_ep.core.event import EventOverlap
from hybrid_ep.core.repeatable import Repeat
from hybrid_ep.engine.calls import (
    CachedDispatchRequest,
    CombineRequest,
    DispatchHandle,
    DispatchRequest,
    PermuteHandle,
)

if TYPE_CHECKING:
    from hybrid_ep.buffers.elastic_calls import ElasticCalls

__all__ = ["READS", "ROWS", "repeat_along", "repeat_combine", "repeat_dispatch"]

# Of the handle: what calls along it must have alike.
READS = {
    "handle": (
        "grid",
        "do_expand",
        "num_tokens",
        "num_topk",
        "num_experts",
        "expert_alignment",
        "num_max_tokens_per_rank",
        "asked_num_sms",
    )
}
ROWS = "handle", "num_rows", "x", "topk_weights"


# What a repeated dispatch returns: rows, scales, experts and weights that arrived, counts on the host, the handle, a
# copy of the top-k indices if it is wanted, and the handle of rows by expert. None: nothing has been done.
_Sent = tuple[
    Tensor, "Tensor | None", "Tensor | None", "Tensor | None", Any, DispatchHandle, Any, "PermuteHandle | None"
]
_Send = Callable[[Tensor, "Tensor | None", Tensor, "Tensor | None"], "_Sent | None"]


def repeat_dispatch(
    buffer: ElasticCalls, request: DispatchRequest, x: object, like: EPHandle, *, copies_topk: bool
) -> Repeat | None:
    """Of a dispatch that makes its route.

    Args:
        buffer, request, x: of one of the calls; `x` as the caller gives it.
        like: the handle of that call.
        copies_topk: whether handles have a copy of the routing.
    """
    parts = parts_of_repeat(x)
    send = _by_expert(buffer, request) if request.pad_multiple else _by_source(buffer, request, copies_topk)
    if parts is None or send is None:
        return None
    taken, tokens = parts
    sizes = {name: getattr(like, name) for name in ("expert_alignment", "num_max_tokens_per_rank", "asked_num_sms")}
    bound = None if request.bound is None else like.num_recv_tokens
    takes = "self", *taken, "topk_idx", "topk_weights", "cumulative_local_expert_recv_stats"
    call = functools.partial(_dispatch, send, sizes, bound, copies_topk)
    return Repeat(call, takes, (tokens, 2, 3, 4, EventOverlap))


def _by_source(buffer: ElasticCalls, request: DispatchRequest, copies_topk: bool) -> _Send | None:
    repeat = buffer.engine.repeat_of(request, returns_topk=copies_topk)
    return None if repeat is None else functools.partial(_send_by_source, repeat.call)


def _send_by_source(call: Callable[..., Any], *arguments: Any) -> _Sent | None:
    made = call(*arguments)
    return made and (*made, None)


def _by_expert(buffer: ElasticCalls, request: DispatchRequest) -> _Send | None:
    call = buffer.engine.repeat_of_permuted(request)
    return None if call is None else functools.partial(_send_by_expert, call)


def _send_by_expert(call: Callable[..., Any], *arguments: Any) -> _Sent | None:
    made = call(*arguments)
    if made is None:
        return None
    rows, scales, probs, counts, permute, copied_topk = made
    return rows, scales, None, probs, counts, permute.dispatch, copied_topk, permute


def _dispatch(
    send: _Send,
    sizes: dict[str, Any],
    bound: int | None,
    copies_topk: bool,
    buffer: ElasticCalls,
    data: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    stats: Tensor | None,
) -> tuple[Any, ...] | None:
    made = send(data, scales, topk_idx, topk_weights)
    if made is None:
        return None
    rows, row_scales, recv_idx, recv_weights, counts, dispatch, copied_topk, permute = made
    on_host: list[int] = []
    if bound is None:
        on_host = up_to(counts if isinstance(counts, list) else counts.tolist(), sizes["expert_alignment"])
    handle = EPHandle(
        **sizes,
        buffer=buffer,
        topk_idx=copied_topk if copies_topk else topk_idx,
        num_recv_tokens=dispatch.num_recv if bound is None else bound,
        num_recv_tokens_per_expert_list=on_host,
        counts=functools.partial(_counts_of, dispatch, sizes["expert_alignment"], permute is not None),
        dispatch=dispatch,
        permute=permute,
        recv_topk_idx=None if recv_idx is None else recv_idx.clone(),
    )
    _add_to(stats, handle)
    return rows, row_scales, recv_idx, recv_weights, handle


def _counts_of(dispatch: DispatchHandle, alignment: int, do_expand: bool) -> Counts:
    """The counts that a repeated dispatch has written. There is one domain."""
    grid, state = dispatch.grid, cast(Any, dispatch.state)
    per_rank = packed(dispatch.rank_prefix_matrix[:, grid.rank])
    per_expert = state.tokens_per_expert(dispatch.num_experts // grid.num_ranks)
    return Counts.of(per_rank, per_expert, alignment, do_expand)


def _add_to(stats: Tensor | None, handle: EPHandle) -> None:
    if stats is not None:
        stats.add_(handle.num_unaligned_recv_tokens_per_expert)


def repeat_along(buffer: ElasticCalls, request: CachedDispatchRequest, x: object, handle: EPHandle) -> Repeat | None:
    """Of a dispatch along a handle, without weights."""
    parts = parts_of_repeat(x)
    call: Callable[..., Any] | None
    if handle.permute is None:
        repeat = buffer.engine.repeat_of_cached(request, handle.dispatch)
        call, handle_of_engine = None if repeat is None else repeat.call, "dispatch"
    else:
        call, handle_of_engine = buffer.engine.repeat_of_permuted_cached(request, handle.permute), "permute"
    if parts is None or call is None:
        return None
    taken, tokens = parts
    takes = *taken, ("handle", handle_of_engine), "handle", "cumulative_local_expert_recv_stats"
    return Repeat(functools.partial(_along, call), takes, (tokens, 2, None, 3, EventOverlap))


def _along(
    call: Callable[..., Any],
    data: Tensor,
    scales: Tensor | None,
    handle_of_engine: object,
    handle: EPHandle,
    stats: Tensor | None,
) -> tuple[Any, ...] | None:
    made = call(data, scales, handle_of_engine)
    if made is None:
        return None
    _add_to(stats, handle)
    experts = handle.recv_topk_idx
    return *made, None if experts is None else experts.clone(), handle


def repeat_combine(buffer: ElasticCalls, request: CombineRequest, bias: object, handle: EPHandle) -> Repeat | None:
    if handle.permute is None:
        repeat = buffer.engine.repeat_of_combine(request, handle.dispatch)
        return repeat_combine_by_source(repeat, bias, ("handle", "dispatch"))
    call = buffer.engine.repeat_of_combine_permuted(request, handle.permute, is_dense=False)
    if call is None or bias is not None:
        return None
    return Repeat(call, ("x", "topk_weights", ("handle", "permute"), None), (0, 1, EventOverlap))
