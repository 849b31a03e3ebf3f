"""Tensors that a call reads may have any strides: transposed, sliced, expanded as gradients of a sum are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_ep import Buffer, ConfigError, HybridEPBuffer

T, H, K, E = 6, 256, 2, 8
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(T, H, generator=GENERATOR).bfloat16()
WEIGHTS, TOPK = torch.rand(T, E, generator=GENERATOR).topk(K)


def column_major(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t()


def every_second(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, torch.zeros_like(tensor)], -1)[..., 0]


every_stride = pytest.mark.parametrize("strided", [column_major, every_second])


def normal(x: Tensor, topk_idx: Tensor, weights: Tensor) -> list[Any]:
    with Buffer(engine="torch") as buffer:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, E)
        layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
        rows, idx, sent, _, handle, _ = buffer.dispatch(x, **layout, topk_idx=topk_idx, topk_weights=weights)
        assert handle is not None
        cached = buffer.dispatch(x, handle)[0]
        combined, home, _ = buffer.combine(x, handle, topk_weights=weights, bias=(x, x))
        return [rows, idx, sent, cached, combined, home]


def permuted(x: Tensor, topk_idx: Tensor, weights: Tensor) -> list[Any]:
    with HybridEPBuffer(None, H, T, E, engine="torch") as buffer:
        rows, probs, _, counts, handle = buffer.dispatch_with_permute(
            hidden=x, topk_idx=topk_idx, topk_weights=weights, num_of_experts=E
        )
        outputs = rows if x.is_contiguous() else column_major(rows)
        return [rows, probs, counts, *buffer.combine_with_unpermute(hidden=outputs, probs=probs, handle=handle)]


def low_latency(x: Tensor, topk_idx: Tensor, weights: Tensor) -> list[Any]:
    with Buffer(low_latency_mode=True, engine="torch") as buffer:
        rows, counts, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, T, E, use_fp8=False)
        assert isinstance(rows, Tensor)
        outputs = rows if x.is_contiguous() else rows.transpose(1, 2).contiguous().transpose(1, 2)
        return [counts, buffer.low_latency_combine(outputs, topk_idx, weights, handle)[0]]


@every_stride
@pytest.mark.parametrize("call", [normal, permuted, low_latency])
def test_results_do_not_depend_on_strides(call: Any, strided: Any) -> None:
    want = call(X, TOPK, WEIGHTS)
    for found, expected in zip(call(strided(X), strided(TOPK), strided(WEIGHTS)), want, strict=True):
        assert torch.equal(found, expected)


def test_an_expanded_gradient_is_copied() -> None:
    ones = torch.ones(1, 1, dtype=torch.bfloat16).expand(T, H)
    assert torch.equal(normal(ones, TOPK, WEIGHTS)[4], normal(ones.contiguous(), TOPK, WEIGHTS)[4])


def test_what_a_call_writes_to_must_be_contiguous() -> None:
    with Buffer(low_latency_mode=True, engine="torch") as buffer:
        rows, _, handle, _, _ = buffer.low_latency_dispatch(X, TOPK, T, E, use_fp8=False)
        assert isinstance(rows, Tensor)
        with pytest.raises(ConfigError, match=r"out.stride\(\)"):
            buffer.low_latency_combine(rows, TOPK, WEIGHTS, handle, out=column_major(X))
