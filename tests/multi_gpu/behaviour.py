"""What the cuda engine promises beyond values: graphs, growth, its pool of slots, streams, lost ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hybrid_ep
from tests.multi_gpu.random_routings import (
    Tokens,
    check_received,
    check_returned,
    dispatch,
    draw_tokens,
)

if TYPE_CHECKING:  # it needs the extension, and this file is read where it is not built too
    from hybrid_ep.engine.arena import Arena

__all__ = [
    "check_async",
    "check_bad_arguments",
    "check_bad_expert",
    "check_graph",
    "check_graph_by_expert",
    "check_growth",
    "check_kept_handles",
    "check_other_streams",
    "check_overflow",
    "check_pool",
    "make_shared_buffer",
    "use_without_peer",
]

_shared: dict[str, hybrid_ep.Buffer] = {}


def _buffer() -> hybrid_ep.Buffer:
    return hybrid_ep.Buffer(dist.group.WORLD, engine="cuda")


def _hybrid_buffer(sent: Tokens) -> hybrid_ep.HybridEPBuffer:
    num_tokens, hidden = sent.x[dist.get_rank()].shape
    return hybrid_ep.HybridEPBuffer(
        dist.group.WORLD, hidden, num_tokens, sent.num_experts // dist.get_world_size(), engine="cuda"
    )


def _arena(buffer: hybrid_ep.Buffer) -> Arena:
    """The slots underneath; a promise about memory can be seen nowhere else."""
    arena: Arena = buffer.engine._arena  # type: ignore[attr-defined]
    return arena


def _draw(seed: int, tokens: int = 96, hidden: int = 1024) -> Tokens:
    num_ranks = dist.get_world_size()
    return draw_tokens(seed, [tokens] * num_ranks, hidden, 4, 8 * num_ranks, holes=0.1)


def _round_trip(buffer: hybrid_ep.Buffer, sent: Tokens, label: str) -> None:
    rank = dist.get_rank()
    result = dispatch(buffer, sent, rank)
    combined, home, _ = buffer.combine(result[0], result[4], result[2])
    check_received(result, sent, rank, label)
    check_returned(combined, home, sent, rank, label)


def check_graph(num_replays: int) -> None:
    """Dispatch and combine are captured once and replayed with other tokens and routings, eager calls in between."""
    rank = dist.get_rank()
    static = _draw(0)
    bound = sum(x.shape[0] for x in static.x)
    with _buffer() as buffer:

        def step() -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
            result = dispatch(buffer, static, rank, num_worst_tokens=bound)
            combined, home, _ = buffer.combine(result[0], result[4], result[2])
            return result, combined, home

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result, combined, home = step()
        for seed in range(1, num_replays + 1):
            drawn = _draw(seed)
            for target, source in zip((static.x, static.topk_idx, static.weights), drawn[:3], strict=True):
                target[rank].copy_(source[rank])
            graph.replay()
            check_received(result, drawn, rank, f"replay {seed}", bound)
            check_returned(combined, home, drawn, rank, f"replay {seed}")
            if seed % 5 == 0:
                _round_trip(buffer, drawn, f"eager call after replay {seed}")


def check_graph_by_expert(num_replays: int) -> None:
    """The same of expert-major calls; one of the captured calls takes a handle that was made before the capture."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    static = _draw(0)
    x, topk_idx, weights = static.x[rank], static.topk_idx[rank], static.weights[rank]
    with _hybrid_buffer(static) as hybrid:

        def send() -> tuple[Any, ...]:
            return hybrid.dispatch_with_permute(
                hidden=x, topk_idx=topk_idx, topk_weights=weights, num_of_experts=static.num_experts,
                num_permuted_tokens=topk_idx.numel() * num_ranks, pad_multiple=4, non_blocking=True,
            )  # fmt: skip

        kept_rows, _, _, _, kept = send()
        kept_home, _ = hybrid.combine_with_unpermute(hidden=kept_rows, handle=kept)

        def step() -> list[Tensor]:
            rows, probs, _, counts, handle = send()
            home, home_probs = hybrid.combine_with_unpermute(hidden=rows, probs=probs, handle=handle)
            again = hybrid.dispatch_with_permute(hidden=x, handle=handle)[0]
            kept_again, _ = hybrid.combine_with_unpermute(hidden=kept_rows, handle=kept)
            assert home_probs is not None
            return [rows, probs, counts, handle[-1], home, home_probs, again, kept_again]

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for seed in range(1, num_replays + 1):
            drawn = _draw(seed)
            for target, source in zip((x, topk_idx, weights), drawn[:3], strict=True):
                target.copy_(source[rank])
            graph.replay()
            for got, want in zip(captured, step(), strict=True):
                assert torch.equal(got, want), f"replay {seed}"
            assert torch.equal(captured[-1], kept_home)


