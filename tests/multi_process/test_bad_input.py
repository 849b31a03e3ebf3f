"""What a caller may get wrong raises a typed error that names the value and what is allowed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_ep import (
    Buffer,
    ClosedError,
    ConfigError,
    HybridEPBuffer,
    HybridEPError,
    OverflowError,
    TopologyError,
)
from hybrid_ep.quantize import cast_to_fp8
from tests.conftest import RunRanks

T, H, K, E = 6, 256, 2, 8
BF16 = torch.bfloat16
X, TOPK, WEIGHTS = torch.ones(T, H, dtype=BF16), torch.arange(T * K).view(T, K) % E, torch.rand(T, K)


@pytest.fixture
def buffer() -> Iterator[Buffer]:
    with Buffer(None, low_latency_mode=True, enable_shrink=True) as made:
        yield made


@pytest.fixture
def hybrid() -> Iterator[HybridEPBuffer]:
    with HybridEPBuffer(None, H, T, E) as made:
        yield made


def layout_of(buffer: Buffer, topk: Tensor = TOPK, num_experts: int = E) -> dict[str, Tensor]:
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk, num_experts)
    return {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}


Bad = Callable[[Buffer], Any]
NORMAL: dict[str, tuple[Bad, str]] = {
    "layout: index dtype": (
        lambda b: b.get_dispatch_layout(TOPK.int(), E),
        "topk_idx.dtype is torch.int32; allowed: torch.int64",
    ),
    "layout: one dimension": (lambda b: b.get_dispatch_layout(TOPK[0], E), r"topk_idx.shape is \[2\]"),
    "layout: index below −1": (lambda b: b.get_dispatch_layout(TOPK - 2, E), "topk_idx is -2; allowed: −1 … 7"),
    "layout: index too large": (lambda b: b.get_dispatch_layout(TOPK, 4), "topk_idx is 7; allowed: −1 … 3"),
    "layout: no experts": (lambda b: b.get_dispatch_layout(TOPK, 0), "num_experts is 0"),
    "layout: top-k above experts": (
        lambda b: b.get_dispatch_layout(torch.zeros(3, 9, dtype=torch.int64), E),
        "top-k .* is 9; allowed: 1 … 8",
    ),
    "layout: top-k above 32": (
        lambda b: b.get_dispatch_layout(torch.zeros(3, 33, dtype=torch.int64), 64),
        "top-k .* is 33; allowed: 1 … 32",
    ),
    "dispatch: float32 tokens": (
        lambda b: b.dispatch(X.float(), **layout_of(b), topk_idx=TOPK),
        "x.dtype is torch.float32; allowed: torch.bfloat16",
    ),
    "dispatch: not contiguous": (
        lambda b: b.dispatch(torch.ones(H, T, dtype=BF16).t(), **layout_of(b), topk_idx=TOPK),
        r"x.stride\(\)",
    ),
    "dispatch: no layout": (lambda b: b.dispatch(X, topk_idx=TOPK), "num_tokens_per_rank, .* not all given"),
    "dispatch: rows of topk": (
        lambda b: b.dispatch(X[:4], **(layout_of(b, TOPK[:4])), topk_idx=TOPK),
        "rows of topk_idx is 6; allowed: 4",
    ),
    "dispatch: another routing's layout": (
        lambda b: b.dispatch(X, **layout_of(b, torch.full_like(TOPK, -1)), topk_idx=TOPK),
        "is_token_in_rank is not that of topk_idx",
    ),
    "dispatch: weights dtype": (
        lambda b: b.dispatch(X, **layout_of(b), topk_idx=TOPK, topk_weights=WEIGHTS.double()),
        "topk_weights.dtype",
    ),
    "dispatch: weights shape": (
        lambda b: b.dispatch(X, **layout_of(b), topk_idx=TOPK, topk_weights=WEIGHTS[:, :1]),
        r"topk_weights.shape is \[6, 1\]; allowed: \[6, 2\]",
    ),
    "dispatch: weights without indices": (
        lambda b: b.dispatch(X, **layout_of(b), topk_weights=WEIGHTS),
        "None without topk_idx",
    ),
    "dispatch: alignment": (
        lambda b: b.dispatch(X, **layout_of(b), topk_idx=TOPK, expert_alignment=0),
        "expert_alignment is 0",
    ),
    "dispatch: FP8 without scales": (
        lambda b: b.dispatch(cast_to_fp8(X)[0], **layout_of(b), topk_idx=TOPK),
        "x.dtype is torch.float8_e4m3fn",
    ),
    "dispatch: FP8 hidden": (
        lambda b: b.dispatch(
            (torch.zeros(T, 192).to(torch.float8_e4m3fn), torch.ones(T, 2)), **layout_of(b), topk_idx=TOPK
        ),
        "hidden of x is 192; allowed: with FP8: multiples of 128",
    ),
    "dispatch: FP8 scales": (
        lambda b: b.dispatch((cast_to_fp8(X)[0], torch.ones(T, 3)), **layout_of(b), topk_idx=TOPK),
        r"scales of x.shape is \[6, 3\]; allowed: \[6, 2\]",
    ),
    "dispatch: not a handle": (lambda b: b.dispatch(X, handle=(1, 2, 3)), "handle is tuple"),  # type: ignore[arg-type]
    "dispatch: handle and indices": (
        lambda b: b.dispatch(X, handle=handle_of(b), topk_idx=TOPK),
        "None with a handle",
    ),
    "dispatch: handle of other tokens": (
        lambda b: b.dispatch(X[:2], handle=handle_of(b)),
        "rows of x is 2; allowed: 6",
    ),
    "combine: rows": (lambda b: b.combine(X[:2], handle_of(b)), "rows of x is 2; allowed: 6"),
    "combine: dtype": (lambda b: b.combine(X.half(), handle_of(b)), "x.dtype is torch.float16"),
    "combine: weights": (
        lambda b: b.combine(X, handle_of(b), topk_weights=torch.ones(T, 3)),
        r"topk_weights.shape is \[6, 3\]",
    ),
    "combine: bias": (lambda b: b.combine(X, handle_of(b), bias=X[:, :8]), r"bias.shape is \[6, 8\]"),
    "combine: three biases": (
        lambda b: b.combine(X, handle_of(b), bias=(X, X, X)),  # type: ignore[arg-type]
        "number of biases is 3; allowed: 0, 1 or 2",
    ),
    "combine: not a handle": (lambda b: b.combine(X, None), "handle is NoneType"),  # type: ignore[arg-type]
    "local buffer: offset": (lambda b: b.get_local_buffer_tensor(BF16, offset=2), "offset is 2; allowed: ≤ 0 bytes"),
    "low latency: more tokens than M": (
        lambda b: b.low_latency_dispatch(X, TOPK, 4, E),
        "rows of x is 6; allowed: ≤ num_max_dispatch_tokens_per_rank = 4",
    ),
    "low latency: FP8 hidden": (
        lambda b: b.low_latency_dispatch(X[:, :64].contiguous(), TOPK, 8, E),
        "hidden of x is 64",
    ),
    "low latency: ue8m0 alone": (lambda b: b.low_latency_dispatch(X, TOPK, 8, E, use_ue8m0=True), "round_scale"),
    "low latency: statistics": (
        lambda b: b.low_latency_dispatch(X, TOPK, 8, E, cumulative_local_expert_recv_stats=torch.zeros(E)),
        "cumulative_local_expert_recv_stats.dtype",
    ),
    "low latency: hook and async": (
        lambda b: b.low_latency_dispatch(X, TOPK, 8, E, async_finish=True, return_recv_hook=True),
        "async_finish and return_recv_hook is both True",
    ),
    "low latency combine: shape": (
        lambda b: b.low_latency_combine(X, TOPK, WEIGHTS, low_latency_handle(b)),
        r"x.shape is \[6, 256\]; allowed: \[8, 8, 256\]",
    ),
    "low latency combine: another routing": (
        lambda b: b.low_latency_combine(torch.ones(E, 8, H, dtype=BF16), TOPK.flip(0), WEIGHTS, low_latency_handle(b)),
        "topk_idx is another routing",
    ),
    "low latency combine: zero copy without a buffer": (
        lambda b: b.low_latency_combine(X, TOPK, WEIGHTS, low_latency_handle(b), zero_copy=True),
        "zero_copy is True without a buffer",
    ),
    "mask: this rank": (lambda b: b.low_latency_update_mask_buffer(0, True), "rank is 0; allowed: .* except this rank"),
    "mask: no such rank": (lambda b: b.low_latency_update_mask_buffer(9, True), "rank is 9"),
    "mask: query": (lambda b: b.low_latency_query_mask_buffer(torch.zeros(1)), "mask_status.dtype"),
    "num_sms": (lambda b: b.set_num_sms(0), "new_num_sms is 0"),
}


def handle_of(buffer: Buffer) -> Any:
    return buffer.dispatch(X, **layout_of(buffer), topk_idx=TOPK, topk_weights=WEIGHTS)[4]


def low_latency_handle(buffer: Buffer) -> Any:
    return buffer.low_latency_dispatch(X, TOPK, 8, E, use_fp8=False)[2]


@pytest.mark.parametrize("name", NORMAL)
def test_buffer(buffer: Buffer, name: str) -> None:
    call, message = NORMAL[name]
    with pytest.raises(ConfigError, match=message):
        call(buffer)
    # A refused call leaves the buffer usable.
    buffer.combine(X, handle_of(buffer))


HYBRID: dict[str, tuple[dict[str, Any], str]] = {
    "no routing": ({}, "neither of topk_idx and routing_map"),
    "two routings": ({"topk_idx": TOPK, "routing_map": torch.ones(T, E).bool()}, "both of topk_idx and routing_map"),
    "map dtype": ({"routing_map": torch.ones(T, E)}, "routing_map.dtype is torch.float32"),
    "map shape": ({"routing_map": torch.ones(T, 4).bool()}, "num_of_experts is 4; allowed: 8"),
    "probs with indices": ({"topk_idx": TOPK, "probs": WEIGHTS}, "probs is given with topk_idx"),
    "probs shape": ({"routing_map": torch.ones(T, E).bool(), "probs": WEIGHTS}, r"probs.shape is \[6, 2\]"),
    "experts": ({"topk_idx": TOPK, "num_of_experts": 16}, "num_of_experts is 16; allowed: 8"),
    "experts per rank": ({"topk_idx": TOPK, "num_of_experts_per_rank": 4}, "num_of_experts is 4; allowed: 8"),
    "non-blocking without a bound": ({"topk_idx": TOPK, "non_blocking": True}, "num_permuted_tokens is None"),
    "fp8 without scales": ({"topk_idx": TOPK, "use_fp8": True}, "use_fp8 is True; allowed: False"),
    "pad": ({"topk_idx": TOPK, "pad_multiple": -1}, "pad_multiple is -1"),
    "more tokens than max": (
        {"hidden": torch.ones(T + 1, H, dtype=BF16), "topk_idx": TOPK},
        "rows of hidden is 7; allowed: ≤ max_num_of_tokens_per_rank = 6",
    ),
    "hidden": ({"hidden": torch.ones(T, 2 * H, dtype=BF16), "topk_idx": TOPK}, "hidden is 512; allowed: ≤ hidden_dim"),
    "handle": ({"handle": ("a", "b")}, "handle is tuple"),
}


@pytest.mark.parametrize("name", HYBRID)
def test_hybrid_buffer(hybrid: HybridEPBuffer, name: str) -> None:
    arguments, message = HYBRID[name]
    with pytest.raises(ConfigError, match=message):
        hybrid.dispatch_with_permute(**({"hidden": X} | arguments))


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


def test_what_is_not_supported_is_named(buffer: Buffer) -> None:
    x = torch.ones(E, 8, H, dtype=BF16)
    for argument in ("use_logfmt", "overlap"):
        with pytest.raises(NotImplementedError, match=argument):
            buffer.low_latency_combine(x, TOPK, WEIGHTS, low_latency_handle(buffer), **{argument: True})


def test_modes_must_be_asked_for() -> None:
    with Buffer(None) as plain, pytest.raises(ConfigError, match="low_latency_mode is False"):
        plain.low_latency_dispatch(X, TOPK, 8, E)
    with Buffer(None, low_latency_mode=True) as rigid, pytest.raises(ConfigError, match="enable_shrink is False"):
        rigid.low_latency_update_mask_buffer(0, True)


def test_a_closed_buffer() -> None:
    buffer = Buffer(None, low_latency_mode=True)
    handle = handle_of(buffer)
    buffer.destroy()
    buffer.destroy()
    calls: list[Callable[[], Any]] = [
        lambda: buffer.get_dispatch_layout(TOPK, E),
        lambda: buffer.dispatch(X, handle=handle),
        lambda: buffer.combine(X, handle),
        lambda: buffer.low_latency_dispatch(X, TOPK, 8, E),
        lambda: buffer.get_local_buffer_tensor(BF16),
    ]
    for call in calls:
        with pytest.raises(ClosedError, match="Buffer of rank 0 was used after it was closed"):
            call()


def test_bad_construction() -> None:
    with pytest.raises(ConfigError, match="num_nvl_bytes is -1"):
        Buffer(None, -1)
    with pytest.raises(ConfigError, match="engine is 'fast'"):
        Buffer(None, engine="fast")
    with pytest.raises(ConfigError, match="timeout_s is -3"):
        Buffer(None, timeout_s=-3)
    with pytest.raises(TopologyError, match="num_ranks_per_domain is 2; allowed: a divisor of 1"):
        Buffer(None, num_ranks_per_domain=2)
    with pytest.raises(ConfigError, match="group is str"):
        Buffer("world")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="hidden_dim is 0"):
        HybridEPBuffer(None, 0, 1, 1)


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
        size = H * (rank + 1)
        expect(lambda: one.dispatch(torch.ones(T, size, dtype=BF16), **layout_of(one), topk_idx=TOPK))
        expect(lambda: one.dispatch(X, **layout_of(one), topk_idx=TOPK, num_worst_tokens=2))
    return seen


def test_mistakes_between_ranks(run_ranks: RunRanks) -> None:
    for seen in run_ranks(2, _on_two_ranks):
        indivisible, other_grid, other_size, overflow = seen
        assert "ConfigError: num_experts is 7; allowed: an integer ≥ 1 that is a multiple of 2" in indivisible
        assert "ConfigError: handle is made for" in other_grid
        assert "ConfigError: rank" in other_size
        assert "allowed: the same hidden, dtype, top-k and weights on every rank" in other_size
        assert overflow.startswith(OverflowError.__name__)
        assert "allowed by the bound: 2" in overflow
