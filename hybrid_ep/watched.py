"""Runs functions in a child process, so that nothing they read can hang or kill this one.

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
from typing import Any, Generic, TypeVar

from hybrid_ep.errors import HybridEPError

S = TypeVar("S")
T = TypeVar("T")
LIMIT_S = 5.0  # for one source to answer
_MOST_LOST = 4  # children; a node where this many sources hang is not worth waiting for
_NOTE_BYTES = 512
_POLL_S = 0.1


class Unreadable(Exception):  # noqa: N818 - a fact about the machine, not an error of ours
    """A fact could not be read; the message says which and why.

    Attributes:
        nvml_code: the nvmlReturn_t, where NVML refused.
        log: of a log that does not reach back far enough, what is left.
    """

    def __init__(self, reason: str, nvml_code: int | None = None, log: tuple[Any, ...] = ()) -> None:
        super().__init__(reason, nvml_code, log)  # all of them, so that it can be pickled
        self.nvml_code = nvml_code
        self.log = log

    def __str__(self) -> str:
        return str(self.args[0])


class Watched(Generic[S]):
    """Runs functions of a subject in a child process.

    Args:
        open_subject: makes the subject, in the child, from a function that has to be called with each source before
            that is read. The function raises Unreadable for a source that did not answer before.
        limit_s: for how long one source may be silent.
    """

    def __init__(self, open_subject: Callable[[Callable[[str], None]], S], *, limit_s: float = LIMIT_S) -> None:
        self._open_subject, self._limit_s = open_subject, limit_s
        self._note = mmap.mmap(-1, _NOTE_BYTES)
        self._silent: dict[str, str] = {}  # source → why it is not asked again
        self._lost = 0
        self._child: tuple[int, Connection] | None = None

    def run(self, task: Callable[..., T], *arguments: Any) -> T:
        """Returns ``task(subject, *arguments)`` from the child; all of it must be picklable.

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
        source = self._note[8:].rstrip(b"\0").decode(errors="replace") or "the child process"
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
        subject: S | None = None
        while True:
            try:
                task, arguments = pipe.recv()
            except EOFError:
                return
            try:
                if subject is None:
                    subject = self._open_subject(self._before)
                answer = ("value", task(subject, *arguments))
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
