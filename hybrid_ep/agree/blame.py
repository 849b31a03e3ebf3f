"""Finds the rank that caused a wait to fail. The peer that was waited for may itself be waiting for a dead rank.

- A rank that waits for long writes to the board which rank it waits for, and rewrites that note at intervals. A rank
  that has lost a peer writes the peer's number.
- A rank whose wait has failed reads the note of its peer. If the peer waits for, or has lost, another rank, that rank's
  note is read next, and so on. The rank at the end of this chain writes nothing: it is dead, stopped, or not in the
  call. The error names that rank.
- A kernel waits for several ranks at once. So a note may name several, and the chain branches.
- The note of a killed or stopped rank stays on the board. So a note "waits" counts only if it is rewritten.
- Two buffers that ranks call in different orders make the ranks wait for each other. So a waiting rank also writes the
  number of its buffer to the board of the group, for an error that names the other buffer.
- Without an answer of the store within its own deadline, the error says so, and names what this rank saw itself.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TypeVar

from hybrid_ep.agree.board import Board, StoreLostError
from hybrid_ep.errors import TransportError

_E = TypeVar("_E", bound=TransportError)

_GRACE_S = 1.0  # how long to look for a new note of a rank
_GRACE_SHARE = 0.25  # of the timeout, where that is less
_BEATS = 10  # notes within the grace
_ACCESS_GRACES = 2.0  # graces in which the store must answer


def blamed(error: _E, culprit: int | None) -> _E:
    """Returns the error for the rank that `Blame.find` has found, in place of the peer that this rank has lost."""
    if culprit is None:
        detail = f"the store did not answer; rank {error.peer} stopped answering this rank ({error.detail})"
        return replace(error, detail=detail)
    if culprit == error.peer:
        return error
    return replace(error, peer=culprit, detail=f"rank {error.peer} gave up on it first")


class Blame:
    """The notes of a rank: it writes which rank it has lost, and reads the notes of others.

    Args:
        board: of one connection of the group; None: there are no notes of other ranks.
        rank: this rank.
        timeout_s: the whole time of a wait and of the search that follows.
        group_board: of all buffers of the group; None: there is no other.
        number: of this buffer on the group.
        grace_s: how long to look for a new note of a rank; None: as the timeout allows.

    Attributes:
        grace_s: how long to look for a new note of a rank.
        wait_s: what is left of the timeout for the wait.
    """

    def __init__(
        self,
        board: Board | None,
        rank: int,
        timeout_s: float,
        *,
        group_board: Board | None = None,
        number: int = 0,
        grace_s: float | None = None,
    ) -> None:
        self._rank, self._number = rank, number
        self._seen: dict[int, str | None] = {}  # the first note about its buffer that each peer had in a wait for it
        self.grace_s = min(_GRACE_S, _GRACE_SHARE * timeout_s) if grace_s is None else grace_s
        access_s = _ACCESS_GRACES * self.grace_s
        self._board = None if board is None else board.within(access_s)
        self._group_board = None if group_board is None else group_board.within(access_s)
        self.wait_s = timeout_s - 1.5 * self.grace_s  # reading the notes of one or two ranks takes time, too
        self._lock = threading.Lock()
        self._peer: int | None = None
        self._num_waits = 0
        self._num_beats = 0
        self._lost: int | None = None
        self._is_closed = False
        self._is_watched = threading.Event()
        self._thread: threading.Thread | None = None

    def close(self) -> None:
        """Ends the thread that writes notes."""
        self._is_closed = True
        self._is_watched.set()
        if self._thread is not None:
            self._thread.join(self.grace_s)

    def begin_wait(self, peer: int) -> None:
        """Says that this rank waits for `peer` from now on."""
        if self._board is None:
            return
        if self._thread is None:
            weakref.finalize(self, self._is_watched.set).atexit = False  # type: ignore[misc]
            arguments = weakref.ref(self), self._is_watched, self.grace_s / _BEATS
            self._thread = threading.Thread(target=_watch, args=arguments, daemon=True, name="hybrid_ep waits")
            self._thread.start()
        self._peer = peer
        self._num_waits += 1
        if not self._is_watched.is_set():
            self._is_watched.set()

    def end_wait(self) -> None:
        """Says that this rank no longer waits."""
        self._peer = None

    def write_lost(self, peer: int, others: Iterable[int] = ()) -> None:
        """Writes at once that this rank has lost `peer`. After that it writes no more waits.

        Args:
            peer: the rank.
            others: other ranks that were waited for in vain at the same time.
        """
        if self._board is not None:
            with self._lock:
                self._peer, self._lost = None, peer
                self._write(" ".join(map(str, ("lost", peer, *others))))

    def find(
        self, suspect: int, known: Collection[int] = (), others: Iterable[int] = (), ahead_s: float = 0.0
    ) -> int | None:
        """Returns the rank to name in the error, for `blamed`.

        Args:
            suspect: the rank that this one has lost.
            known: ranks that were lost before: a note that names one of them is old.
            others: other ranks that were waited for in vain at the same time.
            ahead_s: how much longer than this rank the suspect may wait before it writes a note.

        Returns:
            The first rank that writes nothing. If all write, they have lost each other: `suspect`. None: the store did
            not answer.
        """
        if self._board is None:
            return suspect
        seen, left = {self._rank}, [suspect, *others]
        try:
            while left:
                rank = left.pop(0)
                if rank in seen:
                    continue
                seen.add(rank)
                named = self._named_by(rank, known, ahead_s if rank == suspect else 0.0)
                if not named:
                    return rank
                left = named + left
        except StoreLostError:
            return None
        return suspect

    def other_buffer(self, peer: int) -> int | None:
        """Returns in which other buffer of the group `peer` has waited while this rank waited for it; None: in none."""
        if self._group_board is None or peer not in self._seen:
            return None
        try:
            note = self._group_board.read(self._key(peer))
        except StoreLostError:
            return None
        if note is None or note == self._seen[peer]:
            return None
        number = int(note.split()[0])
        return None if number == self._number else number

    def _named_by(self, rank: int, known: Collection[int], ahead_s: float) -> list[int]:
        """Returns the ranks that `rank` has lost or waits for; none if it writes no new note within its time."""
        assert self._board is not None
        deadline = time.monotonic() + self.grace_s + ahead_s
        first = self._board.read(self._key(rank))
        note = first
        while True:
            verb, *peers = note.split() if note is not None else ("", "-1")
            if int(peers[0]) not in known and verb == "lost":
                return [int(peer) for peer in peers]
            if int(peers[0]) not in known and verb == "waits" and note != first:
                return [int(peers[0])]  # the second field is the number of the note
            if time.monotonic() >= deadline:
                return []
            time.sleep(self.grace_s / _BEATS / 2)
            note = self._board.read(self._key(rank))

    def _beat(self, num_waits_before: int | None) -> int | None:
        """Writes a note if the wait is the one of the last beat; returns the number of the current wait."""
        with self._lock:
            peer, num_waits = self._peer, self._num_waits
            if peer is None or self._lost is not None:
                return None
            if num_waits == num_waits_before:
                self._num_beats += 1
                self._write(f"waits {peer} {self._num_beats}")
                self._write_to_group(peer)
            else:
                self._seen.clear()
            return num_waits

    def _write_to_group(self, peer: int) -> None:
        """Writes in which buffer this rank waits, and looks where `peer` does."""
        if self._group_board is None:
            return
        try:
            self._group_board.write(self._key(self._rank), f"{self._number} {self._num_beats}")
            if peer not in self._seen:
                self._seen[peer] = self._group_board.read(self._key(peer))
        except StoreLostError:
            self._group_board = None

    def _write(self, note: str) -> None:
        assert self._board is not None
        try:
            self._board.write(self._key(self._rank), note)
        except StoreLostError:
            self._lost = self._rank if self._lost is None else self._lost  # the board is lost

    @staticmethod
    def _key(rank: int) -> str:
        return f"rank {rank} waits"


def _watch(blame: weakref.ref[Blame], is_watched: threading.Event, beat_s: float) -> None:
    """Writes notes for as long as a wait lasts; sleeps while there is none, and ends with its `Blame`."""
    num_waits: int | None = None
    while True:
        is_watched.wait()
        alive = blame()
        if alive is None or alive._is_closed:
            return
        num_waits = alive._beat(num_waits)
        if num_waits is None:
            is_watched.clear()
            if alive._peer is not None:  # a wait that began meanwhile
                is_watched.set()
        del alive
        time.sleep(beat_s)
