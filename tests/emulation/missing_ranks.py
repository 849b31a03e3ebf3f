"""Ranks that do not come to the collective allocation of memory."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

import hybrid_ep
from tests.battery.cases import Case
from tests.battery.normal import make_buffer

__all__ = ["check_missing_at_the_first_low_latency_call"]


def check_missing_at_the_first_low_latency_call() -> None:
    """Survivors are told who is missing within the timeout of the buffer, and not of the process group."""
    rank, lost, timeout_s = dist.get_rank(), dist.get_world_size() - 1, 2.0
    case = Case("missing", dist.get_world_size(), 4, hidden=128, topk=2, num_experts=2 * dist.get_world_size())
    inputs = case.inputs(rank)
    with make_buffer(case, low_latency_mode=True, timeout_s=timeout_s) as buffer:
        if rank != lost:
            begin = time.monotonic()
            with pytest.raises(hybrid_ep.TimeoutError) as told:
                buffer.low_latency_dispatch(inputs.x, inputs.topk_idx, 8, case.num_experts, use_fp8=False)
            assert told.value.peer == lost
            assert time.monotonic() - begin < timeout_s + 3.0
    dist.barrier()
    torch.cuda.synchronize()
