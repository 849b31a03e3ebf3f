"""Arguments beside a handle of `HybridEPBuffer` must fit the handle; the error names the one that does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybrid_ep import ConfigError, HybridEPBuffer
from hybrid_ep.core.layout import indices_to_map
from tests.multi_process.small_calls import BF16, TOPK, WEIGHTS, E, H, K, T, X


def test_a_cached_hybrid_dispatch_has_the_shape_of_its_handle(hybrid: HybridEPBuffer) -> None:
    hidden, _, _, tokens_per_expert, handle = hybrid.dispatch_with_permute(hidden=X, topk_idx=TOPK, pad_multiple=4)
    for wrong, message in (
        ({"num_permuted_tokens": 7}, "num_permuted_tokens is 7; allowed: 32, as with this handle"),
        ({"pad_multiple": 16}, "pad_multiple is 16; allowed: 4, as with this handle"),
    ):
        with pytest.raises(ConfigError, match=message):
            hybrid.dispatch_with_permute(hidden=X, handle=handle, **wrong)  # type: ignore[arg-type]
    # Megatron-LM hands in `tokens_per_expert.sum()`, a tensor.
    for size in (32, tokens_per_expert.sum()):
        again, *_ = hybrid.dispatch_with_permute(hidden=X, handle=handle, num_permuted_tokens=size, pad_multiple=4)
        assert torch.equal(again, hidden)
    with pytest.raises(ConfigError, match=r"num_permuted_tokens is 1\.5; allowed: an integer"):
        hybrid.dispatch_with_permute(hidden=X, handle=handle, num_permuted_tokens=torch.tensor(1.5))
    with pytest.raises(ConfigError, match=r"num_permuted_tokens is tensor\(\[8, 8\]\); allowed: an integer"):
        hybrid.dispatch_with_permute(hidden=X, handle=handle, num_permuted_tokens=torch.tensor([8, 8]))


HYBRID_CALLS = ["dispatch", "dispatch_with_permute"]
MAP, PROBS = indices_to_map(TOPK, WEIGHTS, T, E)
ANOTHER_ROUTING = "routing is another than that of the handle; allowed: the handle's, or None"
AGAINST_A_HANDLE: dict[str, tuple[dict[str, Any], str]] = {
    "other indices": ({"topk_idx": TOPK.flip(0)}, ANOTHER_ROUTING),
    "other indices with weights": ({"topk_idx": TOPK.flip(0), "topk_weights": WEIGHTS}, ANOTHER_ROUTING),
    "another map": ({"routing_map": ~MAP}, ANOTHER_ROUTING),
    "fewer indices": ({"topk_idx": TOPK[:4]}, "rows of topk_idx is 4; allowed: 6, as with this handle"),
    "a narrow map": ({"routing_map": MAP[:, :4]}, r"routing_map.shape is \[6, 4\]; allowed: \[6, 8\]"),
    "weights with a map": ({"routing_map": MAP, "topk_weights": WEIGHTS}, "topk_weights is given with routing_map"),
    "other experts": ({"num_of_experts": 16}, "num_of_experts is 16; allowed: 8, as with this handle"),
    "other experts per rank": (
        {"num_of_experts_per_rank": 4},
        "num_of_experts_per_rank is 4; allowed: 8, as with this handle",
    ),
    "other rows": ({"num_dispatched_tokens": 5}, "num_dispatched_tokens is 5; allowed: 6, as with this handle"),
}
OF_ONE_CALL = {"other experts per rank": "dispatch_with_permute", "other rows": "dispatch"}


@pytest.mark.parametrize(
    ("call", "name"),
    [(call, name) for call in HYBRID_CALLS for name in AGAINST_A_HANDLE if OF_ONE_CALL.get(name, call) == call],
)
def test_what_contradicts_the_handle_of_a_hybrid_dispatch(hybrid: HybridEPBuffer, call: str, name: str) -> None:
    arguments, message = AGAINST_A_HANDLE[name]
    handle = getattr(hybrid, call)(hidden=X, topk_idx=TOPK)[-1]
    with pytest.raises(ConfigError, match=message):
        getattr(hybrid, call)(hidden=X, handle=handle, **arguments)


@pytest.mark.parametrize("call", HYBRID_CALLS)
@pytest.mark.parametrize(
    "again",
    [
        {"topk_idx": TOPK, "topk_weights": WEIGHTS, "num_of_experts": E},
        {"topk_idx": TOPK.flip(1), "topk_weights": WEIGHTS.flip(1)},
        {"routing_map": MAP, "probs": PROBS},
        {"topk_idx": TOPK.short(), "probs": PROBS},
        {"topk_idx": TOPK.flip(0), "routing_map": MAP, "probs": PROBS},
    ],
    ids=["same_indices", "indices_in_another_order", "map", "short_indices_and_probs", "map_before_indices"],
)
def test_a_routing_given_again_with_its_handle(hybrid: HybridEPBuffer, call: str, again: dict[str, Any]) -> None:
    """The peer's benchmark hands in the routing along with the handle that was made of it."""
    hidden, probs, *_, handle = getattr(hybrid, call)(hidden=X, topk_idx=TOPK, topk_weights=WEIGHTS)
    same_hidden, same_probs, *_ = getattr(hybrid, call)(hidden=X, handle=handle, **again)
    assert torch.equal(same_hidden, hidden)
    assert torch.equal(same_probs, probs)


