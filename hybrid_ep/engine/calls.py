"""Arguments and results of an engine's calls: rows, routes, requests and handles.

A public call fills one request, and every layer below reads it. Shapes: T tokens of this rank, H hidden, K top-k,
E experts, LE local experts, R ranks, N received rows, W columns of weights, P permuted rows, M the most tokens that a
rank may send in low-latency mode.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

from torch import Tensor

from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.errors import ConfigError, TimeoutError
from hybrid_ep.quantize import RowFormat

# A source must have so many tokens for low-latency combine to sum a token's rows on one rank before they cross. With
# fewer, waiting for the weights costs more than the saved bytes (docs/low_latency.md).
MIN_TOKENS_TO_SUM = 32
NO_SUMS = 2**29 - 1
SEND_TIMEOUT_DIVISOR = 2  # a low-latency send waits for at most this part of the timeout

_T = TypeVar("_T")


class Rows(NamedTuple):
    """Token rows as they travel.

    Attributes:
        data: ``[n, H]`` bf16, or e4m3 when `scales` is given.
        scales: ``[n, H/128]`` float32, or ``[n, ceil(H/512)]`` int32 of packed UE8M0; None for bf16.
    """

    data: Tensor
    scales: Tensor | None = None


class Routing(NamedTuple):
    """The experts of this rank's tokens.

    Attributes:
        topk_idx: ``[T, K]`` int64, global expert index or −1. Several columns of a token may name the same expert.
        topk_weights: ``[T, K]`` float32, or None.
        num_experts: E, a multiple of R.
        has_topk: whether `topk_idx` came from the caller; False where it was made from the ranks of each token.
        max_tokens: the most tokens of a rank, equal at all ranks; if a rank has more, every rank raises. None = as many
            as the engine takes.
    """

    topk_idx: Tensor
    topk_weights: Tensor | None
    num_experts: int
    has_topk: bool = True
    max_tokens: int | None = None


def _refuse_pickling(handle: object) -> NoReturn:
    """Raises ConfigError: a handle may hold addresses of this process."""
    raise ConfigError(f"{type(handle).__name__} cannot be pickled; allowed: the process that dispatched")


class OfThisProcess:
    """The base of handles, which can be copied and not pickled."""

    __slots__ = ()

    def __copy__(self) -> Any:
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = copy.copy(self)
        copied.__dict__.update((name, copy.deepcopy(value, memo)) for name, value in self.__dict__.items())
        return copied

    def __reduce__(self) -> NoReturn:
        _refuse_pickling(self)


class DispatchHandle(NamedTuple):
    """The handle of a dispatch, for `combine` and a dispatch along it. It can be copied and not pickled.

    Attributes:
        rank_prefix_matrix: ``[R, R]`` int32; ``m[i][j]`` = rows that ranks 0…i send to rank j.
        num_tokens: T.
        num_recv: N, or the bound that was given.
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

    def __copy__(self) -> DispatchHandle:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> DispatchHandle:
        fields: Any = copy.deepcopy(tuple(self), memo)
        return DispatchHandle(*fields)

    def __reduce__(self) -> NoReturn:
        _refuse_pickling(self)


class PermuteHandle(NamedTuple):
    """The handle of a dispatch by expert, for `combine` and a dispatch along it. It can be copied and not pickled.

    Attributes:
        dispatch: the handle of the dispatch underneath.
        num_tokens_per_expert: ``[LE]`` int32 or int64, padding included.
        num_permuted: P, rows of the permuted tensor (its bound when `overflow` can be raised).
        pad_multiple: every expert's block is a multiple of it (1 = no padding).
        state: what the engine keeps for itself.
        overflow: ``[1]`` int32, 1 at every rank if at any more rows arrived than its bound; last, as in Hybrid-EP.
    """

    dispatch: DispatchHandle
    num_tokens_per_expert: Tensor
    num_permuted: int
    pad_multiple: int
    state: Any
    overflow: Tensor

    def __copy__(self) -> PermuteHandle:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> PermuteHandle:
        fields: Any = copy.deepcopy(tuple(self), memo)
        return PermuteHandle(*fields)

    def __reduce__(self) -> NoReturn:
        _refuse_pickling(self)


