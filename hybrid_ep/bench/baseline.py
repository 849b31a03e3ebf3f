"""The baseline that needs no library: `all_to_all_single` of rows, NCCL on GPUs and gloo on a CPU.

Rows cross once for each destination rank, as in every good implementation. The baseline has no domains, overlaps
nothing and fuses nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep.bench.plan import BenchPlan
from hybrid_ep.bench.subject import Received, Subject, as_float32
from hybrid_ep.core.layout import Permutation, compute_layout, permutation_by_expert
from hybrid_ep.quantize import cast_to_fp8
from hybrid_ep.testing.batch import Batch

__all__ = ["AllToAllSubject"]


class _Dispatched(NamedTuple):
    """Attributes:
    columns: received rows, their scales where there are any, local experts ``[N, K]`` and weights ``[N, K]``.
    send_idx: ``[S]`` int64, the token of each row that was sent, by destination rank.
    num_sent, num_received: rows by rank.
    permutation: how rows are grouped by expert (permute mode).
    """

    columns: list[Tensor]
    send_idx: Tensor
    num_sent: list[int]
    num_received: list[int]
    permutation: Permutation | None


class AllToAllSubject(Subject):
    """Counts, then rows, experts and weights, each in one `all_to_all_single`.

    Args:
        plan: what is measured; modes normal and permute.
        batch: this rank's tokens.
    """

    def __init__(self, plan: BenchPlan, batch: Batch) -> None:
        self.engine = dist.get_backend()
        self.waiting_calls = frozenset({"dispatch"})
        self.plan, self.batch = plan, batch
        self.num_ranks = dist.get_world_size()
        self.num_local_experts = plan.workload.num_experts // self.num_ranks
        self.tokens = list(cast_to_fp8(batch.x)) if plan.workload.dtype == "fp8" else [batch.x]

    def dispatch(self) -> _Dispatched:
        topk_idx, topk_weights = self.batch.topk_idx, self.batch.topk_weights
        layout = compute_layout(topk_idx, self.plan.workload.num_experts, self.num_ranks, self.num_ranks)
        send_idx = torch.nonzero(layout.is_token_in_rank.t())[:, 1]
        received = torch.empty_like(layout.num_tokens_per_rank)
        dist.all_to_all_single(received, layout.num_tokens_per_rank)
        num_sent, num_received = layout.num_tokens_per_rank.tolist(), received.tolist()
        columns = [
            _all_to_all(column[send_idx], num_sent, num_received) for column in (*self.tokens, topk_idx, topk_weights)
        ]
        first = dist.get_rank() * self.num_local_experts
        mine = (columns[-2] >= first) & (columns[-2] < first + self.num_local_experts)
        columns[-2] = torch.where(mine, columns[-2] - first, -1)
        columns[-1] = torch.where(mine, columns[-1], 0.0)
        permutation = None
        if self.plan.mode == "permute":
            permutation = permutation_by_expert(columns[-2], self.num_local_experts, 1)
            columns[:-2] = [_bytes(column)[permutation.row].view(column.dtype) for column in columns[:-2]]
        return _Dispatched(columns, send_idx, num_sent, num_received, permutation)

    def received(self, dispatched: _Dispatched) -> Received:
        *_, topk_idx, topk_weights = dispatched.columns
        labels = torch.cat([topk_idx.double(), topk_weights.double()], 1)
        if dispatched.permutation is not None:
            row, column = dispatched.permutation.row, dispatched.permutation.column
            labels = torch.stack([topk_idx[row, column].double(), topk_weights[row, column].double()], 1)
        return Received(self._rows(dispatched), labels)

    def outputs(self, dispatched: _Dispatched, factor: float) -> Tensor:
        return (self._rows(dispatched) * factor).to(torch.bfloat16)

    def combine(self, dispatched: _Dispatched, outputs: Tensor) -> Tensor:
        if dispatched.permutation is not None:
            sums = outputs.new_zeros(sum(dispatched.num_received), outputs.shape[1], dtype=torch.float32)
            outputs = sums.index_add_(0, dispatched.permutation.row, outputs.float()).to(outputs.dtype)
        home = _all_to_all(outputs, dispatched.num_received, dispatched.num_sent)
        total = torch.zeros(self.batch.x.shape, dtype=torch.float32, device=outputs.device)
        return total.index_add_(0, dispatched.send_idx, home.float()).to(torch.bfloat16)

    @staticmethod
    def _rows(dispatched: _Dispatched) -> Tensor:
        data = dispatched.columns[:-2]
        return as_float32((data[0], data[1]) if len(data) == 2 else data[0])


def _bytes(rows: Tensor) -> Tensor:
    """fp8 as bytes: neither indexing nor every backend takes float8."""
    return rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows


def _all_to_all(rows: Tensor, num_sent: list[int], num_received: list[int]) -> Tensor:
    sent = rows.contiguous().view(torch.uint8)
    received = sent.new_empty(sum(num_received), sent.shape[1])
    dist.all_to_all_single(received, sent, num_received, num_sent)
    return received.view(rows.dtype)
