"""What the low-latency calls of the cuda engine promise beyond the battery: sizes, graphs, misuse, lost ranks.

The experts are left out: what a rank has received it sends back, so every result follows from the tokens alone.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hybrid_ep
from hybrid_ep.engine.base import MIN_TOKENS_TO_SUM
from tests.battery.normal import equal
from tests.multi_gpu.random_routings import Tokens, draw_tokens

__all__ = [
    "check_bad_expert",
    "check_masks_by_hand",
    "check_replays",
    "check_sizes",
    "check_three_on_their_way",
    "check_two_batches",
    "lose_a_rank",
    "lose_a_rank_between_its_flags",
]

MAX_TOKENS = 64


def _buffer(**options: object) -> hybrid_ep.Buffer:
    return hybrid_ep.Buffer(dist.group.WORLD, low_latency_mode=True, engine="cuda", **options)  # type: ignore[arg-type]


def _draw(seed: int, tokens: list[int] | None = None, hidden: int = 1024, topk: int = 4) -> Tokens:
    num_ranks = dist.get_world_size()
    return draw_tokens(seed, tokens or [MAX_TOKENS] * num_ranks, hidden, topk, 8 * num_ranks, holes=0.1)


def _expected_sum(sent: Tokens, rank: int, lost: int | None = None, *, hooked: bool = False) -> Tensor:
    """Σ_k weight × token in fp32, in top-k order, without the experts of a lost rank.

    Without a hook, and of enough tokens, terms of experts on one rank are first summed and rounded.
    """
    owner, x = sent.owner(rank), sent.x[rank].float()
    counts = owner >= 0
    if lost is not None:
        counts &= owner != lost
    terms = x.unsqueeze(1) * torch.where(counts, sent.weights[rank], 0.0).unsqueeze(2)
    total = torch.zeros_like(x)
    for k in range(owner.shape[1]):
        same = (owner == owner[:, k : k + 1]) & counts
        is_sum = (same.sum(1) > 1) & (not hooked and len(x) >= MIN_TOKENS_TO_SUM)
        partial = torch.zeros_like(x)
        for j in range(owner.shape[1]):
            partial += torch.where(same[:, j : j + 1], terms[:, j], 0.0)
        rounded = torch.where(same[:, :k].any(1, keepdim=True), 0.0, partial.to(torch.bfloat16).float())
        total += torch.where(is_sum.unsqueeze(1), rounded, terms[:, k])
    return total.to(torch.bfloat16)


def _check_received(packed: Tensor, count: Tensor, handle: tuple[Tensor, ...], sent: Tokens, lost: int | None) -> None:
    rank, num_ranks, num_local = dist.get_rank(), len(sent.x), sent.num_experts // len(sent.x)
    sources = [r for r in range(num_ranks) if r != lost]
    for local in range(num_local):
        tokens = [(sent.topk_idx[r] == rank * num_local + local).any(1).nonzero()[:, 0] for r in sources]
        number = sum(t.numel() for t in tokens)
        assert int(count[local]) == number, f"expert {local}: {int(count[local])} rows, expected {number}"
        rows = torch.cat([sent.x[r][t] for r, t in zip(sources, tokens, strict=True)])
        assert torch.equal(packed[local, :number], rows), f"expert {local}: wrong rows"
        assert torch.equal(handle[0][local, :number], torch.cat(tokens).int()), f"expert {local}: wrong source tokens"
        counts = torch.zeros(num_ranks, dtype=torch.int64)
        counts[sources] = torch.tensor([t.numel() for t in tokens])
        equal(handle[1][local], ((counts.cumsum(0) - counts) << 32) | counts, f"expert {local}: layout")


def _round_trip(buffer: hybrid_ep.Buffer, sent: Tokens, max_tokens: int = MAX_TOKENS, lost: int | None = None) -> None:
    rank = dist.get_rank()
    packed, count, handle, _, _ = buffer.low_latency_dispatch(
        sent.x[rank], sent.topk_idx[rank], max_tokens, sent.num_experts, use_fp8=False
    )
    assert isinstance(packed, Tensor)
    combined, _, _ = buffer.low_latency_combine(packed, sent.topk_idx[rank], sent.weights[rank], handle)
    _check_received(packed, count, handle, sent, lost)
    assert torch.equal(combined, _expected_sum(sent, rank, lost)), "combined_x is wrong"


def check_sizes() -> None:
    """The largest sizes, ragged, and others through the same buffer before and after."""
    num_ranks = dist.get_world_size()
    with _buffer() as buffer:
        _round_trip(buffer, _draw(0))
        ragged = [1024, 0, 517, 3, 1, 64, 0, 999][:num_ranks]
        for seed, (hidden, topk) in enumerate([(16384, min(32, 8 * num_ranks)), (7168, 8), (8, 1), (128, 3)]):
            sent = _draw(seed + 1, ragged, hidden, topk)
            for _ in range(3):
                _round_trip(buffer, sent, 1024)
        _round_trip(buffer, _draw(0))


def check_two_batches() -> None:
    """Two micro-batches of other sizes, each in its own stage of dispatch and combine at any time."""
    rank = dist.get_rank()
    with _buffer() as buffer:
        for seed in range(50):
            batches = [_draw(2 * seed), _draw(2 * seed + 1, hidden=512, topk=2)]
            dispatched = [
                buffer.low_latency_dispatch(
                    b.x[rank], b.topk_idx[rank], MAX_TOKENS, b.num_experts, use_fp8=False, return_recv_hook=True
                )
                for b in batches
            ]
            for d in dispatched:
                assert d[4] is not None
                d[4]()
            combined = [
                buffer.low_latency_combine(d[0], b.topk_idx[rank], b.weights[rank], d[2], return_recv_hook=True)  # type: ignore[arg-type]
                for b, d in zip(batches, dispatched, strict=True)
            ]
            for b, d, c in zip(batches, dispatched, combined, strict=True):
                assert c[2] is not None
                c[2]()
                assert torch.equal(c[0], _expected_sum(b, rank, hooked=True)), f"seed {seed}"
                _check_received(d[0], d[1], d[2], b, None)  # type: ignore[arg-type]


def check_replays(num_replays: int) -> None:
    """Both calls in one graph, replayed with a routing that changes every time; the device compares."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    pool = [_draw(seed) for seed in range(61)]
    num_local = pool[0].num_experts // num_ranks
    mine = torch.arange(rank * num_local, (rank + 1) * num_local, device="cuda")
    counts = [sum((i.flatten().unsqueeze(1) == mine).sum(0) for i in p.topk_idx) for p in pool]
    sums = [_expected_sum(p, rank) for p in pool]
    x, topk_idx, weights = (t[rank].clone() for t in pool[0][:3])
    wrong = torch.zeros(2, dtype=torch.int64, device="cuda")
    with _buffer() as buffer:

        def step() -> tuple[Tensor, Tensor]:
            packed, count, handle, _, _ = buffer.low_latency_dispatch(
                x, topk_idx, MAX_TOKENS, pool[0].num_experts, use_fp8=False
            )
            assert isinstance(packed, Tensor)
            return buffer.low_latency_combine(packed, topk_idx, weights, handle)[0], count

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            combined, count = step()
        for replay in range(num_replays):
            # Ranks take the same routing, at their own pace: nothing but the calls keeps them together.
            sent = pool[replay % len(pool)]
            x.copy_(sent.x[rank])
            topk_idx.copy_(sent.topk_idx[rank])
            weights.copy_(sent.weights[rank])
            graph.replay()
            wrong[0] += (combined != sums[replay % len(pool)]).any()
            wrong[1] += (count != counts[replay % len(pool)]).any()
            if replay % 1000 == 999:
                _round_trip(buffer, sent)
    equal(wrong, torch.zeros(2, dtype=torch.int64), "replays with wrong sums, with wrong counts")


