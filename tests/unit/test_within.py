"""Calls with a time limit."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from hybrid_ep.agree.within import UnfinishedError, run_within


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


# The call ends in C++ without Python's lock, while an object that is deleted last holds the finalisation up.
_JOB = """
import datetime, sys, threading, time
import torch.distributed as dist
from hybrid_ep.agree.within import run_within

class Late:
    def __del__(self, sleep=time.sleep):
        sleep(1.0)

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
begun = threading.Event()

def call():
    begun.set()
    store.wait(["never"], datetime.timedelta(seconds=0.5))

def watch():
    try:
        run_within(5.0, call)
    except Exception:
        pass

sys.late = Late()
threading.Thread(target=watch, daemon=True).start()
begun.wait()
"""


def test_a_call_that_runs_at_the_end_does_not_abort_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", _JOB], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr[-2000:]
