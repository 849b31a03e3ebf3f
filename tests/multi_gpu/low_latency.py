"""What the low-latency calls of the cuda engine promise beyond the battery: sizes, graphs, misuse, lost ranks.

The experts are left out: what a rank has received it sends back, so every result follows from the tokens alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hybrid_ep
from hybrid_ep import env
from hybrid_ep.core.quantize import cast_from_fp8, cast_to_fp8
from hybrid_ep.engine.calls import MIN_TOKENS_TO_SUM
from hybrid_ep.engine.cuda_order import LaunchOrder
from tests.battery.normal import equal
from tests.multi_gpu.random_routings import Tokens, current_device, draw_tokens

__all__ = [
    "check_an_answer_that_comes_late",
    "check_bad_expert",
    "check_begun_once",
    "check_error_in_a_capture",
    "check_given_up_on_the_device",
    "check_masks_by_hand",
    "check_masks_of_old_graphs",
    "check_named_at_close",
    "check_other_number_of_tokens",
    "check_pending_loss",
    "check_refused_launch",
    "check_replays",
    "check_sizes",
    "check_three_on_their_way",
    "check_told_at_close",
    "check_told_once",
    "check_two_batches",
    "lose_a_rank",
    "lose_a_rank_between_its_flags",
    "lose_a_rank_between_replays",
    "make_shared_buffer",
    "use_without_peer",
]

MAX_TOKENS = 64
_NOT_THERE = "low_latency_dispatch: (routes|records of another domain)"


def _buffer(**options: object) -> hybrid_ep.Buffer:
    return hybrid_ep.Buffer(dist.group.WORLD, low_latency_mode=True, engine="cuda", **options)  # type: ignore[arg-type]


def _draw(seed: int, tokens: list[int] | None = None, hidden: int = 1024, topk: int = 4) -> Tokens:
    num_ranks = dist.get_world_size()
    return draw_tokens(seed, tokens or [MAX_TOKENS] * num_ranks, hidden, topk, 8 * num_ranks, holes=0.1)


def _expected_sum(sent: Tokens, rank: int, lost: int | None = None, *, hooked: bool = False) -> Tensor:
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


def _quantised(sent: Tokens) -> Tokens:
    """What arrives of tokens that travel as FP8."""
    return sent._replace(x=[cast_from_fp8(*cast_to_fp8(x)) for x in sent.x])


def _pair(
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


def _round_trip(
    buffer: hybrid_ep.Buffer,
    sent: Tokens,
    max_tokens: int = MAX_TOKENS,
    lost: int | None = None,
    *,
    fp8: bool = False,
    hooked: bool = False,
) -> None:
    packed, count, handle, combined = _pair(buffer, sent, max_tokens, fp8=fp8, hooked=hooked)
    arrived = _quantised(sent) if fp8 else sent
    _check_received(packed, count, handle, arrived, lost)
    want = _expected_sum(arrived, dist.get_rank(), lost, hooked=hooked)
    assert torch.equal(combined, want), "combined_x is wrong"


def _masks(buffer: hybrid_ep.Buffer) -> list[int]:
    status = torch.full((dist.get_world_size(),), -1, dtype=torch.int32, device=current_device())
    buffer.low_latency_query_mask_buffer(status)
    masks: list[int] = status.tolist()
    return masks


def _masks_of(lost: int) -> list[int]:
    return [int(r == lost) for r in range(dist.get_world_size())]


def check_sizes() -> None:
    """The largest sizes, ragged, in BF16 and FP8, and others through the same buffer before and after."""
    num_ranks = dist.get_world_size()
    with _buffer() as buffer:
        _round_trip(buffer, _draw(0))
        ragged = [1024, 0, 517, 3, 1, 64, 0, 999][:num_ranks]
        for seed, (hidden, topk) in enumerate([(16384, min(32, 8 * num_ranks)), (7168, 8), (8, 1), (128, 3)]):
            sent = _draw(seed + 1, ragged, hidden, topk)
            for fp8 in (False, hidden % 128 == 0, False):
                _round_trip(buffer, sent, 1024, fp8=fp8)
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
    """Two pairs of calls in one graph, in FP8 and with hooks, and so in both buffers of a kind.

    It is replayed with a routing that changes every time; the device compares.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    pool = [_draw(seed) for seed in range(61)]
    num_local = pool[0].num_experts // num_ranks
    mine = torch.arange(rank * num_local, (rank + 1) * num_local, device="cuda")
    counts = [sum((i.flatten().unsqueeze(1) == mine).sum(0) for i in p.topk_idx) for p in pool]
    sums = [(_expected_sum(_quantised(p), rank), _expected_sum(p, rank, hooked=True)) for p in pool]
    x, topk_idx, weights = (t[rank].clone() for t in pool[0][:3])
    static = Tokens(*([t] * num_ranks for t in (x, topk_idx, weights)), pool[0].num_experts)
    wrong = torch.zeros(2, 2, dtype=torch.int64, device="cuda")
    with _buffer() as buffer:

        def step() -> list[tuple[Tensor, Tensor]]:
            pairs = _pair(buffer, static, fp8=True), _pair(buffer, static, hooked=True)
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
                _round_trip(buffer, sent)
    equal(wrong, torch.zeros(2, 2, dtype=torch.int64), "replays with wrong sums, with wrong counts; FP8, hooks")


