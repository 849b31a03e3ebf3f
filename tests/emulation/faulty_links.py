"""The engine between domains over a link that delays, reorders and loses chunks."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from hybrid_ep.errors import TimeoutError, TransportError
from tests.battery.cases import Case
from tests.battery.normal import dispatch, make_buffer


@contextmanager
def _faults(seed: int, max_delay_us: int = 0, lost_fraction: float = 0.0) -> Iterator[None]:
    """Links that are opened inside misbehave, each in its own way."""
    from hybrid_ep import _cuda
    from hybrid_ep.engine.cuda import between

    faults = _cuda.Faults(seed=100 * seed + dist.get_rank(), max_delay_us=max_delay_us, lost_fraction=lost_fraction)
    opened = between.open_link
    between.open_link = functools.partial(opened, faults=faults)
    try:
        yield
    finally:
        between.open_link = opened


def check_on_slow_link(check: str, seed: int, *args: Any) -> None:
    """Runs a check of tests/ where every command waits for a time of its own, so that chunks overtake each other."""
    module, name = check.rsplit(".", 1)
    with _faults(seed, max_delay_us=20_000):
        getattr(importlib.import_module(f"tests.{module}"), name)(*args)


def check_lost_chunks(case: Case) -> None:
    """Every put is lost: the call ends in its time, and the error names a rank."""
    rank = dist.get_rank()
    with _faults(0, max_delay_us=1, lost_fraction=1.0):
        buffer = make_buffer(case, timeout_s=4.0)
        with pytest.raises((TimeoutError, TransportError)) as found:
            dispatch(buffer, case, case.inputs(rank))
        assert found.value.peer != rank
        assert found.value.peer in range(case.num_ranks)
