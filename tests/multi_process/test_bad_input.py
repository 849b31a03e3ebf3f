"""Wrong arguments raise a typed error that names the value and what is allowed."""

from __future__ import annotations

import weakref
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
    TopologyError,
)
from hybrid_ep.core import kernels
from hybrid_ep.core.quantize import cast_to_fp8, cast_to_nvfp4
from tests.multi_process.small_calls import (
    BF16,
    EXPERT_ROWS,
    SIGNALS,
    TOPK,
    WEIGHTS,
    E,
    H,
    T,
    X,
    handle_of,
    layout_of,
    low_latency_handle,
)


@pytest.fixture
def buffer() -> Iterator[Buffer]:
    with Buffer(None, low_latency_mode=True, enable_shrink=True) as made:
        yield made


@pytest.fixture
def hybrid() -> Iterator[HybridEPBuffer]:
    with HybridEPBuffer(None, H, T, E) as made:
        yield made


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
    "dispatch: NVFP4 hidden": (
        lambda b: b.dispatch((torch.zeros(T, 48, dtype=torch.uint8), *cast_to_nvfp4(X)[1:]), **layout_of(b)),
        "hidden of x is 96; allowed: with NVFP4: multiples of 64",
    ),
    "dispatch: NVFP4 rows": (
        lambda b: b.dispatch((X, *cast_to_nvfp4(X)[1:]), **layout_of(b)),
        "x.dtype is torch.bfloat16; allowed: torch.uint8",
    ),
    "dispatch: NVFP4 scales": (
        lambda b: b.dispatch((cast_to_nvfp4(X)[0], torch.ones(T, H // 16), torch.ones(1)), **layout_of(b)),
        "scales of x.dtype is torch.float32; allowed: torch.float8_e4m3fn or",
    ),
    "dispatch: NVFP4 without scales": (
        lambda b: b.dispatch((cast_to_nvfp4(X)[0], None, torch.ones(1)), **layout_of(b)),  # type: ignore[call-overload]
        "scales of x is NoneType; allowed: a torch.Tensor",
    ),
    "dispatch: two NVFP4 global scales": (
        lambda b: b.dispatch((*cast_to_nvfp4(X)[:2], torch.ones(2)), **layout_of(b)),
        r"global scale of x.shape is \[2\]; allowed: \[1\]",
    ),
    "dispatch: NVFP4 global scale of zero": (
        lambda b: b.dispatch((*cast_to_nvfp4(X)[:2], torch.zeros(1)), **layout_of(b)),
        "global scale of x is 0.0; allowed: a positive, finite number",
    ),
    "low latency: NVFP4 hidden": (
        lambda b: b.low_latency_dispatch(X[:, :96], TOPK, 8, E, use_nvfp4=True, x_global_scale=torch.ones(1)),
        "hidden of x is 96; allowed: with NVFP4: multiples of 64",
    ),
    "low latency: no global scale": (
        lambda b: b.low_latency_dispatch(X, TOPK, 8, E, use_nvfp4=True),
        "x_global_scale is None; allowed: one float32 with use_nvfp4",
    ),
    "low latency: a number as global scale": (
        lambda b: b.low_latency_dispatch(X, TOPK, 8, E, use_nvfp4=True, x_global_scale=1.0),  # type: ignore[arg-type]
        "x_global_scale is float; allowed: a torch.Tensor",
    ),
    "low latency: an infinite global scale": (
        lambda b: b.low_latency_dispatch(X, TOPK, 8, E, use_nvfp4=True, x_global_scale=torch.tensor(torch.inf)),
        "x_global_scale is inf; allowed: a positive, finite number",
    ),
    "low latency: a global scale of nothing": (
        lambda b: b.low_latency_dispatch(X, TOPK, 8, E, x_global_scale=torch.ones(1)),
        "x_global_scale is given; allowed: None without use_nvfp4",
    ),
    "low latency: use_fp8": (
        lambda b: (b.low_latency_dispatch(X, TOPK, 8, E), b.low_latency_dispatch(X, TOPK, 8, E, use_fp8=2)),  # type: ignore[arg-type]
        "use_fp8 is 2; allowed: True or False",
    ),
    "low latency: round_scale": (
        lambda b: b.low_latency_dispatch(X, TOPK, 8, E, round_scale=[]),  # type: ignore[arg-type]
        r"round_scale is \[\]; allowed: True or False",
    ),
    "low latency: use_nvfp4": (
        lambda b: b.low_latency_dispatch(X, TOPK, 8, E, use_nvfp4=2),  # type: ignore[arg-type]
        "use_nvfp4 is 2; allowed: True or False",
    ),
    "low latency: weights to dispatch": (
        lambda b: b.low_latency_dispatch(X, TOPK, 8, E, topk_weights=WEIGHTS[:, :1]),
        r"topk_weights.shape is \[6, 1\]; allowed: \[6, 2\]",
    ),
    "dispatch: a tuple of one": (lambda b: b.dispatch((X,), **layout_of(b)), "x is a tuple of 1; allowed: .*scales"),  # type: ignore[arg-type]
    "dispatch: scales of no tensor": (
        lambda b: b.dispatch((cast_to_fp8(X)[0], [1.0]), **layout_of(b), topk_idx=TOPK),  # type: ignore[arg-type]
        "scales of x is list",
    ),
    "dispatch: device of topk_idx": (
        lambda b: b.dispatch(X, **layout_of(b), topk_idx=TOPK.to("meta")),
        "topk_idx.device is meta; allowed: cpu",
    ),
    "dispatch: device of is_token_in_rank": (
        lambda b: b.dispatch(X, **(layout_of(b) | {"is_token_in_rank": layout_of(b)["is_token_in_rank"].to("meta")})),
        "is_token_in_rank.device is meta; allowed: cpu",
    ),
    "dispatch: config": (
        lambda b: b.dispatch(X, **layout_of(b), topk_idx=TOPK, config=20),  # type: ignore[arg-type]
        "config is int; allowed: a Config",
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
    "dispatch: handle and another bound": (
        lambda b: b.dispatch(X, handle=handle_of(b), num_worst_tokens=4),
        "num_worst_tokens is 4; allowed: 0 or 6, as with this handle",
    ),
    "dispatch: handle and other experts": (
        lambda b: b.dispatch(X, handle=handle_of(b), **layout_of(b, num_experts=2 * E)),
        r"num_tokens_per_expert.shape is \[16\]; allowed: \[8\]",
    ),
    "dispatch: handle and another routing": (
        lambda b: b.dispatch(X, handle=handle_of(b), **layout_of(b, torch.full_like(TOPK, -1))),
        r"num_tokens_per_rank is \[0\]; allowed: \[6\], as with this handle",
    ),
    "dispatch: handle and other tokens": (
        lambda b: b.dispatch(X, handle=handle_of(b), is_token_in_rank=layout_of(b)["is_token_in_rank"][:4]),
        r"is_token_in_rank.shape is \[4, 1\]; allowed: \[6, 1\]",
    ),
    "combine: rows": (lambda b: b.combine(X[:2], handle_of(b)), "rows of x is 2; allowed: 6"),
    "combine: no dimension": (lambda b: b.combine(X[0, 0], handle_of(b)), r"x.shape is \[\]"),
    "combine: config": (
        lambda b: b.combine(X, handle_of(b), config=20),  # type: ignore[arg-type]
        "config is int; allowed: a Config",
    ),
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
    "local buffer: size": (
        lambda b: b.get_local_buffer_tensor(BF16, (-1,)),
        r"size is \[-1\]; allowed: no negative sizes",
    ),
    "local buffer: size is a number": (
        lambda b: b.get_local_buffer_tensor(torch.int8, 5),  # type: ignore[arg-type]
        "size is 5; allowed: a torch.Size or a sequence of integers",
    ),
    "local buffer: size of other things": (
        lambda b: b.get_local_buffer_tensor(torch.int8, (1.5,)),  # type: ignore[arg-type]
        r"size is \(1.5,\); allowed: a torch.Size or a sequence of integers",
    ),
    "local buffer: dtype": (
        lambda b: b.get_local_buffer_tensor("int8"),  # type: ignore[arg-type]
        "dtype is 'int8'; allowed: a torch.dtype",
    ),
    "low latency: more tokens than M": (
        lambda b: b.low_latency_dispatch(X, TOPK, 4, E),
        "rows of x is 6; allowed: ≤ num_max_dispatch_tokens_per_rank = 4",
    ),
    "low latency: FP8 hidden": (
        lambda b: b.low_latency_dispatch(X[:, :64].contiguous(), TOPK, 8, E),
        "hidden of x is 64",
    ),
    "low latency: ue8m0 alone": (lambda b: b.low_latency_dispatch(X, TOPK, 8, E, use_ue8m0=True), "round_scale"),
    "low latency: device of topk_idx": (
        lambda b: b.low_latency_dispatch(X, TOPK.to("meta"), 8, E),
        "topk_idx.device is meta; allowed: cpu",
    ),
    "low latency: device of statistics": (
        lambda b: b.low_latency_dispatch(
            X, TOPK, 8, E, cumulative_local_expert_recv_stats=torch.zeros(E, dtype=torch.int32, device="meta")
        ),
        "cumulative_local_expert_recv_stats.device is meta; allowed: cpu",
    ),
    "low latency: device of waits": (
        lambda b: b.low_latency_dispatch(
            X, TOPK, 8, E, dispatch_wait_recv_cost_stats=torch.zeros(1, dtype=torch.int64, device="meta")
        ),
        "dispatch_wait_recv_cost_stats.device is meta; allowed: cpu",
    ),
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
    "low latency combine: device": (
        lambda b: b.low_latency_combine(
            torch.ones(E, 8, H, dtype=BF16, device="meta"), TOPK, WEIGHTS, low_latency_handle(b)
        ),
        "x.device is meta; allowed: cpu",
    ),
    "low latency combine: device of topk_idx": (
        lambda b: b.low_latency_combine(EXPERT_ROWS, TOPK.to("meta"), WEIGHTS.to("meta"), low_latency_handle(b)),
        "topk_idx.device is meta; allowed: cpu",
    ),
    "low latency combine: no weights": (
        lambda b: b.low_latency_combine(EXPERT_ROWS, TOPK, None, low_latency_handle(b)),  # type: ignore[arg-type]
        "topk_weights is NoneType",
    ),
    "low latency combine: more tokens than M": (
        lambda b: b.low_latency_combine(EXPERT_ROWS, TOPK.repeat(2, 1), WEIGHTS.repeat(2, 1), low_latency_handle(b)),
        "rows of topk_idx is 12; allowed: ≤ num_max_dispatch_tokens_per_rank = 8",
    ),
    "low latency combine: another routing": (
        lambda b: b.low_latency_combine(EXPERT_ROWS, TOPK.flip(0), WEIGHTS, low_latency_handle(b)),
        "topk_idx is another routing",
    ),
    "low latency combine: zero copy without a buffer": (
        lambda b: b.low_latency_combine(X, TOPK, WEIGHTS, low_latency_handle(b), zero_copy=True),
        "zero_copy is True without a buffer",
    ),
    "mask: this rank": (
        lambda b: b.low_latency_update_mask_buffer(0, True),
        "rank_to_mask is 0; allowed: .* except this rank",
    ),
    "mask: no such rank": (lambda b: b.low_latency_update_mask_buffer(9, True), "rank_to_mask is 9"),
    "mask: query": (lambda b: b.low_latency_query_mask_buffer(torch.zeros(1)), "mask_status.dtype"),
    "num_sms": (lambda b: b.set_num_sms(0), "new_num_sms is 0"),
}


@pytest.mark.parametrize("name", NORMAL)
def test_buffer(buffer: Buffer, name: str) -> None:
    call, message = NORMAL[name]
    with pytest.raises(ConfigError, match=message):
        call(buffer)
    # A refused call leaves the buffer usable.
    buffer.combine(X, handle_of(buffer))


def test_arguments_that_have_passed_are_checked_for_another_handle(
    buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments on a GPU that have passed once are not checked again, unless they are for another call."""
    layout = layout_of(buffer, TOPK[:4])
    other = buffer.dispatch(X[:4], **layout, topk_idx=TOPK[:4], topk_weights=WEIGHTS[:4])[4]
    handle = handle_of(buffer)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for _ in range(2):
        buffer.combine(X, handle, topk_weights=WEIGHTS, bias=X)
        buffer.dispatch(X, handle)
    assert len(buffer._passed) == 2
    with pytest.raises(ConfigError, match=r"rows of x is 6; allowed: 4, as received with this handle"):
        buffer.combine(X, other, topk_weights=WEIGHTS, bias=X)
    with pytest.raises(ConfigError, match=r"bias.shape is \[4, 256\]; allowed: \[6, 256\]"):
        buffer.combine(X, handle, topk_weights=WEIGHTS, bias=X[:4])
    with pytest.raises(ConfigError, match=r"x.dtype is torch.float32"):
        buffer.combine(X.float(), handle, topk_weights=WEIGHTS, bias=X)
    with pytest.raises(ConfigError, match=r"x.dtype is torch.float32"):
        buffer.dispatch(X.float(), handle)
    with pytest.raises(ConfigError, match="rows of x is 6; allowed: 4, as with this handle"):
        buffer.dispatch(X, other)


def test_rows_that_have_passed_are_checked_for_another_handle(
    hybrid: HybridEPBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    routing = {"topk_idx": TOPK, "topk_weights": WEIGHTS, "num_of_experts": E}
    _, probs, _, handle = hybrid.dispatch(X, **routing)
    other = hybrid.dispatch(X[:4], topk_idx=TOPK[:4], num_of_experts=E)[3]
    rows, expert_probs, _, _, permuted = hybrid.dispatch_with_permute(hidden=X, **routing)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(kernels, "run_on", lambda _: False)
    for _ in range(2):
        hybrid.combine(X, probs, handle)
        hybrid.combine_with_unpermute(hidden=rows, probs=expert_probs, handle=permuted)
    assert len(hybrid._passed) == 2
    with pytest.raises(ConfigError, match="rows of hidden is 6; allowed: 4, as received"):
        hybrid.combine(X, probs, other)
    with pytest.raises(ConfigError, match=r"hidden.dtype is torch.float32"):
        hybrid.combine_with_unpermute(hidden=rows.float(), probs=expert_probs, handle=permuted)
    assert probs is not None
    with pytest.raises(ConfigError, match=r"probs.shape is \[5, "):
        hybrid.combine(X, probs[:5], handle)


HYBRID: dict[str, tuple[dict[str, Any], str]] = {
    "no routing": ({}, "neither of topk_idx and routing_map"),
    "two routings": ({"topk_idx": TOPK, "routing_map": torch.ones(T, E).bool()}, "both of topk_idx and routing_map"),
    "map is a list": ({"routing_map": [[True]]}, "routing_map is list"),
    "map has no dimension": ({"routing_map": torch.tensor(True)}, r"routing_map.shape is \[\]"),
    "device of topk_idx": ({"topk_idx": TOPK.to("meta")}, "topk_idx.device is meta; allowed: cpu"),
    "scales of no tensor": (
        {"topk_idx": TOPK, "hidden": cast_to_fp8(X)[0], "scaling_factor": 1.0},
        "scales of hidden is float",
    ),
    "map dtype": ({"routing_map": torch.ones(T, E)}, "routing_map.dtype is torch.float32"),
    "map shape": ({"routing_map": torch.ones(4, E).bool()}, r"routing_map.shape is \[4, 8\]"),
    "probs with indices": ({"topk_idx": TOPK, "probs": WEIGHTS}, "probs is given with topk_idx"),
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


def test_tensors_must_be_where_the_engine_is(buffer: Buffer, hybrid: HybridEPBuffer) -> None:
    """A kernel would be handed an address that its GPU cannot read, and take the CUDA context down."""
    given, low_latency, layout = handle_of(buffer), low_latency_handle(buffer), layout_of(buffer)
    plain = hybrid.dispatch(X, topk_idx=TOPK)[-1]
    permuted, *_, permuted_handle = hybrid.dispatch_with_permute(hidden=X, topk_idx=TOPK)
    buffer.engine.device = hybrid.engine.device = torch.device("cuda", 3)
    calls: list[Callable[[], Any]] = [
        lambda: buffer.dispatch(X, **layout, topk_idx=TOPK),
        lambda: buffer.dispatch(X, handle=given),
        lambda: buffer.combine(X, given),
        lambda: buffer.low_latency_dispatch(X, TOPK, 8, E),
        lambda: buffer.low_latency_combine(EXPERT_ROWS, TOPK, WEIGHTS, low_latency),
        lambda: hybrid.dispatch(X, topk_idx=TOPK),
        lambda: hybrid.combine(X, handle=plain),
        lambda: hybrid.dispatch_with_permute(hidden=X, topk_idx=TOPK),
        lambda: hybrid.combine_with_unpermute(hidden=permuted, handle=permuted_handle),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match=r"\.device is cpu; allowed: cuda:3"):
            call()


def test_hidden_that_logfmt_cannot_take() -> None:
    x, topk_idx = torch.ones(2, 192, dtype=BF16), TOPK[:2]
    with Buffer(None, low_latency_mode=True) as buffer:
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, 8, E, use_fp8=False)
        with pytest.raises(ConfigError, match="hidden is 192; allowed: with use_logfmt: multiples of 128"):
            buffer.low_latency_combine(rows, topk_idx, WEIGHTS[:2], handle, use_logfmt=True)
        with pytest.raises(ConfigError, match="use_logfmt is 2; allowed: True or False"):
            buffer.low_latency_combine(rows, topk_idx, WEIGHTS[:2], handle, use_logfmt=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "src_signals and comp_signal is neither; allowed: one of them"),
        ({"comp_signal": SIGNALS, "src_signals": SIGNALS}, "src_signals and comp_signal is both"),
        ({"comp_signal": SIGNALS.long(), "threshold": 1}, "comp_signal.dtype is torch.int64"),
        ({"comp_signal": SIGNALS, "threshold": 0}, "threshold is 0"),
        ({"comp_signal": SIGNALS, "threshold": 1, "block_m": 0}, "block_m is 0"),
        ({"comp_signal": SIGNALS, "threshold": 1, "block_m": 3}, f"elements of comp_signal is {E}; allowed: ≥ {3 * E}"),
        ({"comp_signal": SIGNALS, "threshold": 1, "num_sms": 0}, "num_sms is 0"),
        ({"src_signals": SIGNALS}, "src_signal_expect_value is 0"),
        ({"src_signals": SIGNALS[1:], "src_signal_expect_value": 1}, "src_signals.shape"),
        ({"src_signals": SIGNALS, "packed_recv_count": SIGNALS[1:]}, "packed_recv_count.shape"),
        ({"x": EXPERT_ROWS.transpose(0, 1).contiguous().transpose(0, 1), "src_signals": SIGNALS}, "x.stride"),
    ],
)
def test_signals_of_experts(buffer: Buffer, options: dict[str, Any], message: str) -> None:
    given = {"x": EXPERT_ROWS, "overlap": True, **options}
    with pytest.raises(ConfigError, match=message):
        buffer.low_latency_combine(given.pop("x"), TOPK, WEIGHTS, low_latency_handle(buffer), **given)


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
    with pytest.raises(ConfigError, match="num_ranks_per_domain is 0; allowed: an integer ≥ 1"):
        Buffer(None, num_ranks_per_domain=0)
    with pytest.raises(ConfigError, match="timeout_s is '3'; allowed: a number of seconds > 0"):
        Buffer(None, timeout_s="3")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="group is str"):
        Buffer("world")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="hidden_dim is 0"):
        HybridEPBuffer(None, 0, 1, 1)


def test_a_handle_of_another_engine_is_refused(buffer: Buffer) -> None:
    """As a cuda engine's is, beside a torch engine on the same ranks."""
    words = "handle is of another engine; allowed: one that a dispatch of this buffer's engine returned"
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(TOPK, E)
    rows, _, _, _, handle, _ = buffer.dispatch(X, None, per_rank, None, in_rank, per_expert, TOPK, WEIGHTS)
    foreign = handle._replace(state=object())
    with pytest.raises(ConfigError, match=words):
        buffer.dispatch(X, foreign)
    with pytest.raises(ConfigError, match=words):
        buffer.combine(rows, foreign)
    low_latency = low_latency_handle(buffer)
    low_latency.state = None
    with pytest.raises(ConfigError, match=words):
        buffer.low_latency_combine(torch.ones(E, 8, H, dtype=torch.bfloat16), TOPK, WEIGHTS, low_latency)
    with HybridEPBuffer(None, H, T, E) as hybrid:
        rows, _, _, _, permuted = hybrid.dispatch_with_permute(hidden=X, topk_idx=TOPK, num_of_experts=E)
        permuted.permute = permuted.permute._replace(state=object())
        with pytest.raises(ConfigError, match=words):
            hybrid.combine_with_unpermute(hidden=rows, handle=permuted)
        with pytest.raises(ConfigError, match=words):
            hybrid.dispatch_with_permute(hidden=X, handle=permuted)


@pytest.mark.parametrize("call", ["dispatch", "combine"])
def test_a_hook_is_called_once(buffer: Buffer, call: str) -> None:
    received, _, handle, _, hook = buffer.low_latency_dispatch(X, TOPK, 8, E, use_fp8=False, return_recv_hook=True)
    assert hook is not None
    if call == "combine":
        hook()
        assert isinstance(received, Tensor)
        _, _, hook = buffer.low_latency_combine(received, TOPK, WEIGHTS, handle, return_recv_hook=True)
        assert hook is not None
    hook()
    with pytest.raises(ConfigError, match="calls of one receive hook is 2; allowed: 1"):
        hook()


def test_a_refused_low_latency_call_has_sent_nothing(buffer: Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = low_latency_handle(buffer)

    def sent(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the engine was asked to send")

    for name in ("low_latency_dispatch", "low_latency_combine"):
        monkeypatch.setattr(buffer.engine, name, sent)
    both = {"async_finish": True, "return_recv_hook": True}
    with pytest.raises(ConfigError, match="both True"):
        buffer.low_latency_dispatch(X, TOPK, 8, E, **both)
    with pytest.raises(ConfigError, match="both True"):
        buffer.low_latency_combine(EXPERT_ROWS, TOPK, WEIGHTS, handle, **both)


def test_a_bound_without_indices_exchanges_no_counts(buffer: Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads them, and on a GPU the host would wait for them."""
    layout = layout_of(buffer)

    def exchanged(counts: Tensor) -> None:
        raise AssertionError("counts were exchanged")

    monkeypatch.setattr(buffer.engine, "exchange_expert_counts", exchanged)
    assert buffer.dispatch(X, **layout, num_worst_tokens=T)[3] == []
    with pytest.raises(AssertionError, match="counts were exchanged"):
        buffer.dispatch(X, **layout)


def test_a_closed_buffer_holds_no_memory() -> None:
    buffer = Buffer(None, 1024, low_latency_mode=True)
    held = [
        weakref.ref(t)
        for t in (
            buffer.get_local_buffer_tensor(BF16),
            buffer.get_next_low_latency_combine_buffer(low_latency_handle(buffer)),
        )
    ]
    storage = weakref.ref(buffer._local_memory[False])
    buffer.close()
    assert [ref() for ref in (*held, storage)] == [None] * 3
