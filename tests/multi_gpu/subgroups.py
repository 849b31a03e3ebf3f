"""Buffers over several groups of the same ranks, used at once: each has memory, flags and a pace of its own."""

from __future__ import annotations

import torch
import torch.distributed as dist

import hybrid_ep
from tests.multi_gpu.exact import check_round_trip, draw_exact, finish_round_trip, start_round_trip
from tests.multi_gpu.random_routings import Tokens, check_received, check_returned, dispatch, draw_tokens


def _group_of(members: list[list[int]]) -> tuple[int, dist.ProcessGroup]:
    """Makes a group of each list; returns the one that this rank belongs to, and its number."""
    groups = [dist.new_group(ranks) for ranks in members]
    mine = next(i for i, ranks in enumerate(members) if dist.get_rank() in ranks)
    group = groups[mine]
    assert isinstance(group, dist.ProcessGroup)
    return mine, group


def _draw(seed: int, num_ranks: int) -> Tokens:
    return draw_tokens(seed, [60 + 9 * rank for rank in range(num_ranks)], 512, 4, 8 * num_ranks, holes=0.1)


def _round_trip(buffer: hybrid_ep.Buffer, sent: Tokens, label: str) -> None:
    result = dispatch(buffer, sent, buffer.rank)
    combined, home, _ = buffer.combine(result[0], result[4], result[2])
    check_received(result, sent, buffer.rank, label)
    check_returned(combined, home, sent, buffer.rank, label)


def check_groups_apart(members: list[list[int]]) -> None:
    """Every group makes as many calls, of other tokens, as it likes: none waits for another group."""
    mine, group = _group_of(members)
    with (
        hybrid_ep.Buffer(group, engine="cuda") as buffer,
        hybrid_ep.Buffer(group, engine="cuda", low_latency_mode=True) as low_latency,
    ):
        for seed in range(10 * (mine + 1)):
            _round_trip(buffer, _draw(100 * mine + seed, buffer.group_size), f"group {mine}, call {seed}")
            sent = draw_exact(100 * mine + seed, buffer.group_size)
            result = finish_round_trip(low_latency, sent, start_round_trip(low_latency, sent))
            check_round_trip(result, sent, buffer.rank)


def check_groups_and_all(members: list[list[int]]) -> None:
    """Calls of a group and of all ranks are on their way at once, on streams of their own."""
    mine, group = _group_of(members)
    with (
        hybrid_ep.Buffer(group, engine="cuda") as few,
        hybrid_ep.Buffer(dist.group.WORLD, engine="cuda") as everybody,
        hybrid_ep.Buffer(group, engine="cuda", low_latency_mode=True) as few_low_latency,
        hybrid_ep.Buffer(dist.group.WORLD, engine="cuda", low_latency_mode=True) as all_low_latency,
    ):
        for seed in range(10):
            buffers = (few, everybody)
            sent = [_draw(100 * mine + seed, few.group_size), _draw(seed, everybody.group_size)]
            bounds = [sum(x.shape[0] for x in tokens.x) for tokens in sent]
            results = [
                dispatch(buffer, tokens, buffer.rank, num_worst_tokens=bound, async_finish=True)
                for buffer, tokens, bound in zip(buffers, sent, bounds, strict=True)
            ]
            returned = [
                buffer.combine(result[0], result[4], result[2], previous_event=result[5], async_finish=True)
                for buffer, result in zip(buffers, results, strict=True)
            ]
            for *_, event in returned:
                event.current_stream_wait()
            for buffer, tokens, bound, result, (combined, home, _) in zip(
                buffers, sent, bounds, results, returned, strict=True
            ):
                label = f"{buffer.group_size} ranks, call {seed}"
                check_received(result, tokens, buffer.rank, label, bound)
                check_returned(combined, home, tokens, buffer.rank, label)

            quick = (few_low_latency, all_low_latency)
            exact = [draw_exact(100 * mine + seed, few.group_size), draw_exact(seed, everybody.group_size)]
            started = [start_round_trip(buffer, tokens) for buffer, tokens in zip(quick, exact, strict=True)]
            for buffer, tokens, one in zip(quick, exact, started, strict=True):
                check_round_trip(finish_round_trip(buffer, tokens, one), tokens, buffer.rank)
        torch.cuda.synchronize()
