"""Times calls that all ranks make together, in turn. Measures, asserts nothing.

On GPUs: CUDA events around each call, after all ranks' GPUs have overwritten their L2 cache and then waited in an
all-reduce. Meanwhile the host queues the call. So the time is that of the device's work, and of whatever the call
itself makes the device wait for. On a CPU: the clock around each call, after a barrier.

The host's own time is a second figure, of calls in a row. Caches are warm then, as between the layers of a model, and
nothing else is queued. It is also measured under `torch.set_default_device`, as many trainers run.

A third figure is the time that an eager caller waits: by the clock, from the call on an idle device until the device is
done. The ranks meet in a barrier of the host before it (`HostBarrier`).

`dist.barrier` disturbs what is measured after it. With NCCL each barrier leaves an entry for the watchdog thread of
torch. Every 100 ms that thread looks at its entries and frees their events. Meanwhile calls of CUDA by other threads
may wait for 1 to 3 ms. A barrier of Gloo sleeps, so the caches of its CPU are cold afterwards.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from hybrid_ep.errors import TimeoutError

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


_DIRECTORY = "/dev/shm"  # memory of one host
_BYTES_PER_RANK = 8
_LIMIT_S = 600.0
_LATE = "it did not come; has its process ended?"


class HostBarrier:
    """A barrier of all ranks. If they share no memory, because they are on several hosts, it is `dist.barrier`.

    Construction is collective.

    Args:
        limit_s: how long a rank waits for the others.
    """

    def __init__(self, limit_s: float = _LIMIT_S) -> None:
        self._rank, self._num_ranks, self._limit_s = dist.get_rank(), dist.get_world_size(), limit_s
        self._epoch = 0
        memory = _share_memory(_BYTES_PER_RANK * self._num_ranks)
        self._epochs = None if memory is None else memoryview(memory).cast("q")  # the latest of each rank

    @property
    def is_shared(self) -> bool:
        """Whether the ranks share memory."""
        return self._epochs is not None

    def wait(self) -> None:
        """Returns when every rank has called it as often as this one.

        Raises:
            TimeoutError: a rank did not come.
        """
        if self._epochs is None:
            dist.barrier()
            return
        self._epoch += 1
        self._epochs[self._rank] = self._epoch
        deadline = time.monotonic() + self._limit_s
        for rank in range(self._num_ranks):
            while self._epochs[rank] < self._epoch:
                os.sched_yield()  # ranks may share a core
                if time.monotonic() > deadline:
                    raise TimeoutError("barrier of the benchmark", self._rank, rank, _LATE, timeout_s=self._limit_s)


def _share_memory(num_bytes: int) -> mmap.mmap | None:
    """Memory of zeros that all ranks share; None, at every rank, if they have none. Collective."""
    with contextlib.ExitStack() as stack:
        path = [""]
        if dist.get_rank() == 0:
            with contextlib.suppress(OSError):  # without a path no rank maps it
                file = stack.enter_context(tempfile.NamedTemporaryFile(dir=_DIRECTORY, prefix="hybrid_ep_barrier_"))
                file.truncate(num_bytes)
                path = [file.name]
        dist.broadcast_object_list(path, src=0)
        memory = None
        with contextlib.suppress(OSError), open(path[0], "r+b") as shared:
            memory = mmap.mmap(shared.fileno(), num_bytes)
        mapped: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(mapped, memory is not None)  # only then the file may go
    return memory if all(mapped) else None
