"""Fixtures for all tests: clusters of ranks that live as long as the test session."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid_ep.testing import cluster
from tests.rank_pool import RankPool

# The programs of the developers' tools, as in an activated environment.
os.environ["PATH"] = f"{Path(sys.prefix, 'bin')}:{os.environ['PATH']}"
# Tests read what apt, readelf and others say.
os.environ["LC_ALL"] = "C.UTF-8"
os.environ.pop("LANGUAGE", None)

# What ranks import with the functions that they run: 0.1 s for pytest, 0.6 s for what trainers of layers use.
cluster.PRELOADED += ["pytest", "torch.distributed.fsdp"]

RunRanks = Callable[..., list[Any]]

# Tests that share a fixture which takes long to make. With several workers (pytest -n 4 --dist loadgroup) they run on
# the same one, as those of one file do.
TOGETHER = {
    "tests/deploy/test_wheel.py": "wheel",
    "tests/deploy/test_packages.py": "wheel",
}

# The files that take longest begin, and all of them before the others: so no worker is left with one at the end.
# Tests of lost ranks wait more than they work, those of deploy/ work: one of each kind runs beside the other.
LONGEST = (
    "tests/emulation/test_low_latency_between.py",
    "tests/emulation/test_kernels.py",
    "tests/deploy/test_ansible.py",
    "tests/deploy/test_k8s_jobs.py",
    "tests/emulation/test_softroce.py",
    "tests/emulation/test_lost_ranks.py",
    "tests/emulation/test_between.py",
    "tests/emulation/test_hosts.py",
    "tests/deploy/test_preflight.py",
    "tests/deploy/test_slurm.py",
    "tests/deploy/test_packages.py",
    "tests/deploy/test_wheel.py",
    "tests/multi_process/test_engine.py",
    "tests/multi_process/test_elastic.py",
    "tests/multi_process/test_bench.py",
    "tests/sim/test_scenarios.py",
    "tests/emulation/test_fuzz.py",
    "tests/multi_process/test_examples.py",
    "tests/multi_process/test_random_routings.py",
    "tests/deploy/test_softroce_doctor.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups tests by file, or by the fixture that they share, and puts the longest groups first."""
    places = {file: place for place, file in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(_file_of(item), len(LONGEST)))
    for item in items:
        group = TOGETHER.get(_file_of(item), _file_of(item))
        item.add_marker(pytest.mark.xdist_group(group))


def _file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[RunRanks]:
    """Returns `run(num_ranks, function, *args)`: runs a function on so many CPU ranks and gives the results by rank."""
    pool = RankPool(variables={"HYBRID_EP_TIMEOUT_S": "20"})
    yield pool.run
    pool.close()
