"""The cuda engine: hand-written kernels for the GPUs of one NVLink domain.

A call is one launch on the current stream (`_cuda.Communicator`); this file allocates what the call writes, decides
where rows land, and shapes the results. docs/cuda_engine.md tells how the kernels work and what they reach.

A call with a bound never waits for the device. One without waits for a mailbox that the kernel fills as soon as the
counts are known, while the rows are still on their way. If a slot of any rank is too small for what would arrive, no
rank sends, all learn it from the same counts, and all make room and start again.

Low-latency calls are in cuda_low_latency.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep import _cuda, env
from hybrid_ep.engine.arena import Arena, Landing
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
from hybrid_ep.engine.cuda_route import PermuteState, Route, Sent, address, aligned, row_bytes_of
from hybrid_ep.engine.symmetric import SymmetricMemory
from hybrid_ep.engine.torch_engine import TorchEngine
from hybrid_ep.errors import ConfigError, OverflowError, TimeoutError, TransportError
from hybrid_ep.geometry import RankGrid
from hybrid_ep.quantize import Fp8Format
from hybrid_ep.streams import current_raw_stream

__all__ = ["CudaEngine"]


class CudaEngine(Engine):
    """Dispatch and combine by the kernels of `_cuda`.

    Args:
        group: the ranks of the domain; None for a single rank.
        grid: its geometry; one domain.
        timeout_s: how long a kernel waits for a peer.

    Raises:
        ConfigError: more ranks than a domain has.
        TopologyError: the ranks cannot map each other's memory.
    """

    name = "cuda"

    def __init__(self, group: dist.ProcessGroup | None, grid: RankGrid, timeout_s: float) -> None:
        if grid.num_domains > 1 or grid.num_ranks > _cuda.max_ranks:
            raise ConfigError(
                f"grid is {grid.num_domains} domains of {grid.num_ranks_per_domain} ranks; allowed with the cuda "
                f"engine: one domain of at most {_cuda.max_ranks}"
            )
        self.grid = grid
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._index: int = torch.cuda.current_device()
        self._torch = TorchEngine(group, grid, timeout_s)
        self.traffic = self._torch.traffic
        self._timeout_s = timeout_s
        self._control = SymmetricMemory.allocate(_cuda.control_bytes, group, self.device)
        self._communicator = _cuda.Communicator(
            rank=grid.rank, control=self._control.addresses, device=self._index, timeout_s=timeout_s
        )
        self._arena = Arena(group, self.device, self._communicator, env.POOL_SLOTS.get())
        self._last_stream: torch.cuda.Stream | None = None
        self._low_latency = CudaLowLatency(group, grid, self.device, self._communicator, self._order, self._raise_fault)

    def dispatch(
        self,
        rows: Rows,
        routing: Routing,
        *,
        expert_range: tuple[int, int],
        num_recv_bound: int | None,
        num_sms: int | None,
    ) -> Dispatched:
        num_topk = routing.topk_idx.shape[1]
        sent = self._send(rows, routing, expert_range, 0, num_recv_bound, num_sms)
        n, landing, parts = sent.num_rows, sent.landing, sent.parts
        weights = None
        if routing.topk_weights is not None:
            weights = landing.result(parts.weights, (n, num_topk), torch.float32)
        handle = self._handle(sent, routing)
        result = Dispatched(
            self._rows(landing, parts, rows, n),
            landing.result(parts.experts, (n, num_topk), torch.int64),
            weights,
            sent.reported,
            handle,
        )
        landing.release()
        return result

    def dispatch_cached(self, rows: Rows, handle: DispatchHandle, *, num_sms: int | None) -> Rows:
        route: Route = handle.state
        landing, parts = self._send_again(rows, handle, route.max_recv, 0, num_sms)
        result = self._rows(landing, parts, rows, route.num_recv)
        landing.release()
        return result

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
        route: Route = handle.state
        num_tokens, hidden = handle.num_tokens, data.shape[1]
        row_bytes = row_bytes_of(data)
        num_weights = 0 if weights is None else weights.shape[1]
        widths = _cuda.combine_widths(row_bytes, num_weights)
        self._arena.ensure(widths.slot_bytes_for(route.max_sent))
        self._arena.note_use()
        out = torch.empty(num_tokens, hidden, dtype=data.dtype, device=data.device)
        out_weights = None
        if weights is not None:
            out_weights = torch.empty(num_tokens, num_weights, dtype=torch.float32, device=data.device)
        terms = [aligned(term) for term in bias]
        data = aligned(data)
        self._communicator.combine(
            widths=widths,
            rows=data.data_ptr(),
            weights=address(weights),
            bias_0=address(terms[0] if terms else None),
            bias_1=address(terms[1] if len(terms) > 1 else None),
            out=out.data_ptr(),
            out_weights=address(out_weights),
            send_slot=route.memory.data_ptr(),
            rank_prefix=handle.rank_prefix_matrix.data_ptr(),
            num_tokens=num_tokens,
            num_rows=data.shape[0],
            num_weights=num_weights,
            row_bytes=row_bytes,
            num_sms=num_sms or 0,
            stream=stream,
        )
        self.traffic.within_domain += route.num_from_away * widths.total
        return Combined(out, out_weights)

    def dispatch_permuted(
        self,
        rows: Rows,
        routing: Routing,
        *,
        pad_multiple: int,
        num_permuted_bound: int | None,
        num_sms: int | None,
    ) -> Permuted:
        num_topk = routing.topk_idx.shape[1]
        num_local = routing.num_experts // self.grid.num_ranks
        first = self.grid.rank * num_local
        sent = self._send(rows, routing, (first, first + num_local), pad_multiple, num_permuted_bound, num_sms)
        landing, parts = sent.landing, sent.parts
        num_recv = sent.route.num_recv
        places = landing.result(parts.experts, (num_recv, num_topk), torch.int32, copy=True)
        weights = None
        if routing.topk_weights is not None:
            weights = landing.result(parts.weights, (num_recv, num_topk), torch.float32)
        assert sent.overflow is not None
        dispatch = self._handle(sent, routing)
        waited = num_permuted_bound is None
        handle = PermuteHandle(
            dispatch=dispatch,
            num_tokens_per_expert=sent.reported,
            num_permuted=sent.num_rows,
            pad_multiple=pad_multiple,
            state=PermuteState(places, sent.counts, waited),
            overflow=sent.overflow,
        )
        scales = None
        if rows.scales is not None:
            scales = landing.result(parts.scales, (num_recv, rows.scales.shape[1]), rows.scales.dtype)
        permuted, probs = self._spread(landing, parts, rows, scales, weights, handle)
        landing.release()
        return Permuted(permuted, probs, handle.num_tokens_per_expert, handle)

    def dispatch_permuted_cached(self, rows: Rows, handle: PermuteHandle, *, num_sms: int | None) -> Rows:
        num_max = max(handle.dispatch.state.max_recv, handle.num_permuted)
        landing, parts = self._send_again(rows, handle.dispatch, num_max, handle.pad_multiple, num_sms)
        scales = None
        if rows.scales is not None:
            shape = (handle.dispatch.state.num_recv, rows.scales.shape[1])
            scales = landing.result(parts.scales, shape, rows.scales.dtype)
        permuted, _ = self._spread(landing, parts, rows, scales, None, handle)
        landing.release()
        return permuted

    def combine_permuted(
        self, data: Tensor, handle: PermuteHandle, *, probs: Tensor | None, num_sms: int | None
    ) -> Combined:
        stream = self._begin()
        state: PermuteState = handle.state
        num_recv, num_topk = state.places.shape
        row_bytes = row_bytes_of(data)
        data = aligned(data)
        reduced = torch.empty(num_recv, data.shape[1], dtype=data.dtype, device=data.device)
        weights = None
        if probs is not None:
            weights = torch.empty(num_recv, num_topk, dtype=torch.float32, device=data.device)
        _cuda.reduce_local(
            rows=data.data_ptr(),
            probs=address(probs),
            places=state.places.data_ptr(),
            rank_prefix=handle.dispatch.rank_prefix_matrix.data_ptr(),
            out=reduced.data_ptr(),
            out_weights=address(weights),
            rank=self.grid.rank,
            num_ranks=self.grid.num_ranks,
            num_topk=num_topk,
            row_bytes=row_bytes,
            row_limit=handle.num_permuted,
            recv_limit=num_recv,
            stream=stream,
        )
        return self.combine(reduced, handle.dispatch, weights=weights, bias=(), num_sms=num_sms)

    def raise_on_overflow(self, handle: PermuteHandle) -> None:
        if not handle.state.waited:
            super().raise_on_overflow(handle)

    def exchange_expert_counts(self, num_tokens_per_expert: Tensor) -> Tensor:
        return self._torch.exchange_expert_counts(num_tokens_per_expert)

    def low_latency_dispatch(
        self,
        data: Tensor,
        topk_idx: Tensor,
        *,
        num_max_tokens_per_rank: int,
        num_experts: int,
        fp8: Fp8Format | None,
        wait_stats: Tensor | None,
    ) -> LowLatencyDispatched:
        return self._low_latency.dispatch(data, topk_idx, num_max_tokens_per_rank, num_experts, fp8, wait_stats)

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

    def set_masked(self, rank: int, masked: bool) -> None:
        self._torch.set_masked(rank, masked)
        self._low_latency.set_masked(rank, masked)

    def masked(self) -> Tensor:
        return self._torch.masked().to(self.device)

    def barrier(self) -> None:
        torch.cuda.synchronize(self.device)
        self._torch.barrier()
        self._low_latency.reset()
        torch.cuda.synchronize(self.device)
        self._torch.barrier()
        self._raise_fault()

    def close(self) -> None:
        # Peers may still write here for calls that this rank has not waited for.
        torch.cuda.synchronize(self.device)
        self._low_latency.close()
        self._torch.close()

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
            # Inside a capture there is nothing to wait for: it began when the device was idle.
            if self._last_stream is not None and not torch.cuda.is_current_stream_capturing():
                current.wait_stream(self._last_stream)
            self._last_stream = current
        return stream

    def _raise_fault(self) -> None:
        fault = self._communicator.take_fault()
        if fault is not None:
            self._low_latency.upload_masks()  # a kernel that gave a rank up has masked it
            self._raise(fault)

    def _raise(self, fault: _cuda.Fault) -> NoReturn:
        rank = self.grid.rank
        where = f"{fault.kernel}: {fault.tag}"
        if fault.kind == _cuda.FaultKind.BAD_EXPERT:
            raise ConfigError(f"topk_idx of rank {rank} has {fault.seen}; allowed: −1 … {fault.expected - 1}")
        if fault.kind == _cuda.FaultKind.OVERFLOW:
            raise OverflowError(f"{where}: {fault.seen} at rank {rank}; allowed by the bound: {fault.expected}")
        peer = self.grid.domain[fault.peer]
        detail = f"it is at step {fault.seen}, expected {fault.expected}"
        if fault.witness >= 0:
            detail = f"rank {self.grid.domain[fault.witness]} gave up on it first"
        raise TimeoutError(where, rank, peer, detail, timeout_s=self._timeout_s)

    def _send(
        self,
        rows: Rows,
        routing: Routing,
        expert_range: tuple[int, int],
        pad_multiple: int,
        bound: int | None,
        num_sms: int | None,
    ) -> Sent:
        """Launches a dispatch; without a bound, waits until its counts are known and there is room for its rows.

        Args:
            rows, routing, expert_range, num_sms: as in `dispatch`.
            pad_multiple: 0 = rows by source; otherwise by expert, blocks padded to a multiple.
            bound: rows of the result, or None.
        """
        stream = self._begin()
        num_tokens, num_topk = routing.topk_idx.shape
        num_ranks, num_experts = self.grid.num_ranks, routing.num_experts
        self._check_sizes(num_tokens, num_experts)
        row_bytes = row_bytes_of(rows.data)
        num_scales = 0 if rows.scales is None else rows.scales.shape[1]
        is_permuted = pad_multiple > 0
        device = rows.data.device

        # One allocation for the route, in the order that Route describes, and the kernel's scratch behind it.
        cells = num_tokens * num_ranks
        route_ints = (3 if is_permuted else 2) * cells
        memory = torch.empty(route_ints + num_tokens * (num_topk + 1), dtype=torch.int32, device=device)
        scratch = memory.data_ptr() + 4 * route_ints
        rank_prefix = torch.empty(num_ranks, num_ranks, dtype=torch.int32, device=device)
        num_local = num_experts // num_ranks
        counts = torch.empty((2 if is_permuted else 1) * num_local, dtype=torch.int32, device=device)
        overflow = torch.empty(1, dtype=torch.int32, device=device) if is_permuted else None
        data = aligned(rows.data)
        first, end = expert_range
        # Every rank asks in the same way: for its own experts, or for one range that is equal at all ranks.
        asks_for_own = end - first == num_local and first == self.grid.rank * num_local
        widths = _cuda.dispatch_widths(row_bytes, num_scales, num_topk, routing.topk_weights is not None, is_permuted)
        if bound is not None:
            self._arena.ensure(widths.slot_bytes_for(bound))
        base = memory.data_ptr()
        while True:
            landing = self._arena.land(stream)
            ticket = self._communicator.dispatch(
                widths=widths,
                rows=data.data_ptr(),
                # An empty tensor has no address, and no address means a cached route.
                topk_idx=routing.topk_idx.data_ptr() or self._control.local.data_ptr(),
                topk_weights=address(routing.topk_weights),
                scales=address(rows.scales),
                num_tokens=num_tokens,
                num_topk=num_topk,
                num_experts=num_experts,
                row_bytes=row_bytes,
                num_scales=num_scales,
                range_first=0 if asks_for_own else first,
                range_step=num_local if asks_for_own else 0,
                range_size=end - first,
                slot_idx=landing.slot_idx,
                row_limit=bound or 0,
                pad_multiple=pad_multiple,
                send_slot=base,
                send_list=base + 4 * cells,
                dst_row=base + 8 * cells if is_permuted else 0,
                rank_prefix=rank_prefix.data_ptr(),
                expert_place=scratch + 4 * num_tokens,
                first_mask=scratch,
                num_tokens_per_expert=counts.data_ptr(),
                overflow=address(overflow),
                waits_for_counts=bound is None,
                num_sms=num_sms or 0,
                stream=stream,
            )
            if bound is not None:
                # Expert-major: the bound counts copies, and more rows than that may arrive when it is exceeded.
                num_recv = self._communicator.slot_layout(widths).capacity if is_permuted else bound
                route = Route(memory, num_recv, bound, bound, 0, 0)
                num_rows = bound
                reported = counts[:num_local] if is_permuted else counts
                break
            mail = self._wait_for_counts(ticket, landing)
            if not mail.needs_room:
                max_recv = mail.max_rows if is_permuted else mail.max_recv
                num_from_away = mail.num_recv - mail.num_kept
                route = Route(memory, mail.num_recv, max_recv, mail.max_sent, mail.num_sent_away, num_from_away)
                num_rows = mail.num_permuted if is_permuted else mail.num_recv
                reported = torch.tensor(mail.num_tokens_per_expert(num_local), dtype=torch.int32)
                self.traffic.within_domain += mail.num_sent_away * widths.total
                break
            landing.release()
            self._arena.ensure(widths.slot_bytes_for(mail.max_rows))
        parts = self._communicator.slot_layout(widths)
        return Sent(landing, parts, route, num_rows, rank_prefix, counts, reported, overflow)

    def _send_again(
        self, rows: Rows, handle: DispatchHandle, max_rows: int, pad_multiple: int, num_sms: int | None
    ) -> tuple[Landing, _cuda.SlotLayout]:
        """Launches a dispatch along a known route, which needs no counts and no wait."""
        stream = self._begin()
        route: Route = handle.state
        num_tokens, num_ranks = handle.num_tokens, self.grid.num_ranks
        row_bytes = row_bytes_of(rows.data)
        num_scales = 0 if rows.scales is None else rows.scales.shape[1]
        widths = _cuda.dispatch_widths(row_bytes, num_scales, 0, False, pad_multiple > 0)
        self._arena.ensure(widths.slot_bytes_for(max_rows))
        landing = self._arena.land(stream)
        base, cells = route.memory.data_ptr(), num_tokens * num_ranks
        self._communicator.dispatch(
            widths=widths,
            rows=aligned(rows.data).data_ptr(),
            topk_idx=0,
            topk_weights=0,
            scales=address(rows.scales),
            num_tokens=num_tokens,
            num_topk=0,
            num_experts=0,
            row_bytes=row_bytes,
            num_scales=num_scales,
            range_first=0,
            range_step=0,
            range_size=0,
            slot_idx=landing.slot_idx,
            row_limit=max_rows,
            pad_multiple=pad_multiple,
            send_slot=base,
            send_list=base + 4 * cells,
            dst_row=base + 8 * cells if pad_multiple else 0,
            rank_prefix=handle.rank_prefix_matrix.data_ptr(),
            expert_place=0,
            first_mask=0,
            num_tokens_per_expert=0,
            overflow=0,
            waits_for_counts=False,
            num_sms=num_sms or 0,
            stream=stream,
        )
        self.traffic.within_domain += route.num_sent_away * widths.total
        return landing, self._communicator.slot_layout(widths)

    def _wait_for_counts(self, ticket: int, landing: Landing) -> _cuda.Mail:
        arrived = self._communicator.wait_mailbox(ticket)
        mail = self._communicator.mail
        if arrived and not mail.failed:
            return mail
        landing.release()
        self._raise_fault()
        raise TransportError("dispatch: counts", self.grid.rank, None, "the kernel did not report in its time")

    def _handle(self, sent: Sent, routing: Routing) -> DispatchHandle:
        num_tokens, num_topk = routing.topk_idx.shape
        return DispatchHandle(
            rank_prefix_matrix=sent.rank_prefix,
            num_tokens=num_tokens,
            num_recv=sent.route.num_recv,
            num_experts=routing.num_experts,
            num_topk=num_topk,
            grid=self.grid,
            state=sent.route,
        )

    @staticmethod
    def _rows(landing: Landing, parts: _cuda.SlotLayout, like: Rows, num_rows: int) -> Rows:
        data = landing.result(parts.rows, (num_rows, like.data.shape[1]), like.data.dtype)
        if like.scales is None:
            return Rows(data)
        return Rows(data, landing.result(parts.scales, (num_rows, like.scales.shape[1]), like.scales.dtype))

    def _spread(
        self,
        landing: Landing,
        parts: _cuda.SlotLayout,
        like: Rows,
        scales: Tensor | None,
        weights: Tensor | None,
        handle: PermuteHandle,
    ) -> tuple[Rows, Tensor | None]:
        """Completes expert-major rows where they landed: further copies, pads, scales and probabilities."""
        state: PermuteState = handle.state
        num_rows, num_recv = handle.num_permuted, state.places.shape[0]
        data = landing.in_place(parts.rows, (num_rows, like.data.shape[1]), like.data.dtype)
        probs = None if weights is None else torch.empty(num_rows, dtype=torch.float32, device=self.device)
        permuted_scales = None
        if scales is not None:
            permuted_scales = torch.empty(num_rows, scales.shape[1], dtype=scales.dtype, device=self.device)
        _cuda.duplicate(
            rows=data.data_ptr(),
            places=state.places.data_ptr(),
            weights=address(weights),
            scales=address(scales),
            probs=address(probs),
            permuted_scales=address(permuted_scales),
            rank_prefix=handle.dispatch.rank_prefix_matrix.data_ptr(),
            num_tokens_per_expert=state.counts.data_ptr(),
            rank=self.grid.rank,
            num_ranks=self.grid.num_ranks,
            num_topk=state.places.shape[1],
            num_local_experts=state.counts.shape[0] // 2,
            row_bytes=row_bytes_of(like.data),
            num_scales=0 if scales is None else scales.shape[1],
            row_limit=num_rows,
            recv_limit=num_recv,
            stream=current_raw_stream(self._index),
        )
        if not landing.slot_idx:
            data = data.clone()
        return Rows(data, permuted_scales), probs

    def _check_sizes(self, num_tokens: int, num_experts: int) -> None:
        if num_tokens > _cuda.max_tokens:
            raise ConfigError(f"tokens of rank {self.grid.rank} are {num_tokens}; allowed: ≤ {_cuda.max_tokens}")
        if num_experts > _cuda.max_experts:
            raise ConfigError(f"num_experts is {num_experts}; allowed with the cuda engine: ≤ {_cuda.max_experts}")
