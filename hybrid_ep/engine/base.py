"""What an engine does, in tensors and a handle: the one interface that the public buffers stand on.

The buffers check every argument, choose streams and shape the results as the peers' interfaces want them. An engine
moves tokens: it may trust its arguments, works on the current stream, and must give the same bits as every other
engine:

* order: received rows stand by source rank, then source token; permuted rows by local expert, then source rank, token
  and column of top-k;
* columns: each column of top-k that names an expert counts, has its weight, and is a row of permuted and of
  low-latency output, also where columns of a token name the same expert. A token crosses once to each rank;
* sums: the rows of one token's experts on one rank are summed in fp32 in ascending order of local expert, then column,
  and rounded once to bf16; partial rows are summed in fp32 in ascending domain rank and rounded once for the next hop
  or the output, and across domains in ascending domain index. Bias is added in fp32 before the last rounding.
  Low-latency combine multiplies each expert's row by its weight in fp32 and sums in fp32 in top-k order; for a source
  of as many tokens as its `min_tokens_to_sum`, a rank that has several rows of a token first does the same with them,
  rounds once to bf16, and the result stands in the place of the first. Weights and probabilities are summed in fp32.

Shapes: T tokens of this rank, H hidden, K top-k, E experts, LE local experts, R ranks, N received rows, P permuted
rows, M the most tokens that a rank may send in low-latency mode.
"""

from __future__ import annotations

import abc
import functools
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.core.quantize import RowFormat
from hybrid_ep.errors import ConfigError, OverflowError, TimeoutError, TransportError

