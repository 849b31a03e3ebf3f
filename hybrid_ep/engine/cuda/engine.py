"""The cuda engine: hand-written kernels for the GPUs of one NVLink domain.

A call is one launch on the current stream, which one call of C++ makes (`_cuda.Domain`, csrc/calls/domain.h). What all
ranks do together beside kernels is in Python: growth of memory (arena.py), comparison of calls (compare.py), faults.
Copies of experts are in experts.py, low-latency calls in low_latency.py. docs/internals/cuda_engine.md describes the
kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep import _cuda
from hybrid_ep.agree.losses import Losses
from hybrid_ep.agree.roll_call import RollCall
from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.engine.base import one_at_a_time
from hybrid_ep.engine.calls import (
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
    PermuteHandle,
    Rows,
    along_handle,
    state_of,
)
from hybrid_ep.engine.cuda.base import BaseCudaEngine
from hybrid_ep.engine.cuda.compare import compare_calls
from hybrid_ep.engine.cuda.experts import ExpertCopier
from hybrid_ep.engine.cuda.faults import as_error
from hybrid_ep.engine.cuda.low_latency import CudaLowLatency
from hybrid_ep.engine.cuda.route import PermuteState
from hybrid_ep.errors import ConfigError


class CudaEngine(BaseCudaEngine):
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

    _low_latency: CudaLowLatency

    def __init__(self, group: dist.ProcessGroup | None, grid: RankGrid, timeout_s: float, number: int = 0) -> None:
        if grid.num_domains > 1 or grid.num_ranks > _cuda.max_ranks:
            raise ConfigError(
                f"grid is {grid.num_domains} domains of {grid.num_ranks_per_domain} ranks; allowed with the cuda "
                f"engine: one domain of at most {_cuda.max_ranks}"
            )
        roll_call = RollCall(group, grid.rank, timeout_s, number)
        super().__init__(
            group,
            grid,
            timeout_s,
            number,
            domain=roll_call,
            control_bytes=_cuda.control_bytes,
            lag_s=CudaLowLatency.lag_s(timeout_s),
        )
        self.transport = "none" if grid.num_ranks == 1 else "NVLink"
        self._experts = ExpertCopier(roll_call, self.device, self._communicator, self._arena)
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
        self._low_latency = CudaLowLatency(
            roll_call,
            grid,
            self.device,
            self._communicator,
            self._order,
            Losses(self._board, grid.rank),
            number=number,
            board=None if self._board is None else self._board.at("low latency"),
            # No method of this object: a buffer that is dropped must give its memory back at once.
            error_of=functools.partial(as_error, grid=grid, refusals=self._refusals),
            timeout_s=timeout_s,
        )
        self._low_latency.lost = self.lost

    @property
    def is_quiet(self) -> bool:
        """Whether no fault of an earlier call is still to be raised."""
        return self._late is None and self._low_latency.is_quiet

    @property
    def memory_bytes(self) -> int:
        return super().memory_bytes + self._experts.num_bytes

    @one_at_a_time
    def dispatch(self, request: DispatchRequest) -> Dispatched:
        routing = request.routing
        if routing is None:
            assert request.along is not None
            return along_handle(Rows(*self._domain.dispatch_along(request)), request.along)
        data, scales, topk_idx, weights, counts, rank_prefix, route, by_expert = self._domain.dispatch(request)
        num_tokens, num_topk = routing.topk_idx.shape
        num_recv, num_experts = route.num_recv, routing.num_experts
        handle = DispatchHandle(rank_prefix, num_tokens, num_recv, num_experts, num_topk, self.grid, route)
        permute = None
        if by_expert is not None:
            overflow, chunk, kept = by_expert
            if not isinstance(counts, Tensor):
                counts = torch.tensor(counts, dtype=torch.int64, device="cpu")
            state = PermuteState(chunk, kept, self._communicator)
            permute = PermuteHandle(handle, counts, data.shape[0], request.pad_multiple, state, overflow)
        return Dispatched(Rows(data, scales), topk_idx, weights, counts, handle, permute)

    @one_at_a_time
    def combine(self, request: CombineRequest, handle: DispatchHandle | PermuteHandle) -> Combined:
        return Combined(*self._domain.combine(request, handle))

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
    def default_copy_sms(self) -> int:
        num_sms: int = self._communicator.default_copy_sms
        return num_sms

    def common_bound_of(self, handle: DispatchHandle) -> int:
        return state_of(handle, _cuda.Route).max_recv

    @one_at_a_time
    def low_latency_dispatch(self, request: LowLatencyDispatchRequest) -> LowLatencyDispatched:
        return self._low_latency.dispatch(request)

    @one_at_a_time
    def low_latency_combine(
        self, request: LowLatencyCombineRequest, handle: LowLatencyHandle
    ) -> Callable[[], None] | None:
        return self._low_latency.combine(request, handle)

    def _refuse_low_latency(self, call: str, error: ConfigError) -> None:
        self._low_latency.refuse(call, error)

    def _launch_refusal(self, call: str, number: int) -> None:
        if call in ("combine", "copy of experts"):  # which share their words
            self._domain.refuse_combine(number)
        else:
            self._domain.refuse_dispatch(number)

    def leave_out(self, peer: int) -> None:
        self._low_latency.leave_out(peer, self.set_masked)

    def _compare(self, launch: Callable[[], object]) -> None:
        self.num_calls += 1
        compare_calls(self.device, self._begin, self._take_fault, launch)
