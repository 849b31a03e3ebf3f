"""Low-latency dispatch and combine of the cuda engine; docs/low_latency.md describes them.

Each call is one call of C++ (csrc/calls/low_latency.cpp), which plans, launches and makes the results.
With a hook it is two launches: one sends, and `finish` receives. Without a hook it is one. The host never waits for the
device, so all can be captured in a CUDA graph. A fault that a kernel finds (a rank that does not come, an expert that
does not exist) is therefore raised later, by the first `finish` that sees it. Until then kernels leave a lost rank out
by themselves. A call whose `finish` raises has been launched nevertheless.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from hybrid_ep import _cuda
from hybrid_ep.agree.board import Board
from hybrid_ep.agree.fields import format_code
from hybrid_ep.agree.losses import Losses
from hybrid_ep.agree.roll_call import RollCall
from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.core.streams import is_capturing
from hybrid_ep.engine.calls import (
    LowLatencyCombineRequest,
    LowLatencyDispatched,
    LowLatencyDispatchRequest,
    LowLatencyHandle,
    Rows,
    state_of,
)
from hybrid_ep.engine.cuda.compare import compare_calls, compare_first_calls, refuse_first_call
from hybrid_ep.engine.cuda.faults import low_latency_counter
from hybrid_ep.engine.cuda.low_latency_masks import LowLatencyMasks
from hybrid_ep.engine.cuda.low_latency_region import Region, set_last_call
from hybrid_ep.engine.cuda.route import route_memory
from hybrid_ep.engine.cuda.symmetric import SymmetricMemory
from hybrid_ep.errors import ClosedError, ConfigError, HybridEPError, TransportError

__all__ = ["CudaLowLatency"]

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
        self._calls = _cuda.LowLatencyCalls(
            communicator=communicator,
            order=order,
            results=route_memory(device),  # what dispatches return beside their rows
            num_ranks=grid.num_ranks,
            device=device,
        )
        self._num_cleanings = 0
        self._number, self._num_regions = number, 0  # that have been made

    def dispatch(self, request: LowLatencyDispatchRequest) -> LowLatencyDispatched:
        self._look_for_loss()
        self._prepare()
        fmt = format_code(request.fmt)
        try:
            made = self._calls.dispatch(request, fmt)
            if isinstance(made, _cuda.LowLatencyPlan):
                self._check_growth(made)
        except ConfigError as error:
            self.refuse("low_latency_dispatch", error)
            raise
        if isinstance(made, _cuda.LowLatencyPlan):
            self._grow(made, request)
            made = self._calls.dispatch(request, fmt)
            assert not isinstance(made, _cuda.LowLatencyPlan)
        rows, scales, counts, state, receive = made
        sizes = request.num_max_tokens_per_rank, request.data.shape[1], request.num_experts
        handle = LowLatencyHandle(state, *sizes, self._grid, state.memory, state)
        # The combine reports an overflow to all ranks, which would wait for this rank's. So it is held.
        finish = self._finish_of(receive, holds_overflow=True)
        return LowLatencyDispatched(Rows(rows, scales), counts, handle, finish)

    def combine(self, request: LowLatencyCombineRequest, handle: LowLatencyHandle) -> Callable[[], None] | None:
        self._look_for_loss()
        self._prepare()
        try:
            receive = self._calls.combine(request, state_of(handle, _cuda.LowLatencyState))
        except ConfigError as error:
            self.refuse("low_latency_combine", error)
            raise
        return self._finish_of(receive, holds_overflow=False)

    def _finish_of(self, receive: _cuda.LowLatencyReceive | None, *, holds_overflow: bool) -> Callable[[], None] | None:
        """The `finish` of a call that has been launched.

        Args:
            receive: its second half; None: all of it has been launched.
            holds_overflow: an overflow at this rank is not raised now, but by the combine.
        """
        if receive is not None:
            return functools.partial(self._receive, receive, holds_overflow)
        return None if self._is_clear else functools.partial(self.raise_fault, holds_overflow=holds_overflow)

    def _receive(self, receive: _cuda.LowLatencyReceive, holds_overflow: bool) -> None:
        self._prepare()
        receive()
        if not self._is_clear:
            self.raise_fault(holds_overflow=holds_overflow)

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
        kind = _cuda.LowLatencyKind.COMBINE if is_combine else _cuda.LowLatencyKind.DISPATCH
        # Without a free buffer, or before the first dispatch, no other rank can make this call. So none waits.
        is_too_early = not self._regions and (is_combine or self.masked)
        if self._grid.num_ranks == 1 or not self._calls.can_send(kind) or is_too_early:
            return
        number, told = self._refusals.tell(error)
        if not self._regions:
            refuse_first_call(self._everyone, told)
            raise told from error
        self._prepare()
        plan = _cuda.LowLatencyPlan.refused(num_ranks=self._grid.num_ranks, number=number)
        results = torch.zeros(plan.num_ints_between, dtype=torch.int32, device=self._device)
        if is_combine:
            idx, value = plan.refusal_of_combine
            results[idx] = value
        self._calls.launch_empty(kind, plan, results)
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
        self._calls.begin(None, 0)
        self._regions.clear()

    @property
    def num_bytes(self) -> int:
        """Bytes of all regions that are held."""
        return sum(region.memory.local.nbytes for region in self._regions)

    def _prepare(self) -> None:
        """Must be called before each launch: uploads masks that a capture could not upload."""
        if self.refusal is not None:
            raise type(self.refusal)(*self.refusal.args)
        if self._has_stale_masks:
            self.upload_masks()

    def _check_growth(self, plan: _cuda.LowLatencyPlan) -> None:
        """Raises ConfigError if a dispatch, which needs more memory, cannot be made."""
        num_bytes = self._capacity_for(plan).region_bytes
        asked = f"a call needs {num_bytes} bytes of low-latency memory, more than there are"
        if is_capturing(self._index):
            raise ConfigError(f"{asked}; allowed in a capture: sizes that were called with before it")
        if self.masked or self._calls.are_in_flight:
            raise ConfigError(
                f"{asked}, while ranks {sorted(self.masked)} are masked or a hook has not been called; allowed: the "
                "first call of a size with all ranks and no other call on its way"
            )

    def _capacity_for(self, plan: _cuda.LowLatencyPlan) -> _cuda.LowLatencyCapacity:
        """Returns the capacity of a region for a plan. It also covers the sizes of all earlier calls."""
        return plan.capacity.united_with(self._regions[-1].capacity) if self._regions else plan.capacity

    def _grow(self, plan: _cuda.LowLatencyPlan, request: LowLatencyDispatchRequest) -> None:
        """Makes the region for a plan that the last one does not cover. Collective."""
        if self._regions:
            self._compare(plan, request)
        else:
            compare_first_calls(self._everyone, self._grid.rank, request)
        # A peer may still be writing to the old region. Making the new one begins with a rendezvous of the ranks.
        torch.cuda.synchronize(self._device)
        region = self._make_region(plan)
        if self._regions and not self._regions[-1].native.was_captured:
            self._drop_region()
        self._regions.append(region)
        self._num_regions += 1
        self._count_calls_anew()

    def _count_calls_anew(self) -> None:
        region = self._regions[-1].native if self._regions else None
        counter = low_latency_counter(self._number, self._num_regions, self._losses.period)
        self._calls.begin(region, counter)

    def _compare(self, plan: _cuda.LowLatencyPlan, request: LowLatencyDispatchRequest) -> None:
        """Compares the sizes of the ranks by a dispatch without tokens: see compare.py."""
        compared = plan.compared()
        earlier: list[HybridEPError | None] = []

        def launch() -> None:
            self._prepare()
            results = torch.empty(compared.num_ints_between, dtype=torch.int32, device=self._device)
            self._calls.launch_empty(_cuda.LowLatencyKind.DISPATCH, compared, results, request.global_scale)

        try:
            compare_calls(self._device, lambda: earlier.append(self.take_fault()), self.take_fault, launch)
        finally:
            self._held = next(filter(None, earlier), None)

    def _make_region(self, plan: _cuda.LowLatencyPlan) -> Region:
        """Makes a region for a plan and for all earlier ones."""
        capacity = self._capacity_for(plan)
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
