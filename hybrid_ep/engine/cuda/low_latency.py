"""Low-latency dispatch and combine of the cuda engine; docs/low_latency.md describes them.

With a hook each call is two launches: one sends, and `finish` receives. Without a hook it is one. The host never waits
for the device, so all can be captured in a CUDA graph. A fault that a kernel finds (a rank that does not come, an
expert that does not exist) is therefore raised later, by the first `finish` that sees it. Until then kernels leave
a lost rank out by themselves. A call whose `finish` raises has been launched nevertheless.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from hybrid_ep import _cuda
from hybrid_ep.agree.board import Board
from hybrid_ep.agree.losses import Losses
from hybrid_ep.agree.roll_call import RollCall
from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.core.streams import is_capturing
from hybrid_ep.engine.calls import (
    LowLatencyCombineRequest,
    LowLatencyDispatched,
    LowLatencyDispatchRequest,
    LowLatencyHandle,
    RepeatedLowLatencyCombine,
    RepeatedLowLatencyDispatch,
    state_of,
)
from hybrid_ep.engine.cuda.compare import compare_calls, compare_first_calls, refuse_first_call
from hybrid_ep.engine.cuda.faults import low_latency_counter
from hybrid_ep.engine.cuda.low_latency_empty import launch_refused_combine, launch_without_tokens
from hybrid_ep.engine.cuda.low_latency_masks import LowLatencyMasks
from hybrid_ep.engine.cuda.low_latency_region import Buffers, Region, set_last_call
from hybrid_ep.engine.cuda.plan import LowLatencyPlan, plan_low_latency
from hybrid_ep.engine.cuda.route import aligned, route_memory
from hybrid_ep.engine.cuda.symmetric import SymmetricMemory
from hybrid_ep.errors import ClosedError, ConfigError, HybridEPError, TransportError
from hybrid_ep.quantize import RowFormat

__all__ = ["CudaLowLatency"]

_DEFAULT_STREAM = 0  # CUDA does not capture it
_CALL_BITS = 28  # of the numbers of calls between two cleanings
_MAX_GENERATIONS = 1 << 32 - _CALL_BITS


class CudaLowLatency(LowLatencyMasks):
    """The low-latency calls over one region of symmetric memory, which is made by the first call and grows.

    Args:
        roll_call: rendezvous of the domain's ranks.
        grid, device, communicator, order, losses, board, error_of, timeout_s: as in `LowLatencyMasks`.
        number: number of the buffer on its group.
        everyone: rendezvous of the ranks of all domains; None: there is one domain.
    """

    def __init__(
        self,
        roll_call: RollCall,
        grid: RankGrid,
        device: torch.device,
        communicator: _cuda.Communicator,
        order: _cuda.LaunchOrder,
        losses: Losses,
        *,
        number: int,
        board: Board | None,
        error_of: Callable[[_cuda.Fault], HybridEPError],
        timeout_s: float | None,
        everyone: RollCall | None = None,
    ) -> None:
        super().__init__(grid, device, communicator, order, losses, board, error_of, timeout_s)
        self._roll_call = roll_call
        self._everyone = roll_call if everyone is None else everyone
        self._results = route_memory(device)  # what dispatches return beside their rows
        self._repeated = _cuda.RepeatedLowLatencyCalls(communicator, order)
        self._num_cleanings = 0
        self._number, self._num_regions = number, 0  # that have been made
        self._count_calls_anew()
        self._last_plan: LowLatencyPlan | None = None  # which the region in use covers

    def dispatch(self, request: LowLatencyDispatchRequest) -> LowLatencyDispatched:
        try:
            plan = self._plan_for(request)
            if plan is not self._last_plan:
                self._look_for_loss()
                self._check_growth(plan)
        except ConfigError as error:
            self.refuse("low_latency_dispatch", error)
            raise
        if plan is not self._last_plan:
            self._provide_region(plan, request)
        tensors = request.data, request.topk_idx, request.global_scale, request.wait_stats
        return self.dispatch_in_steps(plan, request.return_recv_hook, *tensors)

    # Calls that repeat an earlier one are one call of C++ (csrc/bindings/cuda/low_latency_calls.cpp). This path opens
    # when a call has ended without a fault. A look for faults, masks that the device has not yet, and a change of the
    # calls' memory close it. While it is closed, where a kernel has reported a fault, and where the call is captured,
    # calls take the steps of `dispatch` and `combine`.

    def repeat_of(self, request: LowLatencyDispatchRequest) -> RepeatedLowLatencyDispatch:
        """As `Engine.repeat_of_low_latency`. No tensors are kept."""
        plan, scales = self._plan_for(request), None
        packed = plan.packed
        rows = _cuda.NewTensor(packed.rows, packed.row_strides, packed.row_type, self._device)
        if packed.scales is not None:
            scales = _cuda.NewTensor(packed.scales, packed.scale_strides, packed.scale_type, self._device)
        return _cuda.RepeatedLowLatencyDispatch(
            self._repeated,
            self,
            request.return_recv_hook,
            plan,
            request.topk_idx.shape[0],
            rows,
            scales,
            self._results,
            LowLatencyHandle,
            self._grid,
        ).call

    def repeat_of_combine(self, request: LowLatencyCombineRequest) -> RepeatedLowLatencyCombine:
        """As `Engine.repeat_of_low_latency_combine`. No tensors are kept."""
        out, (num_tokens, num_topk) = request.out, request.topk_idx.shape
        return _cuda.RepeatedLowLatencyCombine(
            self._repeated,
            self,
            request.return_recv_hook,
            num_tokens,
            num_topk,
            _cuda.NewTensor(out.shape, (out.shape[1], 1), out.dtype, out.device),
            request.use_logfmt,
            request.min_tokens_to_sum,
        ).call

    def dispatch_in_steps(
        self,
        plan: LowLatencyPlan,
        return_recv_hook: bool,
        data: Tensor,
        topk_idx: Tensor,
        global_scale: Tensor | None,
        wait_stats: Tensor | None,
    ) -> LowLatencyDispatched:
        """Dispatches with a plan that the region covers, as it does from the plan's first call on."""
        if self.takes_masks:
            self._look_for_loss()
        region, native, buffers, num_tokens = self._regions[-1].native, plan.native, self._dispatches, topk_idx.shape[0]
        data, rows = aligned(data), plan.packed.empty(self._device)
        idx = buffers.next("low_latency_dispatch")
        stream = self._begin()
        is_captured = stream != _DEFAULT_STREAM and region.is_capturing(stream)
        chunk, results = self._results.take(plan.num_ints, stream, alone=is_captured)
        state = _cuda.LowLatencyState(plan, num_tokens, chunk, results, stream)
        handle = LowLatencyHandle(state, *plan.sizes, self._grid, chunk.memory, state)
        counts = native.counts(chunk.memory, results, self._index)
        sent = native, idx, data, topk_idx, num_tokens, global_scale, self._counter
        # The combine reports an overflow to all ranks, which would wait for this rank's. So it is held.
        if not return_recv_hook:
            region.dispatch_tokens(*sent, *rows, wait_stats, results, stream)
            buffers.note_done()
            state.is_received = True
            return LowLatencyDispatched(rows, counts, handle, self.end_call(holds_overflow=True))
        region.send_tokens(*sent, results, stream)
        buffers.note_sent()
        receive = functools.partial(region.receive_tokens, native, idx, *rows, wait_stats, results)
        finish = functools.partial(self.receive_in_steps, receive, buffers, idx, state, True)
        return LowLatencyDispatched(rows, counts, handle, finish)

    def receive_in_steps(
        self,
        receive: Callable[[int], None],
        buffers: Buffers,
        idx: int,
        state: _cuda.LowLatencyState,
        holds_overflow: bool,
    ) -> None:
        """Receives what a call has sent, on the current stream.

        Args:
            receive: launches on a stream; holds the tensors that the launch uses.
            buffers, idx: the buffer that was sent into.
            state: of the dispatch.
            holds_overflow: as in `end_call`.
        """
        stream = self._begin()
        state.chunk.note_use(stream)
        receive(stream)
        buffers.note_received(idx)
        state.is_received = True
        raise_fault = self.end_call(holds_overflow=holds_overflow)
        if raise_fault is not None:
            raise_fault()

    def combine(self, request: LowLatencyCombineRequest, handle: LowLatencyHandle) -> Callable[[], None] | None:
        if self.takes_masks:
            self._look_for_loss()
        data, topk_idx, topk_weights, out, use_logfmt, wait_stats, signals, return_recv_hook = request
        try:
            state = state_of(handle, _cuda.LowLatencyState)
            self._check_combine(request, state)
        except ConfigError as error:
            self.refuse("low_latency_combine", error)
            raise
        region, native, num_tokens = self._regions[-1].native, state.plan.native, state.num_tokens
        buffers, results = self._combines, state.results
        idx = buffers.next("low_latency_combine")
        weights, target = topk_weights, out
        if (data.data_ptr() | weights.data_ptr() | target.data_ptr()) % _cuda.row_align_bytes:
            weights, target = aligned(weights), aligned(target)
            if signals is None:
                data = aligned(data)
        stream = self._begin()
        state.chunk.note_use(stream)
        summed = topk_idx, weights, target, num_tokens, use_logfmt
        if signals is None and not return_recv_hook:
            region.combine_rows(native, idx, data, results, *summed, request.min_tokens_to_sum, wait_stats, stream)
            buffers.note_done()
            if target is not out:
                out.copy_(target)
            return self.end_call()

        rows = native, idx, data, results, weights, num_tokens, use_logfmt
        if signals is None:
            region.return_rows(*rows, request.min_tokens_to_sum, wait_stats, stream)
        else:
            region.return_signalled_rows(*rows, *signals, stream)
        buffers.note_sent()

        def receive(at: int) -> None:
            region.sum_rows(native, idx, results, *summed, wait_stats, at)
            if target is not out:
                out.copy_(target)

        return functools.partial(self.receive_in_steps, receive, buffers, idx, state, False)

    def end_call(self, *, holds_overflow: bool = False) -> Callable[[], None] | None:
        """Ends a call after its last launch. Returns what raises its error; None: there is none.

        Args:
            holds_overflow: an overflow at this rank is not raised now, but by the combine.
        """
        self._order.end()
        if self._fault is None:
            self._fault = self._communicator.take_fault()
        if self.is_quiet:
            if not (self._has_stale_masks or self._repeated.is_open):
                self._repeated.open(self._regions[-1].native, self._dispatches, self._combines, self._counter)
            return None
        return functools.partial(self.raise_fault, holds_overflow=holds_overflow)

    def refuse(self, call: str, error: ConfigError) -> None:
        """Makes a call without rows, because of which every rank raises an error of this rank.

        Args:
            call: low_latency_dispatch or low_latency_combine.
            error: of the call's arguments.

        Raises:
            ConfigError: the error that every rank raises.
        """
        self._look_for_loss()
        is_combine = call == "low_latency_combine"
        buffers = self._combines if is_combine else self._dispatches
        # Without a free buffer, or before the first dispatch, no other rank can make this call. So none waits.
        is_too_early = not self._regions and (is_combine or self.masked)
        if self._grid.num_ranks == 1 or buffers.are_in_flight or is_too_early:
            return
        number, told = self._refusals.tell(error)
        if not self._regions:
            refuse_first_call(self._everyone, told)
            raise told from error
        region, idx = self._regions[-1].native, buffers.next(call)
        plan = _cuda.LowLatencyPlan.refused(num_ranks=self._grid.num_ranks, number=number)
        launch = launch_refused_combine if is_combine else launch_without_tokens
        launch(region, plan, idx, self._device, self._begin())
        buffers.note_sent()
        buffers.note_received(idx)
        self._order.end()
        raise told from error

    def has_made(self, handle: LowLatencyHandle) -> bool:
        """Whether a dispatch of this class has returned the handle."""
        return isinstance(handle.state, _cuda.LowLatencyState)

    def reset(self, number: int) -> None:
        """Forgets all calls, so that ranks which have made different ones can begin together; no call is running.

        Args:
            number: ≥ 1; of the barrier that the ranks come from, equal at all of them.
        """
        self.refusal = None
        self._losses.begin(number)
        self._num_cleanings = 0
        self._forget_calls()

    def clean(self) -> None:
        """Forgets all calls and masks, without a barrier; no call of this rank is running.

        A late rank may still write here. The calls to come begin at another multiple of 2²⁸ after each cleaning, so
        what it writes has lower numbers than theirs.

        Raises:
            ConfigError: what a kernel has found wrong, but the loss of a rank; the calls are forgotten nevertheless.
        """
        self.refusal = None
        self._losses.clean()
        if isinstance(self._held, TransportError):
            self._held = None
        error = self.take_fault(range(self._grid.num_ranks))
        self._unmask(range(self._grid.num_ranks))
        self._num_cleanings += 1
        self._forget_calls()
        torch.cuda.synchronize(self._device)
        if error is not None:
            raise error

    def _take_fault(self) -> _cuda.Fault | None:
        self._repeated.close()
        return super()._take_fault()

    def leave_out(self, peer: int, set_masked: Callable[[Iterable[int], bool], None]) -> None:
        super().leave_out(peer, set_masked)
        if self.refusal is not None:
            self._repeated.close()

    def upload_masks(self) -> None:
        super().upload_masks()
        if self._has_stale_masks:
            self._repeated.close()

    def _forget_calls(self) -> None:
        self._count_calls_anew()
        self.lately_masked = set(self.masked)
        self.has_found_loss = False
        self._blame = self._new_blame()
        for region in self._regions:
            region.memory.local[: region.capacity.epochs_bytes].zero_()
            if self._last_call:
                set_last_call(region.memory.local, self._last_call)
        self.upload_masks()

    @property
    def _last_call(self) -> int:
        """The number before that of the first call since the ranks have met, or were cleaned."""
        return self._num_cleanings % _MAX_GENERATIONS << _CALL_BITS

    def rows_memory(self) -> Tensor:
        """``[n]`` uint8, this rank's slots of rows; empty before the first call."""
        if not self._regions:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        region = self._regions[-1]
        return region.memory.local[region.capacity.epochs_bytes :]

    def close(self) -> None:
        """Lets go of the engine, whose memory is thereby freed at once; a hook called later raises ClosedError."""
        self.refusal = ClosedError("the hook of a low-latency call was called after its buffer was closed")
        self._repeated.close()
        self._regions.clear()
        self._last_plan = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all regions that are held."""
        return sum(region.memory.local.nbytes for region in self._regions)

    def _begin(self) -> int:
        """Uploads masks that a capture could not upload, and returns the stream of the next launch."""
        if self.refusal is not None:
            raise type(self.refusal)(*self.refusal.args)
        if self._has_stale_masks:
            self.upload_masks()
        return self._order.begin(is_low_latency=True)

    def _check_combine(self, request: LowLatencyCombineRequest, state: _cuda.LowLatencyState) -> None:
        """Raises ConfigError where a combine does not fit the dispatch of its handle, or this buffer."""
        plan, shape = state.plan, request.topk_idx.shape
        if shape != (state.num_tokens, plan.num_topk):
            allowed = f"{[state.num_tokens, plan.num_topk]}, as dispatched"
            raise ConfigError(f"topk_idx.shape is {list(shape)}; allowed: {allowed}")
        if not state.is_received:
            raise ConfigError("handle is of a dispatch whose hook has not been called; allowed: calling it first")
        if plan is not self._last_plan and not self._covers(plan):
            num_bytes = plan.native.capacity.region_bytes
            raise ConfigError(
                f"handle is of a dispatch that needs {num_bytes} bytes of low-latency memory, more than this buffer "
                "has; allowed: one that a dispatch of this buffer returned"
            )
        if request.signals is not None:
            # A copy would be made before the experts have written.
            offset, unit = request.data.data_ptr() % _cuda.row_align_bytes, _cuda.row_align_bytes
            if offset:
                raise ConfigError(
                    f"x.data_ptr() is {offset} bytes after a multiple of {unit}; allowed with overlap: a multiple"
                )

    def _check_growth(self, plan: LowLatencyPlan) -> None:
        """Raises ConfigError if a dispatch needs more memory while it cannot be made."""
        if self._covers(plan):
            return
        num_bytes = self._capacity_for(plan).region_bytes
        asked = f"a call needs {num_bytes} bytes of low-latency memory, more than there are"
        if is_capturing(self._index):
            raise ConfigError(f"{asked}; allowed in a capture: sizes that were called with before it")
        if self.masked or any(self._dispatches.in_flight + self._combines.in_flight):
            raise ConfigError(
                f"{asked}, while ranks {sorted(self.masked)} are masked or a hook has not been called; allowed: the "
                "first call of a size with all ranks and no other call on its way"
            )

    def _capacity_for(self, plan: LowLatencyPlan) -> _cuda.LowLatencyCapacity:
        """Returns the capacity of a region for a plan. It also covers the sizes of all earlier calls."""
        capacity = plan.native.capacity
        return capacity.united_with(self._regions[-1].capacity) if self._regions else capacity

    def _covers(self, plan: LowLatencyPlan) -> bool:
        return bool(self._regions) and self._regions[-1].native.covers(plan.native)

    def _provide_region(self, plan: LowLatencyPlan, request: LowLatencyDispatchRequest) -> None:
        """Makes the region of a dispatch, or makes it larger, where it must be: collective then."""
        if not self._covers(plan):
            self._allocate(plan, request)
        self._last_plan = plan

    def _allocate(self, plan: LowLatencyPlan, request: LowLatencyDispatchRequest) -> None:
        if self._regions:
            self._compare(plan, request)
        else:
            compare_first_calls(self._everyone, self._grid.rank, request)
        # A peer may still be writing to the old region. Making the new one begins with a rendezvous of the ranks.
        torch.cuda.synchronize(self._device)
        region = self._make_region(self._capacity_for(plan))
        self._repeated.close()
        if self._regions and not self._regions[-1].native.was_captured:
            self._drop_region()
        self._regions.append(region)
        self._num_regions += 1
        self._count_calls_anew()

    def _count_calls_anew(self) -> None:
        self._repeated.close()
        self._dispatches, self._combines = Buffers(), Buffers()
        self._counter = low_latency_counter(self._number, self._num_regions, self._losses.period)

    def _compare(self, plan: LowLatencyPlan, request: LowLatencyDispatchRequest) -> None:
        """Compares the sizes of the ranks by a dispatch without tokens: see compare.py."""
        region, buffers = self._regions[-1].native, self._dispatches
        idx = buffers.next("low_latency_dispatch")
        earlier: list[HybridEPError | None] = []

        def launch() -> None:
            launch_without_tokens(
                region,
                plan.native.compared(),
                idx,
                self._device,
                self._begin(),
                counter=self._counter,
                global_scale=request.global_scale,
            )
            buffers.note_sent()
            buffers.note_received(idx)
            self._order.end()

        try:
            compare_calls(self._device, lambda: earlier.append(self.take_fault()), self.take_fault, launch)
        finally:
            self._held = next(filter(None, earlier), None)

    def _make_region(self, capacity: _cuda.LowLatencyCapacity) -> Region:
        memory = SymmetricMemory.allocate(capacity.region_bytes, self._roll_call, self._device)
        native = _cuda.LowLatencyRegion(
            communicator=self._communicator,
            memory=memory.addresses,
            capacity=capacity,
            takes_masks=self.takes_masks,
        )
        return Region(memory, capacity, native, self._grid.num_ranks, self._num_regions + 1)

    def _drop_region(self) -> None:
        """Frees the last region, which no rank uses any more."""
        self._regions.pop()

    def _plan_for(self, request: LowLatencyDispatchRequest) -> LowLatencyPlan:
        data, topk_idx, num_max_tokens_per_rank, num_experts, fmt, *_ = request
        return self._plan_of(num_experts, topk_idx.shape[1], data.shape[1], num_max_tokens_per_rank, fmt)

    def _plan_of(
        self, num_experts: int, num_topk: int, hidden: int, max_tokens: int, fmt: RowFormat | None
    ) -> LowLatencyPlan:
        return plan_low_latency(self._grid.num_ranks, num_experts, num_topk, hidden, max_tokens, fmt)
