"""The cuda engine for several domains: hand-written kernels inside a domain and over a link between them.

A dispatch sends each token once to each remote domain that needs it. The peer there forwards the token. A combine goes
the same way back (docs/internals/cuda_engine.md). Each is one launch on the current stream. A small launch before a
dispatch numbers the tokens for each destination. Permuted calls are a dispatch and a permutation by torch. Low-latency
calls have kernels of their own (low_latency_between.py), unless HYBRID_EP_LOW_LATENCY_BETWEEN asks for the torch
engine; low_latency_choice.py chooses. Combines are in between_combine.py.

A call with a bound never waits for the device. A call without one waits for the host counts. If a slot of any rank is
too small, every rank reads that from the same counts. All grow their slots and start again.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep import _cuda, env
from hybrid_ep.agree.blame import Blame
from hybrid_ep.agree.board import Board
from hybrid_ep.agree.fields import ABSENT
from hybrid_ep.agree.losses import Losses
from hybrid_ep.agree.refusals import Refusals
from hybrid_ep.agree.roll_call import RollCall, roll_call_among
from hybrid_ep.core.checks import packed
from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.core.streams import current_raw_stream, is_capturing
from hybrid_ep.engine.base import one_at_a_time
from hybrid_ep.engine.calls import (
    CachedDispatchRequest,
    Combined,
    CombineRequest,
    Dispatched,
    DispatchHandle,
    DispatchRequest,
    Rows,
    state_of,
)
from hybrid_ep.engine.cuda.arena import Arena
from hybrid_ep.engine.cuda.between_combine import combine
from hybrid_ep.engine.cuda.between_faults import BetweenFaults
from hybrid_ep.engine.cuda.between_route import BetweenRoute, RouteSizes
from hybrid_ep.engine.cuda.low_latency_between import LowLatencyBetween, OpenedLink
from hybrid_ep.engine.cuda.low_latency_choice import LowLatencyChoice
from hybrid_ep.engine.cuda.plan import plan_between, plan_between_along, sizes_of_rows
from hybrid_ep.engine.cuda.refuse import refuse_between
from hybrid_ep.engine.cuda.route import HostCounts, address, aligned_rows, route_memory
from hybrid_ep.engine.cuda.symmetric import SymmetricMemory, map_peers_of
from hybrid_ep.errors import ConfigError, HybridEPError, TimeoutError, TransportError
from hybrid_ep.transport import Ring, open_link

__all__ = ["CudaBetween", "refusal_of_grid"]

_GROWTH = 1.25  # of a capacity for records that was too small
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


class CudaBetween(LowLatencyChoice):
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

    name = "cuda"

    def __init__(self, group: dist.ProcessGroup, grid: RankGrid, timeout_s: float, number: int) -> None:
        if refusal := refusal_of_grid(grid):
            raise ConfigError(refusal)
        super().__init__(group, grid, timeout_s, number, lag_s=LowLatencyBetween.lag_s(timeout_s))
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._index: int = torch.cuda.current_device()
        roll_call = roll_call_among(group, grid.rank, grid.domain, timeout_s, number)
        between_bytes = _cuda.between_control_bytes(
            num_domains=grid.num_domains, ranks_per_domain=grid.num_ranks_per_domain
        )
        self._control = SymmetricMemory.allocate(_cuda.control_bytes + between_bytes, roll_call, self.device)
        self._communicator = _cuda.Communicator(
            rank=grid.domain_rank, control=self._control.addresses, device=self._index, timeout_s=timeout_s
        )
        self._group, self._timeout_s = group, timeout_s
        self._everyone = RollCall(group, grid.rank, timeout_s, number)
        self._peers = roll_call_among(group, grid.rank, grid.peers, timeout_s, number)
        roll_call.lost = self._peers.lost = self._everyone.lost = self.lost
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
        self._arena = Arena(roll_call, self.device, self._communicator, env.POOL_SLOTS.get())
        self._routes = route_memory(self.device)
        # Dispatches are numbered among calls of every kind: after ranks have made different ones, numbers agree again.
        self._num_launches = 0
        self._refused = Refusals(Board.of(group).at(f"buffer {number}/refused calls"), grid.rank)
        blame = Blame(Board.of(group).at(f"buffer {number}/calls"), grid.rank, timeout_s, grace_s=_GRACE_S)
        self._faults = BetweenFaults(grid, self._link, blame, self._refused)
        self._order = _cuda.LaunchOrder(self._index, current_raw_stream)
        self._late: HybridEPError | None = None  # error of an earlier call; raised after the next launch
        self._held_capacity = 0  # records that calls without a bound have needed
        if env.LOW_LATENCY_BETWEEN.get() == "cuda":
            self._low_latency_kernels = LowLatencyBetween(
                roll_call,
                grid,
                self.device,
                self._communicator,
                self._order,
                Losses(Board.of(group).at(f"buffer {number}"), grid.rank),
                number=number,
                board=Board.of(group).at(f"buffer {number}/low latency"),
                open_link=self._open_link,
                error_of=self._faults.error_of,
                everyone=self._everyone,
            )
            self._low_latency_kernels.lost = self.lost
        super().barrier()

    def record_stream(self, tensor: Tensor, stream: torch.Stream) -> None:
        self._arena.record_stream(tensor, stream)

    @property
    def memory_bytes(self) -> int:
        kernels = self._low_latency_kernels
        return self._control.local.nbytes + self._arena.num_bytes + (0 if kernels is None else kernels.num_bytes)

    @one_at_a_time
    def dispatch(self, request: DispatchRequest) -> Dispatched:
        return self._dispatch_rows(request)

    def _dispatch(self, request: DispatchRequest) -> Dispatched:
        # Permuted calls come here. Padding and the bound apply to the permuted rows, so all rows must arrive first.
        return self._dispatch_rows(request._replace(bound=None, common_bound=None, num_sms=None))

    def _dispatch_rows(self, request: DispatchRequest) -> Dispatched:
        rows, routing, bound = request.rows, request.routing, request.bound
        stream = self._begin_launch()
        if bound is None and is_capturing(self._index):
            raise ConfigError("a captured dispatch has no bound; allowed: num_worst_tokens")
        topk_idx, num_experts = packed(routing.topk_idx), routing.num_experts
        planned = plan_between(request, self.grid)
        plan, num_tokens = planned.native, planned.native.num_tokens
        again = ABSENT if request.again is None else state_of(request.again, BetweenRoute).number
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
                    again,
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
            self._end_launch()
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
        self._begin("dispatch_with_permute", device, {})  # kernels have made the dispatch
        return super()._find_overflow(num_rows, bound, device)

    @one_at_a_time
    def dispatch_cached(self, request: CachedDispatchRequest, handle: DispatchHandle) -> Rows:
        route = state_of(handle, BetweenRoute)
        stream = self._begin_launch()
        route.chunk.note_use(stream)
        planned = plan_between_along(request, handle, route.max_recv, self.grid)
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
            self._end_launch()
        finally:
            lease.give_back()
        return Rows(data, scales)

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
    def combine(self, request: CombineRequest, handle: DispatchHandle) -> Combined:
        return combine(self, request, handle)

    def _count_launch(self) -> None:
        self._num_launches += 1
        self.num_calls += 1

    def refuse(self, call: str, error: ConfigError) -> None:
        if call.startswith("low_latency"):
            super().refuse(call, error)
            return
        if is_capturing(self._index):
            return
        number, told = self._refused.tell(error)
        refuse_between(self, call, number)
        raise told from error

    @one_at_a_time
    def clean(self) -> None:
        torch.cuda.synchronize(self.device)
        if isinstance(self._late, TimeoutError):
            self._late = None
        super().clean()
        if (kernels := self._low_latency_kernels) is not None:
            kernels.clean()

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
        stream = self._begin_launch()
        self._between.stream_chunks(num_chunks=num_chunks, chunk_bytes=chunk_bytes, num_sms=num_sms or 0, stream=stream)
        self._end_launch()

    def common_bound_of(self, handle: DispatchHandle) -> int:
        return state_of(handle, BetweenRoute).max_recv

    @staticmethod
    def tokens_per_expert(handle: DispatchHandle) -> Tensor:
        return state_of(handle, BetweenRoute).tokens_per_expert()

    @staticmethod
    def rows_by_source(handle: DispatchHandle) -> Tensor:
        if handle.rank_prefix_matrix.numel():
            return LowLatencyChoice.rows_by_source(handle)
        counts = state_of(handle, BetweenRoute).rows_to_ranks()
        return counts[:, handle.grid.domain_rank].cumsum(0, dtype=torch.int32)

    @property
    def default_num_sms(self) -> int:
        num_sms: int = self._communicator.default_dispatch_sms
        return num_sms

    def masked(self) -> Tensor:
        kernels = self._low_latency_kernels
        if kernels is None:
            self.raise_pending()
            return super().masked().to(self.device)
        self._raise_late()
        kernels.note_losses()
        return torch.maximum(kernels.masks(), super().masked().to(self.device, non_blocking=True))

    @one_at_a_time
    def empty_cache(self) -> None:
        self._arena.shrink()
        self._routes.clear()

    @one_at_a_time
    def barrier(self) -> None:
        torch.cuda.synchronize(self.device)
        kernels = self._low_latency_kernels
        if kernels is None:
            self.raise_pending()
            super().barrier()
            return
        self._raise_late()
        kernels.raise_before_barrier(kernels.lately_masked)
        super().set_masked(kernels.note_told(), True)
        kernels.drain()
        self.meet(after_loss=kernels.knows_loss)
        kernels.reset(self.take_number())
        torch.cuda.synchronize(self.device)
        super().barrier()

    def raise_pending(self) -> None:
        self._note_fault()
        self._raise_late()

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        if self._low_latency_kernels is not None:
            self._low_latency_kernels.close()
        self._link.close(_CLOSE_TIMEOUT_S)
        super().close()
        self._raise_unnamed()

    def _begin_launch(self) -> int:
        """Orders this call after the engine's earlier ones, and returns the stream.

        Raises:
            TimeoutError, TransportError: an earlier call has lost a rank, or the link. `_end_launch` raises other
                faults of earlier calls. Other ranks may not know of them yet, and would wait for this rank's launch.
        """
        self._note_fault()
        if isinstance(self._late, (TimeoutError, TransportError)):
            self._raise_late()
        return self._order.begin()

    def _end_launch(self) -> None:
        """Ends a call, after its last use of the arena; raises the error of an earlier call."""
        self._order.end()
        self._raise_late()

    def _wait_for_counts(self, counts_epoch: int, stream: int, reported: Tensor | None) -> HostCounts:
        num_counts = 0 if reported is None else len(reported)
        host_counts = self._communicator.wait_for_counts(counts_epoch, stream, address(reported), num_counts)
        if host_counts is not None:
            return HostCounts(*host_counts)
        fault = self._take_fault()
        if fault is None:
            fault = TransportError("dispatch: counts", self.grid.rank, None, "the kernel did not report in its time")
        raise fault

    def _count_traffic(self, route: BetweenRoute, record_bytes: int) -> None:
        within, between = route.sent
        self.traffic.within_domain += within * record_bytes
        self.traffic.between_domains += between * record_bytes

    def _note_fault(self) -> None:
        if self._late is None:
            self._late = self._take_fault()

    def _raise_late(self) -> None:
        if self._late is not None:
            late, self._late = self._late, None
            raise late

    def _take_fault(self) -> HybridEPError | None:
        """Returns the error of a fault that a kernel has recorded since the last call."""
        if self._low_latency_kernels is not None:
            return self._low_latency_kernels.take_fault()
        fault = self._communicator.take_fault()
        return None if fault is None else self._faults.error_of(fault)

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