def check_growth() -> None:
    """Slots that are too small grow, with and without a bound, and rank by rank the sizes differ."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    with _buffer() as buffer:
        arena = _arena(buffer)
        small = arena.slot_bytes
        hidden = 8192
        tokens = [2 * small // (2 * hidden) // (r + 1) for r in range(num_ranks)]
        sent = draw_tokens(1, tokens, hidden, 2, 2 * num_ranks)
        result = dispatch(buffer, sent, rank)
        check_received(result, sent, rank, "grown by counts")
        grown = arena.slot_bytes
        assert grown > small
        bound = sum(tokens) * 2
        result = dispatch(buffer, sent, rank, num_worst_tokens=bound)
        check_received(result, sent, rank, "grown by a bound", bound)
        assert arena.slot_bytes > grown
        combined, home, _ = buffer.combine(result[0], result[4], result[2])
        check_returned(combined, home, sent, rank, "after growth")


def check_pool() -> None:
    """Results are slots while there are any, then copies; views keep them; dropped ones come back."""
    rank = dist.get_rank()
    with _buffer() as buffer:
        arena = _arena(buffer)
        num_slots = arena.num_free
        assert num_slots >= 1
        kept = []
        for seed in range(num_slots + 2):
            sent = _draw(seed)
            kept.append((dispatch(buffer, sent, rank), sent))
            assert arena.num_free == max(0, num_slots - seed - 1)
        for result, sent in kept:
            check_received(result, sent, rank, "kept result")
        view = kept[0][0][0][3:5]
        want = view.clone()
        handle, first = kept[0][0][4], kept[0][1]
        del kept, result
        assert arena.num_free == num_slots - 1, "a view must keep its slot, and a handle must not"
        _round_trip(buffer, _draw(99), "beside a view")
        assert torch.equal(view, want)
        del view
        assert arena.num_free == num_slots
        again, *_ = buffer.dispatch(first.x[rank], handle=handle)
        assert again.shape[0] == handle.num_recv


def check_kept_handles() -> None:
    """Handles share memory, chunk by chunk and stream by stream; each keeps its own route until it is used."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    bound = 20_000 * num_ranks
    with _buffer() as buffer:
        kept = []
        for seed in range(14):
            sent = draw_tokens(seed, [20_000 - seed] * num_ranks, 64, 4, 8 * num_ranks, holes=0.1)
            result = dispatch(buffer, sent, rank, num_worst_tokens=bound, async_finish=seed % 3 == 1)
            result[5].current_stream_wait()
            check_received(result, sent, rank, f"seed {seed}", bound)
            kept.append((sent, result[4], result[4][0].clone(), result[2].clone()))
            del result
        for sent, handle, prefix, weights in kept:
            again, *_ = buffer.dispatch(sent.x[rank], handle=handle)
            combined, home, _ = buffer.combine(again, handle, weights)
            check_returned(combined, home, sent, rank, "a kept handle")
            assert torch.equal(handle[0], prefix)


