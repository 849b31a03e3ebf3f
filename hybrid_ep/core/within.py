"""A time limit for calls that take no timeout, or do not keep to it."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["UnfinishedError", "end_calls", "park_at_exit", "run_within"]

T = TypeVar("T")

_EXIT_S = 1.0  # how long the end of the process waits for calls
_running: set[threading.Thread] = set()
_ends = threading.Event()


class UnfinishedError(Exception):
    """A call has not returned within its limit."""


def run_within(
    limit_s: float, call: Callable[[], T], *, discard: Callable[[T], object] | None = None, name: str | None = None
) -> T:
    """Runs a call in a thread, and abandons the thread at the limit.

    Args:
        limit_s: how long the call may take.
        call: what to run; it releases Python's lock while it waits.
        discard: called in the abandoned thread with what the call returns after all.
        name: of the thread.

    Raises:
        UnfinishedError: the call has not returned, or the process ends.
        Exception: what the call raises.
    """
    if _ends.is_set():
        raise UnfinishedError("the process ends")
    lock = threading.Lock()
    results: list[T] = []
    errors: list[Exception] = []
    is_abandoned = False

    def run() -> None:
        try:
            run_and_hand_over()
        finally:
            _running.discard(thread)

    def run_and_hand_over() -> None:
        try:
            result = call()
        except Exception as error:
            errors.append(error)
            return
        with lock:
            if not is_abandoned:
                results.append(result)
                return
        if discard is not None:
            discard(result)

    thread = threading.Thread(target=run, daemon=True, name=name)
    _running.add(thread)
    thread.start()
    thread.join(limit_s)
    with lock:
        is_abandoned = not results
    if results:
        return results.pop()  # no other reference is left
    if errors:
        raise errors.pop()
    raise UnfinishedError(f"no answer within {limit_s:g} s")


def end_calls() -> None:
    """Says that the process ends: from now on no call is run, and `park_at_exit` does not return."""
    _ends.set()


def park_at_exit() -> None:
    """Stops a daemon thread for good where the process ends; otherwise, and in another thread, does nothing.

    A thread that comes back from C++ into a finalised interpreter aborts the process.
    """
    if _ends.is_set() and threading.current_thread().daemon:
        threading.Event().wait()


@atexit.register
def _wait_for_calls() -> None:
    """Waits for running calls: see `park_at_exit`."""
    end_calls()
    deadline = time.monotonic() + _EXIT_S
    for thread in list(_running):
        thread.join(max(0.0, deadline - time.monotonic()))
