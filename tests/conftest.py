"""Fixtures for all tests: clusters of ranks that live as long as the test session."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rank_pool import RankPool

# The programs of the developers' tools, as in an activated environment.
os.environ["PATH"] = f"{Path(sys.prefix, 'bin')}:{os.environ['PATH']}"

RunRanks = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[RunRanks]:
    """Returns `run(num_ranks, function, *args)`: runs a function on so many CPU ranks and gives the results by rank."""
    pool = RankPool(variables={"HYBRID_EP_TIMEOUT_S": "20"})
    yield pool.run
    pool.close()
