"""Wrong arguments of the autograd modules raise a typed error before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hybrid_ep import Buffer, ConfigError
from hybrid_ep.nn import MoECombine, MoEDispatch, MoELayer
from hybrid_ep.quantize import cast_to_fp8

T, H, K, E = 6, 256, 2, 8
X, TOPK, WEIGHTS = torch.ones(T, H, dtype=torch.bfloat16), torch.arange(T * K).view(T, K) % E, torch.rand(T, K)
FP8 = cast_to_fp8(X)
DIFFERENTIABLE: dict[str, tuple[Callable[[Buffer], Any], str]] = {
    "dispatch: no weights": (
        lambda b: MoEDispatch(b, E)(X, TOPK, None),
        "topk_weights is NoneType; allowed: a torch.Tensor",
    ),
    "dispatch: FP8": (lambda b: MoEDispatch(b, E)(FP8, TOPK, WEIGHTS), "x is tuple; allowed: a torch.Tensor"),
    "dispatch: indices": (lambda b: MoEDispatch(b, E)(X, None, WEIGHTS), "topk_idx is NoneType"),
    "dispatch: a list for a buffer": (lambda b: MoEDispatch([b], E), "buffer is list; allowed: a hybrid_ep.Buffer"),
    "dispatch: no buffer": (lambda b: MoEDispatch(None, 4), "buffer is NoneType; allowed: a hybrid_ep.Buffer"),
    "dispatch: no experts": (lambda b: MoEDispatch(b, 0), "num_experts is 0"),
    "combine: no buffer": (lambda b: MoECombine(None), "buffer is NoneType; allowed: a hybrid_ep.Buffer"),
    "combine: not a handle": (lambda b: MoECombine(b)(X, None), "handle is NoneType"),
    "layer: a list": (
        lambda b: MoELayer(b, hidden=H, ffn_hidden=4, num_experts=E, topk=2)([1.0]),
        "x is list; allowed: a torch.Tensor",
    ),
    "layer: no buffer": (
        lambda b: MoELayer(None, hidden=H, ffn_hidden=4, num_experts=E, topk=2),
        "buffer is NoneType; allowed: a hybrid_ep.Buffer",
    ),
    "layer: half an expert": (
        lambda b: MoELayer(b, hidden=H, ffn_hidden=4, num_experts=E, topk=2.5),
        "topk is 2.5; allowed: an integer ≥ 1",
    ),
    "layer: top-k": (
        lambda b: MoELayer(b, hidden=H, ffn_hidden=4, num_experts=E, topk=9),
        "topk is 9; allowed: 1 … 8",
    ),
}


@pytest.fixture
def buffer() -> Iterator[Buffer]:
    with Buffer(None) as made:
        yield made


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_modules_refuse_before_anything_is_sent(buffer: Buffer, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    call, message = DIFFERENTIABLE[name]

    def sent(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the engine was asked to send")

    for collective in ("dispatch", "combine"):
        monkeypatch.setattr(buffer.engine, collective, sent)
    with pytest.raises(ConfigError, match=message):
        call(buffer)
