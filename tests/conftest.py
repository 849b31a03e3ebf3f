"""Fixtures for all tests: clusters of ranks that live as long as the test session."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo  # noqa: F401 - Ansible's modules replace sys.intern when a test imports them, and this then fails

from tests.rank_pool import RankPool

# The programs of the developers' tools, as in an activated environment.
os.environ["PATH"] = f"{Path(sys.prefix, 'bin')}:{os.environ['PATH']}"
# Tests read what apt, readelf and others say.
os.environ["LC_ALL"] = "C.UTF-8"
os.environ.pop("LANGUAGE", None)

RunRanks = Callable[..., list[Any]]

# Tests that share a fixture which takes long to make. With several workers (pytest -n 2 --dist loadgroup) they run on
# the same one, as those of one file do.
TOGETHER = {
    "tests/deploy/test_wheel.py": "wheel",
    "tests/deploy/test_packages.py": "wheel",
}

LARGEST = "tests/emulation/test_low_latency_between.py"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups tests by file, or by the fixture that they share. The largest group begins."""
    items.sort(key=lambda item: not item.nodeid.startswith(LARGEST))
    for item in items:
        file = item.nodeid.partition("::")[0]
        group = TOGETHER.get(file, file)
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[RunRanks]:
    """Returns `run(num_ranks, function, *args)`: runs a function on so many CPU ranks and gives the results by rank."""
    pool = RankPool(variables={"HYBRID_EP_TIMEOUT_S": "20"})
    yield pool.run
    pool.close()
