"""The cuda engine for several domains: hand-written kernels inside a domain and over a link between them.

A dispatch sends each token once to each remote domain that needs it. The peer there forwards the token. A combine goes
the same way back (docs/internals/cuda_engine.md). Each is one launch on the current stream. A small launch before a
dispatch numbers the tokens for each destination. Rows by expert are a dispatch, and a permutation by torch. Low-latency
calls have kernels of their own (low_latency_between.py), unless HYBRID_EP_LOW_LATENCY_BETWEEN asks for the torch
engine.

A call with a bound never waits for the device. A call without one waits for the host counts. If a slot of any rank is
too small, every rank reads that from the same counts. All grow their slots and start again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep import _cuda, env
from hybrid_ep.agree.blame import Blame, blamed
from hybrid_ep.agree.board import Board
from hybrid_ep.agree.fields import ABSENT
from hybrid_ep.agree.losses import Losses
from hybrid_ep.agree.roll_call import RollCall, roll_call_among
from hybrid_ep.core.checks import packed
from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.core.streams import is_capturing
from hybrid_ep.engine.base import one_at_a_time
from hybrid_ep.engine.calls import (
    Combined,
    CombineRequest,
    Dispatched,
    DispatchHandle,
    DispatchRequest,
    LowLatencyCombineRequest,
    LowLatencyDispatched,
    LowLatencyDispatchRequest,
    LowLatencyHandle,
    PermuteHandle,
    Routing,
    Rows,
    along_handle,
    dispatch_of,
    state_of,
)
from hybrid_ep.engine.cuda.base import BaseCudaEngine
from hybrid_ep.engine.cuda.between_route import BetweenRoute, RouteSizes
from hybrid_ep.engine.cuda.compare import compare_calls
from hybrid_ep.engine.cuda.faults import as_error, rank_of, transport_error
from hybrid_ep.engine.cuda.low_latency_between import LowLatencyBetween, OpenedLink
from hybrid_ep.engine.cuda.plan import plan_between, plan_between_along, sizes_of_rows
from hybrid_ep.engine.cuda.route import HostCounts, address, aligned, aligned_rows
from hybrid_ep.engine.cuda.symmetric import map_peers_of
from hybrid_ep.engine.torch.by_expert import permute_rows, rows_by_expert, sum_copies
from hybrid_ep.errors import ConfigError, HybridEPError, TimeoutError, TransportError
from hybrid_ep.transport import Ring, open_link

_GROWTH = 1.25  # of a capacity for records that was too small
_HIDDEN_WITHOUT_ROWS = 8  # of a call that sends none: as few as kernels move
_CLOSE_TIMEOUT_S = 5.0  # for what is still on its way when an engine is closed
# How much later than this rank another rank may give up a call. A kernel ends up to three seconds after its timeout
# (csrc/kernels/between/chunk_stream.cuh), and ranks do not begin a call at the same time.
_GRACE_S = 5.0


def refusal_of_grid(grid: RankGrid) -> str | None:
    """Says what is too large for the kernels between domains; None where nothing is."""
    fits = 2 <= grid.num_domains <= _cuda.max_domains and grid.num_ranks_per_domain <= _cuda.max_ranks
    if fits and grid.num_ranks <= _cuda.max_experts:
        return None
    return (
        f"grid is {grid.num_domains} domains of {grid.num_ranks_per_domain} ranks; allowed between domains: "
        f"2 … {_cuda.max_domains} domains of at most {_cuda.max_ranks}, {_cuda.max_experts} ranks in all"
    )


class CudaBetween(BaseCudaEngine):
    """Dispatch and combine between domains by the kernels of `_cuda`.

    Args:
        group: the ranks of all domains.
        grid: their geometry; two domains or more.
        timeout_s: how long a kernel waits for a rank.
        number: number of the buffer on its group, equal at all ranks.

    Raises:
        ConfigError: more domains, or ranks of a domain, than the kernels take.
        TopologyError: the ranks of a domain cannot map each other's memory.
        TransportError: the peers cannot be reached.
    """

    _low_latency: LowLatencyBetween | None

    def __init__(self, group: dist.ProcessGroup, grid: RankGrid, timeout_s: float, number: int) -> None:
        if refusal := refusal_of_grid(grid):
            raise ConfigError(refusal)
        roll_call = roll_call_among(group, grid.rank, grid.domain, timeout_s, number)
        between_bytes = _cuda.between_control_bytes(
            num_domains=grid.num_domains, ranks_per_domain=grid.num_ranks_per_domain
        )
        super().__init__(
            group,
            grid,
            timeout_s,
            number,
            domain=roll_call,
            control_bytes=_cuda.control_bytes + between_bytes,
            lag_s=LowLatencyBetween.lag_s(timeout_s),
        )
        self._group, self._timeout_s = group, timeout_s
        self._everyone = RollCall(group, grid.rank, timeout_s, number)
        self._peers = roll_call_among(group, grid.rank, grid.peers, timeout_s, number)
        self._peers.lost = self._everyone.lost = self.lost
        ring = Ring(*_cuda.between_ring(num_domains=grid.num_domains))
        self._link, self._keep = self._open_link([ring], grid, False)
        if self._link.proxy.is_mapped and self._link.kernels is None and grid.num_domains > _cuda.max_mapped_domains:
            self._link.close()
            allowed = f"2 … {_cuda.max_mapped_domains} over {self._link.choice.name} on one host; tcp takes more"
            raise ConfigError(f"num_domains is {grid.num_domains}; allowed: {allowed}")
        self.transport = f"NVLink, {self._link.choice.name}"
        self._between = _cuda.BetweenCommunicator(
            domain=self._communicator,
            rank=grid.rank,
            num_domains=grid.num_domains,
            proxy=self._link.proxy,
            kernels=self._link.kernels,
        )
        # Dispatches are numbered among calls of every kind: after ranks have made different ones, numbers agree again.
        self._num_launches = 0
        board = Board.of(group).at(f"buffer {number}")
        self._blame = Blame(board.at("calls"), grid.rank, timeout_s, grace_s=_GRACE_S)
        self._held_capacity = 0  # records that calls without a bound have needed
        self._low_latency = None
        self._calls_kernels: bool | None = None  # whether they served the last low-latency call; None: none yet
        if env.LOW_LATENCY_BETWEEN.get() == "cuda":
            self._low_latency = LowLatencyBetween(
                roll_call,
                grid,
                self.device,
                self._communicator,
                self._order,
                Losses(board, grid.rank),
                number=number,
                board=board.at("low latency"),
                open_link=self._open_link,
                error_of=self._error_of,
                everyone=self._everyone,
            )
            self._low_latency.lost = self.lost
        self._torch.barrier()

    @one_at_a_time
    def dispatch(self, request: DispatchRequest) -> Dispatched:
        if request.routing is None:
            assert request.along is not None
            return self._dispatch_along(request, request.along)
        if request.pad_multiple:
            # Padding and the bound apply to rows by expert, so all rows must arrive first.
            received = self._dispatch(request._replace(bound=None, common_bound=None, num_sms=None), request.routing)
            return rows_by_expert(request, received, self._find_overflow)
        return self._dispatch(request, request.routing)

    def _dispatch(self, request: DispatchRequest, routing: Routing) -> Dispatched:
        rows, bound = request.rows, request.bound
        stream = self._begin()
        if bound is None and is_capturing(self._index):
            raise ConfigError("a captured dispatch has no bound; allowed: num_worst_tokens")
        topk_idx, num_experts = packed(routing.topk_idx), routing.num_experts
        planned = plan_between(request, routing, self.grid)
        plan, num_tokens = planned.native, planned.native.num_tokens
        along = ABSENT if request.along is None else state_of(dispatch_of(request.along), BetweenRoute).number
        checksum = address(None if request.replicas is None else request.replicas.checksum)
        num_topk = topk_idx.shape[1]
        sizes = RouteSizes(self.grid.num_domains, self.grid.num_ranks_per_domain, num_tokens, num_topk, num_experts)
        if bound is not None:
            self._arena.holds(planned.slot_bytes)  # raises in a capture if slots would have to grow
        held_capacity = self._held_capacity_for(sizes, None if bound is None else planned.max_rows)
        sent, reported = aligned_rows(rows), None
        if bound is None:
            reported = torch.empty(num_experts // self.grid.num_ranks, dtype=torch.int32, device="cpu")
        lease = self._arena.slots.lease(stream)
        try:
            while True:
                chunk, base = self._routes.take(sizes.num_ints(held_capacity), stream, alone=lease.is_captured)
                host_counts = self._launch(
                    plan,
                    sent,
                    topk_idx.data_ptr(),
                    address(routing.topk_weights),
                    base,
                    checksum,
                    held_capacity,
                    along,
                    lease,
                    stream,
                    reported,
                )
                if planned.refusal is not None:
                    raise ConfigError(planned.refusal)
                if host_counts is None or not host_counts.needs_capacity:
                    break
                lease = self._lease_larger(lease, plan, host_counts, stream)
                held_capacity = max(held_capacity, int(host_counts.max_held * _GROWTH))
                self._held_capacity = max(self._held_capacity, held_capacity)
            max_rows, crossed = planned.max_rows, (0, 0)
            if bound is not None:
                num_rows = bound, max_rows, max_rows
            else:
                assert host_counts is not None
                num_rows = host_counts.num_recv, host_counts.max_recv, host_counts.max_sent
                crossed = host_counts.num_sent_away, host_counts.num_sent_between
            number = _cuda.dispatch_number(self.number, self._num_launches)
            route = BetweenRoute(chunk, base, sizes, held_capacity, *num_rows, crossed, number)
            self._count_traffic(route, plan.record_bytes)
            matrix = route.rank_prefix_matrix()
            data, scales, experts, weights = lease.results(plan, route.num_recv)
            self._end()
        finally:
            lease.give_back()
        assert experts is not None
        handle = DispatchHandle(matrix, num_tokens, route.num_recv, num_experts, num_topk, self.grid, route)
        return Dispatched(Rows(data, scales), experts, weights, reported, handle)

    def _held_capacity_for(self, sizes: RouteSizes, max_rows: int | None) -> int:
        """Returns for how many records, which this rank forwards, a new route has memory.

        Args:
            sizes: of the route.
            max_rows: the most rows of a rank; None = no bound. Without one, a call that needs more starts again.
        """
        num_others = self.grid.num_domains - 1
        capacity = max(self._held_capacity, min(num_others, sizes.num_topk) * sizes.num_tokens)
        if max_rows is None:
            return capacity
        # Every record is a row of some rank of the domain, and a peer has no more tokens than a rank may send.
        return max(capacity, min(self.grid.num_ranks_per_domain * max_rows, num_others * _cuda.max_tokens))

    def _find_overflow(self, num_rows: int, bound: int, device: torch.device) -> str | None:
        self._torch.begin("dispatch_with_permute", device, {})  # kernels have made the dispatch
        return self._torch.find_overflow(num_rows, bound, device)

    def _dispatch_along(self, request: DispatchRequest, handle: DispatchHandle | PermuteHandle) -> Dispatched:
        dispatch = dispatch_of(handle)
        route = state_of(dispatch, BetweenRoute)
        stream = self._begin()
        route.chunk.note_use(stream)
        planned = plan_between_along(request, dispatch, route.max_recv, self.grid)
        plan = planned.native
        self._arena.holds(planned.slot_bytes)
        sent = aligned_rows(request.rows)
        lease = self._arena.slots.lease(stream)
        try:
            while True:
                host_counts = self._launch(
                    plan, sent, 0, 0, route.address, 0, route.held_capacity, route.number, lease, stream, None
                )
                if host_counts is None or not host_counts.needs_capacity:
                    break
                lease = self._lease_larger(lease, plan, host_counts, stream)
            self._count_traffic(route, plan.record_bytes)
            data, scales, _, _ = lease.results(plan, route.num_recv)
            self._end()
        finally:
            lease.give_back()
        received = Rows(data, scales)
        if isinstance(handle, PermuteHandle):
            received = permute_rows(received, handle)
        return along_handle(received, handle)

    def _lease_larger(
        self, lease: _cuda.SlotLease, plan: _cuda.DispatchShape, host_counts: HostCounts, stream: int
    ) -> _cuda.SlotLease:
        """Gives a slot back that some rank has found too small; returns one that holds the rows. Collective."""
        lease.give_back()
        self._arena.ensure(plan.slot_bytes_for(host_counts.max_recv))
        return self._arena.slots.lease(stream)

    def _launch(
        self,
        plan: _cuda.DispatchShape,
        rows: Rows,
        topk_idx: int,
        topk_weights: int,
        route: int,
        checksum: int,
        held_capacity: int,
        handle: int,
        lease: _cuda.SlotLease,
        stream: int,
        reported: Tensor | None,
    ) -> HostCounts | None:
        """Launches a dispatch once. Returns what it reports to the host; None where the host does not wait for it.

        Args:
            plan: of the call.
            rows: aligned.
            topk_idx, topk_weights, route, checksum: addresses; the last one of a mapping's.
            held_capacity: of the route.
            handle: number of the dispatch whose route or routing is used again; ABSENT where there is none.
            lease: of the slot where its rows land.
            stream: that it runs on.
            reported: counts of the local experts, written; None where nobody asks for them.
        """
        counts_epoch = self._between.dispatch(
            plan=plan,
            rows=rows.data.data_ptr(),
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            scales=address(rows.scales),
            route=route,
            mapping_checksum=checksum,
            held_capacity=held_capacity,
            handle=handle,
            slot_idx=lease.slot_idx,
            stream=stream,
        )
        self._count_launch()
        if counts_epoch == 0 or plan.refusal is not None:
            return None
        return self._wait_for_counts(counts_epoch, stream, reported)

    @one_at_a_time
    def combine(self, request: CombineRequest, handle: DispatchHandle | PermuteHandle) -> Combined:
        if isinstance(handle, PermuteHandle):
            request, handle = sum_copies(request, handle), handle.dispatch
        data, weights = aligned(request.data), request.weights
        route = state_of(handle, BetweenRoute)
        stream = self._begin()
        route.chunk.note_use(stream)
        sizes: dict[str, Any] = {
            "hidden": data.shape[1],
            "num_topk": handle.num_topk,
            "num_experts": handle.num_experts,
            "num_weights": 0 if weights is None else weights.shape[1],
            "num_sms": request.num_sms,
        }
        plan = _cuda.CombinePlan(num_tokens=handle.num_tokens, **sizes)
        # Ranks compare a combine without tokens as if it had them.
        compared = _cuda.CombinePlan(num_tokens=0, **sizes)
        self._arena.ensure(plan.slot_bytes_for(route.max_sums), lambda: self._compare_combine(compared, route, stream))
        self._arena.slots.note_use(stream)

        def make_sums() -> tuple[Tensor, Tensor | None]:
            sums = torch.empty(handle.num_tokens, data.shape[1], dtype=data.dtype, device=data.device)
            if weights is None:
                return sums, None
            return sums, torch.empty(handle.num_tokens, weights.shape[1], dtype=torch.float32, device=data.device)

        out, out_weights = make_sums()
        # A rank that is alone in its domain has no sums over it: the kernel reads the rows of `data`.
        own_sums, own_weights = make_sums() if self.grid.num_ranks_per_domain > 1 else (None, None)
        terms = [aligned(term) for term in request.bias]
        self._between.combine(
            plan=plan,
            rows=data.data_ptr(),
            num_rows=data.shape[0],
            weights=address(weights),
            bias=[term.data_ptr() for term in terms],
            out=out.data_ptr(),
            out_weights=address(out_weights),
            own_sums=address(own_sums),
            own_weights=address(own_weights),
            route=route.address,
            held_capacity=route.held_capacity,
            handle=route.number,
            stream=stream,
        )
        self._count_launch()
        self._end()
        return Combined(out, out_weights)

    def _combine_without_rows(self, plan: _cuda.CombinePlan, no_rows: Tensor, handle: int, stream: int) -> None:
        """Launches a combine that only publishes its call; `no_rows` is a route of zeros."""
        self._between.combine(
            plan=plan,
            rows=0,
            num_rows=0,
            weights=0,
            bias=[],
            out=0,
            out_weights=0,
            own_sums=0,
            own_weights=0,
            route=no_rows.data_ptr(),
            held_capacity=0,
            handle=handle,
            stream=stream,
        )
        self._count_launch()

    def _compare_combine(self, plan: _cuda.CombinePlan, route: BetweenRoute, stream: int) -> None:
        """Compares the combines of the ranks, before slots grow for them: see compare.py."""
        no_rows = torch.zeros(route.sizes._replace(num_tokens=0).num_ints(0), dtype=torch.int32, device=self.device)
        compare_calls(
            self.device,
            self._begin,
            self._take_fault,
            lambda: self._combine_without_rows(plan, no_rows, route.number, stream),
        )

    def _count_launch(self) -> None:
        self._num_launches += 1
        self.num_calls += 1

    def _launch_refusal(self, call: str, number: int) -> None:
        grid, stream = self.grid, self._begin()
        sizes = RouteSizes(grid.num_domains, grid.num_ranks_per_domain, 0, 1, grid.num_ranks)
        no_rows = torch.zeros(sizes.num_ints(0), dtype=torch.int32, device=self.device)
        if call == "combine":
            plan = _cuda.CombinePlan(
                num_tokens=0, hidden=_HIDDEN_WITHOUT_ROWS, num_topk=1, num_experts=grid.num_ranks, refusal=number
            )
            self._combine_without_rows(plan, no_rows, ABSENT, stream)
        else:  # also copies of experts, which the rows of a dispatch carry
            rows = Rows(torch.empty(0, _HIDDEN_WITHOUT_ROWS, dtype=torch.bfloat16, device=self.device))
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
            lease = self._arena.slots.lease(stream)
            try:
                self._launch(shape, rows, 0, 0, no_rows.data_ptr(), 0, 0, ABSENT, lease, stream, None)
            finally:
                lease.give_back()
        self._order.end()

    # Low-latency calls: each by the kernels or, where they do not take its size, by torch.

    @one_at_a_time
    def low_latency_dispatch(self, request: LowLatencyDispatchRequest) -> LowLatencyDispatched:
        kernels = self._low_latency
        self._calls_kernels = kernels is not None and kernels.serves(request)
        if kernels is None or not self._calls_kernels:
            return self._torch.low_latency_dispatch(request)
        return kernels.dispatch(request)

    @one_at_a_time
    def low_latency_combine(
        self, request: LowLatencyCombineRequest, handle: LowLatencyHandle
    ) -> Callable[[], None] | None:
        kernels = self._low_latency
        self._calls_kernels = kernels is not None and kernels.has_made(handle)
        if kernels is None or not self._calls_kernels:
            return self._torch.low_latency_combine(request, handle)
        return kernels.combine(request, handle)

    def _refuse_low_latency(self, call: str, error: ConfigError) -> None:
        kernels = self._low_latency
        # The arguments do not tell which engine the other ranks call: most likely that of the call before.
        if kernels is None or self._calls_kernels is False:
            self._torch.refuse(call, error)
        else:
            kernels.refuse(call, error)

    @property
    def completes_lost_calls(self) -> bool:  # type: ignore[override]
        return not self._calls_kernels

    @property
    def is_left_out(self) -> bool:  # type: ignore[override]
        return self._torch.is_left_out

    def leave_out(self, peer: int) -> None:
        if self._low_latency is not None and self._calls_kernels:
            self._low_latency.leave_out(peer, self.set_masked)
        else:
            self._torch.leave_out(peer)

    def chunks_of(self, rows: Rows, num_topk: int, num_experts: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns tokens of a chunk and its bytes: of a dispatch with weights, of a combine without."""
        sizes = sizes_of_rows(rows)
        dispatch = _cuda.DispatchShape(
            rank=self.grid.rank,
            num_ranks=self.grid.num_ranks,
            **sizes,
            num_topk=num_topk,
            num_experts=num_experts,
            has_weights=True,
            expert_range=(0, num_experts),
        )
        combine = _cuda.CombinePlan(
            num_tokens=sizes["num_tokens"], hidden=sizes["hidden"], num_topk=num_topk, num_experts=num_experts
        )
        return _cuda.between_chunk(dispatch), _cuda.between_chunk(combine)

    @one_at_a_time
    def stream_chunks(self, num_chunks: int, chunk_bytes: int, num_sms: int | None = None) -> None:
        """Measures the link alone: sends chunks without rows to every peer, and takes as many from each.

        Args:
            num_chunks: to each peer; equal at all ranks.
            chunk_bytes: of each; equal at all ranks.
            num_sms: SMs to use; None = the default.
        """
        stream = self._begin()
        self._between.stream_chunks(num_chunks=num_chunks, chunk_bytes=chunk_bytes, num_sms=num_sms or 0, stream=stream)
        self._end()

    def common_bound_of(self, handle: DispatchHandle) -> int:
        return state_of(handle, BetweenRoute).max_recv

    @staticmethod
    def tokens_per_expert(handle: DispatchHandle) -> Tensor:
        return state_of(handle, BetweenRoute).tokens_per_expert()

    @staticmethod
    def rows_by_source(handle: DispatchHandle) -> Tensor:
        if handle.rank_prefix_matrix.numel():
            return BaseCudaEngine.rows_by_source(handle)
        counts = state_of(handle, BetweenRoute).rows_to_ranks()
        return counts[:, handle.grid.domain_rank].cumsum(0, dtype=torch.int32)

    def _close_links(self) -> None:
        self._link.close(_CLOSE_TIMEOUT_S)

    def _wait_for_counts(self, counts_epoch: int, stream: int, reported: Tensor | None) -> HostCounts:
        num_counts = 0 if reported is None else len(reported)
        host_counts = self._communicator.wait_for_counts(counts_epoch, stream, address(reported), num_counts)
        if host_counts is None:
            self._raise_failed()
        return HostCounts(*host_counts)

    def _count_traffic(self, route: BetweenRoute, record_bytes: int) -> None:
        within, between = route.sent
        self.traffic.within_domain += within * record_bytes
        self.traffic.between_domains += between * record_bytes

    def _take_fault(self) -> HybridEPError | None:
        if self._low_latency is not None:
            return super()._take_fault()
        fault = self._communicator.take_fault()
        return None if fault is None else self._error_of(fault)

    def _error_of(self, fault: _cuda.Fault) -> HybridEPError:
        """Returns the error. Waits for other ranks' reports if a rank is lost."""
        if fault.kind == _cuda.FaultKind.TRANSPORT:
            peer = rank_of(fault.peer, self.grid)
            error: HybridEPError = transport_error(fault, [self._link], self.grid.rank, peer)
        else:
            error = as_error(fault, self.grid, self._refusals)
        if not isinstance(error, TransportError) or error.peer is None:
            return error
        others = [rank_of(peer, self.grid) for peer in fault.missed]
        self._blame.write_lost(error.peer, others)
        if not isinstance(error, TimeoutError):
            return error
        return blamed(error, self._blame.find(error.peer, others=others))

    def _open_link(self, rings: list[Ring], grid: RankGrid, joins_all: bool) -> OpenedLink:
        """Opens a link to the peers of a grid. Collective.

        Args:
            rings: rings of the link.
            grid: the engine's grid, or one in which every rank is a domain.
            joins_all: every rank is a domain, and the link goes on without a lost rank.
        """
        device = torch.device("cuda", self._index)
        map_peers = map_peers_of(self._peers if grid == self.grid else self._everyone, device)
        link = open_link(
            self._group,
            grid,
            rings,
            device=device,
            timeout_s=self._timeout_s,
            native=_cuda,
            map_symmetric=map_peers,
            num_near=self.grid.num_ranks_per_domain if joins_all else 1,
            keeps_other_peers=joins_all,
        )
        return OpenedLink(link, map_peers)
