"""Arguments of a type that the call does not take: a typed error on every machine, not only where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hybrid_ep import Buffer, BufferAllocator, ConfigError, ElasticBuffer, EventHandle, HybridEPBuffer
from tests.multi_process.small_calls import (
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


@pytest.fixture(scope="module")
def buffer() -> Iterator[Buffer]:
    with Buffer(None, low_latency_mode=True) as made:
        yield made


@pytest.fixture(scope="module")
def hybrid() -> Iterator[HybridEPBuffer]:
    with HybridEPBuffer(None, H, T, E) as made:
        yield made


EVENT = "previous_event is str; allowed: EventHandle, EventOverlap or None"
NORMAL: dict[str, tuple[Callable[[Any], Any], str]] = {
    "layout: event": (lambda b: b.get_dispatch_layout(TOPK, E, previous_event="now"), EVENT),
    "layout: async_finish": (
        lambda b: b.get_dispatch_layout(TOPK, E, async_finish="no"),
        "async_finish is 'no'; allowed: True or False",
    ),
    "dispatch: event": (lambda b: b.dispatch(X, **layout_of(b), topk_idx=TOPK, previous_event="now"), EVENT),
    "dispatch with a handle: event": (lambda b: b.dispatch(X, handle_of(b), previous_event="now"), EVENT),
    "dispatch: async_finish": (
        lambda b: b.dispatch(X, handle_of(b), async_finish=2),
        "async_finish is 2; allowed: True or False",
    ),
    "combine: event": (lambda b: b.combine(X, handle_of(b), previous_event="now"), EVENT),
    "low latency: hook": (
        lambda b: b.low_latency_dispatch(X, TOPK, 8, E, return_recv_hook="no"),
        "return_recv_hook is 'no'; allowed: True or False",
    ),
    "low latency: async_finish": (
        lambda b: b.low_latency_dispatch(X, TOPK, 8, E, async_finish=[]),
        r"async_finish is \[\]; allowed: True or False",
    ),
    "low latency combine: zero_copy": (
        lambda b: b.low_latency_combine(EXPERT_ROWS, TOPK, WEIGHTS, low_latency_handle(b), zero_copy={}),
        "zero_copy is {}; allowed: True or False",
    ),
    "low latency combine: overlap": (
        lambda b: b.low_latency_combine(EXPERT_ROWS, TOPK, WEIGHTS, low_latency_handle(b), overlap=SIGNALS),
        "overlap is tensor.*; allowed: True or False",
    ),
    "weights of replicas": (
        lambda b: b.lb_prefetch_weights(3, torch.ones(E, 4), TOPK),
        "redundant_expert_weights is int; allowed: a tensor, or a sequence of tensors",
    ),
    "weights of replicas: of numbers": (
        lambda b: b.lb_prefetch_weights([1.5], torch.ones(E, 4), TOPK),
        "an element of redundant_expert_weights is float; allowed: a torch.Tensor",
    ),
    "size hint: group": (
        lambda b: ElasticBuffer.get_buffer_size_hint("world", 8, H),  # type: ignore[arg-type]
        "group is str; allowed: a torch.distributed.ProcessGroup",
    ),
    "plan: shape": (
        lambda b: BufferAllocator().allocate(3, torch.int8),  # type: ignore[arg-type]
        "shape is 3; allowed: a torch.Size or a sequence of integers",
    ),
    "constructor: comm": (
        lambda b: Buffer(comm="world"),
        "comm is str; allowed: an mpi4py communicator, with Get_rank",
    ),
    "constructor: low_latency_mode": (lambda b: Buffer(None, low_latency_mode="no"), "low_latency_mode is 'no'"),  # type: ignore[arg-type]
    "constructor: enable_shrink": (lambda b: Buffer(None, enable_shrink=2), "enable_shrink is 2; allowed: True or"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", NORMAL)
def test_buffer(buffer: Buffer, name: str) -> None:
    call, message = NORMAL[name]
    with pytest.raises(ConfigError, match=message):
        call(buffer)


def test_flags_are_also_1_and_0(buffer: Buffer) -> None:
    """As callers of DeepEP pass them."""
    recv_x = buffer.dispatch(X, handle_of(buffer), async_finish=1)[0]  # type: ignore[call-overload]
    rows = buffer.low_latency_dispatch(X, TOPK, T, E, use_fp8=0, return_recv_hook=0)[0]  # type: ignore[arg-type]
    assert recv_x.dtype == rows.dtype == torch.bfloat16  # type: ignore[union-attr]


def test_an_event_handle_is_an_event(buffer: Buffer) -> None:
    """As with `ElasticBuffer`, whose `capture` returns one."""
    handle = handle_of(buffer)
    recv_x = buffer.dispatch(X, handle, previous_event=EventHandle(), async_finish=True)[0]
    assert buffer.combine(recv_x, handle, previous_event=EventHandle())[0].shape == X.shape


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"non_blocking": "no"}, "non_blocking is 'no'; allowed: True or False"),
        ({"use_host_meta": "no"}, "use_host_meta is 'no'; allowed: True or False"),
        ({"hidden": [1.0], "use_fp8": False}, "hidden is list; allowed: a torch.Tensor"),
        ({"num_of_experts": [E]}, r"num_of_experts is \[8\]; allowed: an integer ≥ 1"),
        ({"num_of_experts_per_rank": "8"}, "num_of_experts_per_rank is '8'; allowed: an integer ≥ 1"),
        ({"pad_multiple": {}}, "pad_multiple is {}; allowed: an integer from 0 to 65536"),
    ],
)
def test_hybrid_buffer(hybrid: HybridEPBuffer, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hybrid.dispatch_with_permute(**({"hidden": X, "topk_idx": TOPK} | arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_sms": SIGNALS}, "num_sms is tensor.*; allowed: an integer ≥ 0"),
        ({"do_expand": SIGNALS}, "do_expand is tensor.*; allowed: True or False"),
        ({"previous_event": "now"}, EVENT),
    ],
)
def test_elastic_buffer(arguments: dict[str, Any], message: str) -> None:
    with ElasticBuffer(None, num_max_tokens_per_rank=T) as elastic, pytest.raises(ConfigError, match=message):
        elastic.dispatch(X, TOPK, num_experts=E, **arguments)
