"""Calls of one buffer whose numbers of tokens, widths and formats change from one call to the next."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist

import hybrid_ep
from hybrid_ep.quantize import cast_to_fp8
from tests.battery import low_latency, normal
from tests.battery.cases import Case, row_of
from tests.battery.normal import equal, make_buffer, on

_TOKENS = 0, 1, 3, 8, 12, 17, 31, 40
_ROUTINGS = "uniform", "holes", "duplicates", "hot"
_MOST_TOKENS = max(_TOKENS)


def check_changing_sizes(num_ranks: int, device: str = "cpu", seed: int = 0) -> None:
    """Twenty sizes in random order, each with and without a bound, along its handle, combined, and in low latency."""
    draw = random.Random(seed)
    first = Case("first", num_ranks, 1)
    with make_buffer(first, low_latency_mode=True) as buffer:
        for number in range(20):
            case = Case(
                f"size {number}",
                num_ranks,
                tuple(draw.choice(_TOKENS) for _ in range(num_ranks)),
                hidden=draw.choice((128, 256, 512)),
                topk=draw.choice((1, 2, 4)),
                num_experts=num_ranks * draw.choice((4, 6)),
                routing=draw.choice(_ROUTINGS),
                seed=number,
            )
            _check_normal(buffer, case, device, is_bounded=draw.random() < 0.5, is_fp8=draw.random() < 0.5)
            if number % 4 == 0:
                _check_low_latency(buffer, case, device)


def _check_normal(buffer: hybrid_ep.Buffer, case: Case, device: str, *, is_bounded: bool, is_fp8: bool) -> None:
    rank = dist.get_rank()
    reference, inputs = case.reference(), on(device, case.inputs(rank))
    rows, sources = reference.received(rank), [case.inputs(r).x for r in range(case.num_ranks)]
    n, x = len(rows), cast_to_fp8(inputs.x) if is_fp8 else inputs.x
    options = {"num_worst_tokens": sum(case.tokens_of(r) for r in range(case.num_ranks)) + 1} if is_bounded else {}
    received, recv_idx, recv_weights, counts, handle, _ = normal.dispatch(buffer, case, inputs, x, **options)
    along = buffer.dispatch(x, handle)[0]
    if is_fp8:
        wanted = [cast_to_fp8(source) for source in sources]
        for part in range(2):
            want = normal.gather_rows(case, rows, [source[part] for source in wanted])
            for name, got in ("recv_x", received[part]), ("recv_x along a handle", along[part]):
                equal(got[:n], want, f"{name}, part {part}")
    else:
        want = normal.gather_rows(case, rows, sources)
        for name, got in ("recv_x", received), ("recv_x along a handle", along):
            equal(got[:n], want, name)
    equal(recv_idx[:n], reference.received_topk(rank), "recv_topk_idx")
    assert bool((recv_idx[n:] == -1).all())
    assert counts == ([] if is_bounded else list(reference.tokens_per_expert(rank)))
    y = torch.zeros(recv_idx.shape[0], case.hidden, dtype=torch.bfloat16)
    y[:n] = normal.returned(case, rank, rows)
    bias = row_of(case.seed, rank, 0, 0, case.hidden * case.tokens_of(rank)).view(-1, case.hidden)
    combined, weights, _ = buffer.combine(y.to(device), handle, recv_weights, bias=bias.to(device))
    equal(combined, normal.expected_combine(case, rank, (bias,)), "combined_x")
    equal(weights, normal.expected_weight_sum(case, rank), "combined_topk_weights")


def _check_low_latency(buffer: hybrid_ep.Buffer, case: Case, device: str) -> None:
    rank = dist.get_rank()
    inputs = on(device, case.inputs(rank))
    _, counts, handle, _, _ = buffer.low_latency_dispatch(
        inputs.x, inputs.topk_idx, _MOST_TOKENS, case.num_experts, use_fp8=False
    )
    assert counts.tolist() == [len(copies) for copies in low_latency.expert_copies(case, rank)]
    y = low_latency.expert_output(case, rank, _MOST_TOKENS * case.num_ranks).to(device)
    combined, _, _ = buffer.low_latency_combine(y, inputs.topk_idx, inputs.topk_weights, handle)
    equal(combined, low_latency.expected_combine(case, rank, lambda _: False), "combined_x of low latency")
