"""The errors for faults of kernels that use a link between domains."""

from __future__ import annotations

from collections.abc import Iterable

from hybrid_ep import _cuda
from hybrid_ep.agree.blame import Blame, blamed
from hybrid_ep.agree.refusals import Refusals
from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.engine.cuda.faults import as_error, rank_of
from hybrid_ep.errors import HybridEPError, TimeoutError, TransportError
from hybrid_ep.transport import DomainLink

__all__ = ["BetweenFaults", "transport_error"]


def transport_error(fault: _cuda.Fault, links: Iterable[DomainLink], rank: int, peer: int) -> TransportError:
    """Returns the error of the first link that has failed.

    Args:
        fault: a fault of kind TRANSPORT.
        links: links of the call.
        rank: this rank.
        peer: rank that the fault names. The error names it if no link of this rank has failed.
    """
    where = f"{fault.kernel}: {fault.tag}"
    try:
        for link in links:
            link.check(where)
    except TransportError as error:
        return error
    return TransportError(where, rank, peer, "the transport has failed")


class BetweenFaults:
    """Errors for the faults of dispatches and combines between domains. Low-latency calls have their own.

    Args:
        grid: geometry of all ranks.
        link: link of the calls.
        blame: notes through which ranks find the lost one.
        refusals: refusals of the buffer.
    """

    def __init__(self, grid: RankGrid, link: DomainLink, blame: Blame, refusals: Refusals) -> None:
        self._grid, self._link, self._blame, self._refusals = grid, link, blame, refusals

    def error_of(self, fault: _cuda.Fault) -> HybridEPError:
        """Returns the error. Waits for other ranks' reports if a rank is lost."""
        if fault.kind == _cuda.FaultKind.TRANSPORT:
            peer = rank_of(fault.peer, self._grid)
            error: HybridEPError = transport_error(fault, [self._link], self._grid.rank, peer)
        else:
            error = as_error(fault, self._grid, self._refusals)
        if not isinstance(error, TransportError) or error.peer is None:
            return error
        others = [rank_of(peer, self._grid) for peer in fault.missed]
        self._blame.write_lost(error.peer, others)
        if not isinstance(error, TimeoutError):
            return error
        return blamed(error, self._blame.find(error.peer, others=others))
