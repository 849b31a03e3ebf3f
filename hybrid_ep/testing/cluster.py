"""A virtual cluster: ranks as processes of this machine, waiting to run functions together.

`hybrid-ep demo`, `hybrid-ep bench` and the tests all start their ranks here. A fork server imports torch once, so that
a rank starts fast. The parent holds the process group's store, so that the store outlives any rank.

    with VirtualCluster(8) as cluster:
        results = cluster.run(function, argument)      # function(argument) on every rank, results by rank
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import multiprocessing.forkserver as forkserver
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hybrid_ep import env
from hybrid_ep.errors import ConfigError, HybridEPError

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
# Modules that the fork server imports, so that no rank has to. More may be added before the first cluster of a process.
PRELOADED = ["torch", "torch.distributed", "hybrid_ep.buffers.v1", "hybrid_ep.buffers.hybrid"]
_START_S = 120.0
_LEAVE_S = 5.0
# torch reads this at the first rendezvous of a process: symmetric memory of two ranks may be on one GPU.
_SHARED_GPUS = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


class _Setup(NamedTuple):
    """The settings with which a rank begins; `gpu` is None on a CPU. A rank outside the group makes no group."""

    rank: int
    num_ranks: int
    backend: str
    gpu: int | None
    num_threads: int
    port: int
    variables: dict[str, str]
    is_in_group: bool = True


class RankError(HybridEPError):
    """A function failed on some ranks.

    Attributes:
        errors: rank → the exception, or None for a rank whose process ended.
    """

    def __init__(self, errors: dict[int, BaseException | None], text: str) -> None:
        super().__init__(text)
        self.errors = errors


class VirtualCluster:
    """Processes that form one process group.

    Args:
        num_ranks: how many.
        device: ``cpu`` (gloo) or ``cuda`` (NCCL; rank r takes GPU r).
        num_threads: CPU threads of each rank.
        variables: environment variables to set in every rank.
        ranks_share_gpus: with ``cuda``, rank r takes GPU r modulo the number of GPUs, over gloo, because NCCL refuses
            two ranks on one GPU. For tests of more ranks than there are GPUs, never for speed: the ranks of a GPU run
            in turns of milliseconds, also while they wait for each other.

    Raises:
        ConfigError: fewer GPUs than ranks, none at all to share, or a number that is not positive.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        device: str = "cpu",
        num_threads: int = 1,
        variables: dict[str, str] | None = None,
        ranks_share_gpus: bool = False,
    ) -> None:
        if num_ranks < 1:
            raise ConfigError(f"num_ranks is {num_ranks}; allowed: ≥ 1")
        if device not in ("cpu", "cuda"):
            raise ConfigError(f"device is {device!r}; allowed: 'cpu' or 'cuda'")
        if ranks_share_gpus and device != "cuda":
            raise ConfigError(f"ranks_share_gpus is True with device {device!r}; allowed with it: 'cuda'")
        num_gpus = torch.cuda.device_count() if device == "cuda" else 0
        if ranks_share_gpus and num_gpus == 0:
            raise ConfigError("ranks_share_gpus is True, and no GPU is visible; allowed: with at least one")
        if device == "cuda" and not ranks_share_gpus and num_gpus < num_ranks:
            raise ConfigError(f"num_ranks is {num_ranks}; allowed with cuda: ≤ {num_gpus} GPUs")
        for variable in env.VARIABLES:
            if variable.name.startswith("HYBRID_EP_") and variable.phase == "run":
                variable.get()  # here once, and not at every rank
        self.num_ranks = num_ranks
        backend = "nccl" if device == "cuda" and not ranks_share_gpus else "gloo"
        variables = ({_SHARED_GPUS: "1"} if ranks_share_gpus else {}) | (variables or {})
        self._store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        # Without CUDA in the parent, ranks can fork from a server that has torch loaded; CUDA must start in each rank
        # itself.
        self._context = context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        with _sigint_blocked():
            forkserver.ensure_running()
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        # Answers of each rank that were taken or given up; one that comes late must not be taken for the next.
        self._num_collected = [0] * num_ranks
        self._setups: list[_Setup] = []
        try:
            for rank in range(num_ranks):
                gpu = rank % num_gpus if device == "cuda" else None
                self._setups.append(_Setup(rank, num_ranks, backend, gpu, num_threads, self._store.port, variables))
                pipe, process = self._start_process(self._setups[-1])
                self._pipes.append(pipe)
                self._processes.append(process)
            self.collect(limit_s=_START_S)
        except BaseException as error:
            self.close(in_order=isinstance(error, RankError))
            raise

    def run(
        self, function: Callable[..., T], *args: Any, ranks: list[int] | None = None, limit_s: float = 600.0
    ) -> list[T]:
        """Runs `function(*args)` on every rank at once and returns the results by rank.

        Args:
            function: importable by name in the ranks.
            *args: picklable.
            ranks: only these ranks, when others have ended.
            limit_s: how long it may take; ranks that take longer count as failed, and their answers are dropped.

        Raises:
            RankError: it raised, or its process ended, on at least one rank.
        """
        self.start(function, *args, ranks=ranks)
        return self.collect(ranks, limit_s=limit_s)

    def start(self, function: Callable[..., Any], *args: Any, ranks: list[int] | None = None) -> None:
        """Starts `function(*args)` on every rank (or on `ranks`); `collect` gets the results."""
        for rank in ranks if ranks is not None else range(self.num_ranks):
            with contextlib.suppress(OSError):  # its process has ended: `collect` says so
                self._pipes[rank].send((function, args))

    @property
    def port(self) -> int:
        """Port of the ranks' store, on this machine."""
        port: int = self._store.port
        return port

    def replace(self, rank: int) -> None:
        """Starts a new process in the place of one that has ended. It is in no process group."""
        self._processes[rank].join()
        self._pipes[rank], self._processes[rank] = self._start_process(self._setups[rank]._replace(is_in_group=False))
        self._num_collected[rank] = 0
        self.collect([rank], limit_s=_START_S)

    def _start_process(self, setup: _Setup) -> tuple[Connection, Any]:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(there, setup), daemon=True)
        process.start()
        there.close()
        return here, process

    def process_id(self, rank: int) -> int:
        """Returns the process id of a rank, to stop or kill it in tests of failures."""
        pid = self._processes[rank].pid
        assert isinstance(pid, int)
        return pid

    def close(self, *, in_order: bool = True) -> None:
        """Ends all ranks: after the call that they are in, or at once."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        if in_order:
            until = time.monotonic() + _LEAVE_S
            for process in self._processes:
                process.join(max(0.0, until - time.monotonic()))
        for process in self._processes:  # all of them before the first is waited for: each takes long on a busy machine
            process.kill()
        for process in self._processes:
            process.join()
        self._pipes, self._processes = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(in_order=not isinstance(error, KeyboardInterrupt))

    def collect(self, ranks: list[int] | None = None, *, limit_s: float) -> list[Any]:
        """Waits for one answer from each of `ranks` (default: all) and returns them in that order.

        Raises:
            RankError: as `run`.
        """
        ranks = ranks if ranks is not None else list(range(self.num_ranks))
        answers: dict[int, tuple[bool, Any, str]] = {}
        pending = {self._pipes[rank]: rank for rank in ranks}
        deadline = time.monotonic() + limit_s
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                answers |= {r: (False, None, f"no answer within {limit_s:g} s") for r in pending.values()}
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pending[pipe]
                try:
                    number, answer = pipe.recv()
                except (EOFError, OSError):
                    answer = (False, None, "its process ended")
                else:
                    if number <= self._num_collected[rank]:
                        continue
                answers[rank] = answer
                del pending[pipe]
        for rank in ranks:
            self._num_collected[rank] += 1
        failed = {rank: (value, text) for rank, (ok, value, text) in sorted(answers.items()) if not ok}
        if failed:
            text = "\n".join(f"rank {rank}: {text}" for rank, (_, text) in failed.items())
            raise RankError({rank: error for rank, (error, _) in failed.items()}, text)
        return [answers[rank][1] for rank in ranks]


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Processes that start in this block get no Ctrl-C, which a terminal sends to all: the parent ends its ranks.

    One that comes meanwhile is raised at the end of the block.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: Connection, setup: _Setup) -> None:
    """The life of one rank."""
    gc.freeze()  # what the fork server has imported lives as long as the rank; a collection would copy all its pages
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(setup.variables)
    # All ranks are on this machine, whose name may have no address, or one that is out of date.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(setup.num_threads)
    _answer(pipe, 1, _join, setup)
    for number in itertools.count(2):
        try:
            task = pipe.recv()
        except EOFError:
            break
        if task is None:
            break
        function, args = task
        _answer(pipe, number, function, *args)
    # Peers may be dead: leave without the farewells that a process group would wait for.
    os._exit(0)


def _end_with_parent() -> None:
    """Ends this process as soon as the one that started the ranks has ended, also while it is in a call."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _join(setup: _Setup) -> None:
    if not setup.is_in_group:
        return
    store = TCPStore("127.0.0.1", setup.port, None, is_master=False)
    timeout = timedelta(seconds=max(env.TIMEOUT_S.get(), 60.0))
    gpu = None if setup.gpu is None else torch.device("cuda", setup.gpu)
    if gpu is not None:
        torch.cuda.set_device(gpu)
    dist.init_process_group(
        setup.backend,
        store=store,
        rank=setup.rank,
        world_size=setup.num_ranks,
        timeout=timeout,
        device_id=gpu if setup.backend == "nccl" else None,
    )


def _answer(pipe: Connection, number: int, function: Callable[..., Any], *args: Any) -> None:
    """Sends the number of the answer and (succeeded, result or exception, text)."""
    try:
        answer: tuple[bool, Any, str] = (True, function(*args), "")
    except Exception as error:
        answer = (False, error, traceback.format_exc())
    try:
        pipe.send((number, answer))
    except OSError:  # the parent has ended
        os._exit(1)
    except Exception as error:  # an exception that cannot be pickled still has its text
        pipe.send((number, (False, None, f"{answer[2]}\n(the result could not be sent: {error})")))
