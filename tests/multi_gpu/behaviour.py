"""What the cuda engine promises beyond values: graphs, streams and threads, kept handles, lost ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hybrid_ep
from hybrid_ep.quantize import cast_to_fp8
from tests.multi_gpu.random_routings import (
    Tokens,
    check_received,
    check_returned,
    dispatch,
    draw_tokens,
)

_shared: dict[str, hybrid_ep.Buffer] = {}


def make_buffer() -> hybrid_ep.Buffer:
    return hybrid_ep.Buffer(dist.group.WORLD, engine="cuda")


def make_hybrid_buffer(sent: Tokens) -> hybrid_ep.HybridEPBuffer:
    num_tokens, hidden = sent.x[dist.get_rank()].shape
    return hybrid_ep.HybridEPBuffer(
        dist.group.WORLD, hidden, num_tokens, sent.num_experts // dist.get_world_size(), engine="cuda"
    )


def draw(seed: int, tokens: int = 96, hidden: int = 1024) -> Tokens:
    num_ranks = dist.get_world_size()
    return draw_tokens(seed, [tokens] * num_ranks, hidden, 4, 8 * num_ranks, holes=0.1)


def round_trip(buffer: hybrid_ep.Buffer, sent: Tokens, label: str) -> None:
    rank = dist.get_rank()
    result = dispatch(buffer, sent, rank)
    combined, home, _ = buffer.combine(result[0], result[4], result[2])
    check_received(result, sent, rank, label)
    check_returned(combined, home, sent, rank, label)


def check_graph(num_replays: int) -> None:
    """Dispatch and combine are captured once and replayed with other tokens and routings, eager calls in between."""
    rank = dist.get_rank()
    static = draw(0)
    bound = sum(x.shape[0] for x in static.x)
    with make_buffer() as buffer:

        def step() -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
            result = dispatch(buffer, static, rank, num_worst_tokens=bound)
            combined, home, _ = buffer.combine(result[0], result[4], result[2])
            return result, combined, home

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result, combined, home = step()
        for seed in range(1, num_replays + 1):
            drawn = draw(seed)
            for target, source in zip((static.x, static.topk_idx, static.weights), drawn[:3], strict=True):
                target[rank].copy_(source[rank])
            graph.replay()
            check_received(result, drawn, rank, f"replay {seed}", bound)
            check_returned(combined, home, drawn, rank, f"replay {seed}")
            if seed % 5 == 0:
                round_trip(buffer, drawn, f"eager call after replay {seed}")


def check_graph_by_expert(num_replays: int) -> None:
    """The same of expert-major calls; one of the captured calls takes a handle that was made before the capture."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    static = draw(0)
    x, topk_idx, weights = static.x[rank], static.topk_idx[rank], static.weights[rank]
    with make_hybrid_buffer(static) as hybrid:

        def send() -> tuple[Any, ...]:
            return hybrid.dispatch_with_permute(
                hidden=x, topk_idx=topk_idx, topk_weights=weights, num_of_experts=static.num_experts,
                num_permuted_tokens=topk_idx.numel() * num_ranks, pad_multiple=4, non_blocking=True,
            )  # fmt: skip

        kept_rows, _, _, _, kept = send()
        kept_home, _ = hybrid.combine_with_unpermute(hidden=kept_rows, handle=kept)

        def step() -> dict[str, Tensor]:
            rows, probs, _, counts, handle = send()
            home, home_probs = hybrid.combine_with_unpermute(hidden=rows, probs=probs, handle=handle)
            again = hybrid.dispatch_with_permute(hidden=x, handle=handle)[0]
            kept_again, _ = hybrid.combine_with_unpermute(hidden=kept_rows, handle=kept)
            assert home_probs is not None
            return {
                "rows": rows, "probs": probs, "counts": counts, "flag": handle[-1], "home": home,
                "home_probs": home_probs, "again": again, "kept_again": kept_again,
            }  # fmt: skip

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for seed in range(1, num_replays + 1):
            drawn = draw(seed)
            for target, source in zip((x, topk_idx, weights), drawn[:3], strict=True):
                target.copy_(source[rank])
            graph.replay()
            eager = step()
            num_rows = int(eager["counts"].sum())  # the rows after them are undefined
            for name, got in captured.items():
                last = num_rows if name in ("rows", "again") else None
                assert torch.equal(got[:last], eager[name][:last]), f"{name} of replay {seed}"
            assert torch.equal(captured["kept_again"], kept_home)


