"""A rendezvous whose store ends with the process of one rank."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore, Store

from hybrid_ep.agree import rendezvous as under_test
from hybrid_ep.agree.board import Board, StoreLostError
from hybrid_ep.agree.rendezvous import rendezvous


class EndingStore(Store):
    """The store of one rank, which sees it `delay_s` late, until the process of another rank ends."""

    def __init__(self, store: HashStore, delay_s: float = 0.0) -> None:
        super().__init__()
        self._store, self._delay_s, self.has_ended = store, delay_s, False

    def _reach(self) -> HashStore:
        time.sleep(self._delay_s)
        if self.has_ended:
            raise RuntimeError("connection closed by peer")
        return self._store

    def set(self, key: str, value: str) -> None:
        self._reach().set(key, value)

    def get(self, key: str) -> bytes:
        return self._reach().get(key)

    def check(self, keys: list[str]) -> bool:
        return self._reach().check(keys)

    def add(self, key: str, value: int) -> int:
        return self._reach().add(key, value)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._reach().compare_set(key, expected, desired)


def test_the_rank_that_holds_the_store_leaves_after_the_others_have_read_the_outcome() -> None:
    shared = HashStore()
    far = EndingStore(shared, delay_s=0.05)

    def hold_store() -> list[int]:
        members = rendezvous(Board(shared, "meeting"), 0, range(2), "of rank 0", timeout_s=20).members
        far.has_ended = True
        return members

    with ThreadPoolExecutor() as pool:
        holder = pool.submit(hold_store)
        other = pool.submit(rendezvous, Board(far, "meeting"), 1, range(2), "of rank 1", timeout_s=20)
        assert holder.result() == [0, 1]
        assert other.result() == ([0, 1], {0: "of rank 0", 1: "of rank 1"})


def test_a_member_that_is_lost_after_the_outcome_is_not_awaited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "_READ_S", 0.2)
    board = Board(HashStore(), "meeting")
    board.write("rank 1", '["of rank 1", []]')
    assert rendezvous(board, 0, range(2), "of rank 0", timeout_s=600).members == [0, 1]


def test_a_store_that_ends_before_the_outcome_is_lost() -> None:
    far = EndingStore(HashStore())
    far.has_ended = True
    with pytest.raises(StoreLostError, match="connection closed by peer"):
        rendezvous(Board(far, "meeting"), 1, range(2), "", timeout_s=20)