def check_three_on_their_way() -> None:
    """There are two buffers; a third call before any hook is the caller's mistake and harms nothing."""
    rank, sent = dist.get_rank(), _draw(0)
    send = (sent.x[rank], sent.topk_idx[rank], MAX_TOKENS, sent.num_experts)
    with _buffer() as buffer:
        hooks = [buffer.low_latency_dispatch(*send, return_recv_hook=True)[4] for _ in range(2)]
        with pytest.raises(hybrid_ep.ConfigError, match="on their way are 3"):
            buffer.low_latency_dispatch(*send, return_recv_hook=True)
        for hook in hooks:
            assert hook is not None
            hook()
        _round_trip(buffer, sent)


def check_bad_expert() -> None:
    """An index outside −1 … E−1 is found by the kernel and raised by the hook; the buffer goes on."""
    rank, sent = dist.get_rank(), _draw(0)
    topk_idx = sent.topk_idx[rank].clone()
    topk_idx[3, 1] = sent.num_experts + 7
    with _buffer() as buffer:
        send = (sent.x[rank], topk_idx, MAX_TOKENS, sent.num_experts)
        *_, hook = buffer.low_latency_dispatch(*send, return_recv_hook=True)
        assert hook is not None
        torch.cuda.synchronize()
        with pytest.raises(hybrid_ep.ConfigError, match=str(sent.num_experts + 7)):
            hook()
        _round_trip(buffer, sent)


