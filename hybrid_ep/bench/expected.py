"""The rows that must arrive and come back, made from the seed alone, without communication. Measures nothing.

Rows are compared exactly, as a set: a library may choose their order, if its handle returns them to their tokens. In
low-latency mode the library itself quantises, so fp8 rows may differ by one step of e4m3 there. A factor that depends
on the rank takes the place of experts, so that a row combined from the wrong rank is noticed.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from hybrid_ep.bench.machine import rank_device
from hybrid_ep.bench.plan import BenchPlan
from hybrid_ep.bench.subjects import Received
from hybrid_ep.quantize import cast_from_fp8, cast_to_fp8
from hybrid_ep.testing.batch import Batch, make_batch
from hybrid_ep.workload import Workload

_BF16_UNIT = 2.0**-8
_MOST_ROUNDINGS = 4  # an expert's row, a rank's sum, a domain's sum, the result
_NUM_KEY_CHANNELS = 16
_E4M3_STEP = 2.0**-3  # between neighbours, relative to the smaller


def expert_factor(rank: int) -> float:
    """Returns the factor by which the experts of a rank multiply rows; exact in bf16, never 0."""
    return 1.0 + (rank % 4) / 4


def check_received(received: Received, plan: BenchPlan, rank: int, num_ranks: int) -> list[str]:
    """Compares what arrived with what had to; returns problems in words, empty = good."""
    expected = _expected(plan.workload, plan.mode, plan.device, rank, num_ranks)
    if received.rows.shape != expected.rows.shape:
        return [f"rank {rank} received {received.rows.shape[0]} rows, not {expected.rows.shape[0]}"]
    if plan.mode == "low-latency":
        # Sources are known, so rows can be put in the order of (expert, source rank, token).
        order, expected_order = _lexicographic(received.labels), _lexicographic(expected.labels)
    else:
        order, expected_order = _by_content(received, plan.mode), _by_content(expected, plan.mode)
    found = []
    if not torch.equal(received.labels[order], expected.labels[expected_order]):
        found.append(f"rank {rank} received rows with other experts, weights or sources than were sent")
    rows, wanted = received.rows[order], expected.rows[expected_order]
    if plan.mode == "low-latency" and plan.workload.dtype == "fp8":
        # A step where values are small is a step of the block's smallest numbers, 2⁻⁹ of 448 steps below its largest.
        floor = wanted.abs().amax(1, keepdim=True) * 2.0**-17
        wrong = bool(((rows - wanted).abs() > _E4M3_STEP * wanted.abs() + floor).any())
    else:
        wrong = not torch.equal(rows, wanted)
    if wrong:
        found.append(f"rank {rank} received rows that differ from those sent")
    return found


def check_combined(combined: Tensor, batch: Batch, plan: BenchPlan, rank: int, num_ranks: int) -> list[str]:
    """Compares the sum that came back with the exact one, within four roundings to bf16; returns problems."""
    workload = plan.workload
    num_local = workload.num_experts // num_ranks
    owner = batch.topk_idx.div(num_local, rounding_mode="floor")
    factors = torch.tensor([expert_factor(r) for r in range(num_ranks)], dtype=torch.float64, device=owner.device)
    if plan.mode == "low-latency":
        multiple = (factors[owner] * batch.topk_weights.double()).sum(1)
    elif plan.mode == "permute":
        multiple = factors[owner].sum(1)
    else:
        goes = torch.zeros(owner.shape[0], num_ranks, dtype=torch.float64, device=owner.device).scatter_(1, owner, 1.0)
        multiple = goes @ factors
    x = _as_sent(batch.x, workload.dtype).double()
    allowed = (1 + _BF16_UNIT) ** _MOST_ROUNDINGS - 1
    if plan.mode == "low-latency" and workload.dtype == "fp8":
        allowed += _E4M3_STEP
    exact = x * multiple.unsqueeze(1)
    error = (combined.double() - exact).abs()
    floor = exact.abs().amax(1, keepdim=True) * 2.0**-17
    wrong = int((~(error <= allowed * exact.abs() + floor)).any(1).sum())
    return [f"rank {rank} got {wrong} of {x.shape[0]} combined rows wrong"] if wrong else []


@lru_cache(maxsize=1)  # the candidates of a plan expect the same
def _expected(workload: Workload, mode: str, device: str, rank: int, num_ranks: int) -> Received:
    num_local = workload.num_experts // num_ranks
    rows, labels = [], []
    on = rank_device(device)
    for source in range(num_ranks):
        batch = make_batch(workload, source, on)
        local = batch.topk_idx - rank * num_local
        mine = (local >= 0) & (local < num_local)
        local = torch.where(mine, local, -1)
        weights = torch.where(mine, batch.topk_weights, 0.0)
        if mode == "normal":
            token = torch.nonzero(mine.any(1)).flatten()
            labels.append(torch.cat([local.double(), weights.double()], 1)[token])
        else:
            token, column = torch.nonzero(mine, as_tuple=True)
            second = weights[token, column].double()
            columns = [local[token, column].double(), second]
            if mode == "low-latency":
                columns = [columns[0], torch.full_like(second, source), token.double()]
            labels.append(torch.stack(columns, 1))
        rows.append(_as_sent(batch.x, workload.dtype)[token])
    return Received(torch.cat(rows), torch.cat(labels))


def _as_sent(x: Tensor, dtype: str) -> Tensor:
    """``[T, H]`` float32: the rows as they are after quantisation."""
    return cast_from_fp8(*cast_to_fp8(x), torch.float32) if dtype == "fp8" else x.float()


def _by_content(received: Received, mode: str) -> Tensor:
    """An order that depends on nothing but what is in the rows: by their expert where each has one, then by channels.

    Tokens are random: their first channels differ.
    """
    key = received.rows[:, :_NUM_KEY_CHANNELS].double()
    return _lexicographic(torch.cat([received.labels[:, :1], key], 1) if mode == "permute" else key)


def _lexicographic(columns: Tensor) -> Tensor:
    """The order of rows by column 0, then 1, …"""
    order = torch.arange(columns.shape[0], device=columns.device)
    for column in reversed(range(columns.shape[1])):
        order = order[torch.argsort(columns[order, column], stable=True)]
    return order
