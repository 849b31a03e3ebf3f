"""The memory of the cuda engine's results: how it grows, which calls get it, and when it is free again."""

from __future__ import annotations

import gc
import os
import random
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist

import hybrid_ep
from hybrid_ep.errors import ConfigError
from hybrid_ep.quantize import cast_to_fp8
from tests.multi_gpu.behaviour import draw, make_buffer, make_hybrid_buffer, round_trip
from tests.multi_gpu.random_routings import check_received, check_returned, dispatch, draw_tokens

if TYPE_CHECKING:  # it needs the extension, and this file is read where it is not built too
    from hybrid_ep.engine.cuda.arena import Arena


def _arena(buffer: hybrid_ep.Buffer | hybrid_ep.HybridEPBuffer | hybrid_ep.ElasticBuffer) -> Arena:
    """The slots underneath; a promise about memory can be seen nowhere else."""
    arena: Arena = buffer.engine._arena  # type: ignore[attr-defined]
    return arena


def check_growth() -> None:
    """Slots that are too small grow, with and without a bound, and rank by rank the sizes differ."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    with make_buffer() as buffer:
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


def check_empty_cache() -> None:
    """Slots that have grown become small again, and memory of routes is freed once no handle uses it."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    with make_buffer() as buffer:
        arena = _arena(buffer)
        small, hidden = arena.slot_bytes, 8192
        sent = draw_tokens(1, [2 * small // (2 * hidden)] * num_ranks, hidden, 2, 2 * num_ranks)
        *_, handle, _ = dispatch(buffer, sent, rank)
        assert arena.slot_bytes > small
        chunk = weakref.ref(handle.dispatch.state.chunk)
        del handle, _
        buffer.empty_cache()
        assert (arena.slot_bytes, chunk()) == (small, None)
        round_trip(buffer, draw(2), "after empty_cache")


def check_exact_counts() -> None:
    """Ranks that know how many rows each of them gets, one of them far more than the others, grow their slots alike."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    num_tokens, hidden = 6000 // num_ranks, 8192
    sent = draw_tokens(3, [num_tokens] * num_ranks, hidden, 1, num_ranks)
    for topk_idx in sent.topk_idx:
        topk_idx.zero_()
        topk_idx[0] = num_ranks - 1
    x, topk_idx, weights = sent.x[rank], sent.topk_idx[rank], sent.weights[rank]
    mine = [(sent.owner(r) == rank).any(1) for r in range(num_ranks)]
    want = torch.cat([x[m] for x, m in zip(sent.x, mine, strict=True)])
    given = {"topk_idx": topk_idx, "topk_weights": weights, "num_of_experts": num_ranks}
    with make_hybrid_buffer(sent) as buffer:
        data, scales = cast_to_fp8(x)
        *_, handle = buffer.dispatch(data, scales, **given, num_dispatched_tokens=want.shape[0])
        # Twice as wide along the same routes, with weights: only one rank's rows need larger slots.
        rows, probs, _, _ = buffer.dispatch(x, handle=handle, topk_weights=weights)
        assert torch.equal(rows, want)
        home, _ = buffer.combine(rows, probs, handle)
        assert torch.equal(home, x)
    with make_hybrid_buffer(sent) as buffer:
        rows, _, _, handle = buffer.dispatch(x, **given, num_dispatched_tokens=want.shape[0])
        assert torch.equal(rows, want)
        permuted, _, _, _, by_expert = buffer.dispatch_with_permute(hidden=x, **given)
        again, *_ = buffer.dispatch_with_permute(hidden=x, handle=by_expert, topk_weights=weights)
        assert torch.equal(again, permuted)


def check_most_tokens() -> None:
    """65,536 tokens on one rank, few on the others."""
    num_ranks = dist.get_world_size()
    sent = draw_tokens(4, [65_536] + [17] * (num_ranks - 1), 8, 2, 2 * num_ranks, holes=0.1)
    with make_buffer() as buffer:
        round_trip(buffer, sent, "65,536 tokens")
        for topk_idx in sent.topk_idx:
            topk_idx[:, 0] = 2 * num_ranks - 1
            topk_idx[:, 1] = -1
        round_trip(buffer, sent, "all of them to one expert")


def check_pool() -> None:
    """Results are slots while there are any, then copies; views keep them; dropped ones come back."""
    rank = dist.get_rank()
    with make_buffer() as buffer:
        arena = _arena(buffer)
        num_slots = arena.num_free
        assert num_slots >= 1
        kept = []
        for seed in range(num_slots + 2):
            sent = draw(seed)
            kept.append((dispatch(buffer, sent, rank), sent))
            assert arena.num_free == max(0, num_slots - seed - 1)
        for result, sent in kept:
            check_received(result, sent, rank, "kept result")
        view = kept[0][0][0][3:5]
        want = view.clone()
        handle, first = kept[0][0][4], kept[0][1]
        del kept, result
        assert arena.num_free == num_slots - 1, "a view must keep its slot, and a handle must not"
        round_trip(buffer, draw(99), "beside a view")
        assert torch.equal(view, want)
        del view
        assert arena.num_free == num_slots
        again, *_ = buffer.dispatch(first.x[rank], handle=handle)
        assert again.shape[0] == handle.num_recv


def check_handles_hold_no_slot() -> None:
    """Of a handle that outlives all other results, from a first call and from later ones."""
    rank, num_experts, num_tokens = dist.get_rank(), 64, 96
    sent = draw_tokens(3, [num_tokens] * dist.get_world_size(), 1024, 4, num_experts)
    x, topk_idx, weights = sent.x[rank], sent.topk_idx[rank], sent.weights[rank]
    routing_map, probs = hybrid_ep.indices_to_map(topk_idx, weights, num_tokens, num_experts)
    routing = {"topk_idx": topk_idx, "num_of_experts": num_experts}
    given = routing | {"topk_weights": weights}
    with (
        make_hybrid_buffer(sent) as hybrid,
        hybrid_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=num_tokens, engine="cuda") as elastic,
    ):
        calls: dict[str, tuple[hybrid_ep.HybridEPBuffer | hybrid_ep.ElasticBuffer, Callable[[], Any]]] = {
            "dispatch": (hybrid, lambda: hybrid.dispatch(x, **given)[3]),
            "dispatch without weights": (hybrid, lambda: hybrid.dispatch(x, **routing)[3]),
            "dispatch of a map": (hybrid, lambda: hybrid.dispatch(x, routing_map=routing_map)[3]),
            "dispatch of probs": (hybrid, lambda: hybrid.dispatch(x, routing_map=routing_map, probs=probs)[3]),
            "dispatch_with_permute": (hybrid, lambda: hybrid.dispatch_with_permute(hidden=x, **given)[4]),
            "elastic": (elastic, lambda: elastic.dispatch(x, topk_idx, weights, num_experts=num_experts)[3]),
            "elastic, by expert": (
                elastic,
                lambda: elastic.dispatch(x, topk_idx, weights, num_experts=num_experts, do_expand=True)[3],
            ),
        }
        for name, (buffer, call) in calls.items():
            num_slots = _arena(buffer).num_free
            for number in range(3):
                handle = call()
                assert _arena(buffer).num_free == num_slots, f"{name}, call {number}: its handle holds a slot"
                del handle


def check_pool_grows() -> None:
    """Results that one rank holds make the pools of all ranks larger, and none is copied; free slots are given back."""
    rank = dist.get_rank()
    with make_buffer() as buffer:
        arena = _arena(buffer)
        first = arena.num_slots
        kept = []
        for seed in range(36):
            sent = draw(seed)
            result = dispatch(buffer, sent, rank)
            if rank == 0:
                kept.append((result, sent))
        while kept:
            check_received(*kept.pop(), rank, "a result beside others")
        del result
        for seed in range(10):  # what calls have asked for is granted by later ones
            round_trip(buffer, draw(seed), "the last growth")
        grown = arena.num_slots
        assert grown >= first + 6
        assert arena.num_free == grown
        held = [dispatch(buffer, sent, rank) for _ in range(grown)]
        assert arena.num_slots == grown, "a pool that is large enough grew"
        assert arena.num_free == 0, "a result was copied beside a free slot"
        buffer.empty_cache()
        assert arena.num_slots == first
        for result in held:
            check_received(result, sent, rank, "a result of the pool before")
        del held, result
        round_trip(buffer, draw(99), "after empty_cache")


def check_full_memory() -> None:
    """A pool that finds no memory to grow is asked once: later results are copies, and no call asks again."""
    from hybrid_ep.engine.cuda import arena as arena_module

    rank = dist.get_rank()
    with make_buffer() as buffer:
        arena = _arena(buffer)
        first, num_bytes = arena.num_slots, arena.num_bytes
        assert num_bytes == arena._memory.local.numel()
        error = ConfigError("no memory")
        with mock.patch.object(arena_module.SymmetricMemory, "allocate", side_effect=error) as allocate:
            kept = []
            for seed in range(30):
                sent = draw(seed)
                kept.append((dispatch(buffer, sent, rank), sent))
            assert allocate.call_count == 1
        assert arena.num_slots == first
        for result, sent in kept:
            check_received(result, sent, rank, "a result of a full pool")


def check_graph_slots() -> None:
    """Captured results are slots of the graph: nobody else gets them until the graph is destroyed."""
    rank = dist.get_rank()
    static = draw(0)
    bound = sum(x.shape[0] for x in static.x)
    with make_buffer() as buffer:

        def send() -> tuple[torch.Tensor, ...]:
            return dispatch(buffer, static, rank, num_worst_tokens=bound)

        send()
        arena = _arena(buffer)
        free = arena.num_free
        assert free >= 2
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dropped = send()
            del dropped
            result = send()
        memory = arena._memory.local
        assert 0 < result[0].data_ptr() - memory.data_ptr() < memory.numel(), "a captured result was copied"
        assert arena.num_free == free - 1, "a slot whose result was dropped was not taken again in the capture"
        for seed in range(1, 9):
            sent = draw(seed)
            for target, source in zip((static.x, static.topk_idx, static.weights), sent[:3], strict=True):
                target[rank].copy_(source[rank])
            eager = [dispatch(buffer, sent, rank) for _ in range(4)]
            graph.replay()
            check_received(result, sent, rank, f"replay {seed}", bound)
            for other in eager:
                check_received(other, sent, rank, f"an eager result beside replay {seed}")
        del result, eager, other
        torch.cuda.synchronize()
        assert arena.num_free == arena.num_slots - 1 or arena._memory.local is not memory, "the graph lost its slot"
        graph.reset()
        del graph
        torch.cuda.synchronize()
        dist.barrier()
        assert arena.num_free == arena.num_slots, "a graph that is destroyed kept its slot"
        round_trip(buffer, draw(99), "after the graph")


def check_no_slots() -> None:
    """Without a pool every result is a copy, which torch's allocator owns."""
    rank = dist.get_rank()
    os.environ["HYBRID_EP_POOL_SLOTS"] = "0"
    try:
        buffer = make_buffer()
    finally:
        del os.environ["HYBRID_EP_POOL_SLOTS"]
    with buffer:
        assert _arena(buffer).num_free == 0
        kept = [(dispatch(buffer, sent, rank), sent) for sent in map(draw, range(3))]
        for result, sent in kept:
            check_received(result, sent, rank, "a copy")
        round_trip(buffer, draw(9), "beside copies")


def _resident_bytes() -> int:
    """Memory of this process on the host."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def check_many_calls(num_calls: int) -> None:
    """Calls of many sizes leave nothing behind: no object of Python, no memory of the GPU, none of the host."""
    rank, num_ranks, draws = dist.get_rank(), dist.get_world_size(), random.Random(0)
    hidden, num_experts, topk, most = 128, 4 * num_ranks, 2, 48
    device = torch.device("cuda", torch.cuda.current_device())

    def step(v1: hybrid_ep.Buffer, hybrid: hybrid_ep.HybridEPBuffer, elastic: hybrid_ep.ElasticBuffer) -> None:
        num_tokens = draws.randint(0, most) if num_ranks == 1 else draws.randint(0, most - num_ranks) + rank
        x = torch.ones(num_tokens, hidden, dtype=torch.bfloat16, device=device)
        topk_idx = torch.rand(num_tokens, num_experts, device=device).topk(topk).indices
        weights = torch.ones(num_tokens, topk, device=device)
        routing = {"topk_idx": topk_idx, "topk_weights": weights}
        kind = draws.randrange(4)
        if kind == 0:
            _, _, handle, _, _ = v1.low_latency_dispatch(x, topk_idx, most, num_experts, use_fp8=draws.random() < 0.5)
            y = torch.zeros(4, most * num_ranks, hidden, dtype=torch.bfloat16, device=device)
            v1.low_latency_combine(y, topk_idx, weights, handle)
        elif kind == 1:
            per_rank, _, per_expert, in_rank, _ = v1.get_dispatch_layout(topk_idx, num_experts)
            layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
            bound = draws.choice((0, most * num_ranks))
            received, _, recv_weights, _, handle, _ = v1.dispatch(x, **layout, **routing, num_worst_tokens=bound)
            v1.dispatch(x, handle)
            v1.combine(received, handle, recv_weights, bias=x)
        elif kind == 2:
            rows, probs, _, _, permuted = hybrid.dispatch_with_permute(
                hidden=x, **routing, num_of_experts=num_experts, pad_multiple=draws.choice((1, 8))
            )
            hybrid.combine_with_unpermute(hidden=rows, probs=probs, handle=permuted)
        else:
            received, _, recv_weights, ep_handle, _ = elastic.dispatch(
                x, topk_idx, weights, num_experts=num_experts, do_expand=draws.random() < 0.5
            )
            elastic.combine(received, ep_handle, recv_weights)

    with (
        hybrid_ep.Buffer(dist.group.WORLD, low_latency_mode=True, engine="cuda") as v1,
        hybrid_ep.HybridEPBuffer(dist.group.WORLD, hidden, most, 4, engine="cuda") as hybrid,
        hybrid_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=most, engine="cuda") as elastic,
    ):
        found = []
        for num in (num_calls // 10, num_calls):
            for _ in range(num):
                step(v1, hybrid, elastic)
            torch.cuda.synchronize()
            gc.collect()
            found.append((len(gc.get_objects()), torch.cuda.memory_allocated(), _resident_bytes()))
        (objects, on_gpu, on_host), (objects_now, on_gpu_now, on_host_now) = found
        assert objects_now - objects < num_calls // 100, f"{objects_now - objects} objects more"
        assert on_gpu_now <= on_gpu + (32 << 20), f"{on_gpu_now - on_gpu} bytes of the GPU more"  # chunks of routes
        assert on_host_now - on_host < num_calls << 10, f"{on_host_now - on_host} bytes of the host more"