def check_three_on_their_way() -> None:
    """There are two buffers; a third call before any hook is the caller's mistake and harms nothing."""
    rank, sent = dist.get_rank(), _draw(0)
    send = (sent.x[rank], sent.topk_idx[rank], MAX_TOKENS, sent.num_experts)
    with _buffer() as buffer:
        hooks = [buffer.low_latency_dispatch(*send, return_recv_hook=True)[4] for _ in range(2)]
        with pytest.raises(hybrid_ep.ConfigError, match="whose hook has not been called are 3"):
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


def _combine_and_wait(buffer: hybrid_ep.Buffer, *arguments: Any) -> None:
    """Combines, and raises what a kernel has found wrong."""
    buffer.low_latency_combine(*arguments)
    torch.cuda.synchronize()
    buffer.raise_pending()


def check_other_number_of_tokens() -> None:
    """A combine of other tokens than the handle's at one rank: all are told, and can combine along the handle again."""
    rank, sent = dist.get_rank(), _draw(0)
    with _buffer() as buffer:
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
            equal(combined, _expected_sum(sent, rank).cpu(), "combined_x")


def check_begun_once() -> None:
    """A receive that follows its send is not ordered again; one that a hook makes is, for other work may have come."""
    with (
        _buffer() as buffer,
        mock.patch.object(
            LaunchOrder, "begin_low_latency", autospec=True, side_effect=LaunchOrder.begin_low_latency
        ) as begin,
    ):
        for hooked, begun in ((False, 2), (True, 4)):
            begin.reset_mock()
            _round_trip(buffer, _draw(0), hooked=hooked)
            assert begin.call_count == begun


def check_refused_launch() -> None:
    """A launch that fails at one rank, which then calls again, takes no buffer."""
    from hybrid_ep import _cuda

    refused = mock.Mock(side_effect=RuntimeError("refused"))
    with _buffer() as buffer:
        for name in ("dispatch_tokens", "combine_rows"):
            _round_trip(buffer, _draw(0))
            if dist.get_rank() == 0:
                with mock.patch.object(_cuda.LowLatencyRegion, name, refused), pytest.raises(RuntimeError):
                    _pair(buffer, _draw(0))
            elif name == "combine_rows":
                # Only the combine was refused: the dispatch before it has been sent.
                sent, rank = _draw(0), dist.get_rank()
                buffer.low_latency_dispatch(
                    sent.x[rank], sent.topk_idx[rank], MAX_TOKENS, sent.num_experts, use_fp8=False
                )
            for seed in range(3):
                _round_trip(buffer, _draw(seed))


