"""Which ranks the low-latency calls of the cuda engine leave out: as the host knows them, and on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from hybrid_ep import _cuda
from hybrid_ep.agree.board import Board
from hybrid_ep.agree.losses import Losses
from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.core.streams import is_capturing
from hybrid_ep.engine.cuda.low_latency_faults import LowLatencyFaults, is_loss
from hybrid_ep.errors import HybridEPError, TransportError

__all__ = ["LowLatencyMasks"]


class LowLatencyMasks(LowLatencyFaults):
    """The masks of the low-latency calls of one buffer.

    Attributes:
        lately_masked: ranks that have been masked at any time since the last barrier.
        refusal: the error of every further call and hook; None: they are allowed.

    Args:
        grid, device, communicator, losses, board, error_of, timeout_s: as in `LowLatencyFaults`.
        order: orders the engine's launches.
    """

    def __init__(
        self,
        grid: RankGrid,
        device: torch.device,
        communicator: _cuda.Communicator,
        order: _cuda.LaunchOrder,
        losses: Losses,
        board: Board | None,
        error_of: Callable[[_cuda.Fault], HybridEPError],
        timeout_s: float | None,
    ) -> None:
        super().__init__(grid, device, communicator, losses, board, error_of, timeout_s)
        self._order = order
        self.refusal: HybridEPError | None = None
        self.lately_masked: set[int] = set()
        self._has_stale_masks = False
        # The device's answer to the last `masks`: for each masked rank the round in which it was asked, otherwise 0. A
        # round begins whenever ranks are unmasked. The device holds its number, for replays of graphs.
        self._told = torch.zeros(grid.num_ranks, dtype=torch.int32, pin_memory=device.type == "cuda", device="cpu")
        self._round, self._unmasked_in = 1, [1] * grid.num_ranks
        self._round_there = torch.ones(1, dtype=torch.int32, device=device)

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
