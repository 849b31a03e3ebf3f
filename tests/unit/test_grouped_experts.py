"""Experts over rows by group: the grouped product, and what must not depend on undefined rows or on the routing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import hybrid_ep
from hybrid_ep.nn import GroupedTokens, MoECombine, MoEGroupedDispatch, MoELayer, Route
from hybrid_ep.nn.grouped import grouped_linear

ENDS = torch.tensor([3, 3, 7], dtype=torch.int32)  # the second group is empty


@pytest.mark.parametrize(
    ("dtype", "sizes", "has_product"),
    [
        (torch.bfloat16, (16, 24), True),
        (torch.bfloat16, (17, 24), False),
        (torch.bfloat16, (16, 25), False),
        (torch.bfloat16, (24, 16), False),  # a torch that has no grouped product
        (torch.float32, (16, 24), False),
        (torch.float64, (16, 24), False),
    ],
)
def test_every_group_takes_its_own_matrix(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, sizes: tuple[int, int], has_product: bool
) -> None:
    calls = []
    product = F.grouped_mm
    if has_product:
        monkeypatch.setattr(F, "grouped_mm", lambda *args, **kw: (calls.append(args), product(*args, **kw))[1])
    elif sizes == (24, 16):
        monkeypatch.delattr(F, "grouped_mm")
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(10, sizes[0], generator=generator).to(dtype).requires_grad_()
    weights = torch.randn(3, sizes[1], sizes[0], generator=generator).to(dtype).requires_grad_()
    got = grouped_linear(rows, weights, ENDS)[:7]
    want = torch.cat([F.linear(rows[:3], weights[0]), F.linear(rows[3:7], weights[2])])
    pull = torch.randn(7, sizes[1], generator=generator).to(dtype)
    found = torch.autograd.grad((got * pull).sum(), (rows, weights))
    wanted = torch.autograd.grad((want * pull).sum(), (rows, weights))
    assert bool(calls) == has_product
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(found[0][:7], wanted[0][:7])
    torch.testing.assert_close(found[1], wanted[1])


class _NoHostValue(TorchDispatchMode):
    """Refuses what reads a value of a tensor on the host, or makes a shape of one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        assert not any(word in name for word in ("_local_scalar_dense", "nonzero", "masked_select", "unique")), name
        return func(*args, **(kwargs or {}))


def _tokens(num_rows: int, tail: float) -> GroupedTokens:
    rows = torch.randn(num_rows, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    rows[7:] = 0
    weights = torch.rand(num_rows, generator=torch.Generator().manual_seed(2))
    weights[7:] = tail
    return GroupedTokens(rows, weights, ENDS, Route(torch.empty(1), 0, 0))


def _experts(buffer: hybrid_ep.Buffer) -> Any:
    return MoELayer(buffer, hidden=16, ffn_hidden=24, num_experts=3, topk=1).experts


def test_experts_over_groups_read_nothing_on_the_host() -> None:
    with hybrid_ep.Buffer(None) as buffer:
        experts = _experts(buffer)
        for dtype in (torch.float32, torch.bfloat16):
            with _NoHostValue():
                experts.to(dtype)(_tokens(10, 0.0)).sum().backward()


def test_undefined_rows_reach_neither_results_nor_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    class Undefined(torch.autograd.Function):
        """The product whose rows after the last end are NaN, forwards and backwards."""

        @staticmethod
        def forward(ctx: Any, rows: Tensor, weights: Tensor) -> Tensor:
            ctx.save_for_backward(rows, weights)
            return _with_nan(product(rows, weights, ENDS))

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
            assert not grads[0].isnan()[:7].any()
            with torch.enable_grad():
                inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
                of_rows, of_weights = torch.autograd.grad(product(*inputs, ENDS)[:7], inputs, grads[0][:7])
            return _with_nan(of_rows), of_weights

    product = grouped_linear
    with hybrid_ep.Buffer(None) as buffer:
        experts = _experts(buffer)
        want = experts(_tokens(7, 0.0))
        want.float().square().sum().backward()
        grads = [parameter.grad.clone() for parameter in experts.parameters()]
        experts.zero_grad()
        monkeypatch.setattr(
            "hybrid_ep.nn.experts.grouped_linear", lambda rows, weights, ends: Undefined.apply(rows, weights)
        )
        got = experts(_tokens(10, float("nan")))
        assert torch.equal(got[:7], want)
        assert torch.equal(got[7:], torch.zeros_like(got[7:]))
        got.float().square().sum().backward()
        for parameter, grad in zip(experts.parameters(), grads, strict=True):
            torch.testing.assert_close(parameter.grad, grad)  # NaN is not close to anything


def _with_nan(rows: Tensor) -> Tensor:
    rows = rows.clone()
    rows[7:] = float("nan")
    return rows


def test_rows_of_another_number_are_refused() -> None:
    x, topk_idx = torch.ones(2, 16).bfloat16(), torch.tensor([[0, 1], [1, 2]])
    with hybrid_ep.Buffer(None) as buffer:
        tokens = MoEGroupedDispatch(buffer, 3, num_rows=5)(x, topk_idx, torch.ones(2, 2))
        with pytest.raises(hybrid_ep.ConfigError, match="rows of x is 4; allowed: 5, as received"):
            MoECombine(buffer)(tokens.x[:4], tokens.handle)
        with pytest.raises(hybrid_ep.ConfigError, match="topk_idx is 3; allowed: −1 … 2"):
            MoEGroupedDispatch(buffer, 3, num_rows=5)(x, topk_idx + 1, torch.ones(2, 2))
        with pytest.raises(hybrid_ep.ConfigError, match="rows of topk_idx is 1; allowed: 2, as x has"):
            MoEGroupedDispatch(buffer, 3, num_rows=5)(x, topk_idx[:1], torch.ones(1, 2))
        with pytest.raises(hybrid_ep.OverflowError, match="4 rows arrived at rank 0; allowed by the bound: 3"):
            MoEGroupedDispatch(buffer, 3, num_rows=3)(x, topk_idx, torch.ones(2, 2))