class LowLatencyHandle(OfThisProcess):
    """The handle of a low-latency dispatch, for `low_latency_combine`.

    As a sequence it has the entries of DeepEP's handle: `src_info`, `layout_range`, M, H and E.

    Attributes:
        num_max_tokens_per_rank: M.
        hidden: H.
        num_experts: E.
        grid: the geometry it was made for.
        memory: holds all that the dispatch returns beside its rows. Uses on other streams are recorded on this tensor.
        state: what the engine keeps for itself.

    Example:
        >>> x, topk_idx = torch.ones(2, 128, dtype=torch.bfloat16), torch.tensor([[0, 1], [1, 3]])
        >>> with hybrid_ep.Buffer(None, low_latency_mode=True) as buffer:
        ...     _, _, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, 8, 4, use_fp8=False)
        >>> handle.src_info[1, :2].tolist()  # rows of expert 1
        [0, 1]

    Args:
        tables: `src_info` and `layout_range`, or a function that returns them; called when one is first asked for.
        num_max_tokens_per_rank, hidden, num_experts, grid, memory, state: the attributes of these names.
    """

    __slots__ = (
        "_tables",
        "grid",
        "hidden",
        "memory",
        "num_experts",
        "num_max_tokens_per_rank",
        "state",
    )

    def __init__(
        self,
        tables: tuple[Tensor, Tensor] | Callable[[], tuple[Tensor, Tensor]],
        num_max_tokens_per_rank: int,
        hidden: int,
        num_experts: int,
        grid: RankGrid,
        memory: Tensor,
        state: Any,
    ) -> None:
        self._tables = tables
        self.num_max_tokens_per_rank, self.hidden, self.num_experts = num_max_tokens_per_rank, hidden, num_experts
        self.grid, self.memory, self.state = grid, memory, state

    def __copy__(self) -> LowLatencyHandle:
        return self  # nothing in it changes

    def __deepcopy__(self, memo: dict[int, Any]) -> LowLatencyHandle:
        return self

    @property
    def src_info(self) -> Tensor:
        """``[LE, M×R]`` int32; source token of each packed row."""
        return self._found_tables[0]

    @property
    def layout_range(self) -> Tensor:
        """``[LE, R]`` int64; ``(begin << 32) | count`` of each source rank's rows."""
        return self._found_tables[1]

    @property
    def _found_tables(self) -> tuple[Tensor, Tensor]:
        if not isinstance(self._tables, tuple):
            self._tables = self._tables()
        return self._tables

    def __len__(self) -> int:
        return 5

    def __getitem__(self, idx: Any) -> Any:
        return (*self._found_tables, self.num_max_tokens_per_rank, self.hidden, self.num_experts)[idx]


def state_of(handle: DispatchHandle | PermuteHandle | LowLatencyHandle, kind: type[_T]) -> _T:
    """What an engine keeps in a handle.

    Raises:
        ConfigError: another engine made the handle.
    """
    if not isinstance(handle.state, kind):
        raise ConfigError("handle is of another engine; allowed: one that a dispatch of this buffer's engine returned")
    return handle.state


class ExpertSignals(NamedTuple):
    """Counters by which experts signal that some rows are written, while they still write others.

    Attributes:
        raised: ``[LE × B]`` int32 or uint32, to which the kernels of experts add; ``raised[expert × B + b]`` is the
            counter of block b of a local expert.
        expected: rows of a block are written once its counter has reached this.
        num_per_expert: B.
        rows_per_signal: rows of a block.
        num_sms: SMs of the send; the experts keep the others.
    """

    raised: Tensor
    expected: int
    num_per_expert: int
    rows_per_signal: int
    num_sms: int


