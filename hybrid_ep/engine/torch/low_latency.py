"""Low-latency dispatch and combine of the torch engine: one hop straight between all ranks that are not masked.

Everything happens when the returned `finish` is called, so a receive hook and an immediate call run the same lines.
Ranks that use hooks must call them in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_ep.agree.fields import dtype_code, format_code
from hybrid_ep.core.layout import compute_layout, permutation_by_expert
from hybrid_ep.core.logfmt import cast_from_logfmt, cast_to_logfmt
from hybrid_ep.engine.calls import (
    SEND_TIMEOUT_DIVISOR,
    ExpertSignals,
    LowLatencyCombineRequest,
    LowLatencyDispatched,
    LowLatencyDispatchRequest,
    LowLatencyHandle,
    Rows,
    missing_signal,
    state_of,
)
from hybrid_ep.engine.packed import PackedLayout
from hybrid_ep.engine.torch.exchange import Exchange
from hybrid_ep.engine.torch.hop import Hop
from hybrid_ep.engine.torch.records import RecordFormat
from hybrid_ep.errors import ConfigError, OverflowError
from hybrid_ep.quantize import Nvfp4Format, RowFormat, cast_to_fp8, cast_to_nvfp4

_COUNT_MASK = (1 << 32) - 1  # of layout_range
_SIGNAL_POLL_S = 1e-4


@dataclass
class _State:
    """Kept in a LowLatencyHandle.

    Attributes:
        topk_idx: ``[T, K]`` int64, as dispatched.
        ranks: the ranks that took part.
        number: of the dispatch, equal at all ranks and of no other, of any buffer of the group.
        is_finished: whether its `finish` has received the rows.
    """

    topk_idx: Tensor
    ranks: list[int]
    number: int
    is_finished: bool = False


class TorchLowLatency:
    """The two low-latency calls over one exchange."""

    def __init__(self, exchange: Exchange, timeout_s: float) -> None:
        self._exchange, self._timeout_s = exchange, timeout_s

    def dispatch(self, request: LowLatencyDispatchRequest) -> LowLatencyDispatched:
        data, topk_idx, num_max_tokens_per_rank, num_experts, fmt, global_scale, wait_stats, _ = request
        exchange, grid = self._exchange, self._exchange.grid
        num_local, capacity = num_experts // grid.num_ranks, num_max_tokens_per_rank * grid.num_ranks
        hidden, device = data.shape[1], data.device
        layout_of_rows = PackedLayout.of(num_local, capacity, hidden, fmt)
        packed = layout_of_rows.empty(device)
        count = torch.zeros(num_local, dtype=torch.int32, device=device)
        src_info = torch.full((num_local, capacity), -1, dtype=torch.int32, device=device)
        layout_range = torch.zeros(num_local, grid.num_ranks, dtype=torch.int64, device=device)
        call = exchange.take_number()
        state = _State(topk_idx, [], exchange.handle_number(call))
        sizes = num_max_tokens_per_rank, hidden, num_experts
        handle = LowLatencyHandle((src_info, layout_range), *sizes, grid, count, state)

        def finish() -> None:
            rows = _quantised(data, fmt, global_scale)
            token = torch.arange(data.shape[0], dtype=torch.int32, device=device).unsqueeze(1)
            columns = [rows.data, topk_idx.to(torch.int32), token]
            if rows.scales is not None:
                columns.append(rows.scales)
            record = RecordFormat.of(columns)
            ranks = state.ranks = exchange.active(range(grid.num_ranks))
            same = {
                "num_experts": num_experts,
                "num_topk": topk_idx.shape[1],
                "hidden": hidden,
                "dtype": dtype_code(rows.data.dtype),
                "max_tokens": num_max_tokens_per_rank,
                "masked": exchange.mask_bits(),
                "scale_format": format_code(fmt),
            }
            if global_scale is not None:
                # The kernels send the upper half of the bits.
                same["global_scale"] = int(global_scale.view(torch.int32)) >> 16 & 0xFFFF
            if rows.scales is not None:
                same |= {"scale_dtype": dtype_code(rows.scales.dtype), "num_scales": rows.scales.shape[1]}
            exchange.begin("low_latency_dispatch", ranks, device, same, call_number=call, wait_stats=wait_stats)
            layout = compute_layout(topk_idx, num_experts, grid.num_ranks, grid.num_ranks_per_domain)
            goes = layout.is_token_in_rank[:, ranks]
            hop = Hop.plan(exchange, "between ranks", ranks, goes)
            arrived = record.unpack(hop.forward(exchange, record.pack(columns), wait_stats))

            # Rows arrived by source rank, then token; each has an index for every column that names a local expert.
            local = arrived[1].to(torch.int64) - grid.rank * num_local
            local = torch.where((local >= 0) & (local < num_local), local, -1)
            copies = permutation_by_expert(local, num_local, 1)
            # Tokens may name an expert in several columns.
            most = copies.num_tokens_per_expert.max().to(torch.int64).view(1)
            for r, (rows_there,) in zip(ranks, exchange.all_gather("most rows", most, ranks).tolist(), strict=True):
                if rows_there > capacity:
                    raise OverflowError(
                        f"low_latency_dispatch: rows: {rows_there} at rank {r}; allowed by the bound: {capacity}"
                    )
            state.is_finished = True
            count.copy_(copies.num_tokens_per_expert)
            begin = count.cumsum(0) - count
            expert = torch.repeat_interleave(torch.arange(num_local, device=device), count)
            row = torch.arange(expert.numel(), device=device) - begin[expert]
            _as_storable(packed.data)[expert, row] = _as_storable(arrived[0])[copies.row]
            if packed.scales is not None:
                layout_of_rows.store_scales(packed.scales, expert, row, arrived[3][copies.row])
            src_info[expert, row] = arrived[2][copies.row, 0]
            sources = torch.repeat_interleave(
                torch.tensor(ranks, device="cpu"), torch.tensor(hop.recv_counts, device="cpu")
            ).to(device)
            counts = torch.zeros_like(layout_range)
            counts.index_put_((expert, sources[copies.row]), torch.ones_like(expert), accumulate=True)
            layout_range.copy_(((counts.cumsum(1) - counts) << 32) | counts)

        return LowLatencyDispatched(packed, count, handle, finish)

    def combine(self, request: LowLatencyCombineRequest, handle: LowLatencyHandle) -> Callable[[], None]:
        data, topk_idx, topk_weights, out, use_logfmt, wait_stats, signals, _ = request
        exchange, grid = self._exchange, self._exchange.grid
        try:
            state = state_of(handle, _State)
            if not torch.equal(topk_idx, state.topk_idx):
                raise ConfigError("topk_idx is another routing than the handle's; allowed: the one that was dispatched")
            if not state.is_finished:
                raise ConfigError("handle is of a dispatch whose hook has not been called; allowed: calling it first")
        except ConfigError as error:
            exchange.refuse("low_latency_combine", error)
            raise
        num_local = handle.num_experts // grid.num_ranks
        call = exchange.take_number()

        def finish() -> None:
            ranks = [r for r in state.ranks if r not in exchange.masked]
            same = {
                "num_topk": topk_idx.shape[1],
                "hidden": handle.hidden,
                "handle": state.number,
                "masked": exchange.mask_bits(),
                "use_logfmt": int(use_logfmt),
            }
            exchange.begin("low_latency_combine", ranks, data.device, same, call_number=call, wait_stats=wait_stats)
            missing = (
                None if signals is None else _first_missing(signals, handle, self._timeout_s / SEND_TIMEOUT_DIVISOR)
            )
            # Both sides know the order of the rows between two ranks: by local expert, then by token.
            outgoing = {r: _rows_of_source(data, handle.layout_range, r) for r in ranks}
            owner = torch.where(topk_idx >= 0, topk_idx.div(num_local, rounding_mode="floor"), -1)
            wanted = {r: _by_expert_then_token(topk_idx, owner == r) for r in ranks}
            rows = {r: data.new_empty(token.numel(), handle.hidden) for r, (token, _) in wanted.items()}
            exchange.swap(
                "rows between ranks",
                {r: t.reshape(-1).view(torch.uint8) for r, t in outgoing.items()},
                {r: t.view(-1).view(torch.uint8) for r, t in rows.items()},
                wait_stats,
            )
            copies = data.new_zeros(*topk_idx.shape, handle.hidden)
            for r, (token, column) in wanted.items():
                copies[token, column] = rows[r]
            weights = torch.where(topk_idx >= 0, topk_weights, 0.0)
            # Each rank publishes how many tokens a source must have for its rows to be sums. This rank computes those
            # sums. A negative value: −1 − the index of a signal that did not come.
            smallest = request.min_tokens_to_sum
            minimum = torch.tensor([smallest if missing is None else -1 - missing], device=data.device)
            minima = exchange.all_gather("tokens from which on rows are summed", minimum, ranks, wait_stats)
            for r, (their_minimum,) in zip(ranks, minima.tolist(), strict=True):
                if their_minimum < 0:
                    waited_s = self._timeout_s / SEND_TIMEOUT_DIVISOR
                    raise missing_signal(grid.rank, r, -1 - their_minimum, waited_s)
                # Rows of other domains are not summed: weights would have to cross first.
                if topk_idx.shape[0] >= their_minimum and r in grid.domain:
                    copies, weights = _sum_rows_of(copies, weights, owner == r)
            # The rows have crossed as bf16; this applies the error of LogFMT-10.
            terms = cast_from_logfmt(*cast_to_logfmt(copies)) if use_logfmt else copies
            out.copy_(_weighted_sum(terms, weights))

        return finish


def _first_missing(signals: ExpertSignals, handle: LowLatencyHandle, timeout_s: float) -> int | None:
    """Waits until the experts have signalled all their rows; returns the index of a signal that is missing then.

    Counters on a GPU are copied in the order of the current stream: the experts are on another one.
    """
    counts = (handle.layout_range & _COUNT_MASK).sum(1, keepdim=True)
    num_blocks = -(-counts // signals.rows_per_signal)
    needed = torch.arange(signals.num_per_expert, device=counts.device) < num_blocks
    raised = signals.raised.view(torch.int32)[: needed.numel()].view(needed.shape)
    deadline = time.perf_counter() + timeout_s
    while True:
        missing = torch.nonzero((needed & (raised < signals.expected)).view(-1))
        if not missing.numel():
            return None
        if time.perf_counter() > deadline:
            return int(missing[0])
        time.sleep(_SIGNAL_POLL_S)


def _weighted_sum(rows: Tensor, weights: Tensor) -> Tensor:
    """``[T, H]`` float32: Σ_k weight × row of ``[T, K, H]``, in order."""
    total = rows.new_zeros(rows.shape[0], rows.shape[2], dtype=torch.float32)
    for k in range(rows.shape[1]):
        total += rows[:, k].float() * weights[:, k].unsqueeze(1)
    return total


def _sum_rows_of(rows: Tensor, weights: Tensor, is_there: Tensor) -> tuple[Tensor, Tensor]:
    """Sums the rows of each token that are on one rank, where there are several, into the first one's column.

    Args:
        rows: ``[T, K, H]`` bf16.
        weights: ``[T, K]`` float32.
        is_there: ``[T, K]``, whether the row is on the rank.

    Returns:
        Rows, and weights that are 1 for a sum and 0 for a row that went into one.
    """
    is_sum = is_there & (is_there.sum(1, keepdim=True) > 1)
    is_first = is_sum & (is_sum.cumsum(1) == 1)
    total = _weighted_sum(rows, torch.where(is_sum, weights, 0.0)).to(rows.dtype)
    rows = torch.where(is_first.unsqueeze(2), total.unsqueeze(1), rows)
    return rows, torch.where(is_first, 1.0, torch.where(is_sum, 0.0, weights))


def _quantised(data: Tensor, fmt: RowFormat | None, global_scale: Tensor | None) -> Rows:
    """Rows as they travel; scales in words of 4 bytes."""
    if fmt is None:
        return Rows(data)
    if isinstance(fmt, Nvfp4Format):
        rows, scales, _ = cast_to_nvfp4(data, global_scale, fmt)
        return Rows(rows, scales.view(torch.int32))
    return Rows(*cast_to_fp8(data, fmt))


def _as_storable(tensor: Tensor) -> Tensor:
    """FP8 as uint8: indexed assignment is not implemented for float8 everywhere."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def _rows_of_source(data: Tensor, layout_range: Tensor, rank: int) -> Tensor:
    """The packed rows that came from `rank`, by local expert, then token."""
    ranges = layout_range[:, rank].tolist()
    parts = [data[e, begin : begin + count] for e, (begin, count) in enumerate(divmod(r, 1 << 32) for r in ranges)]
    return torch.cat(parts)


def _by_expert_then_token(topk_idx: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Positions (token, column) of the chosen entries, by expert, then token, then column."""
    token, column = torch.nonzero(chosen, as_tuple=True)
    order = torch.argsort(topk_idx[token, column], stable=True)
    return token[order], column[order]
