"""What the engines of one domain and of several share: memory, faults of earlier calls, and the engine of torch."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep import _cuda, env
from hybrid_ep.agree.board import Board
from hybrid_ep.agree.refusals import Refusals
from hybrid_ep.agree.roll_call import RollCall
from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.core.streams import current_raw_stream, is_capturing
from hybrid_ep.engine.base import Engine, one_at_a_time
from hybrid_ep.engine.cuda.arena import Arena
from hybrid_ep.engine.cuda.low_latency import CudaLowLatency
from hybrid_ep.engine.cuda.route import route_memory
from hybrid_ep.engine.cuda.symmetric import SymmetricMemory
from hybrid_ep.engine.torch.engine import TorchEngine
from hybrid_ep.errors import ConfigError, HybridEPError, TimeoutError, TransportError


class BaseCudaEngine(Engine):
    """An engine with kernels. It has a torch engine for what has none, and for meetings of all ranks.

    The host does not wait for kernels. A fault of a call is therefore raised by a later one: the loss of a rank before
    that call sends, because other ranks may not know of it yet and would wait, and other faults once it has sent.

    Args:
        group: the ranks; None for a single rank.
        grid: their geometry.
        timeout_s: how long a kernel waits for a rank.
        number: of the buffer among those of the group, equal at all ranks.
        domain: rendezvous of the domain's ranks.
        control_bytes: of the symmetric memory through which the kernels of a domain agree.
        lag_s: by how much later than this rank another one may find the loss of a rank.
    """

    name = "cuda"
    device: torch.device
    _low_latency: CudaLowLatency | None

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        grid: RankGrid,
        timeout_s: float,
        number: int,
        *,
        domain: RollCall,
        control_bytes: int,
        lag_s: float,
    ) -> None:
        super().__init__()
        self.grid, self.number, self.lag_s = grid, number, lag_s
        self._index: int = torch.cuda.current_device()
        self.device = torch.device("cuda", self._index)
        self._torch = TorchEngine(group, grid, timeout_s, number, lag_s=lag_s)
        self.traffic = self._torch.traffic
        self._torch.busy, self._torch.lost = self.busy, self.lost
        domain.lost = self.lost
        self._control = SymmetricMemory.allocate(control_bytes, domain, self.device)
        self._communicator = _cuda.Communicator(
            rank=grid.domain_rank, control=self._control.addresses, device=self._index, timeout_s=timeout_s
        )
        self._arena = Arena(domain, self.device, self._communicator, env.POOL_SLOTS.get())
        self._routes = route_memory(self.device)
        self._order = _cuda.LaunchOrder(self._index, current_raw_stream)
        self._late: HybridEPError | None = None  # that the call which is being made raises when it has been launched
        self._board = None if group is None else Board.of(group).at(f"buffer {number}")
        self._refusals = Refusals(None if self._board is None else self._board.at("refused calls"), grid.rank)

    @property
    def memory_bytes(self) -> int:
        low_latency = 0 if self._low_latency is None else self._low_latency.num_bytes
        return self._control.local.nbytes + self._arena.num_bytes + low_latency

    @property
    def default_num_sms(self) -> int:
        num_sms: int = self._communicator.default_dispatch_sms
        return num_sms

    def exchange_expert_counts(self, num_tokens_per_expert: Tensor) -> Tensor:
        self.num_calls += 1
        return self._torch.exchange_expert_counts(num_tokens_per_expert)

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        self.num_calls += 1
        return self._torch.sum_over_ranks(tensor)

    def refuse(self, call: str, error: ConfigError) -> None:
        if call.startswith("low_latency"):
            self._refuse_low_latency(call, error)
            return
        if self.grid.num_ranks == 1 or is_capturing(self._index):
            return
        number, told = self._refusals.tell(error)
        self._launch_refusal(call, number)
        raise told from error

    @abc.abstractmethod
    def _refuse_low_latency(self, call: str, error: ConfigError) -> None:
        """Does as `refuse`."""

    @abc.abstractmethod
    def _launch_refusal(self, call: str, number: int) -> None:
        """Takes part in a call that this rank refuses, by a launch without tokens.

        It needs no memory but what a route takes. Its words say that this rank refuses the call, and the number of the
        refusal. Then no rank sends, and every other rank reports that number.
        """

    def set_masked(self, ranks: Iterable[int], masked: bool) -> None:
        ranks = set(ranks)
        self._torch.set_masked(ranks, masked)
        if self._low_latency is not None:
            self._low_latency.set_masked(ranks, masked)

    def masked(self) -> Tensor:
        low_latency = self._low_latency
        if low_latency is None:
            self.raise_pending()
            return self._torch.masked().to(self.device)
        self._raise_late()
        low_latency.note_losses()
        return torch.maximum(low_latency.masks(), self._torch.masked().to(self.device, non_blocking=True))

    def allow_masks(self, *, only_masks_lost: bool) -> None:
        super().allow_masks(only_masks_lost=only_masks_lost)
        self._torch.allow_masks(only_masks_lost=only_masks_lost)
        if self._low_latency is not None:
            self._low_latency.takes_masks, self._low_latency.only_masks_lost = True, only_masks_lost

    @one_at_a_time
    def clean(self) -> None:
        torch.cuda.synchronize(self.device)
        if isinstance(self._late, TimeoutError):
            self._late = None
        self._torch.clean()
        if self._low_latency is not None:
            self._low_latency.clean()

    def record_stream(self, tensor: Tensor, stream: torch.Stream) -> None:
        self._arena.record_stream(tensor, stream)

    def low_latency_memory(self) -> Tensor:
        return super().low_latency_memory() if self._low_latency is None else self._low_latency.rows_memory()

    @one_at_a_time
    def barrier(self) -> None:
        torch.cuda.synchronize(self.device)
        low_latency = self._low_latency
        if low_latency is None:
            self.raise_pending()
            self._torch.barrier()
            return
        # Raised before the barrier, for the barrier makes ranks forget the calls and succeeds.
        self._raise_late()
        low_latency.raise_before_barrier(low_latency.lately_masked)
        self._torch.set_masked(low_latency.note_told(), True)
        low_latency.drain()
        self._torch.meet(after_loss=low_latency.knows_loss)
        low_latency.reset(self._torch.take_number())
        torch.cuda.synchronize(self.device)
        self._torch.barrier()

    @one_at_a_time
    def empty_cache(self) -> None:
        self._arena.shrink()
        self._routes.clear()

    def close(self) -> None:
        # Peers may still write here for calls that this rank has not waited for.
        torch.cuda.synchronize(self.device)
        if self._low_latency is not None:
            self._low_latency.close()
        self._close_links()
        self._torch.close()
        self._raise_unnamed()

    def _close_links(self) -> None:
        """Closes links to other domains."""

    def raise_pending(self) -> None:
        self._note_fault()
        self._raise_late()

    # Begin and end of a call.

    def _begin(self) -> int:
        """Orders this call after the engine's earlier ones, and returns the stream.

        Raises:
            TimeoutError, TransportError: an earlier call has lost a rank, or the link. `_end` raises other faults.
        """
        self._note_fault()
        if isinstance(self._late, (TimeoutError, TransportError)):
            self._raise_late()
        return self._order.begin()

    def _end(self) -> None:
        """Ends a call, after its last use of the arena; raises the error of an earlier call."""
        self._order.end()
        self._raise_late()

    def _note_fault(self) -> None:
        if self._late is None:
            self._late = self._take_fault()

    def _raise_late(self) -> None:
        if self._late is not None:
            late, self._late = self._late, None
            raise late

    def _take_fault(self) -> HybridEPError | None:
        """Returns the error of a fault that a kernel has recorded since the last call."""
        assert self._low_latency is not None
        return self._low_latency.take_fault()

    def _raise_failed(self) -> NoReturn:
        """Raises the fault because of which the kernel has sent nothing."""
        fault = self._take_fault()
        if fault is None:
            fault = TransportError("dispatch: counts", self.grid.rank, None, "the kernel did not report in its time")
        raise fault
