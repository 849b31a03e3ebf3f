"""Ranks that disagree while their records have equal bytes, and buffers that share a group: a typed error, or right
rows.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_ep import Buffer, ConfigError, HybridEPBuffer, TimeoutError
from hybrid_ep.quantize import cast_to_fp8
from hybrid_ep.testing.cluster import VirtualCluster
from tests.conftest import RunRanks

BF16 = torch.bfloat16
T, E = 4, 8


def _layout(buffer: Buffer, topk_idx: torch.Tensor, num_experts: int = E) -> dict[str, Any]:
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
    return {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}


def _topk(num_topk: int) -> torch.Tensor:
    return torch.arange(T * num_topk).view(T, num_topk) % E


def _send(buffer: Buffer, x: Any, num_topk: int, *, weights: bool = False, **options: Any) -> Any:
    topk_idx = _topk(num_topk)
    topk_weights = torch.rand(T, num_topk) if weights else None
    return buffer.dispatch(x, **_layout(buffer, topk_idx), topk_idx=topk_idx, topk_weights=topk_weights, **options)


def _x(hidden: int) -> torch.Tensor:
    return torch.ones(T, hidden, dtype=BF16)


def _fp8(hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    return cast_to_fp8(_x(hidden))


def _ue8m0(hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _fp8(hidden)[0], torch.zeros(T, -(-hidden // 512), dtype=torch.int32)


# What rank 0 and rank 1 call with, and the field that both errors name. Bytes of a record are equal where it says so.
_Call = Callable[[Buffer], Any]
PAIRS: dict[str, tuple[_Call, _Call, str]] = {
    "hidden and top-k, equal bytes": (lambda b: _send(b, _x(128), 3), lambda b: _send(b, _x(130), 2), "top-k"),
    "hidden, in other bytes": (lambda b: _send(b, _x(128), 2), lambda b: _send(b, _x(256), 2), "hidden"),
    "bf16 against fp8, equal bytes": (lambda b: _send(b, _x(66), 2), lambda b: _send(b, _fp8(128), 2), "hidden"),
    "float32 against UE8M0 scales, equal bytes": (
        lambda b: _send(b, _fp8(128), 2),
        lambda b: _send(b, _ue8m0(128), 2),
        "dtype of the scales",
    ),
    "weights against further top-k, equal bytes": (
        lambda b: _send(b, _x(128), 2, weights=True),
        lambda b: _send(b, _x(128), 4),
        "top-k",
    ),
    "weights": (
        lambda b: _send(b, _x(128), 2, weights=True),
        lambda b: _send(b, _x(128), 2),
        "whether topk_weights are given",
    ),
    "topk_idx against a layout only": (
        lambda b: b.dispatch(_x(128), **_layout(b, _topk(2)), topk_idx=_topk(2)),
        lambda b: b.dispatch(_x(128), **_layout(b, _topk(2))),
        "whether topk_idx is given",
    ),
    "num_worst_tokens": (
        lambda b: _send(b, _x(128), 2, num_worst_tokens=16),
        lambda b: _send(b, _x(128), 2, num_worst_tokens=24),
        "num_worst_tokens",
    ),
    "a bound at one rank": (
        lambda b: _send(b, _x(128), 2, num_worst_tokens=16),
        lambda b: _send(b, _x(128), 2),
        "num_worst_tokens",
    ),
    "low latency: hidden and top-k, equal bytes": (
        lambda b: b.low_latency_dispatch(_x(128), _topk(3), 8, E, use_fp8=False),
        lambda b: b.low_latency_dispatch(_x(130), _topk(2), 8, E, use_fp8=False),
        "top-k",
    ),
    "low latency: bf16 against fp8, equal bytes": (
        lambda b: b.low_latency_dispatch(_x(66), _topk(2), 8, E, use_fp8=False),
        lambda b: b.low_latency_dispatch(_x(128), _topk(2), 8, E),
        "hidden",
    ),
    "low latency: scales, equal bytes": (
        lambda b: b.low_latency_dispatch(_x(128), _topk(2), 8, E),
        lambda b: b.low_latency_dispatch(_x(128), _topk(2), 8, E, round_scale=True, use_ue8m0=True),
        "dtype of the scales",
    ),
    "another call": (
        lambda b: _send(b, _x(128), 2),
        lambda b: b.low_latency_dispatch(_x(128), _topk(2), 8, E),
        "call",
    ),
}


def disagree(name: str) -> tuple[str, bool]:
    """Both ranks are told, and the buffer goes on."""
    rank = dist.get_rank()
    with Buffer(low_latency_mode=True, enable_shrink=True, timeout_s=10) as buffer:
        with pytest.raises(ConfigError, match="allowed: the same on every rank") as told:
            PAIRS[name][rank](buffer)
        received, _, _, _, handle, _ = _send(buffer, _x(128) * (1 + rank), 2)
        combined, _, _ = buffer.combine(received, handle)
        ranks_of_token = _layout(buffer, _topk(2))["is_token_in_rank"].sum(1, keepdim=True)
        return str(told.value), torch.equal(combined, (1 + rank) * ranks_of_token.expand(T, 128).to(BF16))


@pytest.mark.parametrize("name", PAIRS)
def test_ranks_that_disagree_are_told_the_field(run_ranks: RunRanks, name: str) -> None:
    field = PAIRS[name][2]
    for rank, (told, goes_on) in enumerate(run_ranks(2, disagree, name)):
        assert told.startswith(field), told
        assert f"at rank {rank} and " in told
        assert goes_on


def _round_trip(buffer: Buffer, value: float) -> bool:
    """Rows of a value come back as that value times the ranks that they went to."""
    received, _, _, _, handle, _ = _send(buffer, _x(128) * value, 2)
    combined, _, _ = buffer.combine(received, handle)
    ranks_of_token = _layout(buffer, _topk(2))["is_token_in_rank"].sum(1, keepdim=True)
    everywhere = bool((received == value).all())
    return everywhere and torch.equal(combined, (value * ranks_of_token).expand(T, 128).to(BF16))


def _other_order() -> bool:
    """A then B at rank 0, B then A at rank 1, in threads: each buffer has connections of its own."""
    with Buffer(timeout_s=10) as a, Buffer(timeout_s=10) as b:
        right: dict[str, list[bool]] = {"a": [], "b": []}

        def rounds(name: str, buffer: Buffer, value: float) -> None:
            right[name] = [_round_trip(buffer, value) for _ in range(30)]

        threads = [
            threading.Thread(target=rounds, args=("a", a, 1.0)),
            threading.Thread(target=rounds, args=("b", b, 2.0)),
        ]
        for thread in threads if dist.get_rank() == 0 else reversed(threads):
            thread.start()
        for thread in threads:
            thread.join()
        return right == {"a": [True] * 30, "b": [True] * 30}


def test_a_thread_per_buffer(run_ranks: RunRanks) -> None:
    assert run_ranks(2, _other_order) == [True, True]


def _wait_for_each_other() -> str:
    """A then B at rank 0, B then A at rank 1, in one thread: neither call can end."""
    with Buffer(timeout_s=3) as a, Buffer(timeout_s=3) as b:
        first = (a, b)[dist.get_rank()]
        with pytest.raises(TimeoutError) as told:
            _send(first, _x(128), 2)
        assert told.value.peer == 1 - dist.get_rank()
        return told.value.detail


def test_buffers_in_another_order_are_told(run_ranks: RunRanks) -> None:
    words = "it has waited in a call of another buffer, whose number on the group is {} there and {} here; allowed: "
    for rank, told in enumerate(run_ranks(2, _wait_for_each_other)):
        theirs, mine = re.findall(r"(\d+) (?:here|there)", told)
        assert int(theirs) - int(mine) == (1, -1)[rank]
        assert words.format(theirs, mine) in told


def _handles_of_two_buffers() -> str:
    """Handles with the same call number, of different buffers at different ranks."""
    with Buffer(timeout_s=10) as a, Buffer(timeout_s=10) as b:
        received, _, _, _, of_a, _ = _send(a, _x(128), 2)
        _, _, _, _, of_b, _ = _send(b, _x(128), 2)
        with pytest.raises(ConfigError) as told:
            a.combine(received, (of_a, of_b)[dist.get_rank()])
        return str(told.value)


def test_handles_of_two_buffers_are_told_apart(run_ranks: RunRanks) -> None:
    assert all("number of the handle's dispatch is" in told for told in run_ranks(2, _handles_of_two_buffers))


def _hooks_in_other_order() -> list[str]:
    """Two receives in one order at rank 0 and in the other at rank 1: both are told, by the number of the call."""
    told = []
    with Buffer(low_latency_mode=True, timeout_s=10) as buffer:
        hooks = [
            buffer.low_latency_dispatch(_x(128) * i, _topk(2), 8, E, use_fp8=False, return_recv_hook=True)[-1]
            for i in (1, 2)
        ]
        for hook in hooks if dist.get_rank() == 0 else reversed(hooks):
            assert hook is not None
            with pytest.raises(ConfigError, match="allowed: the same on every rank") as error:
                hook()
            told.append(str(error.value).split(" is ")[0])
    return told


def test_hooks_in_another_order_are_told(run_ranks: RunRanks) -> None:
    assert run_ranks(2, _hooks_in_other_order) == [["number of the call"] * 2] * 2


def _send_beside() -> bool:
    """A user's own messages on the group, with the tags that calls use."""
    rank, group = dist.get_rank(), dist.group.WORLD
    mine, theirs = torch.full((64,), float(rank)), torch.zeros(64)
    with Buffer(timeout_s=10) as buffer:
        for tag in (17, 18, 33, 0, 1):
            work = dist.isend(mine, 1 - rank, group, tag)
            assert _round_trip(buffer, 3.0)
            dist.recv(theirs, 1 - rank, group, tag)
            assert work is not None
            work.wait()
            assert bool((theirs == 1 - rank).all())
        return _round_trip(buffer, 4.0)


