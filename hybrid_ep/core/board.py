"""The exchange of ranks through the store of their process group: notes, and a rendezvous with a deadline.

The store reaches every rank without the connections that a lost rank has broken. The process that holds it may be lost
as well, so no access waits for longer than its deadline.

A rendezvous ends with one outcome, which the store keeps: the ranks that had come when one of them first saw that all
had come, or that the time was up. All ranks read the same outcome. A rank that comes later reads that it is not part of
it. So ranks never go on in two groups that each regard the other as lost. A rank leaves once the others have read the
outcome, because the store may end with its process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from hybrid_ep.core.within import UnfinishedError, run_within
from hybrid_ep.errors import TimeoutError, TransportError

__all__ = ["Board", "Rendezvous", "StoreLostError", "rendezvous", "rendezvous_all"]

T = TypeVar("T")
# The boards that `assign` has given to groups. The key is the group itself, because a later group may have the same
# name.
_boards: WeakKeyDictionary[dist.ProcessGroup, Board] = WeakKeyDictionary()
_FIRST_POLL_S, _LAST_POLL_S = 0.001, 0.05
_ACCESS_S = 5.0
_READ_S = 2.0  # that a rank waits until the others have read an outcome; they look for it every 50 ms


class StoreLostError(Exception):
    """The store does not answer: the process that holds it is lost or stopped."""


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


class Rendezvous(NamedTuple):
    """The outcome of a rendezvous.

    Attributes:
        members: the ranks that are in it, ascending; the same for all that read it.
        texts: what each member has brought, by rank.
    """

    members: list[int]
    texts: dict[int, str]


def rendezvous(
    board: Board,
    rank: int,
    ranks: Iterable[int],
    text: str,
    *,
    timeout_s: float,
    lost: Collection[int] = (),
    grace_s: float = 0.0,
) -> Rendezvous:
    """Waits for other ranks at a board that is used for this rendezvous only, and agrees with them on who has come.

    Args:
        board: equal at all ranks.
        rank: this rank.
        ranks: that are awaited, this one included.
        text: of this rank.
        timeout_s: how long to wait.
        lost: ranks that this one knows to be lost: no rank waits for them, but one that comes takes part.
        grace_s: how long to wait for the lost ranks once all others have come: one of them may be alive.

    Returns:
        The outcome. This rank is not in it if it came after the others had agreed.

    Raises:
        StoreLostError: the store cannot be reached.
    """
    deadline, pause = time.monotonic() + timeout_s, _FIRST_POLL_S
    ranks = set(ranks)
    came: dict[int, tuple[str, list[int]]] = {}
    board.write(f"rank {rank}", json.dumps([text, sorted(lost)]))
    while (outcome := board.read("outcome")) is None:
        _look(board, ranks, came)
        known_lost = {r for _, their_lost in came.values() for r in their_lost}
        if ranks - known_lost <= came.keys() and ranks - came.keys():
            deadline = min(deadline, time.monotonic() + grace_s)
        if ranks <= came.keys() or time.monotonic() >= deadline:
            outcome = board.decide("outcome", json.dumps(sorted(came)))
            break
        time.sleep(pause)
        pause = min(2 * pause, _LAST_POLL_S)
    members: list[int] = json.loads(outcome)
    _look(board, members, came)
    if rank in members:
        _wait_for_readers(board, len(members))
    return Rendezvous(members, {member: came[member][0] for member in members})


def _wait_for_readers(board: Board, num_members: int) -> None:
    """Waits until all members have read the outcome, but not for long: one of them may have been lost meanwhile.

    The process of a member may hold the store, and end after the outcome.
    """
    deadline, pause = time.monotonic() + _READ_S, _FIRST_POLL_S
    try:
        num_readers = board.count("readers")
        while num_readers < num_members and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, _LAST_POLL_S)
            num_readers = int(board.read("readers") or 0)
    except StoreLostError:
        pass  # the process that held it has seen that all have read


def rendezvous_all(
    board: Board, what: str, rank: int, num_ranks: int, text: str, *, timeout_s: float, where: str, missed: str
) -> tuple[list[str], int]:
    """Waits for all ranks of a group, up to a deadline. The error names the ranks that have not come.

    Args:
        board: notes of the group.
        what: name of the purpose, equal at all ranks.
        rank, num_ranks: this rank, and the ranks of the group.
        text: text that this rank gives to the others.
        timeout_s: how long to wait.
        where: the step that the errors name.
        missed: words of the errors for what a missing rank has not done.

    Returns:
        The texts by rank, and the number of the meeting. Meetings for `what` are counted, failed ones too.

    Raises:
        TimeoutError: a rank has not come.
        TransportError: the store cannot be reached.
    """
    try:
        while True:
            number = board.count(f"{what}s of rank {rank}") - 1
            meeting = rendezvous(
                board.at(f"{what} {number}/meeting"), rank, range(num_ranks), text, timeout_s=timeout_s
            )
            missing = sorted(set(range(num_ranks)) - set(meeting.members))
            if rank not in meeting.members:
                continue  # the others have given this one up before this rank came
            if missing:
                raise TimeoutError(where, rank, missing[0], missed, timeout_s=timeout_s)
            return [meeting.texts[r] for r in range(num_ranks)], number
    except StoreLostError as error:
        raise TransportError(where, rank, None, f"the store of the process group is lost ({error})") from error


def _look(board: Board, ranks: Iterable[int], came: dict[int, tuple[str, list[int]]]) -> None:
    """Adds to `came` the ranks whose notes have appeared."""
    for rank in ranks:
        if rank not in came and (note := board.read(f"rank {rank}")) is not None:
            text, lost = json.loads(note)
            came[rank] = text, lost
