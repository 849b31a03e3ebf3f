"""A barrier of the ranks of one host that makes no call of CUDA or NCCL and does not sleep.

`dist.barrier` disturbs what is measured after it. With NCCL each barrier leaves an entry for the watchdog thread of
torch. Every 100 ms that thread looks at its entries and frees their events. Meanwhile calls of CUDA by other threads
may wait for 1 to 3 ms. A barrier of Gloo sleeps, so the caches of its CPU are cold afterwards.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time

import torch.distributed as dist

from hybrid_ep.errors import TimeoutError

__all__ = ["HostBarrier"]

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
