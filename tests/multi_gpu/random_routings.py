"""Random routings, which every rank draws for all, and checks of what a rank receives and gets back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import hybrid_ep
from tests.battery.normal import equal


class Tokens(NamedTuple):
    """What every rank sends; each rank draws all of it and so knows what it must receive."""

    x: list[Tensor]
    topk_idx: list[Tensor]
    weights: list[Tensor]
    num_experts: int

    def owner(self, rank: int) -> Tensor:
        """``[T, K]``: which rank owns the expert, or −1."""
        topk_idx = self.topk_idx[rank]
        num_local = self.num_experts // len(self.x)
        return torch.where(topk_idx >= 0, topk_idx.div(num_local, rounding_mode="floor"), -1)


def current_device() -> torch.device:
    """The current GPU, or the CPU where there is none, as in tests/emulation."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def draw_tokens(
    seed: int,
    tokens: list[int],
    hidden: int,
    topk: int,
    num_experts: int,
    holes: float = 0.0,
    repeats: bool = False,
) -> Tokens:
    """Draws on the current device; the same on every rank. With `repeats`, columns may name the same expert."""
    device = current_device()
    generator = torch.Generator(device).manual_seed(seed)
    drawn = Tokens([], [], [], num_experts)
    for num_tokens in tokens:
        scores = torch.rand(num_tokens, num_experts, device=device, generator=generator)
        topk_idx = scores.topk(topk, 1).indices
        if repeats:
            topk_idx = topk_idx.gather(1, torch.randint(topk, topk_idx.shape, device=device, generator=generator))
        topk_idx[torch.rand(num_tokens, topk, device=device, generator=generator) < holes] = -1
        drawn.topk_idx.append(topk_idx)
        drawn.x.append(torch.randn(num_tokens, hidden, device=device, generator=generator).to(torch.bfloat16))
        drawn.weights.append(torch.rand(num_tokens, topk, device=device, generator=generator))
    return drawn


def dispatch(buffer: hybrid_ep.Buffer, sent: Tokens, rank: int, **options: Any) -> tuple[Any, ...]:
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(sent.topk_idx[rank], sent.num_experts)
    return buffer.dispatch(
        sent.x[rank],
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=sent.topk_idx[rank],
        topk_weights=sent.weights[rank],
        **options,
    )


def check_received(result: tuple[Any, ...], sent: Tokens, rank: int, label: str, bound: int = 0) -> None:
    """Asserts every output of a dispatch."""
    recv_x, recv_idx, recv_weights, counts, _, _ = result
    num_ranks, num_local = len(sent.x), sent.num_experts // len(sent.x)
    owner = [sent.owner(r) for r in range(num_ranks)]
    mine = [(o == rank).any(1) for o in owner]
    n = sum(int(m.sum()) for m in mine)
    assert recv_x.shape[0] == (bound or n), f"{label}: {recv_x.shape[0]} rows, expected {n}"
    _same(recv_x[:n], torch.cat([a[m] for a, m in zip(sent.x, mine, strict=True)]), f"{label}: recv_x")
    local = [torch.where(o == rank, t - rank * num_local, -1) for o, t in zip(owner, sent.topk_idx, strict=True)]
    _same(recv_idx[:n], torch.cat([a[m] for a, m in zip(local, mine, strict=True)]), f"{label}: recv_topk_idx")
    held = [torch.where(o == rank, w, 0.0) for o, w in zip(owner, sent.weights, strict=True)]
    want = torch.cat([a[m] for a, m in zip(held, mine, strict=True)])
    _same(recv_weights[:n], want, f"{label}: recv_topk_weights")
    if bound:
        assert bool((recv_idx[n:] == -1).all()), f"{label}: rows after the last are not marked"
        assert bool((recv_weights[n:] == 0).all()), f"{label}: weights after the last are not 0"
    else:
        indices = torch.cat(local)
        per_expert = [int((indices == e).sum()) for e in range(num_local)]
        assert counts == per_expert, f"{label}: counts {counts}, expected {per_expert}"


def check_returned(combined: Tensor, home: Tensor, sent: Tokens, rank: int, label: str) -> None:
    """Asserts a combine in which every rank returned what it had received: each row as often as ranks had it."""
    owner = sent.owner(rank)
    times = torch.stack([(owner == r).any(1) for r in range(len(sent.x))]).sum(0)
    # fp32 sums of so few equal bf16 numbers are exact, so one product gives the same bits.
    want = (sent.x[rank].float() * times.unsqueeze(1)).to(torch.bfloat16)
    _same(combined, want, f"{label}: combined_x")
    kept = torch.where(sent.topk_idx[rank] >= 0, sent.weights[rank], 0.0)
    _same(home, kept, f"{label}: combined_topk_weights")


def _same(got: Tensor, want: Tensor, what: str) -> None:
    if not torch.equal(got, want):
        equal(got, want.cpu(), what)
