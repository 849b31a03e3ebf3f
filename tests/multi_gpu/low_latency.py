"""What the low-latency calls of the cuda engine promise beyond the battery: sizes, graphs, misuse.

The experts are left out: what a rank has received it sends back, so every result follows from the tokens alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hybrid_ep
from hybrid_ep import env
from hybrid_ep.engine.calls import MIN_TOKENS_TO_SUM
from hybrid_ep.quantize import cast_from_fp8, cast_to_fp8
from tests.battery.normal import equal
from tests.multi_gpu.random_routings import Tokens, draw_tokens

MAX_TOKENS = 64


def make_buffer(**options: object) -> hybrid_ep.Buffer:
    return hybrid_ep.Buffer(dist.group.WORLD, low_latency_mode=True, engine="cuda", **options)  # type: ignore[arg-type]


def draw(seed: int, tokens: list[int] | None = None, hidden: int = 1024, topk: int = 4) -> Tokens:
    num_ranks = dist.get_world_size()
    return draw_tokens(seed, tokens or [MAX_TOKENS] * num_ranks, hidden, topk, 8 * num_ranks, holes=0.1)


def expected_sum(sent: Tokens, rank: int, lost: int | None = None, *, hooked: bool = False) -> Tensor:
    """Σ_k weight × token in fp32, in top-k order, without the experts of a lost rank.

    Without a hook, and of enough tokens, terms of experts on one rank of the own domain are first summed and rounded.
    """
    per_domain = env.NUM_RANKS_PER_DOMAIN.get() or dist.get_world_size()
    owner, x = sent.owner(rank), sent.x[rank].float()
    counts = owner >= 0
    if lost is not None:
        counts &= owner != lost
    terms = x.unsqueeze(1) * torch.where(counts, sent.weights[rank], 0.0).unsqueeze(2)
    total = torch.zeros_like(x)
    for k in range(owner.shape[1]):
        same = (owner == owner[:, k : k + 1]) & counts
        is_near = owner[:, k] // per_domain == rank // per_domain
        is_sum = (same.sum(1) > 1) & is_near & (not hooked and len(x) >= MIN_TOKENS_TO_SUM)
        partial = torch.zeros_like(x)
        for j in range(owner.shape[1]):
            partial += torch.where(same[:, j : j + 1], terms[:, j], 0.0)
        rounded = torch.where(same[:, :k].any(1, keepdim=True), 0.0, partial.to(torch.bfloat16).float())
        total += torch.where(is_sum.unsqueeze(1), rounded, terms[:, k])
    return total.to(torch.bfloat16)


def check_received(packed: Tensor, count: Tensor, handle: tuple[Tensor, ...], sent: Tokens, lost: int | None) -> None:
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


def _quantised(sent: Tokens) -> Tokens:
    """What arrives of tokens that travel as FP8."""
    return sent._replace(x=[cast_from_fp8(*cast_to_fp8(x)) for x in sent.x])


def pair(
    buffer: hybrid_ep.Buffer, sent: Tokens, max_tokens: int = MAX_TOKENS, *, fp8: bool = False, hooked: bool = False
) -> tuple[Tensor, Tensor, tuple[Tensor, ...], Tensor]:
    """A dispatch and its combine; returns received rows in bf16, counts, the handle and the sums."""
    rank = dist.get_rank()
    received, count, handle, _, hook = buffer.low_latency_dispatch(
        sent.x[rank], sent.topk_idx[rank], max_tokens, sent.num_experts, use_fp8=fp8, return_recv_hook=hooked
    )
    if hook is not None:
        hook()
    packed = cast_from_fp8(*received) if isinstance(received, tuple) else received
    combined, _, hook = buffer.low_latency_combine(
        packed, sent.topk_idx[rank], sent.weights[rank], handle, return_recv_hook=hooked
    )
    if hook is not None:
        hook()
    return packed, count, handle, combined


def round_trip(
    buffer: hybrid_ep.Buffer,
    sent: Tokens,
    max_tokens: int = MAX_TOKENS,
    lost: int | None = None,
    *,
    fp8: bool = False,
    hooked: bool = False,
) -> None:
    packed, count, handle, combined = pair(buffer, sent, max_tokens, fp8=fp8, hooked=hooked)
    arrived = _quantised(sent) if fp8 else sent
    check_received(packed, count, handle, arrived, lost)
    want = expected_sum(arrived, dist.get_rank(), lost, hooked=hooked)
    assert torch.equal(combined, want), "combined_x is wrong"


def check_sizes() -> None:
    """The largest sizes, ragged, in BF16 and FP8, and others through the same buffer before and after."""
    num_ranks = dist.get_world_size()
    with make_buffer() as buffer:
        round_trip(buffer, draw(0))
        ragged = [1024, 0, 517, 3, 1, 64, 0, 999][:num_ranks]
        for seed, (hidden, topk) in enumerate([(16384, min(32, 8 * num_ranks)), (7168, 8), (8, 1), (128, 3)]):
            sent = draw(seed + 1, ragged, hidden, topk)
            for fp8 in (False, hidden % 128 == 0, False):
                round_trip(buffer, sent, 1024, fp8=fp8)
        round_trip(buffer, draw(0))


def check_two_batches() -> None:
    """Two micro-batches of other sizes, each in its own stage of dispatch and combine at any time."""
    rank = dist.get_rank()
    with make_buffer() as buffer:
        for seed in range(50):
            batches = [draw(2 * seed), draw(2 * seed + 1, hidden=512, topk=2)]
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
                assert torch.equal(c[0], expected_sum(b, rank, hooked=True)), f"seed {seed}"
                check_received(d[0], d[1], d[2], b, None)  # type: ignore[arg-type]


def check_replays(num_replays: int) -> None:
    """Two pairs of calls in one graph, in FP8 and with hooks, and so in both buffers of a kind.

    It is replayed with a routing that changes every time; the device compares.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    pool = [draw(seed) for seed in range(61)]
    num_local = pool[0].num_experts // num_ranks
    mine = torch.arange(rank * num_local, (rank + 1) * num_local, device="cuda")
    counts = [sum((i.flatten().unsqueeze(1) == mine).sum(0) for i in p.topk_idx) for p in pool]
    sums = [(expected_sum(_quantised(p), rank), expected_sum(p, rank, hooked=True)) for p in pool]
    x, topk_idx, weights = (t[rank].clone() for t in pool[0][:3])
    static = Tokens(*([t] * num_ranks for t in (x, topk_idx, weights)), pool[0].num_experts)
    wrong = torch.zeros(2, 2, dtype=torch.int64, device="cuda")
    with make_buffer() as buffer:

        def step() -> list[tuple[Tensor, Tensor]]:
            pairs = pair(buffer, static, fp8=True), pair(buffer, static, hooked=True)
            return [(combined, count) for _, count, _, combined in pairs]

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step()
        for replay in range(num_replays):
            # Ranks take the same routing, at their own pace: nothing but the calls keeps them together.
            sent = pool[replay % len(pool)]
            x.copy_(sent.x[rank])
            topk_idx.copy_(sent.topk_idx[rank])
            weights.copy_(sent.weights[rank])
            graph.replay()
            for i, (combined, count) in enumerate(results):
                wrong[i, 0] += (combined != sums[replay % len(pool)][i]).any()
                wrong[i, 1] += (count != counts[replay % len(pool)]).any()
            if replay % 1000 == 999:
                round_trip(buffer, sent)
    equal(wrong, torch.zeros(2, 2, dtype=torch.int64), "replays with wrong sums, with wrong counts; FP8, hooks")


