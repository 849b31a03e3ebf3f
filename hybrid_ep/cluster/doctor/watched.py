"""A node that is read by a child process, so that nothing it reads can hang or kill the doctor.

A driver that does not answer blocks the thread that asked it, often where no signal reaches it. So a child does the
reading. It notes in shared memory what it is about to read; the parent waits for answers and watches that note. If a
note stays for too long, or a child dies, that read ends as `Unreadable`, and its source is not read again. Another
child goes on with the rest.
"""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from hybrid_ep.cluster.doctor.node import Node
from hybrid_ep.cluster.doctor.unreadable import Unreadable
from hybrid_ep.errors import HybridEPError

__all__ = ["LIMIT_S", "WatchedNode"]

T = TypeVar("T")
LIMIT_S = 5.0  # for one source to answer
_MOST_LOST = 4  # children; a node where this many sources hang is not worth waiting for
_NOTE_BYTES = 512
_POLL_S = 0.1


class WatchedNode:
    """Runs functions of a `Node` in a child process.

    Args:
        sysroot: as of `Node`.
        limit_s: for how long one source may be silent.
        open_node: makes the node, in the child.
    """

    def __init__(
        self, sysroot: Path = Path("/"), *, limit_s: float = LIMIT_S, open_node: Callable[[Path], Node] = Node
    ) -> None:
        self._sysroot, self._limit_s, self._open_node = sysroot, limit_s, open_node
        self._note = mmap.mmap(-1, _NOTE_BYTES)
        self._silent: dict[str, str] = {}  # source → why it is not asked again
        self._lost = 0
        self._child: tuple[int, Connection] | None = None

    def run(self, task: Callable[..., T], *arguments: Any) -> T:
        """Returns ``task(node, *arguments)`` from the child; all of it must be picklable.

        Raises:
            Unreadable: a source did not answer in time or killed the child, or the task says so.
            HybridEPError: the task raised it.
            RuntimeError: the task raised anything else; the message has its type and text.
        """
        if self._lost >= _MOST_LOST:
            raise Unreadable(f"not asked: {self._lost} sources of this node did not answer")
        pid, pipe = self._child = self._child or self._start()
        pipe.send((task, arguments))
        try:
            self._wait(pipe)
            kind, answer = pipe.recv()
        except TimeoutError:
            raise self._lose(pid, f"no answer in {self._limit_s:g} s") from None
        except (EOFError, OSError):
            raise self._lose(pid, "ended the process that read it") from None
        if kind == "raised":
            raise answer
        if kind == "error":
            raise RuntimeError(answer)
        result: T = answer
        return result

    def insist(self, task: Callable[..., T], *arguments: Any) -> T:
        """As `run`, for a task that copes with what it cannot read.

        If a source falls silent, the task runs again from its beginning without that source.
        """
        while True:
            lost = self._lost
            try:
                return self.run(task, *arguments)
            except Unreadable:
                if self._lost == lost:
                    raise

    def close(self) -> None:
        """Ends the child; one that hangs in the kernel is left to it."""
        if self._child is not None:
            pid, pipe = self._child
            pipe.close()
            self._child = None
            _bury(pid, grace_s=1.0)

    def _wait(self, pipe: Connection) -> None:
        note, since = self._note[:], time.monotonic()
        while not pipe.poll(_POLL_S):
            if (now := self._note[:]) != note:
                note, since = now, time.monotonic()
            elif time.monotonic() - since > self._limit_s:
                raise TimeoutError

    def _lose(self, pid: int, how: str) -> Unreadable:
        """Gives the child up and blames what it was reading."""
        source = self._note[8:].rstrip(b"\0").decode(errors="replace") or "the doctor"
        reason = f"{source}: {how}"
        self._silent[source] = reason
        self._lost += 1
        assert self._child is not None
        self._child[1].close()
        self._child = None
        _bury(pid, grace_s=0.0)
        return Unreadable(reason)

    # ---- in the child ----

    def _start(self) -> tuple[int, Connection]:
        ours, theirs = Pipe()
        pid = os.fork()
        if pid:
            theirs.close()
            return pid, ours
        try:
            ours.close()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            self._serve(theirs)
        finally:
            os._exit(0)

    def _serve(self, pipe: Connection) -> None:
        node: Node | None = None
        while True:
            try:
                task, arguments = pipe.recv()
            except EOFError:
                return
            try:
                if node is None:
                    node = self._open_node(self._sysroot)
                    node.watch = self._before
                answer = ("value", task(node, *arguments))
            except (Unreadable, HybridEPError) as error:
                answer = ("raised", error)
            except Exception as error:
                answer = ("error", f"{type(error).__name__}: {error}")
            pipe.send(answer)

    def _before(self, source: str) -> None:
        """Notes what is read next, with a number in front, so that reading the same again is seen as progress."""
        if source in self._silent:
            raise Unreadable(self._silent[source])
        number = int.from_bytes(self._note[:8], "little") + 1
        self._note[:] = number.to_bytes(8, "little") + source.encode(errors="replace")[:400].ljust(
            _NOTE_BYTES - 8, b"\0"
        )


def _bury(pid: int, grace_s: float) -> None:
    """Waits for a child that should end by itself, then kills it; never waits for one that cannot be killed."""
    until = time.monotonic() + grace_s
    killed = False
    while True:
        try:
            if os.waitpid(pid, os.WNOHANG)[0]:
                return
        except ChildProcessError:
            return
        if time.monotonic() > until:
            if killed:
                return
            os.kill(pid, signal.SIGKILL)
            killed, until = True, time.monotonic() + 0.2
        time.sleep(0.002)
