"""Errors of calls of the cuda engine that do not wait for the GPU: a later call, or `close()`, raises them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import hybrid_ep
from tests.multi_gpu.behaviour import draw, make_buffer, round_trip
from tests.multi_gpu.random_routings import Tokens, dispatch


def _draw_hot() -> Tokens:
    """Every token goes to the last rank, and half of them to the first one too."""
    sent = draw(0)
    for topk_idx in sent.topk_idx:
        topk_idx.fill_(-1)
        topk_idx[:, 0] = sent.num_experts - 1
        topk_idx[: topk_idx.shape[0] // 2, 1] = 0
    return sent


def check_overflow() -> None:
    """A bound that is too small at one rank is raised by the next call of every rank, and the buffer goes on."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    sent = _draw_hot()
    bound = 96 * num_ranks - 3
    with make_buffer() as buffer:
        result = dispatch(buffer, sent, rank, num_worst_tokens=bound)
        torch.cuda.synchronize()
        with pytest.raises(hybrid_ep.OverflowError, match=f"{96 * num_ranks} at rank {num_ranks - 1}; .*: {bound}$"):
            buffer.combine(result[0], result[4])
        round_trip(buffer, sent, "after an overflow")


def check_error_of_the_last_call() -> None:
    """What no later call could raise the end raises, unless it has another error to tell."""
    rank, sent = dist.get_rank(), draw(0)
    buffer = make_buffer()
    dispatch(buffer, sent, rank, num_worst_tokens=3)
    with pytest.raises(hybrid_ep.OverflowError, match="allowed by the bound: 3"):
        buffer.close()
    buffer = make_buffer()
    dispatch(buffer, sent, rank, num_worst_tokens=3)
    with pytest.raises(KeyError), buffer:
        raise KeyError
    with pytest.raises(hybrid_ep.ClosedError):
        buffer.raise_pending()


def check_error_of_a_replay() -> None:
    """Where graphs are replayed and nothing is called, the buffer can be asked."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    static = draw(0)
    with make_buffer() as buffer:

        def step() -> None:
            dispatch(buffer, static, rank, num_worst_tokens=96 * num_ranks - 3)

        static.topk_idx[rank].fill_(-1)
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        graph.replay()
        torch.cuda.synchronize()
        buffer.raise_pending()
        static.topk_idx[rank].copy_(_draw_hot().topk_idx[rank])
        graph.replay()
        torch.cuda.synchronize()
        with pytest.raises(hybrid_ep.OverflowError, match=f"at rank {num_ranks - 1}"):
            buffer.raise_pending()
        buffer.raise_pending()
