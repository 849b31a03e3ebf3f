"""Arenas that begin with the smallest slots, so that few tokens make them grow, and one that does not grow."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hybrid_ep
from tests.battery.cases import Case
from tests.battery.normal import dispatch, make_buffer
from tests.battery.refused_calls import TIMEOUT_S


def check_with_small_slots(function: str, *args: Any) -> None:
    """Runs a function of tests/, as ``multi_gpu.capacity.check_growth``."""
    from hybrid_ep.engine.cuda import arena

    module, name = function.rsplit(".", 1)
    with mock.patch.object(arena, "_INITIAL_SLOT_BYTES", 1):
        getattr(importlib.import_module(f"tests.{module}"), name)(*args)


def check_memory_of_a_graph(num_ranks_per_domain: int) -> None:
    """One rank calls with the memory from before it grew, as a replayed graph does: all are told, and none sends."""
    from hybrid_ep.engine.cuda import arena

    rank, num_ranks, told = dist.get_rank(), dist.get_world_size(), "^number of the memory for rows "
    small = Case("small", num_ranks, 20, hidden=128, num_ranks_per_domain=num_ranks_per_domain)
    large = replace(small, tokens=100, hidden=16384)
    inputs = small.inputs(rank)
    with mock.patch.object(arena, "_INITIAL_SLOT_BYTES", 1), make_buffer(small, timeout_s=TIMEOUT_S) as buffer:
        engine: Any = buffer.engine
        memory = engine._arena._memory
        before = (memory.addresses, engine._arena.slot_bytes, engine._arena._number)
        received, *_, handle, _ = dispatch(buffer, small, inputs)
        want, _, _ = buffer.combine(received, handle)
        dispatch(buffer, large, large.inputs(rank))
        now = (engine._arena._memory.addresses, engine._arena.slot_bytes, engine._arena._number)
        assert now[1] > before[1]
        if rank == num_ranks - 1:
            engine._communicator.set_arena(*before)
        experts = torch.zeros(1, 64, dtype=torch.uint8)
        mapping = torch.zeros(num_ranks, 1, dtype=torch.int64)
        calls: list[Callable[[], object]] = [
            lambda: dispatch(buffer, small, inputs),
            lambda: dispatch(buffer, small, inputs, num_worst_tokens=20 * num_ranks),
            lambda: buffer.combine(received, handle),
        ]
        if num_ranks_per_domain == num_ranks:
            calls.append(lambda: buffer.lb_prefetch_weights(experts.clone(), experts, mapping))
        for call in calls:
            with pytest.raises(hybrid_ep.ConfigError, match=told):
                _call(buffer, call)
        dist.barrier()
        engine._communicator.set_arena(*now)
        assert torch.equal(dispatch(buffer, small, inputs)[0], received)
        assert torch.equal(buffer.combine(received, handle)[0], want)


def _call(buffer: hybrid_ep.Buffer, call: Callable[[], object]) -> None:
    call()
    buffer.raise_pending()


def check_too_small_for_sums() -> None:
    """A rank has more partial rows to sum than its slot holds: ranks of the other domain are told as well.

    Three ranks in each of two domains. Tokens of the first rank go to both others of its domain.
    """
    from hybrid_ep.engine.cuda import arena

    rank, hidden, num_tokens = dist.get_rank(), 8192, 100
    case = Case("sums", 6, (num_tokens, 0, 0, 0, 0, 0), hidden=hidden, topk=2, num_experts=6, num_ranks_per_domain=3)
    topk_idx = torch.tensor([[1, 2]]).repeat(case.tokens_of(rank), 1)
    x = torch.ones(case.tokens_of(rank), hidden, dtype=torch.bfloat16)
    with mock.patch.object(arena, "_INITIAL_SLOT_BYTES", 1), make_buffer(case) as buffer:
        per_rank, per_domain, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, case.num_experts)
        received, *_, handle, _ = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_domain,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=topk_idx,
            topk_weights=torch.ones(topk_idx.shape),
        )
        with mock.patch.object(arena.Arena, "ensure"):
            buffer.combine(received, handle)
        with pytest.raises(hybrid_ep.OverflowError, match=f"partial rows: {2 * num_tokens} at rank 0; "):
            buffer.raise_pending()
        combined, _, _ = buffer.combine(received, handle)
        assert torch.equal(combined, 2 * x)
