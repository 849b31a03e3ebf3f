"""`benchmarks/sm_stores.py`: no two rows of all ranks go to one place, and all fit the memory of a rank."""

from __future__ import annotations

import pytest

from benchmarks.sm_stores import _TARGETS, destinations


@pytest.mark.parametrize("offsets", _TARGETS.values(), ids=_TARGETS)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_rows_do_not_meet(offsets: tuple[int, ...], num_ranks: int) -> None:
    of_ranks = [destinations(5, offsets, rank, num_ranks) for rank in range(num_ranks)]
    every = [place for one in of_ranks for place in one.flatten().tolist()]
    assert len(set(every)) == len(every) == 5 * len(offsets) * num_ranks
    assert {place >> 32 for place in every} == set(range(num_ranks))
    assert max(place & 0xFFFFFFFF for place in every) < 5 * len(offsets)
