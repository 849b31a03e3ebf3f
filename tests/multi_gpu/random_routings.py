"""Many random routings through one buffer, checked on the GPU; shapes, holes, bounds and SM counts vary."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist
from torch import Tensor

import hybrid_ep
from hybrid_ep.config import Config
from tests.battery.normal import equal

__all__ = ["check_random_routings"]


def check_random_routings(count: int) -> None:
    """Every rank draws the same shapes and, for each rank, the same routing; so each knows what it must receive."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank)
    with hybrid_ep.Buffer(dist.group.WORLD, engine="cuda") as buffer:
        for seed in range(count):
            draw = random.Random(seed)
            _check_one(buffer, draw, seed, rank, num_ranks, device)


def _check_one(
    buffer: hybrid_ep.Buffer, draw: random.Random, seed: int, rank: int, num_ranks: int, device: torch.device
) -> None:
    num_experts = num_ranks * draw.choice([1, 2, 5, 8, 32])
    topk = draw.randint(1, min(num_experts, 12))
    hidden = 8 * draw.choice([1, 3, 16, 64, 448])
    tokens = [draw.choice([0, 1, 7, 64, draw.randint(0, 300)]) for _ in range(num_ranks)]
    holes = draw.choice([0.0, 0.0, 0.3, 0.95])
    bound = sum(tokens) + draw.randint(1, 9) if draw.random() < 0.5 else 0
    config = Config(num_sms=draw.choice([1, 2, 7, 16, 24]))
    generator = torch.Generator(device).manual_seed(seed)
    topk_idx, x = [], []
    for num_tokens in tokens:
        drawn = torch.rand(num_tokens, num_experts, device=device, generator=generator).topk(topk, 1).indices
        drawn[torch.rand(num_tokens, topk, device=device, generator=generator) < holes] = -1
        topk_idx.append(drawn)
        x.append(torch.randn(num_tokens, hidden, device=device, generator=generator).to(torch.bfloat16))
    weights = [torch.rand(t.shape, device=device, generator=generator) for t in topk_idx]

    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx[rank], num_experts)
    recv_x, recv_idx, recv_weights, counts, handle, _ = buffer.dispatch(
        x[rank],
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=topk_idx[rank],
        topk_weights=weights[rank],
        num_worst_tokens=bound,
        config=config,
    )
    combined, home, _ = buffer.combine(recv_x, handle, recv_weights, config=config)

    num_local = num_experts // num_ranks
    owner = [torch.where(t >= 0, t.div(num_local, rounding_mode="floor"), -1) for t in topk_idx]
    mine = [(o == rank).any(1) for o in owner]
    n = sum(int(m.sum()) for m in mine)
    assert recv_x.shape[0] == (bound or n), f"seed {seed}: {recv_x.shape[0]} rows, expected {n}"
    _same(recv_x[:n], torch.cat([a[m] for a, m in zip(x, mine, strict=True)]), seed, "recv_x")
    local = [torch.where(o == rank, t - rank * num_local, -1) for o, t in zip(owner, topk_idx, strict=True)]
    _same(recv_idx[:n], torch.cat([a[m] for a, m in zip(local, mine, strict=True)]), seed, "recv_topk_idx")
    held = [torch.where(o == rank, w, 0.0) for o, w in zip(owner, weights, strict=True)]
    _same(recv_weights[:n], torch.cat([a[m] for a, m in zip(held, mine, strict=True)]), seed, "recv_topk_weights")
    if not bound:
        indices = torch.cat(local)
        want = [int((indices == e).sum()) for e in range(num_local)]
        assert counts == want, f"seed {seed}: counts {counts}, expected {want}"
    # Every rank returns what it received: the sum is the row times the number of ranks it went to.
    times = sum((owner[rank] == r).any(1).float() for r in range(num_ranks))
    assert isinstance(times, Tensor)
    _same(combined, _sum_of_copies(x[rank], times), seed, "combined_x")
    _same(home, torch.where(topk_idx[rank] >= 0, weights[rank], 0.0), seed, "combined_topk_weights")


def _sum_of_copies(x: Tensor, times: Tensor) -> Tensor:
    """fp32 sums of equal bf16 numbers are exact for as many ranks as there are, so one product gives the same bits."""
    return (x.float() * times.unsqueeze(1)).to(torch.bfloat16)


def _same(got: Tensor, want: Tensor, seed: int, what: str) -> None:
    if not torch.equal(got, want):
        equal(got, want.cpu(), f"seed {seed}: {what}")
