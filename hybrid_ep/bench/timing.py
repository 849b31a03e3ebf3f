"""Times calls that all ranks make together. Measures, asserts nothing.

On GPUs: CUDA events around each call, after the L2 cache was overwritten and all ranks' GPUs have met in an all-reduce;
both run ahead of the call on the same stream and give the host time to be there first, so what is timed is the device's
work and whatever the call itself makes the device wait for. On a CPU: the clock around each call, after a barrier.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

__all__ = ["time_calls"]

_FLUSH_BYTES = 256 << 20  # more than the L2 cache of any GPU


def time_calls(call: Callable[[], object], *, num_warmups: int, num_runs: int, device: str) -> list[float]:
    """Returns the microseconds of each of `num_runs` calls on this rank. Collective."""
    for _ in range(num_warmups):
        call()
    return _time_on_gpu(call, num_runs) if device == "cuda" else _time_on_cpu(call, num_runs)


def _time_on_cpu(call: Callable[[], object], num_runs: int) -> list[float]:
    microseconds = []
    for _ in range(num_runs):
        dist.barrier()
        begin = time.perf_counter()
        call()
        microseconds.append(1e6 * (time.perf_counter() - begin))
    return microseconds


def _time_on_gpu(call: Callable[[], object], num_runs: int) -> list[float]:
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")
    meeting = torch.zeros(1, device="cuda")
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(num_runs)]
    for begin, end in events:
        flush.zero_()
        dist.all_reduce(meeting)
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [1e3 * begin.elapsed_time(end) for begin, end in events]