def check_graph_by_map(num_replays: int) -> None:
    """The same of plain calls with a map of 80 columns, up to 60 experts of a token."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    num_tokens, num_experts = 40, 80 * num_ranks

    def routing(seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(97 * seed + rank)
        probs = torch.rand(num_tokens, num_experts, generator=generator)
        chosen = probs >= probs.sort(1, descending=True).values[:, seed % 60 : seed % 60 + 1]
        return chosen.cuda(), torch.where(chosen, probs, 0.0).cuda()

    x = torch.randn(num_tokens, 1024, dtype=torch.bfloat16, device="cuda")
    chosen, probs = routing(59)
    with hybrid_ep.HybridEPBuffer(dist.group.WORLD, 1024, num_tokens, 80, engine="cuda") as buffer:

        def step() -> list[Tensor]:
            rows, row_probs, _, handle = buffer.dispatch(
                x, routing_map=chosen, probs=probs, num_dispatched_tokens=num_tokens * num_ranks
            )
            assert row_probs is not None
            used = torch.arange(len(rows), device="cuda").unsqueeze(1) < handle.num_dispatched_tokens
            rows = torch.where(used, rows, 0.0)
            first = rank * 80
            own = torch.zeros_like(row_probs)
            own[:, first : first + 80] = row_probs[:, first : first + 80]
            home, home_probs = buffer.combine(rows, own, handle)
            assert home_probs is not None
            return [rows, row_probs, handle.local_expert_routing_map, home, home_probs]

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for seed in range(1, num_replays + 1):
            for target, source in zip((chosen, probs), routing(seed), strict=True):
                target.copy_(source)
            x.copy_(torch.randn_like(x))
            graph.replay()
            assert torch.equal(captured[-1], probs), f"replay {seed}"
            for got, want in zip(captured, step(), strict=True):
                assert torch.equal(got, want), f"replay {seed}"


def check_kept_handles() -> None:
    """Handles share memory, chunk by chunk and stream by stream; each keeps its own route until it is used."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    bound = 20_000 * num_ranks
    with make_buffer() as buffer:
        kept = []
        for seed in range(14):
            sent = draw_tokens(seed, [20_000 - seed] * num_ranks, 64, 4, 8 * num_ranks, holes=0.1)
            result = dispatch(buffer, sent, rank, num_worst_tokens=bound, async_finish=seed % 3 == 1)
            result[5].current_stream_wait()
            check_received(result, sent, rank, f"seed {seed}", bound)
            kept.append((sent, result[4], result[4].dispatch.rank_prefix_matrix.clone(), result[2].clone()))
            del result
        for sent, handle, prefix, weights in kept:
            again, *_ = buffer.dispatch(sent.x[rank], handle=handle)
            combined, home, _ = buffer.combine(again, handle, weights)
            check_returned(combined, home, sent, rank, "a kept handle")
            assert torch.equal(handle.dispatch.rank_prefix_matrix, prefix)


def check_other_streams() -> None:
    """What a handle keeps is not given to others while a stream on which it was not made still uses it."""
    rank = dist.get_rank()
    sent = draw(0)
    x, topk_idx = sent.x[rank], sent.topk_idx[rank]
    other = torch.cuda.Stream()
    with make_buffer() as buffer, make_hybrid_buffer(sent) as hybrid:

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
            routes = owner.engine._routes
            routes.clear()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            rows, handle = make()
            chunk = (handle.permute.dispatch if owner is hybrid else handle).state.chunk
            begin, size = chunk.memory.data_ptr(), chunk.memory.nbytes
            with torch.cuda.stream(other):
                use(rows, handle)
                torch.cuda._sleep(200_000_000)
            del rows, handle, chunk
            routes.clear()
            taken = torch.empty(size, dtype=torch.uint8, device="cuda")
            assert taken.data_ptr() != begin
            torch.cuda.synchronize()


