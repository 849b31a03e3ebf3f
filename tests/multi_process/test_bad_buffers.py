"""Buffers that are made with wrong arguments, are closed, or get tensors and handles of another engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hybrid_ep import (
    Buffer,
    BufferHandle,
    ClosedError,
    ConfigError,
    HybridEPBuffer,
    TopologyError,
)
from tests.multi_process.small_calls import (
    BF16,
    EXPERT_ROWS,
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


def test_a_handle_of_another_engine_is_refused(buffer: Buffer) -> None:
    """As a cuda engine's is, beside a torch engine on the same ranks."""
    words = "handle is of another engine; allowed: one that a dispatch of this buffer's engine returned"
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(TOPK, E)
    rows, _, _, _, handle, _ = buffer.dispatch(X, None, per_rank, None, in_rank, per_expert, TOPK, WEIGHTS)
    foreign = BufferHandle(buffer, handle.dispatch._replace(state=object()), in_rank, None)
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
