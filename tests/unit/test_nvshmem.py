"""How ranks agree on NVSHMEM's world and on windows of its heap, with a stand-in for the library: no GPU is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore

from hybrid_ep.errors import CudaError, TimeoutError, TransportError
from hybrid_ep.transport import nvshmem

MIB = 1 << 20


class FakeNative(threading.local):
    """The native module of a rank; a rank is a thread."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.refusal = ""
        self.is_quiet = True

    def unique_id(self) -> bytes:
        if self.refusal:
            raise ConnectionError(-1, self.refusal)
        return b"of rank 0"

    def join(self, **place: Any) -> None:
        self.log.append(("join", place["rank"], place["num_ranks"], place["unique_id"]))

    def allocate(self, *, num_bytes: int, device: int) -> int:
        self.log.append(("allocate", num_bytes))
        return 0x1000 * len(self.log)

    def clear(self, *, memory: int, num_bytes: int, device: int) -> None:
        self.log.append(("clear", memory, num_bytes))

    def quiet(self, *, device: int, timeout_s: float) -> bool:
        if self.refusal:
            raise ConnectionError(-1, self.refusal)
        return self.is_quiet


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> FakeNative:
    fake = FakeNative()
    monkeypatch.setattr(nvshmem, "_native", lambda: fake)
    return fake


class Rank:
    """A heap, and what it takes from the others."""

    def __init__(self, store: HashStore, rank: int, num_ranks: int) -> None:
        self.heap, self.rank = nvshmem.Heap(), rank
        self._store, self._num_ranks, self._num_links = store, num_ranks, 0

    def take(self, num_bytes: int, device: int = 0, timeout_s: float = 20.0) -> nvshmem.Window:
        self._num_links += 1
        prefix = f"link {self._num_links}"
        return self.heap.take(
            self._store, prefix, self.rank, self._num_ranks, num_bytes, device=device, timeout_s=timeout_s
        )


def on_ranks(num_ranks: int, function: Callable[[Rank], Any]) -> list[Any]:
    """What the function returns, or raises, at each rank."""
    store = HashStore()

    def run(rank: int) -> Any:
        try:
            return function(Rank(store, rank, num_ranks))
        except TransportError as error:
            return error

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))


def test_all_ranks_join_the_world_of_rank_0_once(native: FakeNative) -> None:
    def use(rank: Rank) -> list[tuple[Any, ...]]:
        rank.take(3 * MIB)
        rank.take(MIB)
        return native.log

    for rank, log in enumerate(on_ranks(3, use)):
        assert log == [("join", rank, 3, b"of rank 0"), ("allocate", 3 * MIB), ("allocate", MIB)]


def test_a_window_is_used_again_once_every_rank_has_given_it_back(native: FakeNative) -> None:
    def use(rank: Rank) -> list[int]:
        large, small = rank.take(3 * MIB), rank.take(2 * MIB)
        native.is_quiet = rank.rank != 1
        assert small.give_back(1.0) == native.is_quiet  # rank 1 keeps it: its puts are not complete
        native.is_quiet = True
        large.give_back(1.0)
        again = rank.take(MIB)
        assert native.log[-1] == ("clear", again.address, 3 * MIB)
        return [again.number, rank.take(MIB).number]

    assert on_ranks(3, use) == [[0, 2]] * 3


@pytest.mark.parametrize("who", [0, 2])
def test_all_ranks_are_told_which_one_cannot_take_part(native: FakeNative, who: int) -> None:
    def use(rank: Rank) -> None:
        rank.take(MIB)
        rank.take(MIB, device=1 if rank.rank == who else 0)

    errors = on_ranks(3, use)
    why = "NVSHMEM of this process is on cuda:0, and the buffer on cuda:1"
    assert [error.peer for error in errors] == [None if who == 0 else 2, 0, 0 if who == 0 else None]
    for rank, error in enumerate(errors):
        assert why in str(error), rank


def test_a_missing_rank_is_named_at_every_rank(native: FakeNative) -> None:
    def use(rank: Rank) -> None:
        if rank.rank != 1:
            rank.take(MIB, timeout_s=0.5)

    first, missing, last = on_ranks(3, use)
    assert missing is None
    assert isinstance(first, TimeoutError)
    assert first.peer == 1
    assert isinstance(last, TransportError)
    assert last.detail.startswith("rank 1: it has published no address")


def test_ranks_whose_world_does_not_start_say_so(native: FakeNative) -> None:
    def use(rank: Rank) -> None:
        native.refusal = "nvshmemx_get_uniqueid returned 7"
        rank.take(MIB, timeout_s=5.0)

    for error in on_ranks(2, use):
        assert "nvshmemx_get_uniqueid returned 7" in str(error)


def test_a_window_of_a_gpu_that_has_failed_is_not_used_again(native: FakeNative) -> None:
    window = nvshmem.Window(0, 0x1000, MIB, 0)
    native.refusal = "cudaStreamQuery: cudaErrorLaunchFailure"
    with pytest.raises(CudaError, match="cudaErrorLaunchFailure"):
        window.give_back(1.0)
    assert not window.is_free
