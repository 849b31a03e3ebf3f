"""Calls that may hang: of a store whose process is stopped, or of gloo, which tries again and again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["NoAnswerError", "call_within"]

T = TypeVar("T")


class NoAnswerError(RuntimeError):
    """The call has not ended within its limit."""


def call_within(limit_s: float, call: Callable[[], T]) -> T:
    """Calls in a thread that is abandoned if the call does not end.

    Args:
        limit_s: how long to wait for the end.
        call: has no arguments, and lets other threads run; nothing may depend on whether it ends later.

    Returns:
        What the call returns.

    Raises:
        NoAnswerError: it has not ended.
        Exception: what the call raises.
    """
    done: list[T] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            done.append(call())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True, name="hybrid_ep waits")
    thread.start()
    thread.join(limit_s)
    if done:
        return done.pop()  # the thread keeps no reference
    raise failed[0] if failed else NoAnswerError(f"no answer within {limit_s:g} s")
