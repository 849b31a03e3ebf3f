"""A time limit for calls that take no timeout, or do not keep to it."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import TypeVar

from hybrid_ep import _C

T = TypeVar("T")

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
    thread.start()
    thread.join(limit_s)
    with lock:
        is_abandoned = not results
    if results:
        return results.pop()  # no other reference is left
    if errors:
        raise errors.pop()
    raise UnfinishedError(f"no answer within {limit_s:g} s")


@atexit.register
def _park_threads() -> None:
    """Lets threads that are in a call now sleep when it returns: by then the interpreter may be finalised."""
    _ends.set()
    _C.park_threads()
