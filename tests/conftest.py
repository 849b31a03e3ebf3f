"""Fixtures for all tests: clusters of ranks that live as long as the test session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hybrid_ep.cluster import RankError, VirtualCluster

RunRanks = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[RunRanks]:
    """Returns `run(num_ranks, function, *args)`: runs a function on so many CPU ranks and gives the results by rank.

    Clusters are started on first use and kept; one in which a rank failed is out of step and is replaced.
    """
    started: dict[int, VirtualCluster] = {}

    def run(num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        if num_ranks not in started:
            started[num_ranks] = VirtualCluster(num_ranks, variables={"HYBRID_EP_TIMEOUT_S": "20"})
        try:
            return started[num_ranks].run(function, *args, limit_s=120)
        except RankError:
            started.pop(num_ranks).close()
            raise

    yield run
    for cluster in started.values():
        cluster.close()
