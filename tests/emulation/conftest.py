"""Builds the module of these tests once, and keeps the ranks that run the checks for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.emulation.build import HERE, build
from tests.emulation.engine import run
from tests.prerequisites import require_programs
from tests.rank_pool import RankPool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives the tests of this folder time for the build: the first one of every worker waits for it."""
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def emulated_module() -> Path:
    """The path of `_cuda` for the CPU."""
    require_programs("g++")
    return build()


# Runs the check whose name follows with tensors whose values are not checked: devices.py.
UNREAD = "emulation.devices.check_unread"


class RunEmulated(Protocol):
    def __call__(self, num_ranks: int, check: str, *args: Any, seed: int = 0) -> None: ...


@pytest.fixture(scope="module")
def run_emulated(emulated_module: Path) -> Iterator[RunEmulated]:
    """Returns `run(num_ranks, check, *args, seed)`: runs a check with its arguments on so many ranks."""
    pool = RankPool(variables={"HYBRID_EP_ENGINE": "cuda", "HYBRID_EP_TIMEOUT_S": "60"}, one_at_a_time=True)

    def run_check(num_ranks: int, check: str, *args: Any, seed: int = 0) -> None:
        pool.run(num_ranks, run, str(emulated_module), seed, check, *args)

    yield run_check
    pool.close()