def check_three_on_their_way() -> None:
    """There are two buffers; a third call before any hook is the caller's mistake and harms nothing."""
    rank, sent = dist.get_rank(), draw(0)
    send = (sent.x[rank], sent.topk_idx[rank], MAX_TOKENS, sent.num_experts)
    with make_buffer() as buffer:
        hooks = [buffer.low_latency_dispatch(*send, return_recv_hook=True)[4] for _ in range(2)]
        with pytest.raises(hybrid_ep.ConfigError, match="whose hook has not been called are 3"):
            buffer.low_latency_dispatch(*send, return_recv_hook=True)
        for hook in hooks:
            assert hook is not None
            hook()
        round_trip(buffer, sent)


def check_bad_expert() -> None:
    """An index outside −1 … E−1 is found by the kernel and raised by the hook; the buffer goes on."""
    rank, sent = dist.get_rank(), draw(0)
    topk_idx = sent.topk_idx[rank].clone()
    topk_idx[3, 1] = sent.num_experts + 7
    with make_buffer() as buffer:
        send = (sent.x[rank], topk_idx, MAX_TOKENS, sent.num_experts)
        *_, hook = buffer.low_latency_dispatch(*send, return_recv_hook=True)
        assert hook is not None
        torch.cuda.synchronize()
        with pytest.raises(hybrid_ep.ConfigError, match=str(sent.num_experts + 7)):
            hook()
        round_trip(buffer, sent)