def check_other_streams() -> None:
    """What a handle keeps is not given to others while a stream on which it was not made still uses it."""
    rank = dist.get_rank()
    sent = _draw(0)
    x, topk_idx = sent.x[rank], sent.topk_idx[rank]
    other = torch.cuda.Stream()
    with _buffer() as buffer, _hybrid_buffer(sent) as hybrid:

        def by_source() -> tuple[Tensor, Any]:
            result = dispatch(buffer, sent, rank)
            return result[0], result[4]

        def by_expert() -> tuple[Tensor, Any]:
            result = hybrid.dispatch_with_permute(hidden=x, topk_idx=topk_idx, num_of_experts=sent.num_experts)
            return result[0], result[4]

        calls: list[tuple[Any, Callable[[], tuple[Tensor, Any]], Callable[[Tensor, Any], object]]] = [
            (buffer, by_source, lambda _, handle: buffer.dispatch(x, handle=handle)),
            (buffer, by_source, lambda rows, handle: buffer.combine(rows, handle)),
            (hybrid, by_expert, lambda _, handle: hybrid.dispatch_with_permute(hidden=x, handle=handle)),
            (hybrid, by_expert, lambda rows, handle: hybrid.combine_with_unpermute(hidden=rows, handle=handle)),
        ]
        for owner, make, use in calls:
            chunks = owner.engine._routes._chunks
            chunks.clear()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            rows, handle = make()
            (chunk,) = chunks.values()
            begin, size = chunk.memory.data_ptr(), chunk.memory.nbytes
            with torch.cuda.stream(other):
                use(rows, handle)
                torch.cuda._sleep(200_000_000)
            del rows, handle, chunk
            chunks.clear()
            taken = torch.empty(size, dtype=torch.uint8, device="cuda")
            assert taken.data_ptr() != begin
            torch.cuda.synchronize()


def check_bad_arguments() -> None:
    """What has passed its checks once does not let through what looks different."""
    rank = dist.get_rank()
    sent = _draw(0)
    x, topk_idx, weights = sent.x[rank], sent.topk_idx[rank], sent.weights[rank]
    with _buffer() as buffer:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, sent.num_experts)
        good = {
            "x": x,
            "topk_idx": topk_idx,
            "topk_weights": weights,
            "num_tokens_per_rank": per_rank,
            "is_token_in_rank": in_rank,
            "num_tokens_per_expert": per_expert,
        }
        for _ in range(2):
            buffer.dispatch(**good, num_worst_tokens=1000)
        for name, bad in [
            ("x", x.float()),
            ("x", x[1:]),
            ("x", x.t().contiguous().t()),
            ("topk_idx", topk_idx.int()),
            ("topk_idx", topk_idx.cpu()),
            ("topk_idx", topk_idx.t().contiguous().t()),
            ("topk_weights", weights.double()),
            ("topk_weights", weights[:, :2]),
            ("topk_weights", weights.tolist()),
            ("is_token_in_rank", in_rank.int()),
            ("is_token_in_rank", None),
            ("num_tokens_per_rank", per_rank.long()),
            ("num_tokens_per_expert", per_expert[:0]),
        ]:
            with pytest.raises(hybrid_ep.ConfigError, match="allowed"):
                buffer.dispatch(**good | {name: bad}, num_worst_tokens=1000)
        _round_trip(buffer, sent, "after bad arguments")
    with _hybrid_buffer(sent) as hybrid:
        by_expert = {"hidden": x, "topk_idx": topk_idx, "topk_weights": weights, "num_of_experts": sent.num_experts}
        for _ in range(2):
            hybrid.dispatch_with_permute(**by_expert)
        for name, bad in [
            ("hidden", x.float()),
            ("hidden", x[1:]),
            ("topk_idx", topk_idx.int()),
            ("topk_idx", None),
            ("topk_weights", weights[:, :2]),
            ("num_of_experts", sent.num_experts + 1),
            ("probs", weights),
        ]:
            with pytest.raises(hybrid_ep.ConfigError, match="allowed"):
                hybrid.dispatch_with_permute(**by_expert | {name: bad})
        hybrid.update_template_config(max_num_of_tokens_per_rank=x.shape[0] - 1)
        with pytest.raises(hybrid_ep.ConfigError, match="max_num_of_tokens_per_rank"):
            hybrid.dispatch_with_permute(**by_expert)


