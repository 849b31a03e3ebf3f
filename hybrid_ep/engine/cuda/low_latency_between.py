"""Low-latency calls of the cuda engine for several domains; docs/internals/low_latency.md describes them.

Every call is that of one domain, with a launch beside it that ships rows to the peers or forwards theirs. So only the
region differs: it has a link. The link joins this rank to its peer in each other domain, which forwards to the ranks
there. Where ranks may be masked, the link joins it to every rank of other domains, so that no rank depends on another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybrid_ep import _cuda
from hybrid_ep.agree.board import Board
from hybrid_ep.agree.fields import format_code
from hybrid_ep.agree.losses import Losses
from hybrid_ep.agree.roll_call import RollCall
from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.engine.calls import (
    LowLatencyDispatchRequest,
)
from hybrid_ep.engine.cuda.faults import transport_error
from hybrid_ep.engine.cuda.low_latency import CudaLowLatency
from hybrid_ep.engine.cuda.low_latency_region import Region
from hybrid_ep.engine.cuda.symmetric import SymmetricMemory
from hybrid_ep.errors import ConfigError, HybridEPError, TransportError
from hybrid_ep.transport import DomainLink, Ring

_SLOT_ALIGN_BYTES = 128
_CLOSE_TIMEOUT_S = 5.0  # for what is still on its way
_SESSION_BITS = 31  # of the number of a barrier, or of cleanings


class OpenedLink(NamedTuple):
    """A link, and the object that keeps its memory alive."""

    link: DomainLink
    keep: Any


@dataclass(frozen=True)
class _RegionWithLink(Region):
    """A region of the ranks of this domain, and the link to the peers.

    Attributes:
        opened: the link.
        chunk_bytes: of a slot of its rings: of a dispatch, and of a combine.
    """

    opened: OpenedLink
    chunk_bytes: tuple[int, int]


class LowLatencyBetween(CudaLowLatency):
    """The low-latency calls over one region and one link, which are made by the first call and grow.

    Args:
        roll_call: rendezvous of the domain's ranks.
        grid: geometry of all ranks.
        device, communicator, order, losses, number, board, error_of, everyone: as in `CudaLowLatency`.
        open_link: opens a link. It takes the rings, the grid whose domains are the groups that a peer forwards to, and
            whether a group is a single rank: then the link goes on without a lost rank. Collective over all ranks.
    """

    # Receiving kernels of a domain wait for each other for two seconds longer (csrc/runtime/low_latency_between.cpp),
    # and ranks do not begin a call at once.
    grace_s = 3.0

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
        board: Board,
        open_link: Callable[[list[Ring], RankGrid, bool], OpenedLink],
        error_of: Callable[[_cuda.Fault], HybridEPError],
        everyone: RollCall,
    ) -> None:
        # Without a timeout: survivors that search for longer would come too late to the next barrier.
        super().__init__(
            roll_call,
            grid,
            device,
            communicator,
            order,
            losses,
            number=number,
            board=board,
            error_of=error_of,
            timeout_s=None,
            everyone=everyone,
        )
        self._open_link = open_link
        self._numbering = RankGrid(grid.rank, grid.num_ranks, grid.num_ranks)

    def serves(self, request: LowLatencyDispatchRequest) -> bool:
        """Whether the kernels take calls of this size; the same at every rank."""
        grid = self._link_grid
        if grid.num_ranks > _cuda.max_ranks or grid.num_domains > _cuda.max_domains:
            return False
        try:
            plan = self._calls.plan_of(request, format_code(request.fmt))
        except ConfigError:
            return False
        return max(_chunk_bytes(plan, grid)) <= _cuda.low_latency_max_chunk_bytes

    @functools.cached_property
    def _link_grid(self) -> RankGrid:
        """All ranks. Its domains are the groups that a peer forwards to."""
        size = 1 if self.takes_masks else self._grid.num_ranks_per_domain
        return RankGrid(self._grid.rank, self._grid.num_ranks, size)

    def drain(self) -> None:
        """Waits until nothing of this rank's calls is on its way to a peer, as far as the links work.

        Raises:
            TransportError: something still is. It could be written over rows of later calls.
        """
        if not all([_link_of(region).drain(_CLOSE_TIMEOUT_S) for region in self._regions]):
            what = f"rows of earlier calls have not arrived within {_CLOSE_TIMEOUT_S:g} s"
            raise TransportError("low latency: cleaning", self._grid.rank, None, what)

    def rows_memory(self) -> Tensor:
        memory = super().rows_memory()
        return memory[: max(0, len(memory) - _cuda.low_latency_between_bytes)]

    def close(self) -> None:
        links = [_link_of(region) for region in self._regions]
        super().close()
        for link in links:
            link.close(_CLOSE_TIMEOUT_S)

    def _make_region(self, plan: _cuda.LowLatencyPlan) -> Region:
        grid, capacity = self._link_grid, self._capacity_for(plan)
        tokens_bytes, rows_bytes = _chunk_bytes(plan, grid)
        if self._regions:
            before = self._regions[-1]
            assert isinstance(before, _RegionWithLink)
            tokens_bytes, rows_bytes = map(max, zip((tokens_bytes, rows_bytes), before.chunk_bytes, strict=True))
        num_bytes = capacity.region_bytes + _cuda.low_latency_between_bytes
        memory = SymmetricMemory.allocate(num_bytes, self._roll_call, self._device)
        num_slots = _cuda.low_latency_buffers
        opened = self._open_link(
            [Ring(tokens_bytes, num_slots, 1), Ring(rows_bytes, num_slots, 1)], grid, self.takes_masks
        )
        native = _cuda.LowLatencyBetweenRegion(
            communicator=self._communicator,
            rank=self._grid.rank,
            num_domains=self._grid.num_domains,
            group_size=grid.num_ranks_per_domain,
            memory=memory.addresses,
            capacity=capacity,
            takes_masks=self.takes_masks,
            proxy=opened.link.proxy,
            kernels=opened.link.kernels,
        )
        number = self._num_regions + 1
        return _RegionWithLink(
            memory, capacity, native, self._grid.num_ranks, number, opened, (tokens_bytes, rows_bytes)
        )

    def _drop_region(self) -> None:
        # No peer uses it any more: all have met to open the link of the next.
        link = _link_of(self._regions[-1])
        super()._drop_region()
        link.close(_CLOSE_TIMEOUT_S)

    def clean(self) -> None:
        torch.cuda.synchronize(self._device)
        self.drain()
        super().clean()

    def _forget_calls(self) -> None:
        super()._forget_calls()
        num_cleanings, number = self._losses.period
        # Words of the link are never reset, so that no session may come twice. Those of cleanings are negative.
        most = 1 << _SESSION_BITS
        session = number % most if number else num_cleanings % most - most
        first_epoch = self._last_call + 1
        words = torch.tensor([session, first_epoch - (first_epoch >> 31 << 32)], dtype=torch.int32, device="cpu")
        for region in self._regions:
            control = region.memory.local[region.capacity.region_bytes :]
            control.zero_()
            offset = _cuda.low_latency_session_offset
            control[offset : offset + words.nbytes].view(torch.int32).copy_(words)

    def _error_of_call(self, fault: _cuda.Fault) -> HybridEPError:
        if fault.kind == _cuda.FaultKind.TRANSPORT:
            links = (_link_of(region) for region in self._regions)
            return transport_error(fault, links, self._grid.rank, fault.peer)
        return super()._error_of_call(fault)


def _chunk_bytes(plan: _cuda.LowLatencyPlan, grid: RankGrid) -> tuple[int, int]:
    """Slots of the rings: for chunks of a dispatch, and of a combine."""
    tokens, rows = plan.peer_chunk_bytes(grid.num_ranks_per_domain)
    return _aligned(tokens), _aligned(rows)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _SLOT_ALIGN_BYTES) * _SLOT_ALIGN_BYTES


def _link_of(region: Region) -> DomainLink:
    assert isinstance(region, _RegionWithLink)
    return region.opened.link
