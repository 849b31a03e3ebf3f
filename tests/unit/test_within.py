"""Calls with a time limit."""

from __future__ import annotations

import threading
import time

import pytest

from hybrid_ep.core.within import UnfinishedError, run_within


def test_a_call_gives_its_result_or_its_error() -> None:
    assert run_within(5.0, lambda: 3) == 3
    assert run_within(5.0, lambda: None) is None
    with pytest.raises(ZeroDivisionError):
        run_within(5.0, lambda: 1 // 0)


def test_a_late_result_is_discarded() -> None:
    may_end, discarded = threading.Event(), threading.Event()
    with pytest.raises(UnfinishedError, match=r"no answer within 0\.05 s"):
        run_within(0.05, lambda: may_end.wait(10), discard=lambda _: discarded.set())
    assert not discarded.is_set()
    may_end.set()
    assert discarded.wait(10)


def test_it_waits_no_longer_than_the_limit() -> None:
    begin = time.monotonic()
    with pytest.raises(UnfinishedError):
        run_within(0.05, lambda: time.sleep(3))
    assert time.monotonic() - begin < 2
