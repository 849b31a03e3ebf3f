"""A part of `CudaEngine`: dispatches by source, by expert, and along the routes of handles. These functions make any.

A call with a bound never waits for the device. A call without one waits for the host counts. The kernel writes them as
soon as they are known, while rows are in flight. If a slot of any rank is too small for its rows, no rank sends. Every
rank reads that from the same counts. All grow their slots and start again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hybrid_ep import _cuda
from hybrid_ep.agree.fields import ABSENT
from hybrid_ep.core.streams import is_capturing
from hybrid_ep.engine.calls import (
    CachedDispatchRequest,
    Dispatched,
    DispatchHandle,
    DispatchRequest,
    Permuted,
    PermuteHandle,
    Routing,
    Rows,
    state_of,
)
from hybrid_ep.engine.cuda.arena import DispatchOutput, SlotLease
from hybrid_ep.engine.cuda.plan import DispatchPlan, plan_dispatch, shape_along, shape_of
from hybrid_ep.engine.cuda.route import HostCounts, PermuteState, Route, address, aligned_rows
from hybrid_ep.errors import ConfigError

if TYPE_CHECKING:
    from hybrid_ep.engine.cuda.engine import CudaEngine

__all__ = ["dispatch", "dispatch_along", "dispatch_permuted", "dispatch_permuted_along", "launch"]


class _Sent(NamedTuple):
    """A dispatch that has been launched.

    Attributes:
        plan: of the call.
        lease: of the slot where its rows land.
        stream: that it runs on.
        route: which it makes or takes.
        num_rows: of the result.
        reported: ``[LE]`` int32 on the host; None where the host did not wait for them.
    """

    plan: _cuda.DispatchPlan
    lease: SlotLease
    stream: int
    route: Route
    num_rows: int
    reported: Tensor | None


def dispatch(engine: CudaEngine, request: DispatchRequest) -> Dispatched:
    """See `Engine.dispatch`. Takes a slot, launches, waits for the counts if there is no bound, makes the tensors."""
    sent = _send(engine, request)
    with sent.lease:
        output = _results(sent)
        engine._end()
    assert output.experts is not None
    handle = _handle(engine, sent, request.routing, output)
    return Dispatched(Rows(output.rows, output.scales), output.experts, output.weights, sent.reported, handle)


def dispatch_along(engine: CudaEngine, request: CachedDispatchRequest, handle: DispatchHandle) -> Rows:
    """See `Engine.dispatch_cached`."""
    route = state_of(handle, Route)
    planned, stream = _plan_along(engine, request, handle, 0)
    sent = _send_again(engine, request.rows, planned.native, route, route.num_recv, stream)
    with sent.lease:
        output = _results(sent)
        engine._end()
    return Rows(output.rows, output.scales)


def dispatch_permuted(engine: CudaEngine, request: DispatchRequest) -> Permuted:
    """See `Engine.dispatch_permuted`."""
    rows, routing = request.rows, request.routing
    sent = _send(engine, request)
    with sent.lease:
        # A handle holds no slot, so the rows of copies move to memory of its own.
        num_ints = sent.route.num_recv * (routing.topk_idx.shape[1] + 1)
        chunk, kept = engine._routes.take(num_ints, sent.stream, alone=sent.lease.is_captured)
        probs = None
        if routing.topk_weights is not None:
            probs = torch.empty(sent.num_rows, dtype=torch.float32, device=engine.device)
        permuted, output = _spread(engine, rows, sent, kept, probs, request.num_expert_sms)
        engine._end()
    assert output.counts is not None
    assert output.overflow is not None
    counts = output.counts if sent.reported is None else sent.reported
    state = PermuteState(chunk, kept, engine._communicator)
    by_source = _handle(engine, sent, routing, output)
    handle = PermuteHandle(by_source, counts, sent.num_rows, request.pad_multiple, state, output.overflow)
    return Permuted(permuted, probs, counts, handle)


def dispatch_permuted_along(engine: CudaEngine, request: CachedDispatchRequest, handle: PermuteHandle) -> Rows:
    """See `Engine.dispatch_permuted_cached`."""
    state = state_of(handle, PermuteState)
    planned, stream = _plan_along(engine, request, handle.dispatch, handle.pad_multiple)
    route = state_of(handle.dispatch, Route)
    sent = _send_again(engine, request.rows, planned.native, route, handle.num_permuted, stream)
    with sent.lease:
        state.chunk.note_use(sent.stream)
        permuted, _ = _spread(engine, request.rows, sent, state.address, None, request.num_expert_sms)
        engine._end()
    return permuted


def _send(engine: CudaEngine, request: DispatchRequest) -> _Sent:
    """Launches a dispatch; without a bound, waits until its counts are known and the slots can hold its rows.

    Raises:
        ConfigError: the call would wait for its counts while a CUDA graph is captured.
    """
    rows, routing, bound, pad_multiple = request.rows, request.routing, request.bound, request.pad_multiple
    stream = engine._begin()
    if bound is None and is_capturing(engine._index):
        raise ConfigError(
            "a captured dispatch has no bound; allowed: num_worst_tokens, num_permuted_tokens or do_cpu_sync=False"
        )
    planned = plan_dispatch(engine.grid.rank, engine.grid.num_ranks, shape_of(request, engine.grid))
    plan, max_rows = planned.native, planned.max_rows
    again = ABSENT if request.again is None else state_of(request.again, Route).number
    checksum = address(None if request.replicas is None else request.replicas.checksum)
    engine._arena.holds(planned.slot_bytes)  # raises in a capture if slots would have to grow
    sent = aligned_rows(rows)
    lease = engine._arena.lease(stream)
    try:
        chunk, base = engine._routes.take(plan.route_ints, stream, alone=lease.is_captured)
        lease, host_counts, reported = launch(
            engine,
            plan,
            sent,
            routing.topk_idx.data_ptr(),
            address(routing.topk_weights),
            base,
            checksum,
            again,
            lease,
            stream,
        )
        if planned.refusal is not None:
            raise ConfigError(planned.refusal)
        number = _cuda.dispatch_number(engine.number, engine.num_calls)
        if bound is not None:
            # Expert-major: the bound counts copies, and more rows than that may arrive when it is exceeded.
            num_recv = engine._communicator.num_records(plan) if pad_multiple else bound
            num_records = planned.num_records
            route = Route(
                chunk, base, plan.counts_at, num_recv, max_rows, plan.most_sent, 0, 0, num_records, number, stream
            )
            return _Sent(plan, lease, stream, route, bound, None)
        assert host_counts is not None
        engine.traffic.within_domain += host_counts.num_sent_away * plan.record_bytes
        max_recv = host_counts.max_rows if pad_multiple else host_counts.max_recv
        num_from_away = host_counts.num_recv - host_counts.num_kept
        route = Route(
            chunk,
            base,
            plan.counts_at,
            host_counts.num_recv,
            max_recv,
            host_counts.max_sent,
            host_counts.num_sent_away,
            num_from_away,
            0,
            number,
            stream,
        )
        return _Sent(
            plan, lease, stream, route, host_counts.num_permuted if pad_multiple else host_counts.num_recv, reported
        )
    except BaseException:
        lease.give_back()
        raise


def launch(
    engine: CudaEngine,
    plan: _cuda.DispatchPlan,
    rows: Rows,
    topk_idx: int,
    topk_weights: int,
    route: int,
    checksum: int,
    handle: int,
    lease: SlotLease,
    stream: int,
) -> tuple[SlotLease, HostCounts | None, Tensor | None]:
    """Launches a dispatch until the slots can hold its rows, in which all ranks agree.

    Args:
        engine, plan: of the call.
        rows: aligned.
        topk_idx, topk_weights, route, checksum: addresses; the last one of a mapping's.
        handle: number of the dispatch whose route or routing is used again; ABSENT where there is none.
        lease: of the slot where its rows land. It is given back where this raises.
        stream: that it runs on.

    Returns:
        The lease of the slot in which rows arrive, and of a call that waits for its counts, what the kernel
        has reported, and the counts of the local experts.
    """
    try:
        while True:
            counts_epoch = engine._communicator.dispatch(
                plan,
                rows.data.data_ptr(),
                topk_idx,
                topk_weights,
                address(rows.scales),
                route,
                checksum,
                handle,
                lease.slot_idx,
                lease.slots_wanted,
                stream,
            )
            engine.num_calls += 1
            if counts_epoch == 0 or plan.is_refused:
                return lease, None, None
            # Allocated before the wait: after it, the host's work delays the result.
            num_local = plan.num_local_experts if handle == ABSENT else 0
            reported = torch.empty(num_local, dtype=torch.int32, device="cpu")
            fields = engine._communicator.wait_for_counts(counts_epoch, stream, reported.data_ptr(), num_local)
            if fields is None:
                engine._raise_failed()
            host_counts = HostCounts(*fields)
            if not host_counts.needs_capacity:
                return lease, host_counts, reported
            lease.give_back()
            engine._arena.ensure(plan.slot_bytes_for(host_counts.max_rows))
            lease = engine._arena.lease(stream)
    except BaseException:
        lease.give_back()
        raise


def _plan_along(
    engine: CudaEngine, request: CachedDispatchRequest, handle: DispatchHandle, pad_multiple: int
) -> tuple[DispatchPlan[_cuda.DispatchPlan], int]:
    """Begins a dispatch along a known route, which needs no counts and no wait; returns its plan and the stream."""
    route = state_of(handle, Route)
    stream = engine._begin()
    route.chunk.note_use(stream)
    shape = shape_along(request, handle, pad_multiple, route.max_recv, route.num_records)
    planned = plan_dispatch(engine.grid.rank, engine.grid.num_ranks, shape)
    engine._arena.holds(planned.slot_bytes)  # raises in a capture if slots would have to grow
    return planned, stream


def _send_again(
    engine: CudaEngine, rows: Rows, plan: _cuda.DispatchPlan, route: Route, num_rows: int, stream: int
) -> _Sent:
    """Launches a dispatch along a known route.

    Args:
        engine: of the call.
        rows: to send.
        plan, stream: of the call.
        route: which it takes.
        num_rows: of the result.
    """
    sent = aligned_rows(rows)
    lease, _, _ = launch(engine, plan, sent, 0, 0, route.address, 0, route.number, engine._arena.lease(stream), stream)
    _count_sent(engine, route, plan)
    return _Sent(plan, lease, stream, route, num_rows, None)


def _count_sent(engine: CudaEngine, route: Route, plan: _cuda.DispatchPlan) -> None:
    if route.num_sent_away:
        engine.traffic.within_domain += route.num_sent_away * plan.record_bytes


def _handle(engine: CudaEngine, sent: _Sent, routing: Routing, output: DispatchOutput) -> DispatchHandle:
    route, prefix = sent.route, output.rank_prefix
    assert prefix is not None
    num_tokens, num_topk = routing.topk_idx.shape
    return DispatchHandle(prefix, num_tokens, route.num_recv, routing.num_experts, num_topk, engine.grid, route)


def _results(sent: _Sent) -> DispatchOutput:
    """The output of a dispatch, in the slot itself or copied out of slot 0."""
    output = sent.lease.output(sent.plan, sent.num_rows, sent.route)
    return output if sent.lease.slot_idx else output.copied()


def _spread(
    engine: CudaEngine, like: Rows, sent: _Sent, kept: int, probs: Tensor | None, num_sms: int | None
) -> tuple[Rows, DispatchOutput]:
    """Completes expert-major rows in place: further copies, padding, scales and probabilities.

    Args:
        engine: of the call.
        like: what was sent.
        sent: the dispatch.
        kept: address of what the handle keeps (PermuteState); written where the dispatch made its route, else read.
        probs: ``[P]``, written; None without weights.
        num_sms: SMs to use; None = all.
    """
    plan, lease, stream, route, num_rows, _ = sent
    scales = None
    if like.scales is not None:
        scales = torch.empty(num_rows, like.scales.shape[1], dtype=like.scales.dtype, device=engine.device)
    engine._communicator.duplicate(
        plan,
        route.address,
        kept,
        address(probs),
        address(scales),
        lease.slot_idx,
        num_rows,
        route.num_recv,
        num_sms or 0,
        stream,
    )
    output = lease.output(plan, num_rows, route)
    return Rows(output.rows if lease.slot_idx else output.rows.clone(), scales), output
