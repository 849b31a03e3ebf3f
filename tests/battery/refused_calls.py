"""How checks of refused calls make calls and collect their errors. Each runs on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

import hybrid_ep

# Of buffers, in which nobody may wait for it: more than the limit of a test.
TIMEOUT_S = 600.0


def errors_of(calls: Iterable[Callable[[], object]], device: str) -> list[str]:
    """Makes the calls, one after the other at all ranks, and returns what the ConfigErrors say."""
    told = []
    for call in calls:
        try:
            call()
            if device == "cuda":
                torch.cuda.synchronize()
        except hybrid_ep.ConfigError as error:
            told.append(str(error))
        dist.barrier()
    return told


def told_to_all(wrong: Callable[[], object], right: Callable[[], object], device: str) -> str:
    """The last rank makes a wrong call, the others a right one; returns the error, which is the same at all ranks."""
    num_ranks = dist.get_world_size()
    # What a call finds is raised by itself or by the next: all make the same number of calls.
    told = errors_of([wrong if dist.get_rank() == num_ranks - 1 else right, right, right], device)
    told_at: list[list[str]] = [[] for _ in range(num_ranks)]
    dist.all_gather_object(told_at, told)
    assert told_at == [told_at[0]] * num_ranks, told_at
    assert len(told) == 1, told
    assert f" at rank {num_ranks - 1}; allowed" in told[0], told
    return told[0]