__all__ = [
    "MIN_TOKENS_TO_SUM",
    "NO_SUMS",
    "SEND_TIMEOUT_DIVISOR",
    "Combined",
    "DispatchHandle",
    "Dispatched",
    "Engine",
    "ExpertSignals",
    "LowLatencyDispatched",
    "LowLatencyHandle",
    "PermuteHandle",
    "Permuted",
    "Routing",
    "Rows",
    "Traffic",
    "missing_signal",
    "one_at_a_time",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")


# From how many tokens on low-latency combine sums a token's rows on one rank before they cross: below it, waiting for
# the weights costs more than the bytes that it saves (docs/low_latency.md).
MIN_TOKENS_TO_SUM = 32
NO_SUMS = 2**29 - 1
SEND_TIMEOUT_DIVISOR = 2  # what a low-latency send waits for, it waits for so small a part of the timeout


def one_at_a_time(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """Refuses a call of an engine while another thread is in one: ranks could not agree on their order."""

    @functools.wraps(call)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        busy = cast("Engine", args[0]).busy
        if not busy.acquire(blocking=False):
            raise ConfigError(
                f"{call.__name__} is called while another thread is in a call of the same buffer; allowed: one at a "
                "time, in an order that is equal on every rank, or a buffer for each thread"
            )
        try:
            return call(*args, **kwargs)
        except TransportError as error:
            if error.peer is not None:
                cast("Engine", args[0]).lost.add(error.peer)
            raise
        finally:
            busy.release()

    return guarded


class Rows(NamedTuple):
    """Token rows as they travel.

    Attributes:
        data: ``[n, H]`` bf16, or e4m3 when `scales` is given.
        scales: ``[n, H/128]`` float32, or ``[n, ceil(H/512)]`` int32 of packed UE8M0; None for bf16.
    """

    data: Tensor
    scales: Tensor | None = None


class Routing(NamedTuple):
    """Where this rank's tokens go.

    Attributes:
        topk_idx: ``[T, K]`` int64, global expert index or −1. An expert may stand in several columns of a token.
        topk_weights: ``[T, K]`` float32, or None.
        num_experts: E, a multiple of R.
        has_topk: whether `topk_idx` came from the caller; False where it was made from the ranks of each token.
        max_tokens: that a rank may have, alike at all ranks, or every rank raises; None = as many as the engine takes.
    """

    topk_idx: Tensor
    topk_weights: Tensor | None
    num_experts: int
    has_topk: bool = True
    max_tokens: int | None = None


class DispatchHandle(NamedTuple):
    """What `combine` and a cached `dispatch` need to know of a dispatch.

    Attributes:
        rank_prefix_matrix: ``[R, R]`` int32; ``m[i][j]`` = rows that ranks 0…i send to rank j.
        num_tokens: T.
        num_recv: N, or the bound that stood for it.
        num_experts: E.
        num_topk: K.
        grid: the geometry it was made for.
        state: what the engine keeps for itself.
    """

    rank_prefix_matrix: Tensor
    num_tokens: int
    num_recv: int
    num_experts: int
    num_topk: int
    grid: RankGrid
    state: object  # typed, so that a call with a handle has the type of its overload


class PermuteHandle(NamedTuple):
    """What `combine_permuted` and a cached `dispatch_permuted` need to know.

    Attributes:
        dispatch: the handle of the dispatch underneath.
        num_tokens_per_expert: ``[LE]`` int32, padding included.
        num_permuted: P, rows of the permuted tensor (its bound when `overflow` can be raised).
        pad_multiple: every expert's block is a multiple of it (1 = no padding).
        state: what the engine keeps for itself.
        overflow: ``[1]`` int32, 1 when more rows arrived than the bound; last, as the peer has it.
    """

    dispatch: DispatchHandle
    num_tokens_per_expert: Tensor
    num_permuted: int
    pad_multiple: int
    state: Any
    overflow: Tensor


class LowLatencyHandle(NamedTuple):
    """What `low_latency_combine` needs to know.

    Attributes:
        src_info: ``[LE, M×R]`` int32; source token of each packed row.
        layout_range: ``[LE, R]`` int64; ``(begin << 32) | count`` of each source rank's rows.
        num_max_tokens_per_rank: M.
        hidden: H.
        num_experts: E.
        grid: the geometry it was made for.
        memory: in which all that the dispatch returns beside its rows stands; what another stream uses of that is
            recorded on this tensor.
        state: what the engine keeps for itself.
    """

    src_info: Tensor
    layout_range: Tensor
    num_max_tokens_per_rank: int
    hidden: int
    num_experts: int
    grid: RankGrid
    memory: Tensor
    state: Any


class ExpertSignals(NamedTuple):
    """Where experts tell that their rows are written, while they still write others.

    Attributes:
        raised: ``[LE × B]`` int32 or uint32 counters, to which the kernels of experts add: that of a local expert's
            block b is ``raised[expert × B + b]``.
        expected: rows of a block are written once its counter has reached this.
        num_per_expert: B.
        rows_per_signal: rows of a block.
        num_sms: that the send may take from the experts.
    """

    raised: Tensor
    expected: int
    num_per_expert: int
    rows_per_signal: int
    num_sms: int


def missing_signal(rank: int, source: int, signal: int, waited_s: float) -> TimeoutError:
    """Returns the error for experts that have not told that their rows are written, the same at every rank.

    No rank is to blame in the sense of `TransportError.peer`: all of them have come.

    Args:
        rank: this rank.
        source: whose experts they are.
        signal: index in `ExpertSignals.raised` there.
        waited_s: how long the source has waited.
    """
    detail = f"signal {signal} of rank {source}'s experts was not raised"
    return TimeoutError("low_latency_combine: rows of experts", rank, None, detail, timeout_s=waited_s)


class Dispatched(NamedTuple):
    """Result of `Engine.dispatch`.

    Attributes:
        rows: N received rows (exactly `num_recv_bound` when one was given; what stands after the last is undefined).
        topk_idx: ``[N, K]`` int64 relative to the expert range asked for, −1 elsewhere and after the last row.
        topk_weights: ``[N, K]`` float32, 0 where `topk_idx` is −1; None when none were sent.
        num_tokens_per_expert: ``[LE]`` int32, exact counts; on the device, or on the host where they are known there.
            None where a bound was given.
        handle: for `combine` and `dispatch_cached`.
    """

    rows: Rows
    topk_idx: Tensor
    topk_weights: Tensor | None
    num_tokens_per_expert: Tensor | None
    handle: DispatchHandle


class Permuted(NamedTuple):
    """Result of `Engine.dispatch_permuted`.

    Attributes:
        rows: P rows by local expert; padding and rows after the last are zero.
        probs: ``[P]`` float32, or None when no weights were sent.
        num_tokens_per_expert: ``[LE]`` int32, padding included; on the device, or on the host if known there.
        handle: for `combine_permuted` and a cached `dispatch_permuted`.
    """

    rows: Rows
    probs: Tensor | None
    num_tokens_per_expert: Tensor
    handle: PermuteHandle


class Combined(NamedTuple):
    """Result of a combine: ``[T, H]`` bf16 and, where weights went in, ``[T, K]`` float32."""

    data: Tensor
    weights: Tensor | None


class LowLatencyDispatched(NamedTuple):
    """Result of `Engine.low_latency_dispatch`; complete once `finish` of the call has run.

    Attributes:
        rows: ``[LE, M×R, H]`` and scales, as `PackedLayout` has them; rows after an expert's count are undefined.
        counts: ``[LE]`` int32.
        handle: for `low_latency_combine`.
        finish: waits for the rows to arrive on the current stream; call exactly once.
    """

    rows: Rows
    counts: Tensor
    handle: LowLatencyHandle
    finish: Callable[[], None]


@dataclass
class Traffic:
    """Bytes that this rank sent to other ranks since it was made or `clear`ed: rows with their metadata, and counts.

    Attributes:
        within_domain: bytes to ranks of the own domain.
        between_domains: bytes to ranks of other domains.
    """

    within_domain: int = 0
    between_domains: int = 0

    def clear(self) -> None:
        self.within_domain = self.between_domains = 0


class Engine(abc.ABC):
    """Moves tokens between the ranks of one group. Every method is collective unless it says otherwise.

    Attributes:
        name: ``torch`` or ``cuda``.
        transport: what carries rows to other ranks, as a backend or a link is called; ``none`` for a single rank.
        grid: geometry of the group.
        device: where tensors must be; None = anywhere.
        traffic: bytes sent.
    """

    name: str
    transport: str
    grid: RankGrid
    device: torch.device | None
    traffic: Traffic
    only_masks_lost: bool = False  # ranks that low-latency kernels give up stay masked, whether or not that is told
    completes_lost_calls: bool = False  # `finish` of a low-latency call that lost a rank can be called again without it

    def __init__(self) -> None:
        self.busy = threading.RLock()  # held by the thread that is in a call
        self.lost: set[int] = set()  # ranks that errors of this rank's calls have named

    @property
    def memory_bytes(self) -> int:
        """Local: bytes of symmetric memory that the engine holds now."""
        return 0

    @abc.abstractmethod
    def dispatch(
        self,
        rows: Rows,
        routing: Routing,
        *,
        expert_range: tuple[int, int],
        num_recv_bound: int | None,
        num_sms: int | None,
        common_bound: int | None = None,
    ) -> Dispatched:
        """Sends each row to every rank that owns one of its experts.

        Args:
            rows: ``[T, H]``.
            routing: where they go.
            expert_range: (first, end) global experts whose indices are reported relative to first; others become −1.
            num_recv_bound: rows of the result; no host sync then. None: exactly what arrives.
            num_sms: SMs to use; None = the engine's choice.
            common_bound: with a bound that differs between ranks, a bound of them all, equal at all ranks.

        Raises:
            OverflowError: more rows arrived than `num_recv_bound` (an engine that does not sync raises it later).
            TransportError, TimeoutError: a rank was lost.
        """

    @abc.abstractmethod
    def dispatch_cached(self, rows: Rows, handle: DispatchHandle, *, num_sms: int | None) -> Rows:
        """Sends ``[T, H]`` along the routes of an earlier dispatch; returns ``[N, H]``."""

    @abc.abstractmethod
    def combine(
        self,
        data: Tensor,
        handle: DispatchHandle,
        *,
        weights: Tensor | None,
        bias: tuple[Tensor, ...],
        num_sms: int | None,
    ) -> Combined:
        """Brings ``[N, H]`` bf16 rows (and ``[N, W]`` float32 weights) back to their source tokens and sums them."""

    @abc.abstractmethod
    def dispatch_permuted(
        self,
        rows: Rows,
        routing: Routing,
        *,
        pad_multiple: int,
        num_permuted_bound: int | None,
        num_sms: int | None,
        num_expert_sms: int | None = None,
        common_bound: int | None = None,
    ) -> Permuted:
        """Dispatches and leaves the rows grouped by local expert, one copy for each expert of a token.

        `num_expert_sms` make the further copies of a row; None = the engine's choice.

        With `num_permuted_bound` there is no host sync, the result has that many rows, rows beyond it are dropped and
        `handle.overflow` says so.
        """

    @abc.abstractmethod
    def dispatch_permuted_cached(
        self, rows: Rows, handle: PermuteHandle, *, num_sms: int | None, num_expert_sms: int | None = None
    ) -> Rows:
        """Sends ``[T, H]`` along the routes of an earlier `dispatch_permuted`; returns ``[P, H]``."""

    @abc.abstractmethod
    def combine_permuted(
        self,
        data: Tensor,
        handle: PermuteHandle,
        *,
        probs: Tensor | None,
        num_sms: int | None,
        num_expert_sms: int | None = None,
        bias: tuple[Tensor, ...] = (),
    ) -> Combined:
        """Brings ``[P, H]`` bf16 rows (and ``[P]`` float32 probs) back to ``[T, H]`` (and ``[T, K]``) and sums them.

        `num_expert_sms` sum the rows of one token that are on this rank; None = the engine's choice.
        """

    @abc.abstractmethod
    def exchange_expert_counts(self, num_tokens_per_expert: Tensor) -> Tensor:
        """Sends ``[E]`` int32 counts to the experts' ranks; returns the sum over sources, ``[LE]`` int32."""

    @abc.abstractmethod
    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Returns the sum of a tensor that every rank has, in ascending order of the ranks; equal at all."""

    def dispatch_again(
        self,
        rows: Rows,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: DispatchHandle,
        *,
        expert_range: tuple[int, int],
        num_sms: int | None,
    ) -> Dispatched:
        """Sends rows and weights where a dispatch of the same `topk_idx` went, of which it made `handle`.

        A cached route carries rows only. Made again from the same experts it is the same, and needs no host sync.
        """
        return self.dispatch(
            rows,
            Routing(topk_idx, topk_weights, handle.num_experts),
            expert_range=expert_range,
            num_recv_bound=handle.num_recv,
            num_sms=num_sms,
            common_bound=self.common_bound_of(handle),
        )

    def dispatch_permuted_again(
        self,
        rows: Rows,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: PermuteHandle,
        *,
        num_sms: int | None,
        num_expert_sms: int | None = None,
    ) -> Permuted:
        """The same of `dispatch_permuted`."""
        return self.dispatch_permuted(
            rows,
            Routing(topk_idx, topk_weights, handle.dispatch.num_experts),
            pad_multiple=handle.pad_multiple,
            num_permuted_bound=handle.num_permuted,
            num_sms=num_sms,
            num_expert_sms=num_expert_sms,
            common_bound=self.common_bound_of(handle.dispatch),
        )

    @abc.abstractmethod
    def tokens_per_expert(self, handle: DispatchHandle) -> Tensor:
        """Local: ``[LE]`` int32 on the device of the rows; what arrived for each local expert, without padding.

        Of a dispatch with top-k indices. Valid in stream order behind it.
        """

    def rows_by_source(self, handle: DispatchHandle) -> Tensor:
        """Local: ``[R]`` int32, without gaps; running sum of the rows that arrived, by source rank.

        Valid in stream order behind the dispatch.
        """
        return handle.rank_prefix_matrix[:, self.grid.rank].contiguous()

    @property
    @abc.abstractmethod
    def default_num_sms(self) -> int:
        """SMs of a dispatch that does not ask for a number."""

    def common_bound_of(self, handle: DispatchHandle) -> int:
        """Local: the `common_bound` of a dispatch that goes where that of `handle` went."""
        return handle.num_recv

    def raise_on_overflow(self, handle: PermuteHandle) -> None:
        """Local: waits for the dispatch of `handle` and raises what its flag says.

        Raises:
            OverflowError: more rows arrived than the bound.
        """
        if int(handle.overflow.item()):
            arrived = int(handle.num_tokens_per_expert.sum())
            raise OverflowError(
                f"{arrived} permuted rows arrived; allowed by num_permuted_tokens: {handle.num_permuted}"
            )

    @abc.abstractmethod
    def low_latency_dispatch(
        self,
        data: Tensor,
        topk_idx: Tensor,
        *,
        num_max_tokens_per_rank: int,
        num_experts: int,
        fmt: RowFormat | None,
        global_scale: Tensor | None,
        wait_stats: Tensor | None,
        return_recv_hook: bool,
    ) -> LowLatencyDispatched:
        """Sends ``[T, H]`` bf16 rows, quantised on the way where `fmt` says so, to packed rows by expert.

        NVFP4 rows have a `global_scale`, one float32, the same on every rank.
        Ranks masked by `set_masked` are neither sent to nor waited for. `wait_stats` ``[R]`` int64 is added the
        microseconds that each source rank was waited for. The caller receives, by `finish`, at once or, if it is to
        `return_recv_hook`, behind other work of the stream.
        """

    @abc.abstractmethod
    def low_latency_combine(
        self,
        data: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: LowLatencyHandle,
        *,
        out: Tensor,
        min_tokens_to_sum: int,
        use_logfmt: bool,
        wait_stats: Tensor | None,
        signals: ExpertSignals | None = None,
    ) -> Callable[[], None]:
        """Brings ``[LE, M×R, H]`` bf16 rows back and writes their weighted sum to `out` ``[T, H]``.

        For a source of at least `min_tokens_to_sum` tokens, the rows of one token that are on this rank are summed
        before they cross, for which the rank's kernel waits for the source. It is `MIN_TOKENS_TO_SUM` or more, or
        `NO_SUMS`; ranks need not agree on it.

        With `signals`, experts may still write: rows are sent once their signals are raised, and none are summed.
        A signal that does not come is raised by `finish` at every rank, as `missing_signal` tells.

        Returns what waits for the rows; `out` is complete once it has run. Rows of masked ranks count as zero.
        """

    def leave_out(self, peer: int) -> None:
        """Goes on without a rank that a low-latency call of all survivors has lost.

        An engine on which survivors could come to different masks makes them agree here.
        """
        self.set_masked([peer], True)

    @abc.abstractmethod
    def set_masked(self, ranks: Iterable[int], masked: bool) -> None:
        """Local: leaves `ranks` out of low-latency calls, or takes them back in."""

    @abc.abstractmethod
    def masked(self) -> Tensor:
        """Local: ``[R]`` int32 on the engine's device, 1 = masked; the host does not wait for the device.

        Ranks that kernels have given up in work that the current stream holds, as in a replayed graph, are among them
        and stay masked. Anything else that they are known to have found wrong is raised.
        """

    @abc.abstractmethod
    def clean(self) -> None:
        """Local: forgets low-latency calls and masks, so that ranks which have made different calls begin together.

        Every rank does so, equally often, and makes its next call when all have.
        """

    def low_latency_memory(self) -> Tensor:
        """Local: ``[n]`` uint8, this rank's memory where rows of low-latency calls land; empty without one."""
        return torch.empty(0, dtype=torch.uint8, device=self.device or "cpu")

    @abc.abstractmethod
    def barrier(self) -> None:
        """Returns when every rank that is not masked has called it; a rank that was masked joins again here.

        What an earlier call has found wrong and nobody knows yet is raised before this rank meets the others.
        """

    @abc.abstractmethod
    def raise_pending(self) -> None:
        """Local: raises what a kernel has reported since the last call; the host does not wait for any."""

    def empty_cache(self) -> None:  # noqa: B027 - not every engine keeps memory
        """Gives back memory that no result holds. Collective."""

    @abc.abstractmethod
    def close(self) -> None:
        """Local: gives back everything the engine holds, and then does as `raise_pending`."""
