"""The interface of an engine. The public buffers call nothing else to move tokens.

The buffers check every argument, choose streams, and give results the shape of DeepEP's interfaces. An engine moves
tokens. It may trust its arguments, works on the current stream, and must give the same bits as every other engine:

* order: received rows are sorted by source rank, then source token; permuted rows by local expert, then source rank,
  token and column of top-k;
* columns: each column of top-k that names an expert has its weight, and gives a row of permuted and of low-latency
  output, even if two columns of a token name the same expert. A token crosses once to each rank;
* sums: the rows of one token's experts on one rank are summed in fp32 in ascending order of local expert, then column,
  and rounded once to bf16; partial rows are summed in fp32 in ascending domain rank and rounded once for the next hop
  or the output, and across domains in ascending domain index. Bias is added in fp32 before the last rounding.
  Low-latency combine multiplies each expert's row by its weight in fp32 and sums in fp32 in top-k order. If the source
  has at least `min_tokens_to_sum` tokens, a rank that has several rows of a token first weights and sums these in fp32,
  rounds once to bf16, and sends the result as the first of these rows. Weights and probabilities are summed in fp32.

Shapes: T tokens of this rank, H hidden, K top-k, E experts, LE local experts, R ranks, N received rows, P permuted
rows, M the most tokens that a rank may send in low-latency mode.
"""

from __future__ import annotations

import abc
import functools
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from hybrid_ep.core.checks import packed, packed_copy
from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.engine.calls import (
    Combined,
    CombineRequest,
    Dispatched,
    DispatchHandle,
    DispatchRequest,
    ExpertCopies,
    LowLatencyCombineRequest,
    LowLatencyDispatched,
    LowLatencyDispatchRequest,
    LowLatencyHandle,
    PermuteHandle,
    Routing,
    Rows,
    dispatch_of,
)
from hybrid_ep.errors import ConfigError, TransportError

_P = ParamSpec("_P")
_R = TypeVar("_R")