def check_error_in_a_capture() -> None:
    """What an earlier call has left to tell is told in a capture, too; the capture fails, the buffer goes on."""
    rank, sent = dist.get_rank(), _draw(0)
    topk_idx = sent.topk_idx[rank].clone()
    topk_idx[3, 1] = sent.num_experts + 7
    graph = torch.cuda.CUDAGraph()
    with _buffer() as buffer:
        _round_trip(buffer, sent)
        *_, hook = buffer.low_latency_dispatch(
            sent.x[rank], topk_idx, MAX_TOKENS, sent.num_experts, return_recv_hook=True
        )
        torch.cuda.synchronize()
        assert hook is not None
        with pytest.raises(hybrid_ep.ConfigError, match=str(sent.num_experts + 7)), torch.cuda.graph(graph):
            hook()
        torch.cuda.synchronize()
        buffer.clean_low_latency_buffer(MAX_TOKENS, 1024, sent.num_experts)
        _round_trip(buffer, sent)


def check_masks_of_old_graphs() -> None:
    """A graph goes on with the memory that it was captured with; masks and cleanings reach it there."""
    rank, lost, sent = dist.get_rank(), dist.get_world_size() - 1, _draw(0)
    with _buffer(enable_shrink=True) as buffer:
        _round_trip(buffer, sent)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            *result, combined = _pair(buffer, sent)

        def replay(lost: int | None) -> None:
            graph.replay()
            _check_received(*result, sent, lost)  # type: ignore[arg-type]
            assert torch.equal(combined, _expected_sum(sent, rank, lost)), "combined_x is wrong"

        replay(None)
        _round_trip(buffer, _draw(0, hidden=2048))  # the memory grows
        replay(None)
        torch.cuda.synchronize()
        dist.barrier()
        if rank != lost:
            buffer.low_latency_update_mask_buffer(lost, True)
            begin = time.monotonic()
            for _ in range(3):
                replay(lost)
            assert time.monotonic() - begin < 5, "a masked rank was waited for"
        buffer.low_latency_clean_mask_buffer()
        buffer.clean_low_latency_buffer(MAX_TOKENS, 2048, sent.num_experts)
        for _ in range(3):
            replay(None)
            _round_trip(buffer, _draw(0, hidden=2048))


def check_given_up_on_the_device(timeout_s: float) -> None:
    """What kernels have masked and no call has told the host, as in replays, is found by asking for the masks."""
    rank, lost = dist.get_rank(), dist.get_world_size() - 1
    with _buffer(enable_shrink=True, timeout_s=timeout_s) as buffer:
        _round_trip(buffer, _draw(0))
        torch.cuda.synchronize()
        dist.barrier()
        if rank != lost:
            with _untold(buffer):
                _pair(buffer, _draw(0))
            assert _masks(buffer) == _masks_of(lost)
            for seed in range(3):
                _round_trip(buffer, _draw(seed), lost=lost)
        torch.cuda.synchronize()
        dist.barrier()


def check_pending_loss(timeout_s: float) -> None:
    """Who asks for what is pending, and is told of a lost rank, goes on without it."""
    rank, lost = dist.get_rank(), dist.get_world_size() - 1
    with _buffer(enable_shrink=True, timeout_s=timeout_s) as buffer:
        _round_trip(buffer, _draw(0))
        torch.cuda.synchronize()
        dist.barrier()
        if rank != lost:
            with _untold(buffer):
                _pair(buffer, _draw(0))
            torch.cuda.synchronize()
            with pytest.raises(hybrid_ep.TimeoutError):
                buffer.raise_pending()
            assert _masks(buffer) == _masks_of(lost)
        dist.barrier()


def check_told_at_close(timeout_s: float) -> None:
    """What kernels have found wrong and nobody knows is told when the buffer is closed, by its own name."""
    rank, lost = dist.get_rank(), dist.get_world_size() - 1
    buffer = _buffer(timeout_s=timeout_s)
    _round_trip(buffer, _draw(0))
    torch.cuda.synchronize()
    dist.barrier()
    if rank != lost:
        with _untold(buffer):
            _pair(buffer, _draw(0))
        with pytest.raises(hybrid_ep.TimeoutError) as told:
            buffer.close()
        assert told.value.peer == lost
    dist.barrier()
    buffer.close()


