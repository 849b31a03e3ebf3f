"""Autograd through dispatch and combine, and a layer that trains, against a dense single-process mixture in float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import hybrid_ep
from hybrid_ep.nn import MoECombine, MoEDispatch, MoELayer
from hybrid_ep.testing.reference import dense_moe
from tests.battery.cases import Case
from tests.conftest import RunRanks

BF16_STEP = 2.0**-8  # half the distance between neighbouring bf16 values, relative


def _gradients(case: Case) -> None:
    """Y = combine(weight × recv_x); its gradients are known in closed form."""
    rank = dist.get_rank()
    inputs = case.inputs(rank)
    x = inputs.x.clone().requires_grad_()
    weights = inputs.topk_weights.clone().requires_grad_()
    with hybrid_ep.Buffer(num_ranks_per_domain=case.num_ranks_per_domain) as buffer:
        tokens = MoEDispatch(buffer, case.num_experts)(x, inputs.topk_idx, weights)
        scaled = (tokens.x.float() * tokens.topk_weights.sum(1, keepdim=True)).to(torch.bfloat16)
        y = MoECombine(buffer)(scaled, tokens.handle)
        pull = torch.randn(y.shape, generator=torch.Generator().manual_seed(rank))
        (y.float() * pull).sum().backward()
    kept = (inputs.topk_idx >= 0).float()
    total = (inputs.topk_weights * kept).sum(1, keepdim=True)
    # Every product and every partial sum is rounded to bf16: at most one rounding for each rank and hop.
    bound = BF16_STEP * (case.num_ranks + 4)
    assert x.grad is not None
    assert weights.grad is not None
    _close(y.detach(), inputs.x.float() * total, bound)
    _close(x.grad, pull * total, bound)
    dot = (pull * inputs.x.float()).sum(1, keepdim=True)
    scale = (pull.abs() * inputs.x.float().abs()).sum(1, keepdim=True)
    assert bool(((weights.grad - dot * kept).abs() <= bound * scale + 1e-6).all())


def _close(got: Tensor, want: Tensor, bound: float) -> None:
    error = (got.float() - want).abs()
    assert bool((error <= bound * want.abs() + bound * 1e-2).all()), f"largest error {error.max():.3g}"


@pytest.mark.parametrize(
    "case",
    [
        Case("one_rank", 1, 20, hidden=64),
        Case("four_ranks", 4, 20, hidden=64),
        Case("ragged", 4, (3, 0, 17, 8), hidden=64),
        Case("holes", 4, 20, hidden=64, routing="holes"),
        Case("duplicates", 4, 20, hidden=64, routing="duplicates"),
        Case("two_domains", 4, 20, hidden=64, num_ranks_per_domain=2),
    ],
    ids=lambda case: case.id,
)
def test_gradients(run_ranks: RunRanks, case: Case) -> None:
    run_ranks(case.num_ranks, _gradients, case)


HIDDEN, WIDTH, EXPERTS, TOPK, TOKENS = 32, 48, 8, 2, 24


def _layer_gradients(num_ranks_per_domain: int | None) -> dict[str, Tensor]:
    """Outputs and gradients of the layer on this rank."""
    x = _tokens(dist.get_rank()).requires_grad_()
    with hybrid_ep.Buffer(num_ranks_per_domain=num_ranks_per_domain) as buffer:
        layer = MoELayer(buffer, hidden=HIDDEN, ffn_hidden=WIDTH, num_experts=EXPERTS, topk=TOPK, seed=3)
        y = layer(x)
        (y * _pull(dist.get_rank())).sum().backward()
    assert layer.router.grad is not None
    return {
        "y": y.detach(),
        "x": x.grad,
        "router": layer.router.grad,
        "up": layer.experts.up.grad.to_local(),
        "down": layer.experts.down.grad.to_local(),
    }


def _tokens(rank: int) -> Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(50 + rank)).bfloat16().float()


def _pull(rank: int) -> Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(90 + rank))


@pytest.mark.parametrize("num_ranks_per_domain", [None, 2], ids=["one_domain", "two_domains"])
def test_layer_agrees_with_a_dense_mixture(run_ranks: RunRanks, num_ranks_per_domain: int | None) -> None:
    num_ranks = 4
    results = run_ranks(num_ranks, _layer_gradients, num_ranks_per_domain)
    with hybrid_ep.Buffer(None) as alone:
        dense = MoELayer(alone, hidden=HIDDEN, ffn_hidden=WIDTH, num_experts=EXPERTS, topk=TOPK, seed=3).double()
    x = torch.cat([_tokens(rank) for rank in range(num_ranks)]).double().requires_grad_()
    probs = F.softmax(x @ dense.router.t(), dim=-1)
    weights, topk_idx = probs.topk(TOPK, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    outputs = torch.stack([F.gelu(x @ dense.experts.up[e].t()) @ dense.experts.down[e].t() for e in range(EXPERTS)])
    y = (outputs[topk_idx, torch.arange(x.shape[0]).unsqueeze(1)] * weights.unsqueeze(-1)).sum(1)
    pull = torch.cat([_pull(rank) for rank in range(num_ranks)]).double()
    ((y * pull).sum() / num_ranks).backward()  # the mean of the ranks' losses
    num_local = EXPERTS // num_ranks
    wanted = {
        "y": torch.cat([r["y"] for r in results]), "x": torch.cat([r["x"] for r in results]),
        "router": sum(r["router"] for r in results) / num_ranks,
        "up": torch.cat([r["up"] for r in results]), "down": torch.cat([r["down"] for r in results]),
    }  # fmt: skip
    assert dense.experts.up.grad is not None
    assert dense.experts.up.grad.shape[0] == num_local * num_ranks
    assert x.grad is not None
    grads = {name.removeprefix("experts."): parameter.grad for name, parameter in dense.named_parameters()}
    truth = {"y": y, "x": x.grad * num_ranks, **grads}
    for name, got in wanted.items():
        want = truth[name]
        error = float(((got.double() - want).norm() / want.norm()).detach())
        assert error < 8 * BF16_STEP, f"{name}: relative error {error:.2e}"


def test_the_dense_reference_is_the_layer_in_float64() -> None:
    with hybrid_ep.Buffer(None) as alone:
        layer = MoELayer(alone, hidden=HIDDEN, ffn_hidden=WIDTH, num_experts=EXPERTS, topk=TOPK, seed=3)
        x = _tokens(0)
        topk_idx, weights = layer.route(x)
        got = layer(x)
    up, down = layer.experts.up.detach().double(), layer.experts.down.detach().double()
    want = dense_moe(x, topk_idx, weights.detach(), lambda e, rows: F.gelu(rows @ up[e].t()) @ down[e].t())
    assert ((got.detach().double() - want).norm() / want.norm()).item() < 2 * BF16_STEP


def _train() -> list[float]:
    rank, losses = dist.get_rank(), []
    with hybrid_ep.Buffer(num_ranks_per_domain=2) as buffer:
        layer = MoELayer(buffer, hidden=HIDDEN, ffn_hidden=WIDTH, num_experts=EXPERTS, topk=TOPK, seed=3)
        optimizer = torch.optim.Adam(layer.parameters(), lr=3e-3)
        x = _tokens(rank)
        target = torch.sin(x.roll(1, 1))
        for _ in range(25):
            optimizer.zero_grad()
            loss = F.mse_loss(layer(x), target) + 0.01 * layer.balance_loss
            loss.backward()
            layer.sync_router_gradients()
            optimizer.step()
            losses.append(loss.item())
    return losses


def test_the_layer_trains(run_ranks: RunRanks) -> None:
    for losses in run_ranks(4, _train):
        assert losses[-1] < 0.5 * losses[0]
