"""The cuda engine: hand-written kernels for the GPUs of one NVLink domain.

A call is one launch on the current stream, which one call of C++ makes (`_cuda.Domain`, csrc/calls/domain.h). What all
ranks do together beside kernels is here and in arena.py: growth of memory, comparison of calls, faults. Copies of
experts are in experts.py, low-latency calls in low_latency.py. docs/internals/cuda_engine.md describes the kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep import _cuda, env
from hybrid_ep.agree.board import Board
from hybrid_ep.agree.losses import Losses
from hybrid_ep.agree.refusals import Refusals
from hybrid_ep.agree.roll_call import RollCall
from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.core.streams import current_raw_stream, is_capturing
from hybrid_ep.engine.base import Engine, one_at_a_time
from hybrid_ep.engine.calls import (
    CachedDispatchRequest,
    Combined,
    CombineRequest,
    Dispatched,
    DispatchHandle,
    DispatchRequest,
    ExpertCopies,
    LowLatencyCombineRequest,
    LowLatencyDispatched,
    LowLatencyDispatchRequest,
    LowLatencyHandle,
    Permuted,
    PermuteHandle,
    Rows,
    state_of,
)
from hybrid_ep.engine.cuda.arena import Arena
from hybrid_ep.engine.cuda.compare import compare_calls
from hybrid_ep.engine.cuda.experts import ExpertCopier
from hybrid_ep.engine.cuda.faults import as_error
from hybrid_ep.engine.cuda.low_latency import CudaLowLatency
from hybrid_ep.engine.cuda.refuse import refuse_within
from hybrid_ep.engine.cuda.route import PermuteState, route_memory
from hybrid_ep.engine.cuda.symmetric import SymmetricMemory
from hybrid_ep.engine.torch.engine import TorchEngine
from hybrid_ep.errors import ConfigError, HybridEPError, TimeoutError, TransportError

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
        self.transport = "none" if grid.num_ranks == 1 else "NVLink"
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._index: int = torch.cuda.current_device()
        self.lag_s = CudaLowLatency.lag_s(timeout_s)
        self._torch = TorchEngine(group, grid, timeout_s, number, lag_s=self.lag_s)
        self.traffic = self._torch.traffic
        roll_call = RollCall(group, grid.rank, timeout_s, number)
        self._control = SymmetricMemory.allocate(_cuda.control_bytes, roll_call, self.device)
        self._communicator = _cuda.Communicator(
            rank=grid.rank, control=self._control.addresses, device=self._index, timeout_s=timeout_s
        )
        self._arena = Arena(roll_call, self.device, self._communicator, env.POOL_SLOTS.get())
        self._experts = ExpertCopier(roll_call, self.device, self._communicator, self._arena)
        self._routes = route_memory(self.device)
        self.number = number
        self._order = _cuda.LaunchOrder(self._index, current_raw_stream)
        self._domain = _cuda.Domain(
            engine=self,
            rank=grid.rank,
            num_ranks=grid.num_ranks,
            number=number,
            communicator=self._communicator,
            launches=self._order,
            routes=self._routes,
            slots=self._arena.slots,
            device=self.device,
        )
        self._late: HybridEPError | None = None  # that the call which is being made raises when it has been launched
        board = None if group is None else Board.of(group).at(f"buffer {number}")
        self._refusals = Refusals(None if board is None else board.at("refused calls"), grid.rank)
        self._low_latency = CudaLowLatency(
            roll_call,
            grid,
            self.device,
            self._communicator,
            self._order,
            Losses(board, grid.rank),
            number=number,
            board=None if board is None else board.at("low latency"),
            error_of=functools.partial(as_error, grid=grid, refusals=self._refusals),
            timeout_s=timeout_s,
        )
        self._low_latency.lost = self._torch.lost = roll_call.lost = self.lost

    @property
    def is_quiet(self) -> bool:
        """Whether no fault of an earlier call is still to be raised."""
        return self._late is None and self._low_latency.is_quiet

    @property
    def memory_bytes(self) -> int:
        slots = self._arena.num_bytes + self._experts.num_bytes
        return self._control.local.nbytes + slots + self._low_latency.num_bytes

    @one_at_a_time
    def dispatch(self, request: DispatchRequest) -> Dispatched:
        data, scales, topk_idx, topk_weights, counts, rank_prefix, route = self._domain.dispatch(request)
        handle = self._handle(request, rank_prefix, route)
        return Dispatched(Rows(data, scales), topk_idx, topk_weights, counts, handle)

    @one_at_a_time
    def dispatch_cached(self, request: CachedDispatchRequest, handle: DispatchHandle) -> Rows:
        return Rows(*self._domain.dispatch_along(request, handle))

    @one_at_a_time
    def combine(self, request: CombineRequest, handle: DispatchHandle) -> Combined:
        return Combined(*self._domain.combine(request, handle))

    @one_at_a_time
    def dispatch_permuted(self, request: DispatchRequest) -> Permuted:
        results = self._domain.dispatch_by_expert(request)
        data, scales, probs, counts, rank_prefix, overflow, route, chunk, kept = results
        if not isinstance(counts, Tensor):
            counts = torch.tensor(counts, dtype=torch.int64, device="cpu")
        handle = PermuteHandle(
            self._handle(request, rank_prefix, route),
            counts,
            data.shape[0],
            request.pad_multiple,
            PermuteState(chunk, kept, self._communicator),
            overflow,
        )
        return Permuted(Rows(data, scales), probs, counts, handle)

    @one_at_a_time
    def dispatch_permuted_cached(self, request: CachedDispatchRequest, handle: PermuteHandle) -> Rows:
        state_of(handle, PermuteState)
        return Rows(*self._domain.dispatch_by_expert_along(request, handle))

    @one_at_a_time
    def combine_permuted(self, request: CombineRequest, handle: PermuteHandle) -> Combined:
        state_of(handle, PermuteState)
        return Combined(*self._domain.combine_by_expert(request, handle))

    def _handle(self, request: DispatchRequest, rank_prefix: Tensor, route: _cuda.Route) -> DispatchHandle:
        num_tokens, num_topk = request.routing.topk_idx.shape
        num_experts = request.routing.num_experts
        return DispatchHandle(rank_prefix, num_tokens, route.num_recv, num_experts, num_topk, self.grid, route)

    def allocate_spare(self, num_bytes: int, device: torch.device) -> Tensor:
        return self._experts.allocate(num_bytes) if device == self.device else super().allocate_spare(num_bytes, device)

    @one_at_a_time
    def copy_experts(self, copies: ExpertCopies) -> bool:
        if copies.mapping.numel() > _cuda.max_replicas:
            return False
        self._experts.copy(copies, self._begin(), self._compare)
        self.num_calls += 1
        self._end()
        return True

    def sent_topk_idx(self, handle: DispatchHandle, topk_idx: Tensor) -> Tensor:
        return self._domain.sent_topk_idx(state_of(handle, _cuda.Route), *topk_idx.shape)

    @staticmethod
    def tokens_per_expert(handle: DispatchHandle) -> Tensor:
        route = state_of(handle, _cuda.Route)
        counts: Tensor = route.chunk.ints(route.address, route.counts_at, handle.num_experts // handle.grid.num_ranks)
        return counts

    @property
    def default_num_sms(self) -> int:
        num_sms: int = self._communicator.default_dispatch_sms
        return num_sms

    @property
    def default_copy_sms(self) -> int:
        num_sms: int = self._communicator.default_copy_sms
        return num_sms

    def common_bound_of(self, handle: DispatchHandle) -> int:
        return state_of(handle, _cuda.Route).max_recv

    def exchange_expert_counts(self, num_tokens_per_expert: Tensor) -> Tensor:
        return self._torch.exchange_expert_counts(num_tokens_per_expert)

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        return self._torch.sum_over_ranks(tensor)

    @one_at_a_time
    def low_latency_dispatch(self, request: LowLatencyDispatchRequest) -> LowLatencyDispatched:
        return self._low_latency.dispatch(request)

    @one_at_a_time
    def low_latency_combine(
        self, request: LowLatencyCombineRequest, handle: LowLatencyHandle
    ) -> Callable[[], None] | None:
        return self._low_latency.combine(request, handle)

    def refuse(self, call: str, error: ConfigError) -> None:
        if call.startswith("low_latency"):
            self._low_latency.refuse(call, error)
            return
        if self.grid.num_ranks == 1 or is_capturing(self._index):
            return
        number, told = self._refusals.tell(error)
        refuse_within(self, call, number)
        raise told from error

    def set_masked(self, ranks: Iterable[int], masked: bool) -> None:
        ranks = set(ranks)
        self._torch.set_masked(ranks, masked)
        self._low_latency.set_masked(ranks, masked)

    def leave_out(self, peer: int) -> None:
        self._low_latency.leave_out(peer, self.set_masked)

    def masked(self) -> Tensor:
        self._raise_late()
        self._low_latency.note_losses()
        return self._low_latency.masks()

    @one_at_a_time
    def clean(self) -> None:
        torch.cuda.synchronize(self.device)
        if isinstance(self._late, TimeoutError):
            self._late = None
        self._torch.clean()
        self._low_latency.clean()

    def allow_masks(self, *, only_masks_lost: bool) -> None:
        super().allow_masks(only_masks_lost=only_masks_lost)
        self._torch.allow_masks(only_masks_lost=only_masks_lost)
        self._low_latency.takes_masks, self._low_latency.only_masks_lost = True, only_masks_lost

    def record_stream(self, tensor: Tensor, stream: torch.Stream) -> None:
        self._arena.record_stream(tensor, stream)

    def low_latency_memory(self) -> Tensor:
        return self._low_latency.rows_memory()

    @one_at_a_time
    def barrier(self) -> None:
        torch.cuda.synchronize(self.device)
        # Raised before the barrier, for the barrier makes ranks forget the calls and succeeds.
        self._raise_late()
        self._low_latency.raise_before_barrier(self._low_latency.lately_masked)
        self._torch.set_masked(self._low_latency.note_told(), True)
        self._torch.meet(after_loss=self._low_latency.knows_loss)
        self._low_latency.reset(self._torch.take_number())
        torch.cuda.synchronize(self.device)
        self._torch.barrier()

    @one_at_a_time
    def empty_cache(self) -> None:
        self._arena.shrink()
        self._routes.clear()

    def close(self) -> None:
        # Peers may still write here for calls that this rank has not waited for.
        torch.cuda.synchronize(self.device)
        self._low_latency.close()
        self._torch.close()
        self._raise_unnamed()

    def raise_pending(self) -> None:
        self._raise_late()
        self._low_latency.raise_fault()

    # Begin and end of a call.

    def _begin(self) -> int:
        """Orders this call after the engine's earlier ones, and returns the stream.

        Raises:
            TimeoutError: an earlier call has lost a rank. `_end` raises other faults of earlier calls. Other ranks may
                not know of them yet, and would wait for this rank's launch.
        """
        if self._late is None:
            self._late = self._low_latency.take_fault()
        if isinstance(self._late, TimeoutError):
            self._raise_late()
        return self._order.begin()

    def _end(self) -> None:
        """Ends a call, after its last use of the arena; raises the error of an earlier call."""
        self._order.end()
        if self._late is not None:
            self._raise_late()

    def _compare(self, launch: Callable[[], object]) -> None:
        self.num_calls += 1
        compare_calls(self.device, self._begin, self._low_latency.take_fault, launch)

    def _raise_late(self) -> None:
        if self._late is not None:
            late, self._late = self._late, None
            raise late

    def _raise_failed(self) -> NoReturn:
        """Raises the fault because of which the kernel has sent nothing."""
        fault = self._low_latency.take_fault()
        if fault is None:
            fault = TransportError("dispatch: counts", self.grid.rank, None, "the kernel did not report in its time")
        raise fault
