"""The cuda engine: hand-written kernels for the GPUs of one NVLink domain.

A call is one launch on the current stream (`_cuda.Communicator`); this file allocates what the call writes, decides
where rows land, and shapes the results. docs/cuda_engine.md tells how the kernels work and what they reach. What calls
of one shape have in common is in cuda_plan.py.

A call with a bound never waits for the device. One without waits for a mailbox that the kernel fills as soon as the
counts are known, while the rows are still on their way. If a slot of any rank is too small for what would arrive, no
rank sends, all learn it from the same counts, and all make room and start again.

Low-latency calls are in cuda_low_latency.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep import _cuda, env
from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.core.quantize import Fp8Format
from hybrid_ep.core.streams import current_raw_stream
from hybrid_ep.engine.arena import Arena, Landed
from hybrid_ep.engine.base import (
    Combined,
    Dispatched,
    DispatchHandle,
    Engine,
    LowLatencyDispatched,
    LowLatencyHandle,
    Permuted,
    PermuteHandle,
    Routing,
    Rows,
)
from hybrid_ep.engine.cuda_low_latency import CudaLowLatency
from hybrid_ep.engine.cuda_plan import plan_cached_dispatch, plan_combine, plan_dispatch, scale_kind
from hybrid_ep.engine.cuda_route import Mail, PermuteState, Route, RouteMemory, Sent, address, aligned
from hybrid_ep.engine.symmetric import SymmetricMemory
from hybrid_ep.engine.torch_engine import TorchEngine
from hybrid_ep.errors import ConfigError, OverflowError, TimeoutError, TransportError

__all__ = ["CudaEngine"]


class CudaEngine(Engine):
    """Dispatch and combine by the kernels of `_cuda`.

    Args:
        group: the ranks of the domain; None for a single rank.
        grid: its geometry; one domain.
        timeout_s: how long a kernel waits for a peer.
        number: of the buffer among those of the group, equal at all ranks.

    Raises:
        ConfigError: more ranks than a domain has.
        TopologyError: the ranks cannot map each other's memory.
    """

    name = "cuda"

    def __init__(self, group: dist.ProcessGroup | None, grid: RankGrid, timeout_s: float, number: int = 0) -> None:
        if grid.num_domains > 1 or grid.num_ranks > _cuda.max_ranks:
            raise ConfigError(
                f"grid is {grid.num_domains} domains of {grid.num_ranks_per_domain} ranks; allowed with the cuda "
                f"engine: one domain of at most {_cuda.max_ranks}"
            )
        super().__init__()
        self.grid = grid
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._index: int = torch.cuda.current_device()
        self._torch = TorchEngine(group, grid, timeout_s, number)
        self.traffic = self._torch.traffic
        self._control = SymmetricMemory.allocate(_cuda.control_bytes, group, self.device)
        self._communicator = _cuda.Communicator(
            rank=grid.rank, control=self._control.addresses, device=self._index, timeout_s=timeout_s
        )
        self._arena = Arena(group, self.device, self._communicator, self._torch.barrier, env.POOL_SLOTS.get())
        self._routes = RouteMemory(self.device)
        self._last_stream: torch.cuda.Stream | None = None
        self._low_latency = CudaLowLatency(
            group, grid, self.device, self._communicator, self._torch.barrier, self._order, self._raise_fault
        )

    def dispatch(
        self,
        rows: Rows,
        routing: Routing,
        *,
        expert_range: tuple[int, int],
        num_recv_bound: int | None,
        num_sms: int | None,
        room: int | None = None,
    ) -> Dispatched:
        sent = self._send(rows, routing, expert_range, 0, num_recv_bound, room, num_sms)
        landed = self._results(sent)
        assert landed.experts is not None
        handle = self._handle(sent, routing, landed)
        return Dispatched(
            _as_sent(rows, landed.rows, landed.scales), landed.experts, landed.weights, sent.reported, handle
        )

    def dispatch_cached(self, rows: Rows, handle: DispatchHandle, *, num_sms: int | None) -> Rows:
        route: Route = handle.state
        landed = self._results(self._send_again(rows, handle, route.num_recv, route.max_recv, 0, num_sms))
        return _as_sent(rows, landed.rows, landed.scales)

    def combine(
        self,
        data: Tensor,
        handle: DispatchHandle,
        *,
        weights: Tensor | None,
        bias: tuple[Tensor, ...],
        num_sms: int | None,
    ) -> Combined:
        stream = self._begin()
        num_rows, hidden = data.shape
        num_weights = 0 if weights is None else weights.shape[1]
        plan = plan_combine(handle.num_tokens, num_rows, hidden, data.dtype, num_weights, num_sms)
        return self._combine(plan, aligned(data), weights, bias, handle, stream)

    def dispatch_permuted(
        self,
        rows: Rows,
        routing: Routing,
        *,
        pad_multiple: int,
        num_permuted_bound: int | None,
        num_sms: int | None,
        num_expert_sms: int | None = None,
        room: int | None = None,
    ) -> Permuted:
        num_local = routing.num_experts // self.grid.num_ranks
        first = self.grid.rank * num_local
        sent = self._send(rows, routing, (first, first + num_local), pad_multiple, num_permuted_bound, room, num_sms)
        # A handle holds no slot, so the places move to memory of its own.
        num_ints = sent.route.num_recv * (routing.topk_idx.shape[1] + 1)
        chunk, kept = self._routes.take(num_ints, sent.stream, alone=sent.slot_idx == 0)
        probs = None
        if routing.topk_weights is not None:
            probs = torch.empty(sent.num_rows, dtype=torch.float32, device=self.device)
        permuted, landed = self._spread(rows, sent, kept, probs, num_expert_sms)
        assert landed.counts is not None
        assert landed.overflow is not None
        counts = landed.counts if sent.reported is None else sent.reported
        state = PermuteState(chunk, kept, self._communicator, num_permuted_bound is None)
        handle = PermuteHandle(
            self._handle(sent, routing, landed), counts, sent.num_rows, pad_multiple, state, landed.overflow
        )
        return Permuted(permuted, probs, counts, handle)

    def dispatch_permuted_cached(
        self, rows: Rows, handle: PermuteHandle, *, num_sms: int | None, num_expert_sms: int | None = None
    ) -> Rows:
        route: Route = handle.dispatch.state
        state: PermuteState = handle.state
        num_rows = handle.num_permuted
        sent = self._send_again(rows, handle.dispatch, num_rows, route.max_recv, handle.pad_multiple, num_sms)
        state.chunk.note_use(sent.stream)
        permuted, _ = self._spread(rows, sent, state.address, None, num_expert_sms)
        return permuted

    def combine_permuted(
        self,
        data: Tensor,
        handle: PermuteHandle,
        *,
        probs: Tensor | None,
        num_sms: int | None,
        num_expert_sms: int | None = None,
    ) -> Combined:
        stream = self._begin()
        state: PermuteState = handle.state
        (num_copies, hidden), dispatch = data.shape, handle.dispatch
        num_recv, num_topk = dispatch.num_recv, dispatch.num_topk
        state.begin_combine(self._communicator, num_recv, num_topk, stream)
        data = aligned(data)
        sums = torch.empty(num_recv, hidden, dtype=data.dtype, device=data.device)
        weights = None
        if probs is not None:
            weights = torch.empty(num_recv, num_topk, dtype=torch.float32, device=data.device)
        num_weights = 0 if probs is None else num_topk
        plan = plan_combine(
            dispatch.num_tokens,
            num_recv,
            hidden,
            data.dtype,
            num_weights,
            num_sms,
            num_topk,
            num_copies,
            num_expert_sms,
        )
        experts = (data.data_ptr(), address(probs), state.address)
        return self._combine(plan, sums, weights, (), dispatch, stream, experts)

    def room_of(self, handle: DispatchHandle) -> int:
        route: Route = handle.state
        return route.max_recv

    def raise_on_overflow(self, handle: PermuteHandle) -> None:
        if not handle.state.waited:
            super().raise_on_overflow(handle)

    def exchange_expert_counts(self, num_tokens_per_expert: Tensor) -> Tensor:
        return self._torch.exchange_expert_counts(num_tokens_per_expert)

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        return self._torch.sum_over_ranks(tensor)

    def low_latency_dispatch(
        self,
        data: Tensor,
        topk_idx: Tensor,
        *,
        num_max_tokens_per_rank: int,
        num_experts: int,
        fp8: Fp8Format | None,
        wait_stats: Tensor | None,
        return_recv_hook: bool,
    ) -> LowLatencyDispatched:
        return self._low_latency.dispatch(
            data, topk_idx, num_max_tokens_per_rank, num_experts, fp8, wait_stats, return_recv_hook
        )

    def low_latency_combine(
        self,
        data: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: LowLatencyHandle,
        *,
        out: Tensor,
        min_tokens_to_sum: int,
        wait_stats: Tensor | None,
    ) -> Callable[[], None]:
        return self._low_latency.combine(data, topk_idx, topk_weights, handle, out, min_tokens_to_sum, wait_stats)

    def set_masked(self, ranks: Iterable[int], masked: bool) -> None:
        ranks = set(ranks)
        self._torch.set_masked(ranks, masked)
        self._low_latency.set_masked(ranks, masked)

    def masked(self) -> Tensor:
        given_up = self._low_latency.given_up()
        if given_up:
            self.set_masked(given_up, True)
        self._raise_fault()
        return self._torch.masked().to(self.device)

    def barrier(self) -> None:
        torch.cuda.synchronize(self.device)
        # Before the ranks meet, or a call that is forgotten would fail a meeting that succeeds.
        self._raise_fault(self._low_latency.lately_masked)
        self._torch.barrier()
        self._low_latency.reset()
        torch.cuda.synchronize(self.device)
        self._torch.barrier()

    def close(self) -> None:
        # Peers may still write here for calls that this rank has not waited for.
        torch.cuda.synchronize(self.device)
        self._low_latency.close()
        self._torch.close()
        self._raise_fault()

    def raise_pending(self) -> None:
        self._raise_fault()

    # How a call begins and what it leaves behind.

    def _begin(self) -> int:
        """Raises what an earlier call left, orders this call after it, and returns the stream."""
        self._raise_fault()
        return self._order()

    def _order(self) -> int:
        """Orders the next launch after the engine's earlier ones and returns the stream."""
        stream = current_raw_stream(self._index)
        if self._last_stream is None or self._last_stream.cuda_stream != stream:
            current = torch.cuda.current_stream(self._index)
            if self._last_stream is not None and self._is_ordered_by_hand(self._last_stream):
                current.wait_stream(self._last_stream)
            self._last_stream = current
        return stream

    @staticmethod
    def _is_ordered_by_hand(last: torch.cuda.Stream) -> bool:
        """Whether the current stream must be made to wait for what `last` holds: not in the first call of a capture,
        which begins when the device is idle, and could not wait for work outside.
        """
        if not torch.cuda.is_current_stream_capturing():
            return True
        with torch.cuda.stream(last):
            return torch.cuda.is_current_stream_capturing()

    def _raise_fault(self, known: Collection[int] = ()) -> None:
        """Raises what a kernel has found wrong, but the loss of a rank that is left out already or `known` to be lost.

        The receive of a low-latency call may have begun to wait for a rank before its send gave that rank up, and tell
        it again.
        """
        fault = self._communicator.take_fault()
        if fault is None:
            return
        self._low_latency.upload_masks()  # a kernel that gave a rank up has masked it
        is_known = fault.peer in self._low_latency.masked or fault.peer in known
        if is_known and fault.kind == _cuda.FaultKind.TIMEOUT and fault.kernel.startswith("low_latency"):
            return
        self._raise(fault)

    def _raise(self, fault: _cuda.Fault) -> NoReturn:
        rank = self.grid.rank
        where = f"{fault.kernel}: {fault.tag}"
        if fault.kind == _cuda.FaultKind.BAD_EXPERT:
            raise ConfigError(f"topk_idx of rank {rank} has {fault.seen}; allowed: −1 … {fault.expected - 1}")
        if fault.kind == _cuda.FaultKind.OVERFLOW:
            peer = self.grid.domain[fault.peer]
            raise OverflowError(f"{where}: {fault.seen} at rank {peer}; allowed by the bound: {fault.expected}")
        peer = self.grid.domain[fault.peer]
        if fault.kind == _cuda.FaultKind.OTHER_CALL:
            raise ConfigError(
                f"{fault.kernel}: {fault.tag} is {fault.expected} at rank {rank} and {fault.seen} at rank {peer}; "
                "allowed: the same on every rank"
            )
        detail = f"it is at step {fault.seen}, expected {fault.expected}"
        if fault.witness >= 0:
            detail = f"rank {self.grid.domain[fault.witness]} gave up on it first"
        raise TimeoutError(where, rank, peer, detail, timeout_s=fault.waited_s)

    def _send(
        self,
        rows: Rows,
        routing: Routing,
        expert_range: tuple[int, int],
        pad_multiple: int,
        bound: int | None,
        room: int | None,
        num_sms: int | None,
    ) -> Sent:
        """Launches a dispatch; without a bound, waits until its counts are known and there is room for its rows.

        Args:
            rows, routing, expert_range, num_sms: as in `dispatch`.
            pad_multiple: 0 = rows by source; otherwise by expert, blocks padded to a multiple.
            bound: rows of the result, or None.
            room: as in `dispatch`.

        Raises:
            ConfigError: the call would wait for its counts while a CUDA graph is captured.
        """
        stream = self._begin()
        if bound is None and torch.cuda.is_current_stream_capturing():
            raise ConfigError("a captured dispatch has no bound; allowed: num_worst_tokens or num_permuted_tokens")
        rank, num_ranks = self.grid.rank, self.grid.num_ranks
        topk_idx, topk_weights, num_experts, _ = routing
        plan = plan_dispatch(
            rank,
            num_ranks,
            rows.data.shape,
            rows.data.dtype,
            scale_kind(rows),
            topk_idx.shape[1],
            num_experts,
            topk_weights is not None,
            expert_range,
            pad_multiple,
            bound,
            num_sms,
        )
        data = aligned(rows.data)
        max_rows = 0
        if bound is not None:
            max_rows = bound if room is None else room
            self._arena.ensure(plan.slot_bytes_for(max_rows))
        slot_idx = self._arena.take(stream)
        # With slot 0, the call may be part of a graph.
        chunk, base = self._routes.take(plan.route_ints, stream, alone=slot_idx == 0)
        while True:
            ticket = self._communicator.dispatch(
                plan,
                data.data_ptr(),
                topk_idx.data_ptr(),
                address(topk_weights),
                address(rows.scales),
                base,
                slot_idx,
                stream,
            )
            if bound is not None:
                # Expert-major: the bound counts copies, and more rows than that may arrive when it is exceeded.
                num_recv = self._communicator.capacity(plan) if pad_multiple else bound
                return Sent(plan, slot_idx, stream, Route(chunk, base, num_recv, max_rows, max_rows, 0, 0), bound, None)
            # What needs no counts is done before the wait: behind it, the host races the rows.
            reported = torch.empty(num_experts // num_ranks, dtype=torch.int32, device="cpu")
            mail = self._wait_for_counts(ticket, slot_idx, reported)
            if not mail.needs_room:
                break
            self._arena.release(slot_idx)
            self._arena.ensure(plan.slot_bytes_for(mail.max_rows))
            slot_idx = self._arena.take(stream)
        self.traffic.within_domain += mail.num_sent_away * plan.row_bytes
        max_recv = mail.max_rows if pad_multiple else mail.max_recv
        num_from_away = mail.num_recv - mail.num_kept
        route = Route(chunk, base, mail.num_recv, max_recv, mail.max_sent, mail.num_sent_away, num_from_away)
        return Sent(plan, slot_idx, stream, route, mail.num_permuted if pad_multiple else mail.num_recv, reported)

    def _send_again(
        self,
        rows: Rows,
        handle: DispatchHandle,
        num_rows: int,
        max_rows: int,
        pad_multiple: int,
        num_sms: int | None,
    ) -> Sent:
        """Launches a dispatch along a known route, which needs no counts and no wait.

        Args:
            rows, handle, num_sms: as in `dispatch_cached`.
            num_rows: of the result.
            max_rows: the most that any slot must hold.
            pad_multiple: as in `_send`.
        """
        stream = self._begin()
        route: Route = handle.state
        route.chunk.note_use(stream)
        plan = plan_cached_dispatch(
            self.grid.num_ranks,
            rows.data.shape,
            rows.data.dtype,
            scale_kind(rows),
            handle.num_topk,
            handle.num_experts,
            pad_multiple,
            max_rows,
            num_sms,
        )
        self._arena.ensure(plan.slot_bytes_for(max_rows))
        slot_idx = self._arena.take(stream)
        data = aligned(rows.data)
        self._communicator.dispatch(plan, data.data_ptr(), 0, 0, address(rows.scales), route.address, slot_idx, stream)
        self.traffic.within_domain += route.num_sent_away * plan.row_bytes
        return Sent(plan, slot_idx, stream, route, num_rows, None)

    def _combine(
        self,
        plan: _cuda.CombinePlan,
        data: Tensor,
        weights: Tensor | None,
        bias: tuple[Tensor, ...],
        handle: DispatchHandle,
        stream: int,
        experts: tuple[int, int, int] = (0, 0, 0),
    ) -> Combined:
        """Launches a combine and returns its results.

        Args:
            plan, data, weights, bias, handle: as in `combine`; from experts, data and weights are written first.
            stream: what `_begin` has returned.
            experts: from experts, the addresses of their rows, of their probabilities and of the PermuteState.
        """
        route: Route = handle.state
        route.chunk.note_use(stream)
        self._arena.ensure(plan.slot_bytes_for(route.max_sent))
        self._arena.note_use(stream)
        out = torch.empty(handle.num_tokens, data.shape[1], dtype=data.dtype, device=data.device)
        out_weights = None
        if weights is not None:
            out_weights = torch.empty(handle.num_tokens, weights.shape[1], dtype=torch.float32, device=data.device)
        terms = [aligned(term) for term in bias]
        self._communicator.combine(
            plan,
            data.data_ptr(),
            address(weights),
            address(terms[0] if terms else None),
            address(terms[1] if len(terms) > 1 else None),
            out.data_ptr(),
            address(out_weights),
            route.address,
            *experts,
            stream,
        )
        self.traffic.within_domain += route.num_from_away * plan.row_bytes
        return Combined(out, out_weights)

    def _wait_for_counts(self, ticket: int, slot_idx: int, reported: Tensor) -> Mail:
        """Returns what the kernel tells the host, and writes the counts of the local experts."""
        mail = self._communicator.wait_for_counts(ticket, reported.data_ptr(), len(reported))
        if mail is not None:
            return Mail(*mail)
        self._arena.release(slot_idx)
        self._raise_fault()
        raise TransportError("dispatch: counts", self.grid.rank, None, "the kernel did not report in its time")

    def _handle(self, sent: Sent, routing: Routing, landed: Landed) -> DispatchHandle:
        route, prefix = sent.route, landed.rank_prefix
        assert prefix is not None
        num_tokens, num_topk = routing.topk_idx.shape
        return DispatchHandle(prefix, num_tokens, route.num_recv, routing.num_experts, num_topk, self.grid, route)

    def _results(self, sent: Sent) -> Landed:
        """What landed, in the slot itself or copied out of slot 0."""
        landed = self._arena.landed(sent)
        return landed if sent.slot_idx else landed.copied()

    def _spread(
        self, like: Rows, sent: Sent, kept: int, probs: Tensor | None, num_sms: int | None
    ) -> tuple[Rows, Landed]:
        """Completes expert-major rows where they landed: further copies, pads, scales and probabilities.

        Args:
            like: what was sent.
            sent: the dispatch.
            kept: address of what the handle keeps (PermuteState); written where the dispatch made its route, else read.
            probs: ``[P]``, written; None without weights.
            num_sms: SMs to use; None = all.
        """
        plan, slot_idx, stream, route, num_rows, _ = sent
        scales = None
        if like.scales is not None:
            scales = torch.empty(num_rows, like.scales.shape[1], dtype=like.scales.dtype, device=self.device)
        self._communicator.duplicate(
            plan,
            route.address,
            kept,
            address(probs),
            address(scales),
            slot_idx,
            num_rows,
            route.num_recv,
            num_sms or 0,
            stream,
        )
        landed = self._arena.landed(sent)
        return _as_sent(like, landed.rows if slot_idx else landed.rows.clone(), scales), landed


def _as_sent(sent: Rows, data: Tensor, scales: Tensor | None) -> Rows:
    """What landed, in the dtype in which it was sent."""
    return Rows(data) if sent.scales is None else Rows(data.view(sent.data.dtype), scales)
