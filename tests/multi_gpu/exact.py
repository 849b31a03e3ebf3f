"""Low-latency round trips over any group, with any ranks missing, whose sums are exact in whatever order they are made.

Tokens are small integers and weights powers of two. The experts are left out: what a rank has received it sends back.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

import hybrid_ep
from tests.battery.normal import equal
from tests.multi_gpu.random_routings import Tokens, draw_tokens

MAX_TOKENS = 32
NUM_LOCAL_EXPERTS = 4


class RoundTrip(NamedTuple):
    """What a dispatch and a combine have returned."""

    packed: Tensor
    count: Tensor
    combined: Tensor


class _Started(NamedTuple):
    packed: Tensor
    count: Tensor
    handle: tuple[Tensor, ...]


def draw_exact(seed: int, num_ranks: int, hidden: int = 1024) -> Tokens:
    """Draws on the current device; the same on every rank, ragged between them."""
    tokens = [MAX_TOKENS - (seed + 5 * rank) % MAX_TOKENS for rank in range(num_ranks)]
    drawn = draw_tokens(seed, tokens, hidden, min(4, num_ranks), NUM_LOCAL_EXPERTS * num_ranks, holes=0.1)
    integers = [(8 * x.float()).round().clamp(-16, 16).to(torch.bfloat16) for x in drawn.x]
    powers = [torch.exp2(-(4 * weight).floor()) for weight in drawn.weights]
    return drawn._replace(x=integers, weights=powers)


def start_round_trip(buffer: hybrid_ep.Buffer, sent: Tokens) -> _Started:
    """The dispatch."""
    packed, count, handle, _, _ = buffer.low_latency_dispatch(
        sent.x[buffer.rank], sent.topk_idx[buffer.rank], MAX_TOKENS, sent.num_experts, use_fp8=False
    )
    assert isinstance(packed, Tensor)
    return _Started(packed, count, handle)


def finish_round_trip(buffer: hybrid_ep.Buffer, sent: Tokens, started: _Started) -> RoundTrip:
    """The combine."""
    topk_idx, weights = sent.topk_idx[buffer.rank], sent.weights[buffer.rank]
    combined, _, _ = buffer.low_latency_combine(started.packed, topk_idx, weights, started.handle)
    return RoundTrip(started.packed, started.count, combined)


def check_round_trip(result: RoundTrip, sent: Tokens, rank: int, lost: Collection[int] = ()) -> None:
    """Asserts rows, counts and sums; rows of lost ranks do not come, and their experts count as zero."""
    first = rank * NUM_LOCAL_EXPERTS
    for local in range(NUM_LOCAL_EXPERTS):
        rows = [
            x[(topk_idx == first + local).any(1)]
            for r, (x, topk_idx) in enumerate(zip(sent.x, sent.topk_idx, strict=True))
            if r not in lost
        ]
        want = torch.cat(rows)
        assert int(result.count[local]) == want.shape[0], f"expert {local}: {int(result.count[local])} rows"
        equal(result.packed[local, : want.shape[0]], want.cpu(), f"rows of expert {local}")
    owner = sent.owner(rank)
    counts = owner >= 0
    for r in lost:
        counts &= owner != r
    factor = torch.where(counts, sent.weights[rank], 0.0).sum(1, keepdim=True)
    equal(result.combined, (sent.x[rank].float() * factor).to(torch.bfloat16).cpu(), "combined_x")
