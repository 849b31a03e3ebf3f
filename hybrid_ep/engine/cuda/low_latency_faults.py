"""What low-latency kernels of the cuda engine have found wrong, as errors.

The host never waits for the device. A fault is therefore raised by the first call or hook that sees its record.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Iterable

import torch

from hybrid_ep import _cuda
from hybrid_ep.agree.blame import Blame, blamed
from hybrid_ep.agree.board import Board
from hybrid_ep.agree.fields import FIELDS, disagreement
from hybrid_ep.agree.losses import Losses
from hybrid_ep.agree.refusals import Refusals
from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.core.streams import is_capturing
from hybrid_ep.engine.cuda.faults import as_error
from hybrid_ep.engine.cuda.low_latency_region import Region, RegionsInUse
from hybrid_ep.errors import HybridEPError, OverflowError, TimeoutError, TransportError

__all__ = ["LowLatencyFaults", "is_loss"]


class LowLatencyFaults(abc.ABC):
    """The faults of the low-latency calls of one buffer. `LowLatencyMasks` has the masks, `CudaLowLatency` the calls.

    Attributes:
        masked: ranks that calls leave out.
        only_masks_lost: a rank that a kernel gives up stays masked on the device. Otherwise the host, which gets one
            report at a time, takes masks back, so that the next call reports another.
        takes_masks: whether ranks may be masked; set before the first call, equal at all ranks.
        lost: ranks that errors have named.

    Args:
        grid: geometry of the ranks.
        device: this rank's GPU.
        communicator: holds the fault record and the timeout.
        losses: the log through which ranks agree on lost ranks.
        board: notes of these calls; None without a group.
        error_of: returns the error for a fault of any other call.
        timeout_s: deadline of a receiving kernel. A send gives up after half of it. The survivor then also waits for
            the other half, so that a peer which has waited for as long can write its note. None: it does not.
    """

    grace_s = 1.0  # by how much later than this rank another one may give up the same call

    def __init__(
        self,
        grid: RankGrid,
        device: torch.device,
        communicator: _cuda.Communicator,
        losses: Losses,
        board: Board | None,
        error_of: Callable[[_cuda.Fault], HybridEPError],
        timeout_s: float | None,
    ) -> None:
        self._grid, self._device, self._communicator, self._losses = grid, device, communicator, losses
        self._index: int = device.index
        self._board, self._other_error_of, self._timeout_s = board, error_of, timeout_s
        self._numbering = grid  # faults of these calls number ranks by this grid
        self._refusals = Refusals(None if board is None else board.at("refusals"), grid.rank)
        self.masked: set[int] = set()
        self.lost: set[int] = set()
        self.takes_masks = self.only_masks_lost = False
        self._overflow: OverflowError | None = None  # a dispatch at this rank has dropped rows; to be raised
        self._fault: _cuda.Fault | None = None  # taken from the record, not raised yet
        self._held: HybridEPError | None = None  # the error of a fault that was taken; raised next
        self.has_found_loss = False  # since the last barrier
        self._blame = self._new_blame()
        self._regions: list[Region] = []  # the last is in use; graphs have the addresses of those before

    @classmethod
    def lag_s(cls, timeout_s: float) -> float:
        """By how much later than this rank another one may find the loss of a rank.

        Rows of the lost rank may have reached the other one. It then makes one more call, and waits there as long as
        this rank has. It cannot be two calls ahead, because the second needs rows of this rank.
        """
        return timeout_s + cls.grace_s

    @abc.abstractmethod
    def set_masked(self, ranks: Iterable[int], masked: bool) -> None:
        """Masks ranks, or takes them back."""

    @abc.abstractmethod
    def note_told(self) -> set[int]:
        """Masks the ranks that the device has reported as masked, and returns all that are masked."""

    @abc.abstractmethod
    def upload_masks(self) -> None:
        """Makes the kernels leave out the ranks that the host has masked."""

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
