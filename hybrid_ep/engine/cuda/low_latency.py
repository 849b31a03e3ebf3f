"""Low-latency dispatch and combine of the cuda engine; docs/low_latency.md describes them.

Each call is one call of C++ (csrc/calls/low_latency.cpp), which plans, launches and makes the results.
With a hook it is two launches: one sends, and `finish` receives. Without a hook it is one. The host never waits for the
device, so all can be captured in a CUDA graph. A fault that a kernel finds (a rank that does not come, an expert that
does not exist) is therefore raised later, by the first `finish` that sees it. Until then kernels leave a lost rank out
by themselves. A call whose `finish` raises has been launched nevertheless.

Ranks are masked as the host knows them, and on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor

from hybrid_ep import _cuda
from hybrid_ep.agree.blame import Blame, blamed
from hybrid_ep.agree.board import Board
from hybrid_ep.agree.fields import FIELDS, disagreement, format_code
from hybrid_ep.agree.losses import Losses
from hybrid_ep.agree.refusals import Refusals
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
from hybrid_ep.engine.cuda.faults import as_error, low_latency_counter
from hybrid_ep.engine.cuda.low_latency_region import Region, RegionsInUse, set_last_call
from hybrid_ep.engine.cuda.route import route_memory
from hybrid_ep.engine.cuda.symmetric import SymmetricMemory
from hybrid_ep.errors import ClosedError, ConfigError, HybridEPError, OverflowError, TimeoutError, TransportError

_CALL_BITS = 28  # of the numbers of calls between two cleanings
_MAX_GENERATIONS = 1 << 32 - _CALL_BITS


class CudaLowLatency:
    """The low-latency calls over one region of symmetric memory, which is made by the first call and grows.

    Attributes:
        masked: ranks that calls leave out.
        lately_masked: ranks that have been masked at any time since the last barrier.
        only_masks_lost: a rank that a kernel gives up stays masked on the device. Otherwise the host, which gets one
            report at a time, takes masks back, so that the next call reports another.
        takes_masks: whether ranks may be masked; set before the first call, equal at all ranks.
        lost: ranks that errors have named.
        has_found_loss: whether a rank has been lost since the last barrier.
        refusal: the error of every further call and hook; None: they are allowed.

    Args:
        roll_call: rendezvous of the domain's ranks.
        grid: geometry of the ranks.
        device: this rank's GPU.
        communicator: holds the fault record and the timeout.
        order: orders the engine's launches.
        losses: the log through which ranks agree on lost ranks.
        number: number of the buffer on its group.
        board: notes of these calls; None without a group.
        error_of: returns the error for a fault of any other call.
        timeout_s: deadline of a receiving kernel. A send gives up after half of it. The survivor then also waits for
            the other half, so that a peer which has waited for as long can write its note. None: it does not.
        everyone: rendezvous of the ranks of all domains; None: there is one domain.
    """

    grace_s = 1.0  # by how much later than this rank another one may give up the same call

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
        self._grid, self._device, self._communicator, self._order = grid, device, communicator, order
        self._index: int = device.index
        self._roll_call = roll_call
        self._everyone = roll_call if everyone is None else everyone
        self._calls = _cuda.LowLatencyCalls(
            communicator=communicator,
            order=order,
            results=route_memory(device),  # what dispatches return beside their rows
            num_ranks=grid.num_ranks,
            device=device,
        )
        self._regions: list[Region] = []  # the last is in use; graphs have the addresses of those before
        self._number, self._num_regions = number, 0  # that have been made
        self._num_cleanings = 0
        self.refusal: HybridEPError | None = None
        # Faults.
        self._losses, self._board, self._other_error_of, self._timeout_s = losses, board, error_of, timeout_s
        self._numbering = grid  # faults of these calls number ranks by this grid
        self._refusals = Refusals(None if board is None else board.at("refusals"), grid.rank)
        self.lost: set[int] = set()
        self._overflow: OverflowError | None = None  # a dispatch at this rank has dropped rows; to be raised
        self._fault: _cuda.Fault | None = None  # taken from the record, not raised yet
        self._held: HybridEPError | None = None  # the error of a fault that was taken; raised next
        self.has_found_loss = False
        self._blame = self._new_blame()
        # Masks.
        self.takes_masks = self.only_masks_lost = False
        self.masked: set[int] = set()
        self.lately_masked: set[int] = set()
        self._has_stale_masks = False
        # The device's answer to the last `masks`: for each masked rank the round in which it was asked, otherwise 0. A
        # round begins whenever ranks are unmasked. The device holds its number, for replays of graphs.
        self._told = torch.zeros(grid.num_ranks, dtype=torch.int32, pin_memory=device.type == "cuda", device="cpu")
        self._round, self._unmasked_in = 1, [1] * grid.num_ranks
        self._round_there = torch.ones(1, dtype=torch.int32, device=device)

    @classmethod
    def lag_s(cls, timeout_s: float) -> float:
        """By how much later than this rank another one may find the loss of a rank.

        Rows of the lost rank may have reached the other one. It then makes one more call, and waits there as long as
        this rank has. It cannot be two calls ahead, because the second needs rows of this rank.
        """
        return timeout_s + cls.grace_s

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

    def drain(self) -> None:
        """Waits until nothing of this rank's calls is on its way to another domain."""

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

    # Masks.

    def set_masked(self, ranks: Iterable[int], masked: bool) -> None:
        self.note_told()
        if masked:
            self.masked.update(ranks)
        else:
            self._unmask(ranks)
        self.lately_masked |= self.masked
        self.upload_masks()

    def leave_out(self, peer: int, set_masked: Callable[[Iterable[int], bool], None]) -> None:
        """Goes on without a lost rank, if the others do not go on without this one: see `Losses`.

        Args:
            peer: the lost rank.
            set_masked: masks ranks at the engine.
        """
        if self.refusal is not None:
            return
        set_masked([peer], True)
        if self.only_masks_lost:
            return
        refusal = self.refusal = self._losses.report(peer)
        if refusal is None:
            set_masked(self._losses.left_out, True)
        elif refusal.peer is not None:
            set_masked(range(self._grid.num_ranks), False)  # for the rendezvous after a cleaning

    @property
    def knows_loss(self) -> bool:
        """Whether a rank has been lost or masked since the last barrier, or is masked."""
        return self.has_found_loss or bool(self.lately_masked)

    def note_losses(self) -> None:
        """Masks a rank that a kernel has reported as given up, and raises any other fault.

        The host does not wait for kernels.
        """
        held, self._held = self._held, None
        if held is not None and not (isinstance(held, TransportError) and held.peer in self.masked):
            raise held
        fault = self._take_fault()
        if fault is None:
            overflow, self._overflow = self._overflow, None
            if overflow is not None:
                raise overflow
            return
        if is_loss(fault):
            self.masked.add(fault.peer)
            self.lately_masked.add(fault.peer)
            return
        self.upload_masks()
        raise self._error_of(fault)

    def masks(self) -> Tensor:
        """``[R]`` int32 on the device: ranks that the host has masked, or a kernel on the current stream.

        The host does not wait. It reads the masks of kernels at the next `note_told`.
        """
        if self._has_stale_masks:
            self.upload_masks()
        masks = self._masks_of_host()
        if not self._regions:
            return masks
        self._order.begin()
        for region in self._regions:
            masks = torch.maximum(masks, region.masks)
        self._told.copy_(masks * self._round_there, non_blocking=True)
        return masks

    def note_told(self) -> set[int]:
        """Masks the ranks that the last `masks` has reported, and returns all that are masked.

        An answer of an earlier round may come after a rank was unmasked. It does not count for this rank.
        """
        told = enumerate(self._told.tolist())
        self.masked.update(r for r, asked_in in told if asked_in >= self._unmasked_in[r])
        self.lately_masked |= self.masked
        return self.masked

    def upload_masks(self) -> None:
        """Makes the kernels leave out the ranks that the host has masked, and no others: see `only_masks_lost`.

        A capture cannot do that: the next call outside of one does.
        """
        self._has_stale_masks = is_capturing(self._index)
        if self._has_stale_masks:
            return
        masks = self._masks_of_host()
        self._order.begin()
        for region in self._regions:
            region.masks.copy_(torch.maximum(masks, region.masks) if self.only_masks_lost else masks)
        self._round_there.fill_(self._round)
        self._order.end()

    def _masks_of_host(self) -> Tensor:
        masks = [int(r in self.masked) for r in range(self._grid.num_ranks)]
        return torch.tensor(masks, dtype=torch.int32, device="cpu").to(self._device, non_blocking=True)

    def _unmask(self, ranks: Iterable[int]) -> None:
        ranks = list(ranks)
        self.masked.difference_update(ranks)
        self._round += 1
        for r in ranks:
            self._unmasked_in[r] = self._round
        if is_capturing(self._index):
            return
        self._order.begin()
        for region in self._regions:
            for r in ranks:
                region.masks[r : r + 1].zero_()
        self._order.end()

    # Faults.

    @property
    def is_quiet(self) -> bool:
        """Whether no fault has been taken that is still to be raised."""
        return self._held is None and self._fault is None and self._overflow is None

    @property
    def _is_clear(self) -> bool:
        """Whether `take_fault` has nothing to look at."""
        is_quiet = self._held is None and self._fault is None and self._overflow is None
        return is_quiet and not self._communicator.has_fault

    def take_fault(self, known: Collection[int] = ()) -> HybridEPError | None:
        """Returns the error of a fault; None for the loss of a rank that is already masked or `known` to be lost.

        Such a loss can be reported twice: by the send of a call, and by its receive, which was already waiting.
        """
        if self._is_clear:
            return None
        held, self._held = self._held, None
        if held is not None:
            return held
        fault = self._take_fault()
        if fault is None:
            overflow, self._overflow = self._overflow, None
            return overflow
        self.note_told()
        self.upload_masks()  # a kernel that gave a rank up has masked it
        if (fault.peer in self.masked or fault.peer in known) and is_loss(fault):
            return None
        error = self._error_of(fault)
        if isinstance(error, TimeoutError) and error.peer is not None:
            self.lost.add(error.peer)
            self.has_found_loss = True
        return error

    def _take_fault(self) -> _cuda.Fault | None:
        """Takes the fault record, but drops that other ranks' calls differ from one that this rank has refused."""
        fault, self._fault = self._fault or self._communicator.take_fault(), None
        if fault is not None and fault.tag == "shape" and _cuda.low_latency_call_fields(fault.expected)["refusal"]:
            return None
        return fault

    def _forget_loss(self) -> None:
        """Drops the fault record if it tells of a lost rank; anything else is raised next."""
        fault = self._take_fault()
        if fault is not None and not is_loss(fault):
            self._fault = fault

    def _error_of(self, fault: _cuda.Fault) -> HybridEPError:
        if not fault.kernel.startswith("low_latency"):
            return self._other_error_of(fault)
        error = self._error_of_call(fault)
        # Ranks that only mask do not use the store.
        if not isinstance(error, TransportError) or error.peer is None or self.only_masks_lost:
            return error
        return self._of_culprit(error, max(0.0, (self._timeout_s or 0.0) - fault.waited_s))

    def _error_of_call(self, fault: _cuda.Fault) -> HybridEPError:
        """The error for a fault of a low-latency call, before it is known which rank has caused it."""
        if fault.kind == _cuda.FaultKind.REFUSED:
            return self._refusals.read(fault.peer, fault.seen)
        if fault.tag != "shape":
            return as_error(fault, self._numbering, self._refusals)
        mine, theirs = (_cuda.low_latency_call_fields(value) for value in (fault.expected, fault.seen))
        if theirs["refusal"]:
            return self._refusals.read(fault.peer, theirs["refusal"])
        key = next(key for key in FIELDS if mine.get(key) != theirs.get(key))
        return disagreement(key, mine[key], self._grid.rank, theirs[key], fault.peer)

    def _of_culprit(self, error: TransportError, ahead_s: float) -> HybridEPError:
        """Returns the error for the rank that has caused this one: the peer may have lost another before.

        Args:
            error: names a peer.
            ahead_s: by how much longer than this rank the peer may wait.
        """
        assert error.peer is not None
        region = None if is_capturing(self._index) else self._regions_in_use.tell(self._regions, error.peer)
        self._blame.write_lost(error.peer)
        culprit = self._blame.find(error.peer, self.masked, ahead_s=ahead_s)
        if self.takes_masks and not is_capturing(self._index):
            # Kernels that were waiting may report the peer, which the next call does not lose.
            torch.cuda.synchronize(self._device)
            self._forget_loss()
        if culprit is None:
            return blamed(error, None)
        theirs = self._regions_in_use.of(culprit)
        if region is not None and theirs is not None and theirs != region:
            return disagreement("arena", region, self._grid.rank, theirs, culprit)
        if culprit != error.peer:
            self._blame.write_lost(culprit)
        return blamed(error, culprit)

    def _new_blame(self) -> Blame:
        board = self._board
        if board is not None:
            board = board.at("session {}.{}".format(*self._losses.period))
        self._regions_in_use = RegionsInUse(board, self._grid.rank)
        return Blame(board, self._grid.rank, 0.0, grace_s=self.grace_s)

    def raise_fault(self, known: Collection[int] = (), *, holds_overflow: bool = False) -> None:
        """Raises `take_fault`. With `holds_overflow` an OverflowError is kept for the next call without it."""
        error = self.take_fault(known)
        if holds_overflow and isinstance(error, OverflowError):
            self._overflow = error
        elif error is not None:
            raise error

    def raise_before_barrier(self, known: Collection[int]) -> None:
        """Raises `take_fault` once all calls have ended.

        After the loss of a rank, other losses are dropped: calls that were on their way may have given up ranks that
        only waited for the lost one. The barrier meets those, and raises if one does not come.
        """
        if self.has_found_loss and not self.only_masks_lost:
            self._forget_loss()
        self.raise_fault(known)

    def _look_for_loss(self) -> None:
        """Corrects the masks before a call is launched if an earlier one has lost a rank; `take_fault` returns it.

        Kernels may have given up ranks that only waited for the lost one. Those must not miss the rows of this call.
        """
        if self._is_clear or not self.takes_masks or self.only_masks_lost or self._held is not None:
            return
        if is_capturing(self._index):
            return
        self._held = self.take_fault()
        if isinstance(self._held, TransportError) and self._held.peer is not None:
            self.set_masked([self._held.peer], True)


def is_loss(fault: _cuda.Fault) -> bool:
    """Whether a low-latency kernel has given a rank up."""
    return fault.kind == _cuda.FaultKind.TIMEOUT and fault.kernel.startswith("low_latency")
