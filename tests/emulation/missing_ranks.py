"""Ranks that do not come to the collective allocation of memory."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

import hybrid_ep
from tests.battery.cases import Case
from tests.battery.normal import dispatch, make_buffer


def check_missing_at_the_first_low_latency_call() -> None:
    """Survivors are told who is missing within the timeout of the buffer, and not of the process group."""
    rank, lost, timeout_s = dist.get_rank(), dist.get_world_size() - 1, 2.0
    case = Case("missing", dist.get_world_size(), 4, hidden=128, topk=2, num_experts=2 * dist.get_world_size())
    inputs = case.inputs(rank)
    with make_buffer(case, low_latency_mode=True, timeout_s=timeout_s) as buffer:
        if rank != lost:
            with pytest.raises(hybrid_ep.TimeoutError) as told:
                buffer.low_latency_dispatch(inputs.x, inputs.topk_idx, 8, case.num_experts, use_fp8=False)
            assert told.value.peer == lost
    dist.barrier()
    torch.cuda.synchronize()


def _dispatch_and_ask(buffer: hybrid_ep.Buffer, case: Case) -> None:
    """The rows of a rank that has given up come too late for the call that waits for them: the buffer tells."""
    dispatch(buffer, case, case.inputs(dist.get_rank()))
    buffer.raise_pending()


def check_missing_after_another_was_late() -> None:
    """The last rank is late once, and all go on. Then another one is missing, and is named."""
    rank, num_ranks, timeout_s = dist.get_rank(), dist.get_world_size(), 5.0
    late, lost = num_ranks - 1, num_ranks - 2
    case = Case("late", num_ranks, 8, hidden=128, topk=2, num_experts=2 * num_ranks)
    inputs = case.inputs(rank)
    with make_buffer(case, timeout_s=timeout_s) as buffer:
        dispatch(buffer, case, inputs)
        dist.barrier()
        if rank == late:
            time.sleep(timeout_s + 1.0)
        with pytest.raises(hybrid_ep.TimeoutError):
            _dispatch_and_ask(buffer, case)
        dist.barrier()
        received, *_, handle, _ = dispatch(buffer, case, inputs)
        buffer.combine(received, handle)
        buffer.raise_pending()
        dist.barrier()
        if rank != lost:
            with pytest.raises(hybrid_ep.TimeoutError) as told:
                dispatch(buffer, case, inputs)
            assert told.value.peer == lost
        dist.barrier()