def test_messages_of_a_user_do_not_meet_those_of_a_call(run_ranks: RunRanks) -> None:
    assert run_ranks(2, _send_beside) == [True, True]


def _plain_and_permuted() -> str:
    rank = dist.get_rank()
    with HybridEPBuffer(dist.group.WORLD, 128, T, E // 2, timeout_s=10) as buffer:
        given = {"hidden": _x(128), "topk_idx": _topk(2), "num_of_experts": E}
        with pytest.raises(ConfigError) as told:
            buffer.dispatch(**given) if rank else buffer.dispatch_with_permute(**given)
        return str(told.value)


def test_a_plain_dispatch_and_a_permuted_one(run_ranks: RunRanks) -> None:
    first, second = run_ranks(2, _plain_and_permuted)
    assert first.startswith("call is 'dispatch_with_permute' at rank 0 and 'dispatch' at rank 1")
    assert second.startswith("call is 'dispatch' at rank 1 and 'dispatch_with_permute' at rank 0")


def _make_alone(timeout_s: float) -> tuple[str, float, bool]:
    """Rank 0 makes a buffer that rank 1 does not; then both make one."""
    told, began = "", time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(TimeoutError) as error:
            Buffer(timeout_s=timeout_s)
        told = str(error.value)
    else:
        time.sleep(timeout_s + 1)
    took = time.monotonic() - began
    with Buffer(timeout_s=20) as buffer:
        return told, took, _round_trip(buffer, 1.0)


def test_a_buffer_made_at_one_rank_only() -> None:
    with VirtualCluster(2) as cluster:
        (told, took, works), (_, _, works_there) = cluster.run(_make_alone, 2.0)
    assert told == "making a buffer: rank 0 waited 2 s for rank 1: it has made none"
    assert took < 3
    assert works
    assert works_there