@pytest.mark.parametrize("call", HYBRID_CALLS)
def test_short_indices_with_probs(hybrid: HybridEPBuffer, call: str) -> None:
    """Compact routing sends top-k indices, and has a gradient of dense probabilities."""
    combine = hybrid.combine if call == "dispatch" else hybrid.combine_with_unpermute
    topk_idx, probs = TOPK.masked_fill(TOPK == 3, -1), PROBS.masked_fill(torch.arange(E) == 3, 0.0)
    weights = WEIGHTS.masked_fill(topk_idx < 0, 0.0)
    want = getattr(hybrid, call)(hidden=X, topk_idx=topk_idx, topk_weights=weights, num_of_experts=E)
    for routing in ({"topk_idx": topk_idx.short()}, {"topk_idx": TOPK, "routing_map": MAP & (torch.arange(E) != 3)}):
        found = getattr(hybrid, call)(hidden=X, **routing, probs=probs, num_of_experts=E)
        for one, other in zip(found[:2], want[:2], strict=True):
            assert torch.equal(one, other)
        rows, back = combine(hidden=found[0], probs=found[1], handle=found[-1])
        assert rows.shape == X.shape
        assert torch.equal(back, probs)


def test_a_non_blocking_call_with_a_handle_has_its_counts_as_without(hybrid: HybridEPBuffer) -> None:
    *_, counts, handle = hybrid.dispatch_with_permute(hidden=X, topk_idx=TOPK)
    assert counts.dtype == torch.int64
    for weights in (None, WEIGHTS):
        *_, on_device, _ = hybrid.dispatch_with_permute(
            hidden=X, topk_weights=weights, handle=handle, num_permuted_tokens=T * K, non_blocking=True
        )
        assert on_device.dtype == torch.int64
        assert on_device.tolist() == counts.tolist()


def test_hybrid_combine(hybrid: HybridEPBuffer) -> None:
    with pytest.raises(ConfigError, match="handle is NoneType"):
        hybrid.combine(X)
    *_, handle = hybrid.dispatch_with_permute(hidden=X, topk_idx=TOPK, pad_multiple=4)
    permuted = torch.ones(handle.permute.num_permuted, H, dtype=BF16)
    with pytest.raises(ConfigError, match="rows of hidden is 6; allowed: 32"):
        hybrid.combine_with_unpermute(hidden=X, handle=handle)
    with pytest.raises(ConfigError, match="pad_multiple is 8; allowed: 4"):
        hybrid.combine_with_unpermute(hidden=permuted, handle=handle, pad_multiple=8)
    with pytest.raises(ConfigError, match=r"probs.shape"):
        hybrid.combine_with_unpermute(hidden=permuted, handle=handle, probs=WEIGHTS)


@pytest.mark.parametrize("call", HYBRID_CALLS)
@pytest.mark.parametrize("num_experts", [E, 40])
@pytest.mark.parametrize("as_map", [False, True], ids=["indices", "map"])
def test_a_routing_may_be_overwritten_after_the_call(
    hybrid: HybridEPBuffer, call: str, num_experts: int, as_map: bool
) -> None:
    """As every argument may: a handle has its own."""
    routing_map, probs = indices_to_map(TOPK, WEIGHTS, T, num_experts)
    given = {"routing_map": routing_map} if as_map else {"topk_idx": TOPK.clone()}
    weights = {"probs": probs} if as_map else {"topk_weights": WEIGHTS}
    hidden, received, *_, handle = getattr(hybrid, call)(hidden=X, num_of_experts=num_experts, **given, **weights)
    (routing,) = given.values()
    routing.copy_(routing.flip(0).clone())
    same_hidden, same_received, *_ = getattr(hybrid, call)(hidden=X, handle=handle, **weights)
    assert torch.equal(same_hidden, hidden)
    assert torch.equal(same_received, received)
    combine = hybrid.combine if call == "dispatch" else hybrid.combine_with_unpermute
    _, summed = combine(hidden=hidden, probs=received, handle=handle)
    assert torch.equal(summed, probs)


@pytest.mark.parametrize("call", HYBRID_CALLS)
def test_a_call_without_experts_has_those_of_the_constructor(call: str) -> None:
    """Whatever calls before it have named, and whatever the buffer was made large enough for."""
    with HybridEPBuffer(None, H, T, E) as hybrid:
        getattr(hybrid, call)(hidden=X, topk_idx=TOPK, num_of_experts=4 * E)
        hybrid.update_template_config(num_local_experts=2 * E)
        with pytest.raises(ConfigError, match=f"topk_idx is {2 * E - 1}; allowed: −1 … {E - 1}"):
            getattr(hybrid, call)(hidden=X, topk_idx=TOPK + E)
        handle = getattr(hybrid, call)(hidden=X, topk_idx=TOPK)[-1]
        assert handle.num_experts == E