def check_long_earlier_work() -> None:
    """A blocking dispatch behind more work of its stream than the host waits for a kernel: no rank was late."""
    rank, sent = dist.get_rank(), draw(0)
    timeout_s, grace_s = 3.0, 10.0  # kHostCountsGraceS
    with hybrid_ep.Buffer(dist.group.WORLD, engine="cuda", timeout_s=timeout_s) as buffer:
        round_trip(buffer, sent, "before")
        torch.cuda.synchronize()
        dist.barrier()
        began = time.perf_counter()
        torch.cuda._sleep(28_000_000_000)
        check_received(dispatch(buffer, sent, rank), sent, rank, "behind long work")
        waited_s = time.perf_counter() - began
        assert waited_s > timeout_s + grace_s, f"the case needs longer work than {waited_s:.1f} s"
        buffer.raise_pending()


def check_bad_arguments() -> None:
    """What has passed its checks once does not let through what looks different."""
    rank = dist.get_rank()
    sent = draw(0)
    x, topk_idx, weights = sent.x[rank], sent.topk_idx[rank], sent.weights[rank]
    with make_buffer() as buffer:
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
            ("topk_idx", topk_idx.int()),
            ("topk_idx", topk_idx.cpu()),
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
        want = buffer.dispatch(**good, num_worst_tokens=1000)
        for name in ("x", "topk_idx", "topk_weights"):
            column_major = good[name].t().contiguous().t()
            found = buffer.dispatch(**good | {name: column_major}, num_worst_tokens=1000)
            num_recv = int(found[4][0][-1, dist.get_rank()])
            assert all(torch.equal(a[:num_recv], b[:num_recv]) for a, b in zip(found[:3], want[:3], strict=True)), name
        round_trip(buffer, sent, "after bad arguments")
    with make_hybrid_buffer(sent) as hybrid:
        by_expert = {"hidden": x, "topk_idx": topk_idx, "topk_weights": weights, "num_of_experts": sent.num_experts}
        for _ in range(2):
            hybrid.dispatch_with_permute(**by_expert)
        for name, bad in [
            ("hidden", x.float()),
            ("hidden", x[1:]),
            ("topk_idx", topk_idx.int()),
            ("topk_idx", None),
            ("topk_weights", weights[:, :2]),
            ("num_of_experts", sent.num_experts + 1 if dist.get_world_size() > 1 else 0),
            ("probs", weights),
        ]:
            with pytest.raises(hybrid_ep.ConfigError, match="allowed"):
                hybrid.dispatch_with_permute(**by_expert | {name: bad})


def check_async() -> None:
    """Asynchronous calls on the communication stream, with events and work on the current stream in between."""
    rank = dist.get_rank()
    with make_buffer() as buffer:
        for seed in range(20):
            sent = draw(seed, tokens=700)
            before = buffer.capture()
            result = dispatch(buffer, sent, rank, async_finish=True, previous_event=before)
            result[5].current_stream_wait()
            doubled = result[0] * 2
            combined, home, event = buffer.combine(doubled, result[4], result[2], async_finish=True)
            event.current_stream_wait()
            check_received(result, sent, rank, f"seed {seed}")
            check_returned(combined, home, sent._replace(x=[x * 2 for x in sent.x]), rank, f"seed {seed}")
            if seed % 3 == 0:
                round_trip(buffer, draw(seed + 1000), "on the current stream")


