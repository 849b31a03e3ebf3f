"""Wrong arguments of `Buffer`'s normal calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_ep import Buffer, ConfigError
from hybrid_ep.quantize import cast_to_fp8, cast_to_nvfp4
from tests.multi_process.small_calls import BF16, TOPK, WEIGHTS, E, H, T, X, handle_of, layout_of

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
    "num_sms": (lambda b: b.set_num_sms(0), "new_num_sms is 0"),
}


@pytest.mark.parametrize("name", NORMAL)
def test_normal_calls(buffer: Buffer, name: str) -> None:
    call, message = NORMAL[name]
    with pytest.raises(ConfigError, match=message):
        call(buffer)
    # A refused call leaves the buffer usable.
    buffer.combine(X, handle_of(buffer))


def test_arguments_are_checked_for_another_handle(buffer: Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments on a GPU are checked in every call."""
    layout = layout_of(buffer, TOPK[:4])
    other = buffer.dispatch(X[:4], **layout, topk_idx=TOPK[:4], topk_weights=WEIGHTS[:4])[4]
    handle = handle_of(buffer)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for _ in range(2):
        buffer.combine(X, handle, topk_weights=WEIGHTS, bias=X)
        buffer.dispatch(X, handle)
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


def test_a_bound_without_indices_exchanges_no_counts(buffer: Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads them, and on a GPU the host would wait for them."""
    layout = layout_of(buffer)

    def exchanged(counts: Tensor) -> None:
        raise AssertionError("counts were exchanged")

    monkeypatch.setattr(buffer.engine, "exchange_expert_counts", exchanged)
    assert buffer.dispatch(X, **layout, num_worst_tokens=T)[3] == []
    with pytest.raises(AssertionError, match="counts were exchanged"):
        buffer.dispatch(X, **layout)