def check_named_at_close(timeout_s: float) -> None:
    """Calls that wait behind the one that has lost a rank lose it too; `close` does not raise that again."""
    rank, lost = dist.get_rank(), dist.get_world_size() - 1
    buffer = _buffer(timeout_s=timeout_s)
    _round_trip(buffer, _draw(0))
    torch.cuda.synchronize()
    dist.barrier()
    if rank != lost:
        with pytest.raises(hybrid_ep.TimeoutError) as told:  # noqa: PT012
            _pair(buffer, _draw(0))
            torch.cuda.synchronize()
            _pair(buffer, _draw(0))
        assert told.value.peer == lost
        with _untold(buffer), contextlib.suppress(hybrid_ep.TimeoutError):
            _pair(buffer, _draw(0))
    buffer.close()
    dist.barrier()


def check_told_once(timeout_s: float) -> None:
    """A rank that was late and given up joins again; what kernels have told of it again is not raised then."""
    rank, late = dist.get_rank(), dist.get_world_size() - 1
    with _buffer(enable_shrink=True, timeout_s=timeout_s) as buffer:
        _round_trip(buffer, _draw(0))
        torch.cuda.synchronize()
        dist.barrier()
        if rank != late:
            with pytest.raises(hybrid_ep.TimeoutError):  # noqa: PT012
                _pair(buffer, _draw(0))
                torch.cuda.synchronize()
                _pair(buffer, _draw(0))
            buffer.low_latency_update_mask_buffer(late, False)
            with _untold(buffer):
                _pair(buffer, _draw(0))
        buffer.low_latency_clean_mask_buffer()
        dist.barrier()  # whoever has waited in vain comes later
        buffer.clean_low_latency_buffer(MAX_TOKENS, 1024, 8 * dist.get_world_size())
        assert _masks(buffer) == [0] * dist.get_world_size()
        for seed in range(3):
            _round_trip(buffer, _draw(seed))


def _untold(buffer: hybrid_ep.Buffer) -> contextlib.AbstractContextManager[object]:
    """Calls in it do not look at what kernels find wrong, as replays of a graph do not."""
    return mock.patch.object(_kernels_of(buffer), "take_fault", return_value=None)


def _kernels_of(buffer: hybrid_ep.Buffer) -> Any:
    """What makes the low-latency calls of a buffer, of one domain or of several."""
    engine: Any = buffer.engine
    return getattr(engine, "_low_latency_kernels", None) or engine._low_latency


def check_masks_by_hand(fp8: bool, hooked: bool) -> None:
    """All agree to leave a rank out, which makes no calls; then they take it back in."""
    rank, lost = dist.get_rank(), dist.get_world_size() - 1
    with _buffer(enable_shrink=True) as buffer:
        _round_trip(buffer, _draw(0), fp8=fp8, hooked=hooked)
        torch.cuda.synchronize()
        dist.barrier()
        if rank != lost:
            buffer.low_latency_update_mask_buffer(lost, True)
            for seed in range(3):
                _round_trip(buffer, _draw(seed), lost=lost, fp8=fp8, hooked=hooked)
        buffer.low_latency_clean_mask_buffer()
        buffer.clean_low_latency_buffer(MAX_TOKENS, 1024, 8 * dist.get_world_size())
        assert _masks(buffer) == [0] * dist.get_world_size()
        for seed in range(3):
            _round_trip(buffer, _draw(seed), fp8=fp8, hooked=hooked)