def one_at_a_time(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """Refuses a call while another thread is in a call of the engine: ranks could not agree on the order of calls."""

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


@dataclass
class Traffic:
    """Bytes that this rank sent to other ranks since it was made or `clear`ed: rows with their metadata, and counts.

    Attributes:
        within_domain: bytes to ranks of this domain.
        between_domains: bytes to ranks of other domains.
    """

    within_domain: int = 0
    between_domains: int = 0

    def clear(self) -> None:
        self.within_domain = self.between_domains = 0


class Engine(abc.ABC):
    """Moves tokens between the ranks of one group. Every method is collective unless its docstring says otherwise.

    Attributes:
        name: ``torch`` or ``cuda``.
        transport: name of the backend or link that carries rows to other ranks; ``none`` for a single rank.
        grid: geometry of the group.
        device: where tensors must be; None = anywhere.
        traffic: bytes sent.
        number: of the buffer among those of its group; equal at all ranks, and unique among the groups of a store.
        num_calls: collective calls in which this rank has taken part, low-latency ones excepted.
    """

    name: str
    transport: str
    grid: RankGrid
    device: torch.device | None
    traffic: Traffic
    number: int
    only_masks_lost: bool = False  # whether a low-latency call masks a lost rank without raising
    is_left_out: bool = False  # whether the others have agreed to go on without this rank
    lag_s: float = 0.0  # by how much later than this rank another one may find the same loss
    completes_lost_calls: bool = False  # `finish` of a low-latency call that lost a rank can be called again without it

    def __init__(self) -> None:
        self.busy = threading.RLock()  # held by the thread that is in a call
        self.lost: set[int] = set()  # ranks that errors of this rank's calls have named
        self.num_calls = 0

    @property
    def memory_bytes(self) -> int:
        """Local: bytes of symmetric memory that the engine holds now."""
        return 0

    @abc.abstractmethod
    def dispatch(self, request: DispatchRequest) -> Dispatched:
        """Sends each row to every rank that owns one of its experts.

        Rows land by source, or with a `pad_multiple` by local expert, one copy for each expert of a token. With a bound
        there is no host sync. By expert, rows beyond the bound are dropped. If any rank drops rows, `overflow` of the
        handle is set at all, because a combine of theirs may lack them.

        Raises:
            OverflowError: more rows than the bound, at any rank, without `drops_rows` (an engine that does not sync
                raises it later).
            TransportError, TimeoutError: a rank was lost.
        """

    @abc.abstractmethod
    def combine(self, request: CombineRequest, handle: DispatchHandle | PermuteHandle) -> Combined:
        """Brings bf16 rows of a dispatch (and their float32 weights) back to their source tokens and sums them.

        The result is ``[T, H]`` and, with weights, ``[T, W]``; by expert ``[T, K]``.
        """

    def request_along(
        self,
        rows: Rows,
        handle: DispatchHandle | PermuteHandle,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        *,
        num_sms: int | None = None,
        num_expert_sms: int | None = None,
        expert_range: tuple[int, int] | None = None,
    ) -> DispatchRequest:
        """Local: returns the request of a dispatch along the routes of an earlier one, which needs no host sync.

        Rows alone take the route as it is. Weights travel with their experts, so the route is made again from these.

        Args:
            rows: ``[T, H]``.
            handle: of the earlier dispatch; rows land as its rows did.
            topk_idx: that the earlier dispatch has sent, if weights are sent.
            topk_weights: ``[T, K]`` float32, or None.
            num_sms, num_expert_sms, expert_range: as in `DispatchRequest`.
        """
        if topk_idx is None:
            return DispatchRequest(rows, None, None, num_sms, num_expert_sms=num_expert_sms, along=handle)
        permute = handle if isinstance(handle, PermuteHandle) else None
        dispatch = dispatch_of(handle)
        return DispatchRequest(
            rows,
            Routing(topk_idx, topk_weights, dispatch.num_experts),
            dispatch.num_recv if permute is None else permute.num_permuted,
            num_sms,
            expert_range,
            common_bound=self.common_bound_of(dispatch),
            pad_multiple=0 if permute is None else permute.pad_multiple,
            num_expert_sms=num_expert_sms,
            along=handle,
            drops_rows=permute is not None,  # as the dispatch that made the handle
        )

    def allocate_spare(self, num_bytes: int, device: torch.device) -> Tensor:
        """Allocates memory for spare slots, which the engine holds until it is freed. Collective.

        An engine that can let peers write it sends weights there without a copy in between.

        Args:
            num_bytes: the same at all ranks.
            device: of the memory.

        Returns:
            ``[num_bytes]`` uint8, zeros.

        Raises:
            ConfigError: a rank asks for another number of bytes or has not as many free, or a CUDA graph is captured.
            TransportError, TimeoutError: a rank was lost.
        """
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def copy_experts(self, copies: ExpertCopies) -> bool:
        """Fills spare slots with experts of other ranks, if the engine has a kernel for that.

        Returns:
            False, at all ranks alike, if it has none for these sizes. Then nothing is done: rows of a dispatch can
            carry the experts.

        Raises:
            ConfigError: sizes or mappings differ between ranks.
            TransportError, TimeoutError: a rank was lost.
        """
        return False

    @abc.abstractmethod
    def exchange_expert_counts(self, num_tokens_per_expert: Tensor) -> Tensor:
        """Sends ``[E]`` int32 counts to the experts' ranks; returns the sum over sources, ``[LE]`` int32."""

    @abc.abstractmethod
    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Returns the sum of a tensor over all ranks, added in ascending order of the ranks; the same at every rank."""

    def sent_topk_idx(self, handle: DispatchHandle, topk_idx: Tensor) -> Tensor:
        """Local: returns a copy of the top-k indices that made the handle, which a caller may overwrite.

        Args:
            handle: that a dispatch has just returned.
            topk_idx: as it was sent.
        """
        return packed_copy(topk_idx)

    @staticmethod
    @abc.abstractmethod
    def tokens_per_expert(handle: DispatchHandle) -> Tensor:
        """Local: ``[LE]`` int32 on the device of the rows; copies that arrived for each local expert, without padding.

        The dispatch must have had top-k indices. Valid in stream order after it.
        """

    @staticmethod
    def rows_by_source(handle: DispatchHandle) -> Tensor:
        """Local: ``[R]`` int32, without gaps; running sum of the rows that arrived, by source rank.

        Valid in stream order after the dispatch.
        """
        return packed(handle.rank_prefix_matrix[:, handle.grid.rank])

    @property
    @abc.abstractmethod
    def default_num_sms(self) -> int:
        """SMs of a dispatch that does not ask for a number."""

    @property
    def default_copy_sms(self) -> int:
        """SMs of `copy_experts`, or of the dispatch that takes its place, that does not ask for a number."""
        return self.default_num_sms

    def common_bound_of(self, handle: DispatchHandle) -> int:
        """Local: the `common_bound` of another dispatch along the routes of `handle`."""
        return handle.num_recv

    @abc.abstractmethod
    def low_latency_dispatch(self, request: LowLatencyDispatchRequest) -> LowLatencyDispatched:
        """Sends ``[T, H]`` bf16 rows, quantised on the way where the format asks for it, to packed rows by expert.

        Ranks masked by `set_masked` are neither sent to nor waited for.
        """

    @abc.abstractmethod
    def low_latency_combine(
        self, request: LowLatencyCombineRequest, handle: LowLatencyHandle
    ) -> Callable[[], None] | None:
        """Brings ``[LE, M×R, H]`` bf16 rows back and writes their weighted sum to `out` ``[T, H]``.

        Returns a function that waits for the rows, as `LowLatencyDispatched.finish`; `out` is complete once it has run.
        Rows of masked ranks count as zero.
        """

    @abc.abstractmethod
    def refuse(self, call: str, error: ConfigError) -> None:
        """Takes part in a call whose arguments do not fit at this rank, so that every rank raises the error.

        It replaces the call at this rank, and sends no rows. It returns, and raises nothing, if no other rank waits for
        this one, and while a CUDA graph is captured: a capture cannot reach other ranks.

        Args:
            call: one of `agree.fields.CALLS`.
            error: of this rank's arguments.

        Raises:
            ConfigError: the error that every rank raises: it names this rank.
            TimeoutError, TransportError: an earlier call has lost a rank.
        """

    def allow_masks(self, *, only_masks_lost: bool) -> None:
        """Allows callers to mask ranks, and to go on without lost ones. Local.

        Call it before the first call, with the same value at all ranks.

        Args:
            only_masks_lost: see the attribute.
        """
        self.only_masks_lost = only_masks_lost

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

        They include ranks that kernels on the current stream have given up, in a replayed graph too; those stay masked.
        Other faults that kernels have already reported are raised.
        """

    @abc.abstractmethod
    def clean(self) -> None:
        """Local: forgets low-latency calls and masks, so that ranks that have made different calls can go on together.

        Every rank must do so, equally often, and make its next call when all have.
        """

    def record_stream(self, tensor: Tensor, stream: torch.Stream) -> None:
        """Local: says that `stream` uses a tensor, as `Tensor.record_stream`, which knows torch's own memory only."""
        tensor.record_stream(stream)

    def low_latency_memory(self) -> Tensor:
        """Local: ``[n]`` uint8, this rank's memory where rows of low-latency calls land; empty without one."""
        return torch.empty(0, dtype=torch.uint8, device=self.device or "cpu")

    @abc.abstractmethod
    def barrier(self) -> None:
        """Returns when every rank that is not masked has called it; a rank that was masked joins again here.

        An error of an earlier call that has not been raised yet is raised before this rank joins the barrier.
        """

    @abc.abstractmethod
    def raise_pending(self) -> None:
        """Local: raises what a kernel has reported since the last call; the host does not wait for kernels."""

    def empty_cache(self) -> None:  # noqa: B027 - not every engine keeps memory
        """Gives back memory that no result holds. Collective."""

    @abc.abstractmethod
    def close(self) -> None:
        """Local: gives back everything the engine holds, and then does as `raise_pending`.

        The loss of a rank that an error has named before is not raised again.
        """

    def _raise_unnamed(self) -> None:
        """Does as `raise_pending`, but not for a lost rank that an error has named: queued calls lose that rank too."""
        named = set(self.lost)
        try:
            self.raise_pending()
        except TransportError as error:
            if error.peer is None or error.peer not in named:
                raise
