"""Ranks for the tests of one module, each on a GPU of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import RunRanks
from tests.rank_pool import RankPool

every_engine = pytest.mark.parametrize("run_gpus", ["torch", "cuda"], indirect=True)


@pytest.fixture(scope="module")
def run_gpus(request: pytest.FixtureRequest) -> Iterator[RunRanks]:
    """Returns `run(num_ranks, function, *args)` on GPUs, with the engine of `every_engine`, or the cuda engine."""
    engine = getattr(request, "param", "cuda")
    pool = RankPool(device="cuda", variables={"HYBRID_EP_ENGINE": engine, "HYBRID_EP_TIMEOUT_S": "20"})
    yield pool.run
    pool.close()
