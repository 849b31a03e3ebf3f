"""Notes of ranks in the store of their process group.

The store reaches every rank without the connections that a lost rank has broken. The process that holds it may be lost
as well, so no access waits for longer than its deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

from hybrid_ep.agree.within import UnfinishedError, run_within
from hybrid_ep.errors import TransportError

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed import Store  # type: ignore[attr-defined]

T = TypeVar("T")
# The boards that `assign` has given to groups. The key is the group itself, because a later group may have the same
# name.
_boards: WeakKeyDictionary[dist.ProcessGroup, Board] = WeakKeyDictionary()
_ACCESS_S = 5.0


class StoreLostError(Exception):
    """The store does not answer: the process that holds it is lost or stopped."""

    def at_step(self, where: str, rank: int) -> TransportError:
        """Returns what a call raises because of it, in a step of this rank."""
        return TransportError(where, rank, None, f"the store of the process group is lost ({self})")


class Board:
    """Notes under a name in the store of a group.

    Args:
        store: reaches every rank of the group.
        name: equal at all ranks, and used by nothing else.
        access_s: how long an access may take; a store that does not answer for so long is lost.
    """

    def __init__(self, store: Store, name: str, access_s: float = _ACCESS_S) -> None:
        self._store, self._name, self._access_s, self._is_lost = store, name, access_s, False

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Board:
        """Returns the board of a group."""
        import torch.distributed as dist  # here, because commands without torch use boards of other stores

        if group in _boards:
            return _boards[group]
        store = dist.distributed_c10d._get_default_store()
        ranks = dist.get_process_group_ranks(group)
        return cls(store, f"hybrid_ep/{group.group_name}/{min(ranks)}-{max(ranks)}/{len(ranks)}")

    def assign(self, group: dist.ProcessGroup) -> None:
        """Makes this the board of a group, for processes whose default groups differ."""
        _boards[group] = self

    @property
    def store(self) -> Store:
        """The store that holds the notes."""
        return self._store

    @property
    def name(self) -> str:
        """The name of the notes in the store."""
        return self._name

    def at(self, name: str) -> Board:
        """Returns the notes under a name below this one."""
        return Board(self._store, f"{self._name}/{name}", self._access_s)

    def within(self, access_s: float) -> Board:
        """Returns the same notes, for accesses that may take no longer than this."""
        return Board(self._store, self._name, min(access_s, self._access_s))

    def write(self, key: str, text: str | bytes) -> None:
        """Writes a note, over an earlier one."""
        self._access(lambda: self._store.set(self._path(key), text))  # type: ignore[arg-type]

    def read(self, key: str) -> str | None:
        """Returns a note, or None where there is none."""
        note = self.read_bytes(key)
        return None if note is None else note.decode()

    def read_bytes(self, key: str) -> bytes | None:
        """Returns a note that is not text, or None where there is none."""
        path = self._path(key)
        return self._access(lambda: self._store.get(path) if self._store.check([path]) else None)

    def decide(self, key: str, text: str) -> str:
        """Writes a note unless there is one, and returns the one that is there."""
        return self._access(lambda: self._store.compare_set(self._path(key), "", text).decode())

    def count(self, key: str) -> int:
        """Adds 1 to a number that begins at 0, and returns the sum."""
        return self._access(lambda: self._store.add(self._path(key), 1))

    def _path(self, key: str) -> str:
        return f"{self._name}/{key}"

    def _access(self, access: Callable[[], T]) -> T:
        """Runs an access in a thread that is abandoned if it hangs, as it does where the store's process is stopped.

        Raises:
            StoreLostError: the store fails, or has not answered in time.
        """
        if self._is_lost:
            raise StoreLostError("it has not answered before")
        try:
            return run_within(self._access_s, access)
        except UnfinishedError as error:
            self._is_lost = True
            raise StoreLostError(str(error)) from error
        except RuntimeError as error:
            raise StoreLostError(str(error).splitlines()[0]) from error
