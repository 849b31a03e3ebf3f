"""Calls of a buffer have no backward pass, so every call refuses arguments whose gradient would be lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_ep import Buffer, ConfigError, ElasticBuffer, HybridEPBuffer
from tests.multi_process.small_calls import TOPK, WEIGHTS, E, H, K, T, X, layout_of

MAP, PROBS = torch.zeros(T, E, dtype=torch.bool).scatter_(1, TOPK, True), torch.rand(T, E)


def leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


class Buffers:
    """One buffer of each class, a handle of each call, and the rows that came with it."""

    def __init__(self) -> None:
        self.normal = Buffer(None, low_latency_mode=True)
        self.hybrid = HybridEPBuffer(None, H, T, E)
        self.elastic = ElasticBuffer(None, num_max_tokens_per_rank=T)
        sent = layout_of(self.normal) | {"topk_idx": TOPK, "topk_weights": WEIGHTS}
        self.handle = self.normal.dispatch(X, **sent)[4]  # type: ignore[call-overload]
        self.plain = self.hybrid.dispatch(X, topk_idx=TOPK, topk_weights=WEIGHTS, num_of_experts=E)[-1]
        permuted = self.hybrid.dispatch_with_permute(hidden=X, topk_idx=TOPK, topk_weights=WEIGHTS, num_of_experts=E)
        self.rows, self.permuted = permuted[0], permuted[-1]
        self.low_latency_rows, _, self.low_latency, _, _ = self.normal.low_latency_dispatch(
            X, TOPK, T, E, use_fp8=False
        )
        self.elastic_handle = self.elastic.dispatch(X, TOPK, WEIGHTS, num_experts=E)[3]

    def close(self) -> None:
        for buffer in (self.normal, self.hybrid, self.elastic):
            buffer.close()


@pytest.fixture(scope="module")
def buffers() -> Iterator[Buffers]:
    made = Buffers()
    yield made
    made.close()


CALLS: dict[str, tuple[str, Callable[[Buffers], Any]]] = {
    "combine: weights": ("topk_weights", lambda b: b.normal.combine(X, b.handle, topk_weights=leaf(torch.rand(T, K)))),
    "combine: bias": ("bias", lambda b: b.normal.combine(X, b.handle, bias=leaf(X))),
    "combine: second bias": ("bias", lambda b: b.normal.combine(X, b.handle, bias=(X, leaf(X)))),
    "low latency: out": (
        "out",
        lambda b: b.normal.low_latency_combine(b.low_latency_rows, TOPK, WEIGHTS, b.low_latency, out=leaf(X)),
    ),
    "elastic combine: bias": ("bias", lambda b: b.elastic.combine(X, b.elastic_handle, bias=leaf(X))),
    "elastic: weights along a handle": (
        "topk_weights",
        lambda b: b.elastic.dispatch(X, topk_weights=leaf(WEIGHTS), handle=b.elastic_handle),
    ),
    "hybrid: probabilities": (
        "probs",
        lambda b: b.hybrid.dispatch_with_permute(hidden=X, routing_map=MAP, probs=leaf(PROBS)),
    ),
    "hybrid: weights along a handle": (
        "topk_weights",
        lambda b: b.hybrid.dispatch(X, topk_weights=leaf(WEIGHTS), handle=b.plain),
    ),
    "hybrid: probabilities along a handle": (
        "probs",
        lambda b: b.hybrid.dispatch_with_permute(hidden=X, probs=leaf(PROBS), handle=b.permuted),
    ),
    "hybrid combine": ("probs", lambda b: b.hybrid.combine(X, leaf(torch.rand(T, E)), b.plain)),
    "hybrid combine by expert": (
        "probs",
        lambda b: b.hybrid.combine_with_unpermute(hidden=b.rows, probs=leaf(torch.rand(T * K)), handle=b.permuted),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_is_refused(buffers: Buffers, name: str) -> None:
    argument, call = CALLS[name]
    with pytest.raises(ConfigError, match=f"^{argument}.requires_grad is True, and this call has no backward pass"):
        call(buffers)
    with torch.no_grad():  # as in the backward pass of an autograd.Function
        call(buffers)
