"""The torch engine: plain PyTorch on `torch.distributed`. Runs everywhere and is the oracle for every other engine.

A row takes two hops, each a `Hop`. The first goes between domains, to the peer in each domain that needs the row. The
second goes within the domain, to each rank that needs it. In a single domain the first hop is this rank alone. Combine
goes the same way back.

    dispatch   x[T,H] ─ pack ─► records ─ between domains ─► held ─ within domain ─► arrived ─ sort ─► recv_x[N,H]
    combine    out[T,H] ◄─ sum, round ─ between domains ◄─ sum, round ─ within domain ◄─ unsort ─ x[N,H]

A call begins with a header that all ranks compare, so that a disagreement is reported before a row is sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep.agree.fields import dtype_code
from hybrid_ep.core.checks import packed
from hybrid_ep.core.config import Config
from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.core.layout import compute_layout
from hybrid_ep.engine.base import Engine, one_at_a_time
from hybrid_ep.engine.calls import (
    Combined,
    CombineRequest,
    Dispatched,
    DispatchHandle,
    DispatchRequest,
    LowLatencyCombineRequest,
    LowLatencyDispatched,
    LowLatencyDispatchRequest,
    LowLatencyHandle,
    PermuteHandle,
    Rows,
    along_handle,
    dispatch_of,
    state_of,
)
from hybrid_ep.engine.torch.by_expert import permute_rows, rows_by_expert, sum_copies
from hybrid_ep.engine.torch.exchange import Exchange
from hybrid_ep.engine.torch.hop import Hop
from hybrid_ep.engine.torch.link import uses_gloo
from hybrid_ep.engine.torch.low_latency import TorchLowLatency
from hybrid_ep.engine.torch.records import RecordFormat
from hybrid_ep.errors import ConfigError, OverflowError


class _Route(NamedTuple):
    """The state of the torch engine in a DispatchHandle.

    Attributes:
        between: the hop between domains.
        within: the hop within the domain.
        order: ``[N]`` int64; arrival position of each received row.
        num_recv: rows that really arrived; the result may have more.
        num_tokens_per_expert: ``[LE]`` int32; exact counts.
        number: of the dispatch, equal at all ranks and of no other, of any buffer of the group.
    """

    between: Hop
    within: Hop
    order: Tensor
    num_recv: int
    num_tokens_per_expert: Tensor
    number: int


class TorchEngine(Engine):
    """Dispatch and combine with `torch.distributed` point-to-point messages.

    Args:
        group: any backend that sends and receives; None for a single rank.
        grid: geometry of the group.
        timeout_s: how long to wait for a peer (gloo; NCCL's own watchdog rules on GPUs).
        number: of the buffer among those of the group, equal at all ranks.
        lag_s: as in `Exchange`; 0 for the calls of this engine: a rank that has lost another closes its connections.
    """

    name = "torch"
    completes_lost_calls = True

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        grid: RankGrid,
        timeout_s: float,
        number: int = 0,
        *,
        lag_s: float = 0.0,
    ) -> None:
        super().__init__()
        self.grid = grid
        self.transport = "none" if group is None else "gloo" if uses_gloo(group) else dist.get_backend(group)
        self.device = None
        self.number = number
        self.lag_s = lag_s
        self._exchange = Exchange(group, grid, timeout_s, number, lag_s)
        self.traffic = self._exchange.traffic
        self._low_latency = TorchLowLatency(self._exchange, timeout_s)

    @one_at_a_time
    def dispatch(self, request: DispatchRequest) -> Dispatched:
        if request.routing is None:
            assert request.along is not None
            return self._dispatch_along(request, request.along)
        result = self._dispatch(request)
        if request.pad_multiple:
            return rows_by_expert(request, result, self.find_overflow)
        if request.bound is None:
            return result
        self._require_bounds(len(result.rows.data), request.bound, result.rows.data.device)
        return _padded(result, request.bound)

    def find_overflow(self, num_rows: int, bound: int, device: torch.device) -> str | None:
        """What is wrong where more rows than its bound have arrived at any rank; the same at every rank."""
        both, ranks = torch.tensor([num_rows, bound], device=device), list(range(self.grid.num_ranks))
        for rank, (arrived, most) in enumerate(self._exchange.all_gather("rows and bounds", both, ranks).tolist()):
            if arrived > most:
                return f"{arrived} rows arrived at rank {rank}; allowed by the bound: {most}"
        return None

    def _require_bounds(self, num_rows: int, bound: int, device: torch.device) -> None:
        """Raises at every rank if more rows than its bound have arrived at any: the others would wait for that rank."""
        if overflow := self.find_overflow(num_rows, bound, device):
            raise OverflowError(overflow)

    def _require_same_replicas(self, replicas: Tensor) -> None:
        """Raises at every rank where ranks differ: experts would land in slots that are of others."""
        ranks, size = list(range(self.grid.num_ranks)), len(replicas)
        told = self._exchange.all_gather("replicas", replicas, ranks).cpu().unflatten(0, (-1, size))
        for group, nth, rank, slot in (told != told[:, :1]).nonzero().tolist():
            first, (ours, theirs) = group * size, told[group, [0, nth], rank, slot].tolist()
            raise ConfigError(
                f"the expert in slot {slot} of rank {first + rank} is {ours} at rank {first} and {theirs} at rank "
                f"{first + nth}; allowed: the same on every rank"
            )

    def _dispatch(self, request: DispatchRequest) -> Dispatched:
        """Receives exactly what arrives; the bound is only compared. With a `pad_multiple`, rows will be permuted."""
        rows, routing, pad_multiple = request.rows, request.routing, request.pad_multiple
        assert routing is not None
        exchange, grid = self._exchange, self.grid
        topk_idx = routing.topk_idx
        columns = self._columns(rows, topk_idx, routing.topk_weights)
        fmt = RecordFormat.of(columns)
        layout = compute_layout(topk_idx, routing.num_experts, grid.num_ranks, grid.num_ranks_per_domain)
        same = _row_fields(rows) | {
            "num_experts": routing.num_experts,
            "num_topk": routing.topk_idx.shape[1],
            "has_topk": int(routing.has_topk),
            "has_weights": int(routing.topk_weights is not None),
            "is_bounded": int(request.bound is not None),
            "drops_rows": int(request.drops_rows),
            "pad_multiple": pad_multiple,
        }
        if request.replicas is not None:
            same["num_slots"] = request.replicas.experts.shape[1]
        if request.along is not None:
            same["handle"] = state_of(dispatch_of(request.along), _Route).number
        # Permuted ones may differ, and that of rows of experts follows from the mapping.
        is_alike = request.common_bound is None and not pad_multiple and request.replicas is None
        if request.bound is not None and is_alike:
            same["num_worst_tokens"] = request.bound
        if routing.max_tokens is not None:
            same["most_tokens"] = routing.max_tokens
            if len(topk_idx) > routing.max_tokens:
                same["too_many_tokens"] = len(topk_idx) << 32 | routing.max_tokens
        name = "dispatch_with_permute" if pad_multiple else "dispatch"
        call, sent = self.begin(name, rows.data.device, same, layout.num_tokens_per_rank)
        if request.replicas is not None:
            self._require_same_replicas(request.replicas.experts)
        num_local = routing.num_experts // grid.num_ranks

        # Hop 1: to every domain that needs the token.
        in_domain = layout.is_token_in_rank.view(-1, grid.num_domains, grid.num_ranks_per_domain).any(-1)
        between = Hop.plan(exchange, "between domains", list(grid.peers), in_domain)
        held = between.forward(exchange, fmt.pack(columns))

        # Hop 2: to every rank of this domain that needs it; the record itself names them.
        held_topk = fmt.unpack(held)[1]
        owner = torch.where(held_topk >= 0, held_topk.div(num_local, rounding_mode="floor"), -1)
        domain = torch.arange(grid.domain.start, grid.domain.stop, device=owner.device)
        in_rank = (owner.unsqueeze(-1) == domain).any(1)
        within = Hop.plan(exchange, "within domain", list(grid.domain), in_rank)
        arrived = within.forward(exchange, held)

        data, global_topk, src, *rest = fmt.unpack(arrived)
        order = torch.argsort(src.flatten(), stable=True)
        num_recv = arrived.shape[0]
        weights = rest.pop(0)[order] if routing.topk_weights is not None else None
        scales = rest.pop(0)[order] if rows.scales is not None else None
        reported, reported_weights = _in_expert_range(
            global_topk[order], weights, request.reported_experts(routing, grid)
        )
        first = grid.rank * num_local
        local, _ = _in_expert_range(global_topk, None, (first, first + num_local))
        counts = torch.bincount(local[local >= 0], minlength=num_local).to(torch.int32)
        handle = DispatchHandle(
            rank_prefix_matrix=sent.to(rows.data.device).cumsum(0, dtype=torch.int32),
            num_tokens=topk_idx.shape[0],
            num_recv=num_recv,
            num_experts=routing.num_experts,
            num_topk=topk_idx.shape[1],
            grid=grid,
            state=_Route(between, within, order, num_recv, counts, exchange.handle_number(call)),
        )
        return Dispatched(Rows(data[order], scales), reported, reported_weights, counts, handle)

    def _dispatch_along(self, request: DispatchRequest, handle: DispatchHandle | PermuteHandle) -> Dispatched:
        rows, dispatch = request.rows, dispatch_of(handle)
        route = state_of(dispatch, _Route)
        columns = [rows.data] if rows.scales is None else [rows.data, rows.scales]
        fmt = RecordFormat.of(columns)
        self.begin("dispatch along a handle", rows.data.device, _row_fields(rows) | {"handle": route.number})
        held = route.between.forward(self._exchange, fmt.pack(columns))
        arrived = fmt.unpack(route.within.forward(self._exchange, held))
        received = Rows(*(_pad(column[route.order], dispatch.num_recv) for column in arrived))
        if isinstance(handle, PermuteHandle):
            received = permute_rows(received, handle)
        return along_handle(received, handle)

    @one_at_a_time
    def combine(self, request: CombineRequest, handle: DispatchHandle | PermuteHandle) -> Combined:
        if isinstance(handle, PermuteHandle):
            request, handle = sum_copies(request, handle), handle.dispatch
        data, weights = request.data, request.weights
        route = state_of(handle, _Route)
        num_weights = 0 if weights is None else weights.shape[1]
        same = _row_fields(Rows(data)) | {"num_weights": num_weights, "handle": route.number}
        self.begin("combine", data.device, same)
        arrived = data[: route.num_recv]
        partial = torch.empty_like(arrived).index_copy_(0, route.order, arrived)
        if weights is not None:
            weights = torch.empty_like(weights[: route.num_recv]).index_copy_(0, route.order, weights[: route.num_recv])
        held, weights = route.within.backward(self._exchange, partial, weights)
        if self.grid.num_domains > 1:
            held = held.to(data.dtype)  # rounded once for the next hop
        total, weights = route.between.backward(self._exchange, held, weights)
        for term in request.bias:
            total += term.float()
        return Combined(total.to(data.dtype), weights)

    @staticmethod
    def tokens_per_expert(handle: DispatchHandle) -> Tensor:
        return state_of(handle, _Route).num_tokens_per_expert

    @property
    def default_num_sms(self) -> int:
        """Has no meaning here: the default of a `Config`."""
        return Config.num_sms

    @one_at_a_time
    def exchange_expert_counts(self, num_tokens_per_expert: Tensor) -> Tensor:
        num_ranks = self.grid.num_ranks
        same = {"num_experts": num_tokens_per_expert.numel()}
        self.begin("counts of experts", num_tokens_per_expert.device, same)
        sent = packed(num_tokens_per_expert).view(num_ranks, -1)
        received = torch.empty_like(sent)
        self._exchange.swap(
            "counts of experts",
            {r: sent[r].view(torch.uint8) for r in range(num_ranks)},
            {r: received[r].view(torch.uint8) for r in range(num_ranks)},
        )
        return received.sum(0, dtype=torch.int32)

    @one_at_a_time
    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        exchange, ranks = self._exchange, list(range(self.grid.num_ranks))
        self.begin("sum over ranks", tensor.device, {"numel": tensor.numel()})
        total: Tensor = exchange.all_gather("terms", tensor, ranks).sum(0)
        return total

    @one_at_a_time
    def low_latency_dispatch(self, request: LowLatencyDispatchRequest) -> LowLatencyDispatched:
        sent = self._low_latency.dispatch(request)
        assert sent.finish is not None
        return sent._replace(finish=functools.partial(self._receive, sent.finish))

    @one_at_a_time
    def low_latency_combine(
        self, request: LowLatencyCombineRequest, handle: LowLatencyHandle
    ) -> Callable[[], None] | None:
        return functools.partial(self._receive, self._low_latency.combine(request, handle))

    @one_at_a_time
    def refuse(self, call: str, error: ConfigError) -> None:
        self.num_calls += 1
        self._exchange.refuse(call, error)

    @one_at_a_time
    def _receive(self, finish: Callable[[], None]) -> None:
        finish()

    def allow_masks(self, *, only_masks_lost: bool) -> None:
        super().allow_masks(only_masks_lost=only_masks_lost)
        self._exchange.may_mask = True

    @property
    def is_left_out(self) -> bool:  # type: ignore[override]
        return self._exchange.is_left_out

    @one_at_a_time
    def leave_out(self, peer: int) -> None:
        self._exchange.leave_out(peer)

    def set_masked(self, ranks: Iterable[int], masked: bool) -> None:
        (self._exchange.masked.update if masked else self._exchange.masked.difference_update)(ranks)

    def masked(self) -> Tensor:
        return torch.tensor(
            [int(r in self._exchange.masked) for r in range(self.grid.num_ranks)], dtype=torch.int32, device="cpu"
        )

    @one_at_a_time
    def clean(self) -> None:
        self._exchange.clean()
        self.lost.clear()

    def barrier(self) -> None:
        self.meet(after_loss=False)

    @one_at_a_time
    def meet(self, *, after_loss: bool) -> None:
        """As `barrier`. After a loss, it waits longer by `lag_s`."""
        self._exchange.barrier(after_loss=after_loss)
        self.lost.intersection_update(self._exchange.masked)  # the others have come

    def take_number(self) -> int:
        """Local: the number of a new call, used once; right after `barrier` the same at all ranks that were in it."""
        return self._exchange.take_number()

    def raise_pending(self) -> None:
        """Does nothing: each call of this engine raises its own errors."""

    def close(self) -> None:
        self._exchange.close()

    def begin(
        self, call: str, device: torch.device, same: dict[str, int], counts: Tensor | None = None
    ) -> tuple[int, Tensor]:
        """Compares a call of all ranks: see `Exchange.begin`."""
        self.num_calls += 1
        return self._exchange.begin(call, list(range(self.grid.num_ranks)), device, same, counts=counts)

    def _columns(self, rows: Rows, topk_idx: Tensor, weights: Tensor | None) -> list[Tensor]:
        """The parts of a record: the row, where it goes (int32 is enough), where it comes from, and what is
        optional.
        """
        num_tokens = rows.data.shape[0]
        src = torch.full((num_tokens, 1), self.grid.rank, dtype=torch.int32, device=rows.data.device)
        columns = [rows.data, topk_idx.to(torch.int32), src]
        if weights is not None:
            columns.append(weights)
        if rows.scales is not None:
            columns.append(rows.scales)
        return columns


def _row_fields(rows: Rows) -> dict[str, int]:
    """The header fields of rows, on which ranks must agree."""
    fields = {"hidden": rows.data.shape[1], "dtype": dtype_code(rows.data.dtype)}
    if rows.scales is not None:
        fields |= {"scale_dtype": dtype_code(rows.scales.dtype), "num_scales": rows.scales.shape[1]}
    return fields


def _in_expert_range(
    topk_idx: Tensor, weights: Tensor | None, expert_range: tuple[int, int]
) -> tuple[Tensor, Tensor | None]:
    """Indices relative to the range, as int64; −1 and weight 0 outside it."""
    first, end = expert_range
    inside = (topk_idx >= first) & (topk_idx < end)
    relative = torch.where(inside, topk_idx - first, -1).to(torch.int64)
    return relative, None if weights is None else torch.where(inside, weights, 0.0)


def _pad(tensor: Tensor, num_rows: int, value: int = 0) -> Tensor:
    if tensor.shape[0] == num_rows:
        return tensor
    padded = tensor.new_zeros(num_rows, *tensor.shape[1:])
    padded[tensor.shape[0] :] = value
    padded[: tensor.shape[0]] = tensor
    return padded


def _padded(result: Dispatched, bound: int) -> Dispatched:
    """Returns the result, padded to `bound` rows."""
    data = _pad(result.rows.data.view(torch.uint8), bound).view(result.rows.data.dtype)
    scales = None if result.rows.scales is None else _pad(result.rows.scales, bound)
    weights = None if result.topk_weights is None else _pad(result.topk_weights, bound)
    handle = result.handle._replace(num_recv=bound)
    assert result.topk_idx is not None
    return Dispatched(Rows(data, scales), _pad(result.topk_idx, bound, -1), weights, None, handle)
