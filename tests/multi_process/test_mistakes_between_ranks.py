"""A mistake of one rank, or of several together, raises the same typed error at every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hybrid_ep import Buffer, ConfigError, HybridEPError, OverflowError
from tests.conftest import RunRanks
from tests.multi_process.small_calls import BF16, TOPK, E, H, K, T, X, handle_of, layout_of


def _on_two_ranks() -> list[str]:
    """Mistakes that need several ranks; every rank makes them together."""
    import torch.distributed as dist

    seen = []

    def expect(call: Callable[[], Any]) -> None:
        try:
            call()
        except HybridEPError as error:
            seen.append(f"{type(error).__name__}: {error}")

    rank = dist.get_rank()
    with Buffer(num_ranks_per_domain=2) as one, Buffer(num_ranks_per_domain=1) as two:
        expect(lambda: one.get_dispatch_layout(TOPK, 7))
        handle = handle_of(one)
        expect(lambda: two.combine(torch.ones(handle.num_recv, H, dtype=BF16), handle))
        again, *_ = one.dispatch(X, handle=handle, **layout_of(one))
        assert again.shape[0] == handle.num_recv
        size = H * (rank + 1)
        expect(lambda: one.dispatch(torch.ones(T, size, dtype=BF16), **layout_of(one), topk_idx=TOPK))
        expect(lambda: one.dispatch(X, **layout_of(one), topk_idx=TOPK, num_worst_tokens=2))
    return seen


def test_mistakes_between_ranks(run_ranks: RunRanks) -> None:
    for seen in run_ranks(2, _on_two_ranks):
        indivisible, other_grid, other_size, overflow = seen
        assert "ConfigError: num_experts is 7; allowed: an integer ≥ 1 that is a multiple of 2" in indivisible
        assert "ConfigError: handle is made at" in other_grid
        assert "ConfigError: hidden is " in other_size
        assert overflow.startswith(OverflowError.__name__)
        assert "allowed by the bound: 2" in overflow


def _at_odds() -> list[str]:
    """Ranks that call with other sizes than each other: all are told, none waits or is ended, and all go on."""
    import torch.distributed as dist

    seen, rank = [], dist.get_rank()
    with Buffer(low_latency_mode=True, timeout_s=5) as buffer:
        handles = handle_of(buffer), handle_of(buffer)
        rows = torch.ones(handles[0].num_recv, H, dtype=BF16)
        wide = H * (1 + rank)
        weights = torch.rand(handles[0].num_recv, K) if rank else None
        experts = E * (1 + rank)
        topk = torch.zeros(2, 1, dtype=torch.int64)
        calls: list[Callable[[], Any]] = [
            lambda: buffer.combine(torch.ones(rows.shape[0], wide, dtype=BF16), handles[0]),
            lambda: buffer.combine(rows, handles[0], topk_weights=weights),
            lambda: buffer.combine(rows, handles[rank]),
            lambda: buffer.dispatch(torch.ones(T, wide, dtype=BF16), handle=handles[0]),
            lambda: buffer.dispatch(X, **layout_of(buffer, num_experts=experts), topk_idx=TOPK),
            lambda: buffer.low_latency_dispatch(X, TOPK, 8, experts),
            lambda: buffer.low_latency_dispatch(X[:2], topk, 2 + rank, E),
            lambda: buffer.combine(rows, handles[0]) if rank else buffer.dispatch(X, handle=handles[0]),
        ]
        for call in calls:
            with pytest.raises(ConfigError, match="allowed: the same") as refused:
                call()
            seen.append(str(refused.value))
        combined, _, _ = buffer.combine(rows, handles[0])
        assert torch.equal(combined[:, 0], layout_of(buffer)["is_token_in_rank"].sum(1).to(BF16))
    return seen


def test_ranks_at_odds_are_told_so(run_ranks: RunRanks) -> None:
    for seen in run_ranks(2, _at_odds):
        assert [text.split(" is ")[0] for text in seen] == [
            "hidden",
            "weights of a row",
            "number of the handle's dispatch",
            "hidden",
            "num_experts",
            "num_experts",
            "num_max_dispatch_tokens_per_rank",
            "call",
        ]


def _ask_for_different_engines() -> list[str]:
    """Ranks are started with different variables or arguments: nobody waits for somebody who has left."""
    import torch.distributed as dist

    seen, rank = [], dist.get_rank()
    different: list[dict[str, Any]] = [
        {"engine": ("auto", "torch")[rank]},
        {"engine": ("torch", "fast")[rank]},
        {"num_ranks_per_domain": (1, 2)[rank]},
    ]
    for arguments in different:
        with pytest.raises(ConfigError, match="allowed: the same on every rank") as refused:
            Buffer(**arguments)
        seen.append(str(refused.value).split(";")[0])
    with pytest.raises(ConfigError, match="engine is 'fast'; allowed: auto, torch or cuda"):
        Buffer(engine="fast")
    with Buffer(engine="torch") as buffer:
        handle_of(buffer)
    return seen


def test_ranks_that_ask_for_different_engines_are_told_so(run_ranks: RunRanks) -> None:
    first, second = run_ranks(2, _ask_for_different_engines)
    assert first == [
        "engine is 'auto' at rank 0 and 'torch' at rank 1",
        "engine is 'torch' at rank 0 and 'fast' at rank 1",
        "num_ranks_per_domain is 1 at rank 0 and 2 at rank 1",
    ]
    assert second[0] == "engine is 'torch' at rank 1 and 'auto' at rank 0"