def check_captured_streams() -> None:
    """Calls on two streams of one capture keep their order in the graph; a capture refuses what would wait."""
    rank = dist.get_rank()
    static = draw(0)
    x, bound = static.x[rank], sum(x.shape[0] for x in static.x)
    with make_buffer() as buffer:
        handle = dispatch(buffer, static, rank, num_worst_tokens=bound)[4]

        def step() -> tuple[tuple[Any, ...], Any, Tensor, Tensor]:
            result = dispatch(buffer, static, rank, num_worst_tokens=bound, async_finish=True)
            again, *_ = buffer.dispatch(x, handle=handle)  # beside it, as far as the caller says
            result[5].current_stream_wait()
            combined, home, _ = buffer.combine(result[0], result[4], result[2])
            return result, again, combined, home

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            with pytest.raises(hybrid_ep.ConfigError, match="num_worst_tokens"):
                dispatch(buffer, static, rank)
            result, again, combined, home = step()
        for seed in range(1, 20):
            drawn = draw(seed)
            x.copy_(drawn.x[rank])
            graph.replay()
            sent = static._replace(x=drawn.x)
            check_received(result, sent, rank, f"replay {seed}", bound)
            num_recv = int(handle.dispatch.rank_prefix_matrix[-1, rank])
            assert torch.equal(again[:num_recv], result[0][:num_recv]), f"replay {seed}"
            check_returned(combined, home, sent, rank, f"replay {seed}")


def check_scales_on_a_stream() -> None:
    """With an event to wait for, nothing of a call waits for what the current stream holds: not its copies either."""
    rank = dist.get_rank()
    sent = draw(0, tokens=700)
    sources = [cast_to_fp8(x) for x in sent.x]
    data, scales = sources[rank]
    column_major = scales.t().contiguous().t()
    with make_buffer() as buffer:
        for _ in range(3):
            torch.full_like(scales, float("nan"))  # what a copy that comes too late would leave there
            before = buffer.capture()
            torch.cuda._sleep(100_000_000)
            result = dispatch(
                buffer, sent._replace(x=[(data, column_major)] * len(sent.x)), rank,
                async_finish=True, previous_event=before, num_worst_tokens=700 * len(sent.x),
            )  # fmt: skip
            result[5].current_stream_wait()
            owner = [(sent.owner(r) == rank).any(1) for r in range(len(sent.x))]
            want = torch.cat([source[1][mine] for source, mine in zip(sources, owner, strict=True)])
            assert torch.equal(result[0][1][: want.shape[0]], want)


def check_other_threads() -> None:
    """A thread begins with GPU 0 as the current one, whatever the others have set."""
    rank, sent = dist.get_rank(), draw(0)
    with make_buffer() as buffer:
        result = dispatch(buffer, sent, rank)
        torch.cuda.synchronize()
        with ThreadPoolExecutor(1) as pool:
            combined, home, _ = pool.submit(buffer.combine, result[0], result[4], result[2]).result()
            torch.cuda.synchronize()
        check_returned(combined, home, sent, rank, "from a new thread")


def make_shared_buffer(timeout_s: float) -> None:
    """Makes a buffer that later calls of this process use."""
    _shared["buffer"] = hybrid_ep.Buffer(dist.group.WORLD, engine="cuda", timeout_s=timeout_s)
    round_trip(_shared["buffer"], draw(0), "all ranks alive")


def use_without_peer(lost: int, timeout_s: float) -> None:
    """With a lost rank, a call that waits and one that does not both name it in time, and the GPU stays usable."""
    buffer, rank, sent = _shared["buffer"], dist.get_rank(), draw(1)
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


def use_without_peer_between(lost: int, timeout_s: float) -> None:
    """The same where a link leads to the lost rank: the link may know sooner, and says what its transport does."""
    buffer, rank, sent = _shared["buffer"], dist.get_rank(), draw(1)

    def call(bound: int) -> None:
        dispatch(buffer, sent, rank, num_worst_tokens=bound)
        torch.cuda.synchronize()
        buffer.raise_pending()

    for bound in (0, 1000):
        begin = time.monotonic()
        with pytest.raises((hybrid_ep.TimeoutError, hybrid_ep.TransportError)) as caught:
            call(bound)
        assert caught.value.peer == lost
        assert caught.value.rank == rank
        assert time.monotonic() - begin < 10 * timeout_s
    torch.cuda.synchronize()
    ones = torch.ones(64, 64, device="cuda")
    assert torch.equal(ones @ ones, torch.full((64, 64), 64.0, device="cuda"))
