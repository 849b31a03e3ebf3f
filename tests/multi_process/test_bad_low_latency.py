"""Wrong arguments of low-latency calls, their hooks, signals and masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_ep import Buffer, ConfigError
from tests.multi_process.small_calls import (
    BF16,
    EXPERT_ROWS,
    SIGNALS,
    TOPK,
    WEIGHTS,
    E,
    H,
    X,
    handle_of,
    low_latency_handle,
)

Bad = Callable[[Buffer], Any]
LOW_LATENCY: dict[str, tuple[Bad, str]] = {
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
}


@pytest.mark.parametrize("name", LOW_LATENCY)
def test_low_latency_calls(buffer: Buffer, name: str) -> None:
    call, message = LOW_LATENCY[name]
    with pytest.raises(ConfigError, match=message):
        call(buffer)
    # A refused call leaves the buffer usable.
    buffer.combine(X, handle_of(buffer))


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