def check_async() -> None:
    """Asynchronous calls on the communication stream, with events and work on the current stream in between."""
    rank = dist.get_rank()
    with _buffer() as buffer:
        for seed in range(20):
            sent = _draw(seed, tokens=700)
            before = buffer.capture()
            result = dispatch(buffer, sent, rank, async_finish=True, previous_event=before)
            result[5].current_stream_wait()
            doubled = result[0] * 2
            combined, home, event = buffer.combine(doubled, result[4], result[2], async_finish=True)
            event.current_stream_wait()
            check_received(result, sent, rank, f"seed {seed}")
            check_returned(combined, home, sent._replace(x=[x * 2 for x in sent.x]), rank, f"seed {seed}")
            if seed % 3 == 0:
                _round_trip(buffer, _draw(seed + 1000), "on the current stream")


def check_overflow() -> None:
    """A bound that is too small is raised by the next call, and the buffer goes on."""
    rank = dist.get_rank()
    sent = _draw(0)
    with _buffer() as buffer:
        dispatch(buffer, sent, rank, num_worst_tokens=3)
        torch.cuda.synchronize()
        with pytest.raises(hybrid_ep.OverflowError, match="allowed by the bound: 3"):
            dispatch(buffer, sent, rank)
        _round_trip(buffer, sent, "after an overflow")


def check_bad_expert() -> None:
    """The host cannot see an index outside −1 … E−1 without a wait: the kernel finds it and the next call raises."""
    rank = dist.get_rank()
    sent = _draw(0)
    with _buffer() as buffer:
        sent.topk_idx[rank][5, 1] = sent.num_experts + 7
        dispatch(buffer, sent, rank, num_worst_tokens=1000)
        torch.cuda.synchronize()
        with pytest.raises(hybrid_ep.ConfigError, match=str(sent.num_experts + 7)):
            dispatch(buffer, sent, rank, num_worst_tokens=1000)
        _round_trip(buffer, _draw(1), "after a bad index")


def make_shared_buffer(timeout_s: float) -> None:
    """Makes a buffer that later calls of this process use."""
    _shared["buffer"] = hybrid_ep.Buffer(dist.group.WORLD, engine="cuda", timeout_s=timeout_s)
    _round_trip(_shared["buffer"], _draw(0), "all ranks alive")


def use_without_peer(lost: int, timeout_s: float) -> None:
    """With a lost rank, a call that waits and one that does not both name it in time, and the GPU stays usable."""
    buffer, rank, sent = _shared["buffer"], dist.get_rank(), _draw(1)
    begin = time.monotonic()
    with pytest.raises(hybrid_ep.TimeoutError) as caught:
        dispatch(buffer, sent, rank)
    assert caught.value.peer == lost
    assert caught.value.rank == rank
    assert "dispatch: counts" in str(caught.value)
    assert time.monotonic() - begin < 10 * timeout_s
    dispatch(buffer, sent, rank, num_worst_tokens=1000)
    torch.cuda.synchronize()
    with pytest.raises(hybrid_ep.TimeoutError) as caught:
        dispatch(buffer, sent, rank, num_worst_tokens=1000)
    assert caught.value.peer == lost
    torch.cuda.synchronize()
    ones = torch.ones(64, 64, device="cuda")
    assert torch.equal(ones @ ones, torch.full((64, 64), 64.0, device="cuda"))
