"""Buffers of a single rank, for tests of arguments."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hybrid_ep import Buffer, HybridEPBuffer
from tests.multi_process.small_calls import E, H, T


@pytest.fixture
def buffer() -> Iterator[Buffer]:
    with Buffer(None, low_latency_mode=True, enable_shrink=True) as made:
        yield made


@pytest.fixture
def hybrid() -> Iterator[HybridEPBuffer]:
    with HybridEPBuffer(None, H, T, E) as made:
        yield made