def check_an_answer_that_comes_late() -> None:
    """The device has told of a mask. That arrives when the rank has been taken back in."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    other = (rank + 1) % num_ranks
    with _buffer(enable_shrink=True) as buffer:
        _round_trip(buffer, _draw(0))
        buffer.low_latency_update_mask_buffer(other, True)
        assert _masks(buffer) == _masks_of(other)
        kernels = _kernels_of(buffer)
        torch.cuda.synchronize()
        late = kernels._told.clone()
        buffer.low_latency_update_mask_buffer(other, False)
        kernels._told.copy_(late)
        assert kernels.note_told() == set()
        assert _masks(buffer) == [0] * num_ranks
        _round_trip(buffer, _draw(1))


def lose_a_rank(lost: int, timeout_s: float, fp8: bool, hooked: bool) -> int | None:
    """The rank dies between two calls; the others are told who it was, and go on without it."""
    rank, sent = dist.get_rank(), _draw(0)
    with _buffer(enable_shrink=True, timeout_s=timeout_s) as buffer:
        _round_trip(buffer, sent, fp8=fp8, hooked=hooked)
        _die_alone(lost)

        def dispatch() -> None:
            *_, hook = buffer.low_latency_dispatch(
                sent.x[rank],
                sent.topk_idx[rank],
                MAX_TOKENS,
                sent.num_experts,
                use_fp8=fp8,
                return_recv_hook=hooked,
            )
            if hook is not None:
                hook()

        with pytest.raises(hybrid_ep.TimeoutError, match=_NOT_THERE) as told:  # noqa: PT012
            dispatch()  # gives the rank up on the device
            torch.cuda.synchronize()
            dispatch()  # and here the host is told
        assert _masks(buffer) == _masks_of(lost)
        for seed in range(5):
            _round_trip(buffer, _draw(seed), lost=lost, fp8=fp8, hooked=hooked)
    return told.value.peer


def lose_a_rank_between_replays(lost: int, timeout_s: float) -> list[int]:
    """Ranks only replay a graph, and one of them dies; the others find its mask, and replay on without it."""
    rank, sent = dist.get_rank(), _draw(0)
    with _buffer(enable_shrink=True, timeout_s=timeout_s) as buffer:
        _round_trip(buffer, sent)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            *result, combined = _pair(buffer, sent)
        for _ in range(3):
            graph.replay()
        assert _masks(buffer) == [0] * dist.get_world_size()
        _die_alone(lost)
        graph.replay()
        masks = _masks(buffer)
        for _ in range(3):
            graph.replay()
            _check_received(*result, sent, lost)  # type: ignore[arg-type]
            assert torch.equal(combined, _expected_sum(sent, rank, lost)), "combined_x is wrong"
        _round_trip(buffer, sent, lost=lost)  # and nothing is told that is known
    return masks


def _die_alone(lost: int) -> None:
    """The rank dies when no rank is in a call."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    if dist.get_rank() == lost:
        os.kill(os.getpid(), signal.SIGKILL)


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
        assert _masks(buffer) == _masks_of(lost)
        for seed in range(5):
            _round_trip(buffer, _draw(seed), lost=lost)
            torch.cuda.synchronize()
    return str(told.value)


def _raise_weights_flag_of(buffer: hybrid_ep.Buffer, peer: int) -> None:
    """Writes what the peer's third combine would."""
    from hybrid_ep import _cuda

    memory = _kernels_of(buffer)._regions[-1].memory.local
    channel = _cuda.low_latency_buffers * _cuda.low_latency_channel_bytes  # those of dispatch come first
    begin = channel + _cuda.low_latency_channel_offsets["weights_epoch"]
    flag = memory[begin:][: 4 * _cuda.max_ranks].view(torch.int32)[peer]
    assert int(flag) == 1
    flag += 1


_shared: dict[str, hybrid_ep.Buffer] = {}


def make_shared_buffer(timeout_s: float) -> None:
    """Makes a buffer that later calls of this process use."""
    _shared["buffer"] = _buffer(timeout_s=timeout_s)
    _round_trip(_shared["buffer"], _draw(0))


def use_without_peer(timeout_s: float) -> int | None:
    """A rank has died since; returns whom the error names, which is told in its time."""
    rank, sent, begin = dist.get_rank(), _draw(0), time.monotonic()
    with pytest.raises((hybrid_ep.TimeoutError, hybrid_ep.TransportError)) as told:  # noqa: PT012
        for _ in range(2):  # the second tells what the first has found
            _shared["buffer"].low_latency_dispatch(sent.x[rank], sent.topk_idx[rank], MAX_TOKENS, sent.num_experts)
            torch.cuda.synchronize()
    assert time.monotonic() - begin < 10 * timeout_s
    return told.value.peer
