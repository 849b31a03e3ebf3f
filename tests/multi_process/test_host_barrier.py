"""`bench.timing.HostBarrier`: no rank leaves the barrier before all have come, with shared memory and without."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch.distributed as dist

from hybrid_ep.bench import timing
from hybrid_ep.bench.timing import HostBarrier
from hybrid_ep.errors import TimeoutError
from tests.conftest import RunRanks

NUM_BARRIERS = 4
MISSING = "/missing_directory"


def come_in_turns(directory: str = "") -> tuple[bool, list[tuple[float, float]]]:
    """Whether memory is shared, and when this rank came to each barrier and left it; another rank is late each time."""
    times = []
    with mock.patch.object(timing, "_DIRECTORY", directory or timing._DIRECTORY):
        barrier = HostBarrier()
    for i in range(NUM_BARRIERS):
        time.sleep(0.02 if i % dist.get_world_size() == dist.get_rank() else 0)
        came = time.monotonic()
        barrier.wait()
        times.append((came, time.monotonic()))
    return barrier.is_shared, times


def _check(of_ranks: list[tuple[bool, list[tuple[float, float]]]], *, is_shared: bool) -> None:
    assert [found for found, _ in of_ranks] == [is_shared] * len(of_ranks)
    for at_once in zip(*(times for _, times in of_ranks), strict=True):
        assert max(came for came, _ in at_once) <= min(left for _, left in at_once)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_no_rank_leaves_before_all_have_come(run_ranks: RunRanks, num_ranks: int) -> None:
    _check(run_ranks(num_ranks, come_in_turns), is_shared=True)


def test_ranks_without_shared_memory(run_ranks: RunRanks) -> None:
    _check(run_ranks(2, come_in_turns, MISSING), is_shared=False)


def map_nothing_at_rank_1() -> bool:
    """Whether memory is shared if one rank, as on another host, does not see the file."""
    with mock.patch.object(timing, "open", create=True) as opened:
        opened.side_effect = FileNotFoundError if dist.get_rank() == 1 else open
        barrier = HostBarrier()
    barrier.wait()
    return barrier.is_shared


def test_a_rank_that_does_not_see_the_memory(run_ranks: RunRanks) -> None:
    assert run_ranks(2, map_nothing_at_rank_1) == [False, False]


def wait_for_rank_1() -> str:
    """What rank 0 is told if rank 1 does not come."""
    barrier = HostBarrier(limit_s=0.1)
    if dist.get_rank() == 1:
        return ""
    with pytest.raises(TimeoutError) as raised:
        barrier.wait()
    return str(raised.value)


def test_a_rank_that_does_not_come(run_ranks: RunRanks) -> None:
    message = run_ranks(2, wait_for_rank_1)[0]
    assert message == (
        "barrier of the benchmark: rank 0 waited 0.1 s for rank 1: it did not come; has its process ended?"
    )


def lowest_epochs() -> list[int]:
    """The lowest epoch of all ranks each time this one left."""
    barrier = HostBarrier()
    found = []
    for _ in range(1000):
        barrier.wait()
        assert barrier._epochs is not None
        found.append(min(barrier._epochs))
    return found


def test_a_thousand_barriers(run_ranks: RunRanks) -> None:
    assert run_ranks(3, lowest_epochs) == [list(range(1, 1001))] * 3