def _combine_and_wait(buffer: hybrid_ep.Buffer, *arguments: Any) -> None:
    """Combines, and raises what a kernel has found wrong."""
    buffer.low_latency_combine(*arguments)
    torch.cuda.synchronize()
    buffer.raise_pending()


def check_other_number_of_tokens() -> None:
    """A combine of other tokens than the handle's at one rank: all are told, and can combine along the handle again."""
    rank, sent = dist.get_rank(), draw(0)
    with make_buffer() as buffer:
        for wrong in (MAX_TOKENS - 1, 0):
            packed, _, handle, _, _ = buffer.low_latency_dispatch(
                sent.x[rank], sent.topk_idx[rank], MAX_TOKENS, sent.num_experts, use_fp8=False
            )
            assert isinstance(packed, Tensor)
            topk_idx, weights = sent.topk_idx[rank], sent.weights[rank]
            num_tokens = MAX_TOKENS if rank else wrong
            with pytest.raises(hybrid_ep.ConfigError, match=rf"topk_idx.shape is \[{wrong}, 4\]"):
                _combine_and_wait(buffer, packed, topk_idx[:num_tokens], weights[:num_tokens], handle)
            combined, _, _ = buffer.low_latency_combine(packed, topk_idx, weights, handle)
            equal(combined, expected_sum(sent, rank).cpu(), "combined_x")


def check_streams() -> None:
    """A combine on another stream than its dispatch waits for it, however many calls lie before."""
    rank, other = dist.get_rank(), torch.cuda.Stream()
    with make_buffer() as buffer:
        for step in range(4):
            with torch.cuda.stream(other):
                round_trip(buffer, draw(0))
                round_trip(buffer, draw(0))
                sent = draw(1 + step)  # rows of earlier calls are not those of this one
                torch.cuda._sleep(50_000_000)
                packed, _, handle, _, _ = buffer.low_latency_dispatch(
                    sent.x[rank], sent.topk_idx[rank], MAX_TOKENS, sent.num_experts, use_fp8=False
                )
            assert isinstance(packed, Tensor)
            combined, _, _ = buffer.low_latency_combine(packed, sent.topk_idx[rank], sent.weights[rank], handle)
            equal(combined, expected_sum(sent, rank).cpu(), "combined_x")
            round_trip(buffer, draw(0))


def check_error_in_a_capture() -> None:
    """What an earlier call has left to tell is told in a capture, too; the capture fails, the buffer goes on."""
    rank, sent = dist.get_rank(), draw(0)
    topk_idx = sent.topk_idx[rank].clone()
    topk_idx[3, 1] = sent.num_experts + 7
    graph = torch.cuda.CUDAGraph()
    with make_buffer() as buffer:
        round_trip(buffer, sent)
        *_, hook = buffer.low_latency_dispatch(
            sent.x[rank], topk_idx, MAX_TOKENS, sent.num_experts, return_recv_hook=True
        )
        torch.cuda.synchronize()
        assert hook is not None
        with pytest.raises(hybrid_ep.ConfigError, match=str(sent.num_experts + 7)), torch.cuda.graph(graph):
            hook()
        torch.cuda.synchronize()
        buffer.clean_low_latency_buffer(MAX_TOKENS, 1024, sent.num_experts)
        round_trip(buffer, sent)