def missing_signal(rank: int, source: int, signal: int, waited_s: float) -> TimeoutError:
    """Returns the error for experts that have not signalled that their rows are written, the same at every rank.

    `TransportError.peer` is None: all ranks have come.

    Args:
        rank: this rank.
        source: whose experts they are.
        signal: index in `ExpertSignals.raised` there.
        waited_s: how long the source has waited.
    """
    detail = f"signal {signal} of rank {source}'s experts was not raised"
    return TimeoutError("low_latency_combine: rows of experts", rank, None, detail, timeout_s=waited_s)


class ReplicaMapping(NamedTuple):
    """Which expert is in each spare slot.

    Attributes:
        experts: ``[ranks, B]`` int64, contiguous: an expert or −1, in the slots of all ranks or of those of a domain;
            equal at these ranks.
        checksum: ``[1]`` int64 on the same device, of `experts`.
    """

    experts: Tensor
    checksum: Tensor


class DispatchRequest(NamedTuple):
    """A dispatch. `Engine.request_along` makes that of a dispatch along a handle.

    Attributes:
        rows: ``[T, H]``.
        routing: where they go; None: rows alone go along the route of an earlier dispatch.
        bound: rows of the result, without a host sync; None = exactly what arrives.
        num_sms: SMs to use; None = the engine's choice.
        expert_range: (first, end) global experts whose indices are reported relative to first; others become −1.
            None = this rank's own, as a permuted dispatch has them.
        common_bound: with a bound that differs between ranks, a bound of them all, equal at all ranks.
        pad_multiple: 0 = rows by source; otherwise by local expert, blocks padded to a multiple.
        num_expert_sms: SMs that make the further copies of a permuted row; None = the engine's choice.
        replicas: if the rows are weights or gradients of experts, the mapping by which they are sent, on their device;
            otherwise None. If such a call fails, rows of a bound are zero.
        along: handle of the dispatch whose route is used or, with a routing, made again; that of the same dispatch at
            all ranks. None: there is none.
        drops_rows: rows beyond the bound of a permuted dispatch only set `PermuteHandle.overflow`, and are no error.
    """

    rows: Rows
    routing: Routing | None
    bound: int | None
    num_sms: int | None = None
    expert_range: tuple[int, int] | None = None
    common_bound: int | None = None
    pad_multiple: int = 0
    num_expert_sms: int | None = None
    replicas: ReplicaMapping | None = None
    along: DispatchHandle | PermuteHandle | None = None
    drops_rows: bool = False

    def reported_experts(self, routing: Routing, grid: RankGrid) -> tuple[int, int]:
        """(first, end) of the global experts whose indices are reported to this rank."""
        if self.expert_range is not None:
            return self.expert_range
        num_local = routing.num_experts // grid.num_ranks
        return grid.rank * num_local, (grid.rank + 1) * num_local


class CombineRequest(NamedTuple):
    """Rows of experts, to be brought back and summed.

    Attributes:
        data: ``[N, H]`` bf16, or ``[P, H]`` with the handle of a dispatch by expert.
        weights: ``[N, W]`` float32, or ``[P]`` with such a handle; None = none.
        bias: up to two of ``[T, H]`` bf16.
        num_sms: SMs to use; None = the engine's choice.
        num_expert_sms: SMs that sum the permuted rows of one token that are on this rank; None = the engine's choice.
    """

    data: Tensor
    weights: Tensor | None = None
    bias: tuple[Tensor, ...] = ()
    num_sms: int | None = None
    num_expert_sms: int | None = None


