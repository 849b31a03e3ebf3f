"""Times calls that all ranks make together, in turn. Measures, asserts nothing.

On GPUs: CUDA events around each call, after all ranks' GPUs have overwritten their L2 cache and then waited in an
all-reduce. Meanwhile the host queues the call. So the time is that of the device's work, and of whatever the call
itself makes the device wait for. On a CPU: the clock around each call, after a barrier.

The host's own time is a second figure, of calls in a row. Caches are warm then, as between the layers of a model, and
nothing else is queued. It is also measured under `torch.set_default_device`, as many trainers run.

A third figure is the time that an eager caller waits: by the clock, from the call on an idle device until the device is
done. The ranks meet in a barrier of the host before it (host_barrier.py).
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from hybrid_ep.bench.host_barrier import HostBarrier

__all__ = ["Holding", "Times", "time_calls", "time_floor", "time_host", "time_host_floor", "time_until_done"]

_FLUSH_BYTES = 1 << 30  # several times any L2 cache; overwriting it takes a GPU of 4 TB/s about 0.3 ms
_NUM_FLUSHES = 3  # so that the first call of a round too is queued before its turn comes, also by a slow host
_NUM_ROWS = 48  # of calls in a row
# Of each operation. So few that the device never delays the host: a dispatch waits for the eighth dispatch before it
# (Communicator::slots_agreed), and a mode has up to four kinds of dispatches.
_CALLS_IN_A_ROW = 2


@dataclass
class Times:
    """Times of one operation on this rank.

    Attributes:
        microseconds: of each run, on the device that does the work.
        host_microseconds: of each run, until the call returned to the host.
        in_a_row_microseconds: until the call returned to the host, of calls in a row; empty where none were made.
        default_device_microseconds: `in_a_row_microseconds` under `torch.set_default_device`.
    """

    microseconds: list[float] = field(default_factory=list)
    host_microseconds: list[float] = field(default_factory=list)
    in_a_row_microseconds: list[float] = field(default_factory=list)
    default_device_microseconds: list[float] = field(default_factory=list)

    def each_of(self, num_calls: int) -> Times:
        """The times of one call, where every run made several."""
        series = (
            self.microseconds,
            self.host_microseconds,
            self.in_a_row_microseconds,
            self.default_device_microseconds,
        )
        return Times(*([value / num_calls for value in values] for values in series))


class Holding:
    """A call whose latest results stay alive, as a model keeps one per layer for its backward pass.

    Args:
        call: what is made, collective.
        num_held: how many results are alive when a call begins.
    """

    def __init__(self, call: Callable[[], object], num_held: int) -> None:
        self._call = call
        self._held: deque[object] = deque(maxlen=num_held)

    def __call__(self) -> None:
        while len(self._held) < (self._held.maxlen or 0):
            self._held.append(self._call())
        self._held.append(self._call())


def time_calls(
    calls: dict[str, Callable[[], object]], *, num_warmups: int, num_runs: int, device: str
) -> dict[str, Times]:
    """Makes all calls in turn, `num_warmups` times, then `num_runs` times with the clock. Collective.

    In turn, because a low-latency dispatch may count on a combine between it and the next.

    Returns:
        For each name, the times of its runs on this rank.
    """
    for _ in range(num_warmups):
        for call in calls.values():
            call()
    return _time_on_gpu(calls, num_runs) if device == "cuda" else _time_on_cpu(calls, num_runs)


def time_floor(device: str, num_runs: int) -> list[float]:
    """Microseconds of one trivial kernel (on a CPU: one trivial call) by the same timer. Collective."""
    number = torch.zeros(1, device=device)
    return time_calls({"floor": lambda: number.add_(1)}, num_warmups=3, num_runs=num_runs, device=device)[
        "floor"
    ].microseconds


def time_host_floor(device: str) -> list[float]:
    """Microseconds until one trivial call of torch returned to the host, of calls in a row. Collective."""
    number = torch.zeros(1, device=device)
    return time_host({"floor": lambda: number.add_(1)}, device)["floor"]


def time_host(
    calls: dict[str, Callable[[], object]],
    device: str = "cuda",
    *,
    num_rows: int = _NUM_ROWS,
    in_a_row: int = _CALLS_IN_A_ROW,
    num_skipped: int = 0,
) -> dict[str, list[float]]:
    """Makes calls in turn, in a row, that do not wait for the GPU. Collective.

    Args:
        calls: by name.
        device: of the calls.
        num_rows: how often a row of calls is made, each after a barrier.
        in_a_row: of each name in a row.
        num_skipped: so many of these are not counted, the first ones.

    Returns:
        For each name, microseconds until each call that counts returned to the host.
    """
    microseconds: dict[str, list[float]] = {name: [] for name in calls}
    barrier = HostBarrier()
    for _ in range(num_rows):
        _wait_for(device)
        barrier.wait()
        for i in range(in_a_row):
            for name, call in calls.items():
                begin = time.perf_counter()
                call()
                if i >= num_skipped:
                    microseconds[name].append(1e6 * (time.perf_counter() - begin))
    _wait_for(device)
    return microseconds


def time_until_done(
    calls: dict[str, Callable[[], object]],
    *,
    num_warmups: int = 0,
    num_runs: int,
    device: str,
    in_any_order: bool = False,
) -> dict[str, Times]:
    """Makes calls in turn, each on an idle device. Collective.

    Args:
        calls: by name.
        num_warmups: of each before the clock. A call may drop the last result of memory that an implementation has
            replaced since. Freeing that takes milliseconds, once.
        num_runs: of each.
        device: of the calls.
        in_any_order: each run has another order, the same at all ranks. A call takes the host less time after one that
            is like it.

    Returns:
        For each name, microseconds by the clock until the device had done what the call asked for.
    """
    for _ in range(num_warmups):
        for call in calls.values():
            call()
    times = {name: Times() for name in calls}
    orders = random.Random(num_runs)
    barrier = HostBarrier()
    for _ in range(num_runs):
        names = list(calls)
        for name in orders.sample(names, len(names)) if in_any_order else names:
            _wait_for(device)
            barrier.wait()
            begin = time.perf_counter()
            calls[name]()
            returned = time.perf_counter()
            _wait_for(device)
            times[name].microseconds.append(1e6 * (time.perf_counter() - begin))
            times[name].host_microseconds.append(1e6 * (returned - begin))
    return times


def _wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _time_on_cpu(calls: dict[str, Callable[[], object]], num_runs: int) -> dict[str, Times]:
    times = {name: Times() for name in calls}
    barrier = HostBarrier()
    for _ in range(num_runs):
        for name, call in calls.items():
            barrier.wait()
            begin = time.perf_counter()
            call()
            times[name].microseconds.append(1e6 * (time.perf_counter() - begin))
            times[name].host_microseconds.append(times[name].microseconds[-1])
    return times


def _time_on_gpu(calls: dict[str, Callable[[], object]], num_runs: int) -> dict[str, Times]:
    times = {name: Times() for name in calls}
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")
    barrier = torch.zeros(1, device="cuda")
    for _ in range(num_runs):
        torch.cuda.synchronize()  # or the launch queue fills up, and the host's time is that of the GPU
        for name, call in calls.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            for _ in range(_NUM_FLUSHES):
                flush.zero_()
            dist.all_reduce(barrier)
            begin.record()
            host_begin = time.perf_counter()
            call()
            times[name].host_microseconds.append(1e6 * (time.perf_counter() - host_begin))
            end.record()
            events[name].append((begin, end))
    torch.cuda.synchronize()
    for name, pairs in events.items():
        times[name].microseconds = [1e3 * begin.elapsed_time(end) for begin, end in pairs]
    return times
