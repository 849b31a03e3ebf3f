"""Connections between some ranks of a group, which carry the messages of the torch engine.

Over gloo every buffer has its own connections. So its messages never mix with those of another buffer, or of a user who
sends on the same group. When a wait times out, gloo closes all connections of the process group. With its own group, a
buffer loses only its own connections, not the user's.

Over NCCL, connections for each buffer would take a communicator for each buffer. So on GPUs the user's group is used.
The header of a call names its buffer.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from hybrid_ep.agree.board import Board, StoreLostError
from hybrid_ep.agree.within import UnfinishedError, run_within

_UNUSED_TAG = (1 << 30) + 1
_MIN_CONNECT_S = 1.0  # processes that start together are some milliseconds apart
_FIRST_POLL_S, _LAST_POLL_S = 0.001, 0.05
_MORE_S = 0.5  # for gloo to report by itself that it could not connect
_LINGER_S = 3.0  # for how long connections stay for a peer that does not close its own: it may still read from them


def uses_gloo(group: dist.ProcessGroup) -> bool:
    """Returns whether the group carries CPU tensors over gloo."""
    config: str = dist.get_backend_config(group)
    return "cpu:gloo" in config.split(",")


class Link:
    """Connections among `members` of a group.

    Args:
        group: the user's process group.
        members: the ranks that are connected, this one among them, ascending.
        rank: this rank.
        board: of these connections only; with gloo, where ranks write their addresses.
        timeout_s: how long it may take to connect.

    Raises:
        RuntimeError: they could not be connected.
    """

    def __init__(self, group: dist.ProcessGroup, members: list[int], rank: int, board: Board, timeout_s: float) -> None:
        self.group, self.members, self._rank, self._board = group, members, rank, board
        self._index = {member: i for i, member in enumerate(members)}
        self._process_id = os.getpid()
        self._gloo: Any = None  # a ProcessGroupGloo; torch declares none of its methods
        if uses_gloo(group):
            limit_s = max(timeout_s, _MIN_CONNECT_S)
            self._gloo = _connected(_Addresses(board, limit_s), self._index[rank], len(members), limit_s)

    def close(self) -> None:
        """Returns when the connections and their threads are gone. Local.

        Waits until all members close theirs, but not for long: one may still read what is on its way.
        """
        if self._gloo is None or os.getpid() != self._process_id:
            return
        deadline, pause = time.monotonic() + _LINGER_S, _FIRST_POLL_S
        with contextlib.suppress(StoreLostError):  # its process has ended, or the store is stopped
            num_closed = self._board.count("closed")
            while num_closed < len(self.members) and time.monotonic() < deadline:
                time.sleep(pause)
                pause = min(2 * pause, _LAST_POLL_S)
                num_closed = int(self._board.read("closed") or 0)
        self._gloo = None

    def __del__(self) -> None:
        if self._gloo is None:
            return
        if os.getpid() != self._process_id:
            # A forked child cannot close them: it would wait for threads that only its parent has.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo))
            return
        if sys.is_finalizing():
            return  # the process closes them; a thread that is started now never runs, and its start would wait for it
        # Closing a socket with unread data, such as gloo's acknowledgements, resets it. Then data that the peer has not
        # read is lost.
        with contextlib.suppress(RuntimeError):  # an interpreter that is about to end starts no threads
            timer = threading.Timer(_LINGER_S, _let_go, [self._gloo])
            timer.daemon = True
            timer.start()

    @property
    def device(self) -> torch.device | None:
        """The device from which tensors are sent without a copy; None: this rank's GPU."""
        return None if self._gloo is None else torch.device("cpu")

    def transfer(
        self, sends: dict[int, Tensor], receives: dict[int, Tensor], tag: int
    ) -> list[tuple[int, dist.Work | RuntimeError]]:
        """Begins to send and to receive; returns what to wait for, or the error of what could not begin, by peer."""
        if self._gloo is None:
            return self._transfer_on_gpu(sends, receives)
        begun: list[tuple[int, dist.Work | RuntimeError]] = []
        for verb, tensors in ((self._gloo.send, sends), (self._gloo.recv, receives)):
            for peer, tensor in tensors.items():
                try:
                    begun.append((peer, verb([tensor], self._index[peer], tag)))
                except RuntimeError as error:
                    begun.append((peer, error))
        return begun

    def abort(self) -> None:
        """Closes the connections now, so that peers learn of it; with NCCL, nothing. Local.

        Dropping the last reference would close them, but an exception's traceback may hold one for long. gloo has no
        call to close them, but a wait that times out closes them all.
        """
        for peer, index in self._index.items():
            if self._gloo is None or peer == self._rank:
                continue
            with contextlib.suppress(RuntimeError):  # also where this one is closed already
                self._gloo.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], index, _UNUSED_TAG).wait(
                    timedelta(seconds=1e-3)
                )

    def _transfer_on_gpu(
        self, sends: dict[int, Tensor], receives: dict[int, Tensor]
    ) -> list[tuple[int, dist.Work | RuntimeError]]:
        """One NCCL group call; its works cover all messages, and its own watchdog reports lost peers."""
        ops = [
            dist.P2POp(verb, tensor, dist.get_global_rank(self.group, peer), self.group)
            for verb, tensors in ((dist.isend, sends), (dist.irecv, receives))
            for peer, tensor in tensors.items()
        ]
        peers = [*sends, *receives]
        works = dist.batch_isend_irecv(ops)
        return [(peers[min(i, len(peers) - 1)], work) for i, work in enumerate(works)]


def _connected(addresses: Store, index: int, num_members: int, limit_s: float) -> Any:
    """Connects over gloo, in a thread that is abandoned if gloo exceeds the time limit.

    Where a peer dies while it connects, gloo tries again, each time up to the limit.

    Raises:
        RuntimeError: they could not be connected.
    """
    limit = timedelta(seconds=limit_s)
    try:
        return run_within(
            limit_s + _MORE_S,
            lambda: dist.ProcessGroupGloo(addresses, index, num_members, limit),
            name="hybrid_ep connects",
        )
    except UnfinishedError as error:
        raise RuntimeError(f"gloo has not connected within {limit_s:g} s") from error


class _Addresses(Store):
    """A board as the store in which gloo looks for addresses.

    It asks again and again. A wait at the store itself would hold up whatever else this process asks it. Two ranks
    whose threads connect two buffers in different orders would then wait for each other.
    """

    def __init__(self, board: Board, limit_s: float) -> None:
        super().__init__()
        self._board, self._deadline = board, time.monotonic() + limit_s

    def set(self, key: str, value: bytes | str) -> None:
        self._board.write(key, value)

    def get(self, key: str) -> bytes:
        pause = _FIRST_POLL_S
        while (value := self._board.read_bytes(key)) is None:
            if time.monotonic() >= self._deadline:
                raise RuntimeError(f"nothing at {key}")
            time.sleep(pause)
            pause = min(2 * pause, _LAST_POLL_S)
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(self._board.read_bytes(key) is not None for key in keys)


def _let_go(connections: Any) -> None:
    """Drops the last reference to the connections, which a timer has held."""