def check_masks_by_hand() -> None:
    """All agree to leave a rank out, which makes no calls; then they take it back in."""
    rank, lost = dist.get_rank(), dist.get_world_size() - 1
    with _buffer(enable_shrink=True) as buffer:
        _round_trip(buffer, _draw(0))
        torch.cuda.synchronize()
        dist.barrier()
        if rank != lost:
            buffer.low_latency_update_mask_buffer(lost, True)
            for seed in range(5):
                _round_trip(buffer, _draw(seed), lost=lost)
        buffer.low_latency_clean_mask_buffer()
        buffer.clean_low_latency_buffer(MAX_TOKENS, 1024, 8 * dist.get_world_size())
        status = torch.ones(dist.get_world_size(), dtype=torch.int32, device="cuda")
        buffer.low_latency_query_mask_buffer(status)
        equal(status, torch.zeros(dist.get_world_size(), dtype=torch.int32), "masks")
        for seed in range(5):
            _round_trip(buffer, _draw(seed))


def lose_a_rank(lost: int, timeout_s: float) -> int | None:
    """The rank dies between two calls; the others are told who it was, and go on without it."""
    rank, sent = dist.get_rank(), _draw(0)
    with _buffer(enable_shrink=True, timeout_s=timeout_s) as buffer:
        _round_trip(buffer, sent)
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        if rank == lost:
            os.kill(os.getpid(), signal.SIGKILL)
        send = (sent.x[rank], sent.topk_idx[rank], MAX_TOKENS, sent.num_experts)
        with pytest.raises(hybrid_ep.TimeoutError, match="low_latency_dispatch: routes") as told:  # noqa: PT012
            buffer.low_latency_dispatch(*send, use_fp8=False)  # gives the rank up on the device
            torch.cuda.synchronize()
            buffer.low_latency_dispatch(*send, use_fp8=False)  # and here the host is told
        status = torch.zeros(dist.get_world_size(), dtype=torch.int32, device="cuda")
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [int(r == lost) for r in range(dist.get_world_size())]
        for seed in range(5):
            _round_trip(buffer, _draw(seed), lost=lost)
    return told.value.peer


def lose_a_rank_between_its_flags(timeout_s: float) -> str:
    """The last rank is lost in a combine, when its weights stand at the first rank only and its rows nowhere.

    The others wait for its weights, and the first waits for their rows; it must not give them up.
    """
    rank, lost, sent = dist.get_rank(), dist.get_world_size() - 1, _draw(0)
    with _buffer(enable_shrink=True, timeout_s=timeout_s) as buffer:
        _round_trip(buffer, sent)
        _round_trip(buffer, sent)
        send = (sent.x[rank], sent.topk_idx[rank], MAX_TOKENS, sent.num_experts)
        packed, _, handle, _, _ = buffer.low_latency_dispatch(*send, use_fp8=False)
        assert isinstance(packed, Tensor)
        torch.cuda.synchronize()
        if rank == 0:
            _raise_weights_flag_of(buffer, lost)
        torch.cuda.synchronize()
        dist.barrier()
        if rank == lost:
            return ""
        if rank > 0:
            time.sleep(0.1)  # the first rank's time is over first
        with pytest.raises(hybrid_ep.TimeoutError) as told:  # noqa: PT012
            buffer.low_latency_combine(packed, sent.topk_idx[rank], sent.weights[rank], handle)
            torch.cuda.synchronize()
            buffer.low_latency_dispatch(*send, use_fp8=False)
        assert told.value.peer == lost
        status = torch.zeros(dist.get_world_size(), dtype=torch.int32, device="cuda")
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [int(r == lost) for r in range(dist.get_world_size())]
        for seed in range(5):
            _round_trip(buffer, _draw(seed), lost=lost)
            torch.cuda.synchronize()
    return str(told.value)


def _raise_weights_flag_of(buffer: hybrid_ep.Buffer, peer: int) -> None:
    """Writes what the peer's third combine would, where csrc/layout/low_latency_layout.h has it."""
    from hybrid_ep import _cuda

    calls = buffer.engine._low_latency  # type: ignore[attr-defined]
    words = calls._memory.local[: calls._capacity.epochs_bytes].view(torch.int32)
    num_ranks = _cuda.max_ranks
    begun, sent, weights_epoch, free_epoch, progress = 2 * num_ranks, 2 * num_ranks, num_ranks, num_ranks, 4
    waited_us = num_ranks
    channel = begun + sent + weights_epoch + free_epoch + progress + waited_us
    flag = words[2 * channel + begun + sent + peer]
    assert int(flag) == 1
    flag += 1
