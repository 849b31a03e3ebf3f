"""The errors for faults that kernels have recorded."""

from __future__ import annotations

from collections.abc import Iterable

from hybrid_ep import _cuda
from hybrid_ep.agree.fields import ABSENT, CALLS, disagreement
from hybrid_ep.agree.refusals import Refusals
from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.engine.calls import missing_signal
from hybrid_ep.engine.cuda.plan import refusal_of
from hybrid_ep.errors import ConfigError, HybridEPError, OverflowError, TimeoutError, TransportError
from hybrid_ep.transport import DomainLink

_CALL_BITS, _COUNTER_BITS = 32, 25  # of a low-latency dispatch: its number, then its counter


def low_latency_counter(buffer: int, region: int, period: tuple[int, int]) -> int:
    """Returns a word that identifies the counter of low-latency dispatches. Each part is modulo what its bits hold.

    Args:
        buffer: number of the buffer.
        region: number of the region; the calls of each region are counted from 1.
        period: `Losses.period`; each period begins the count again.
    """
    num_cleanings, barrier = period
    return (buffer & 0x7F) << _COUNTER_BITS | (region & 0x1F) << 20 | (num_cleanings & 0xFF) << 12 | barrier & 0xFFF


def as_error(fault: _cuda.Fault, grid: RankGrid, refusals: Refusals) -> HybridEPError:
    """Returns the error for a fault, in the same words at every rank that has found the same."""
    rank, peer = grid.rank, rank_of(fault.peer, grid)
    if fault.kind == _cuda.FaultKind.OTHER_CALL:
        return _other_call(fault, rank if fault.witness < 0 else rank_of(fault.witness, grid), peer)
    if fault.kind == _cuda.FaultKind.REFUSED:
        return refusals.read(peer, fault.seen)
    if fault.kind == _cuda.FaultKind.OVERFLOW:
        return OverflowError(
            f"{fault.kernel}: {fault.tag}: {fault.seen} at rank {peer}; allowed by the bound: {fault.expected}"
        )
    if fault.kind == _cuda.FaultKind.NO_SIGNAL:
        return missing_signal(rank, peer, fault.seen, fault.waited_s)
    if fault.kind != _cuda.FaultKind.TIMEOUT:
        return ConfigError(refusal_of(fault.kind, peer, fault.seen, fault.expected))
    detail = f"it is at step {fault.seen}, expected {fault.expected}"
    if fault.witness >= 0:
        detail = f"rank {rank_of(fault.witness, grid)} gave up on it first"
    return TimeoutError(f"{fault.kernel}: {fault.tag}", rank, peer, detail, timeout_s=fault.waited_s)


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


def rank_of(peer: int, grid: RankGrid) -> int:
    """Returns the rank that a fault names: of this rank's domain, or of another one; −1 is this rank."""
    if peer >= _cuda.rank_elsewhere:
        return peer - _cuda.rank_elsewhere
    return grid.rank if peer < 0 else grid.domain[peer]


def _other_call(fault: _cuda.Fault, rank: int, peer: int) -> ConfigError:
    """The error for a field in which a rank and its peer differ; `fault.tag` is its key."""
    key, mine, theirs = fault.tag, fault.expected, fault.seen
    if key == "handle" and ABSENT in (mine, theirs):
        calls = [CALLS.index("dispatch" if value == ABSENT else "dispatch along a handle") for value in (mine, theirs)]
        return disagreement("call", calls[0], rank, calls[1], peer)
    if key == "handle":
        is_low_latency = fault.kernel.startswith("low_latency")
        bits = _CALL_BITS + _COUNTER_BITS if is_low_latency else _cuda.dispatch_number_bits
        buffers = mine >> bits & 0x7F, theirs >> bits & 0x7F
        if buffers[0] != buffers[1]:
            return disagreement("buffer", buffers[0], rank, buffers[1], peer)
        mask = (1 << _CALL_BITS if is_low_latency and (mine ^ theirs) % (1 << _CALL_BITS) else 1 << bits) - 1
        mine, theirs = mine & mask, theirs & mask
    return disagreement(key, mine, rank, theirs, peer)
