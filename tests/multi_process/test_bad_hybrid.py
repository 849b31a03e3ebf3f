"""Wrong arguments of `HybridEPBuffer`'s calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybrid_ep import ConfigError, HybridEPBuffer
from hybrid_ep.core import kernels
from hybrid_ep.quantize import cast_to_fp8
from tests.multi_process.small_calls import BF16, TOPK, WEIGHTS, E, H, T, X

HYBRID: dict[str, tuple[dict[str, Any], str]] = {
    "no routing": ({}, "neither of topk_idx and routing_map"),
    "map is a list": ({"routing_map": [[True]]}, "routing_map is list"),
    "map has no dimension": ({"routing_map": torch.tensor(True)}, r"routing_map.shape is \[\]"),
    "device of topk_idx": ({"topk_idx": TOPK.to("meta")}, "topk_idx.device is meta; allowed: cpu"),
    "scales of no tensor": (
        {"topk_idx": TOPK, "hidden": cast_to_fp8(X)[0], "scaling_factor": 1.0},
        "scales of hidden is float",
    ),
    "map dtype": ({"routing_map": torch.ones(T, E)}, "routing_map.dtype is torch.float32"),
    "map shape": ({"routing_map": torch.ones(4, E).bool()}, r"routing_map.shape is \[4, 8\]"),
    "probs of columns": ({"topk_idx": TOPK, "probs": WEIGHTS}, r"probs.shape is \[6, 2\]; allowed: \[6, 8\]"),
    "dense routing": ({"topk_idx": TOPK, "dense_routing": "no"}, "dense_routing is 'no'; allowed: True or False"),
    "weights with a map": (
        {"routing_map": torch.ones(T, E).bool(), "topk_weights": WEIGHTS},
        r"topk_weights is given with routing_map; allowed: None \(give probs\)",
    ),
    "probs shape": ({"routing_map": torch.ones(T, E).bool(), "probs": WEIGHTS}, r"probs.shape is \[6, 2\]"),
    "experts": ({"topk_idx": TOPK, "num_of_experts": 0}, "num_of_experts is 0; allowed: an integer ≥ 1"),
    "experts per rank": ({"topk_idx": TOPK, "num_of_experts_per_rank": 4}, "topk_idx is 7; allowed: −1 … 3"),
    "non-blocking without a bound": ({"topk_idx": TOPK, "non_blocking": True}, "num_permuted_tokens is None"),
    "fp8 without scales": ({"topk_idx": TOPK, "use_fp8": True}, "use_fp8 is True; allowed: False"),
    "pad": ({"topk_idx": TOPK, "pad_multiple": -1}, "pad_multiple is -1"),
    "more tokens than indices": (
        {"hidden": torch.ones(T + 1, H, dtype=BF16), "topk_idx": TOPK},
        "rows of topk_idx is 6; allowed: 7, as hidden has",
    ),
    "host counts without a bound": ({"topk_idx": TOPK, "use_host_meta": False}, "num_permuted_tokens is None"),
    "handle": ({"handle": ("a", "b")}, "handle is tuple"),
}


@pytest.mark.parametrize("name", HYBRID)
def test_hybrid_buffer(hybrid: HybridEPBuffer, name: str) -> None:
    arguments, message = HYBRID[name]
    with pytest.raises(ConfigError, match=message):
        hybrid.dispatch_with_permute(**({"hidden": X} | arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_dispatched_tokens": -1}, "num_dispatched_tokens is -1; allowed: an integer ≥ 0"),
        ({"num_dispatched_tokens_tensor": torch.zeros(2)}, r"num_dispatched_tokens_tensor.dtype is torch.float32"),
        ({"num_dispatched_tokens_tensor": 6}, "num_dispatched_tokens_tensor is int"),
        ({"num_dispatched_tokens_tensor": torch.tensor([1, 2])}, r"num_dispatched_tokens_tensor.shape is \[2\]"),
    ],
)
def test_hybrid_dispatch(hybrid: HybridEPBuffer, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hybrid.dispatch(X, topk_idx=TOPK, **arguments)


def test_rows_are_checked_for_another_handle(hybrid: HybridEPBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    routing = {"topk_idx": TOPK, "topk_weights": WEIGHTS, "num_of_experts": E}
    _, probs, _, handle = hybrid.dispatch(X, **routing)
    other = hybrid.dispatch(X[:4], topk_idx=TOPK[:4], num_of_experts=E)[3]
    rows, expert_probs, _, _, permuted = hybrid.dispatch_with_permute(hidden=X, **routing)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(kernels, "run_on", lambda _: False)
    for _ in range(2):
        hybrid.combine(X, probs, handle)
        hybrid.combine_with_unpermute(hidden=rows, probs=expert_probs, handle=permuted)
    with pytest.raises(ConfigError, match="rows of hidden is 6; allowed: 4, as received"):
        hybrid.combine(X, probs, other)
    with pytest.raises(ConfigError, match=r"hidden.dtype is torch.float32"):
        hybrid.combine_with_unpermute(hidden=rows.float(), probs=expert_probs, handle=permuted)
    assert probs is not None
    with pytest.raises(ConfigError, match=r"probs.shape is \[5, "):
        hybrid.combine(X, probs[:5], handle)