class ExpertCopies(NamedTuple):
    """Experts that go to spare slots of other ranks.

    Attributes:
        spare: tensors ``[B, *shape]`` of any dtype, contiguous; written where the mapping names an expert.
        experts: as many ``[LE, *shape]`` of the same dtypes, contiguous.
        mapping: ``[R, B]`` int64, contiguous, the same on all ranks: the expert in each spare slot, or −1.
        num_sms: SMs to use; None = the engine's choice.
    """

    spare: Sequence[Tensor]
    experts: Sequence[Tensor]
    mapping: Tensor
    num_sms: int | None = None

    @property
    def item_bytes(self) -> list[int]:
        """Bytes of one expert in each tensor."""
        return [one.numel() // one.shape[0] * one.dtype.itemsize for one in self.experts]


class LowLatencyDispatchRequest(NamedTuple):
    """A low-latency dispatch.

    Attributes:
        data: ``[T, H]`` bf16.
        topk_idx: ``[T, K]`` int64, global expert index or −1.
        num_max_tokens_per_rank: M.
        num_experts: E.
        fmt: the format to which rows are quantised; None = bf16.
        global_scale: of NVFP4 rows, one float32, the same on every rank.
        wait_stats: ``[R]`` int64; the microseconds of waiting for each source rank are added to it.
        return_recv_hook: whether other work comes before `finish`, which receives. Otherwise it is called at once, on
            the same stream.
    """

    data: Tensor
    topk_idx: Tensor
    num_max_tokens_per_rank: int
    num_experts: int
    fmt: RowFormat | None
    global_scale: Tensor | None
    wait_stats: Tensor | None
    return_recv_hook: bool


class LowLatencyCombineRequest(NamedTuple):
    """A low-latency combine.

    Attributes:
        data: ``[LE, M×R, H]`` bf16.
        topk_idx: ``[T, K]`` int64, as dispatched.
        topk_weights: ``[T, K]`` float32.
        out: ``[T, H]`` bf16, written.
        use_logfmt: whether rows cross as LogFMT-10.
        wait_stats: as in `LowLatencyDispatchRequest`.
        signals: of experts that still write: rows are sent once their signals are raised, and none are summed. If a
            signal does not come, `finish` raises `missing_signal` at every rank.
        return_recv_hook: as in `LowLatencyDispatchRequest`.
    """

    data: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    out: Tensor
    use_logfmt: bool
    wait_stats: Tensor | None
    signals: ExpertSignals | None
    return_recv_hook: bool

    @property
    def min_tokens_to_sum(self) -> int:
        """If a source has at least so many tokens, this rank sums the rows of each of its tokens before they cross.

        It waits for the source's weights to do so. Ranks need not agree on it.
        """
        return NO_SUMS if self.return_recv_hook or self.signals is not None else MIN_TOKENS_TO_SUM


class Dispatched(NamedTuple):
    """Result of `Engine.dispatch`. Rows alone come without experts, weights and counts.

    Attributes:
        rows: N received rows by source, or P by local expert, whose padding is zero. With a bound, that many rows;
            those after the last that arrived, or after the last expert's, are undefined.
        topk_idx: ``[N, K]`` int64 relative to the expert range asked for, −1 elsewhere and after the last row. None
            by expert.
        topk_weights: ``[N, K]`` float32, 0 where `topk_idx` is −1; by expert ``[P]``, 0 where no row is. None when none
            were sent.
        num_tokens_per_expert: exact counts of the local experts; ``[LE]`` int32, or a list where the host knows them.
            None where a bound was given. By expert, the counts of `permute`.
        handle: of the dispatch; of rows by source, for `combine` and a dispatch along it.
        permute: of rows by expert, the handle for both.
    """

    rows: Rows
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    num_tokens_per_expert: Tensor | list[int] | None
    handle: DispatchHandle
    permute: PermuteHandle | None = None


def dispatch_of(handle: DispatchHandle | PermuteHandle) -> DispatchHandle:
    """The handle of the dispatch itself."""
    return handle.dispatch if isinstance(handle, PermuteHandle) else handle


def along_handle(rows: Rows, handle: DispatchHandle | PermuteHandle) -> Dispatched:
    """The result of a dispatch of rows alone along a handle."""
    if isinstance(handle, PermuteHandle):
        return Dispatched(rows, None, None, None, handle.dispatch, handle)
    return Dispatched(rows, None, None, None, handle)


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
        finish: waits for the rows to arrive on the current stream; call exactly once. None: they have been received
            without an error, as only a call without a hook can.
    """

    rows: Rows
    counts: Tensor
    handle: LowLatencyHandle
    finish: Callable[[], None] | None
