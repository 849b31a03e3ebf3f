"""Agreement on lost ranks of low-latency calls: a log in the store of the group, which all ranks read in one order.

The kernels of each rank mask a rank that they wait for in vain. But a rank that is only late masks all the others, and
would go on alone. So a rank that has lost another one first appends that to the log. It may append only after it has
read all earlier entries. A rank that reads its own number has been left out: it raises, and appends nothing more. No
rank waits for another rank.
"""

from __future__ import annotations

from hybrid_ep.agree.board import Board, StoreLostError
from hybrid_ep.errors import TransportError


class LossLog:
    """One log, as far as this rank has read it.

    Args:
        board: of this log only; equal at all ranks.
        rank: this rank.

    Attributes:
        left_out: ranks that are in the log.
    """

    def __init__(self, board: Board, rank: int) -> None:
        self._board, self._rank, self._num_read = board, rank, 0
        self.left_out: set[int] = set()

    def report(self, peer: int) -> int | None:
        """Reads new entries, and appends that this rank has lost `peer` unless another has. Local; waits for no rank.

        Returns:
            The rank that goes on without this one; None: there is none, and `peer` is in the log.

        Raises:
            StoreLostError: the store cannot be reached.
        """
        while True:
            key = f"loss {self._num_read}"
            is_known = peer in self.left_out
            note = self._board.read(key) if is_known else self._board.decide(key, f"{self._rank} {peer}")
            if note is None:
                return None
            self._num_read += 1
            writer, lost = map(int, note.split())
            if lost == self._rank:
                return writer
            self.left_out.add(lost)


class Losses:
    """The logs of one buffer: a new log begins whenever all its ranks take part again.

    Attributes:
        period: what names the current log: equal at all ranks that take part, and of no other log.

    Args:
        board: of the buffer; None without a group, where there is nothing to agree on.
        rank: this rank.
    """

    def __init__(self, board: Board | None, rank: int) -> None:
        self._board, self._rank, self._num_cleanings = board, rank, 0
        self.begin()

    @property
    def left_out(self) -> set[int]:
        """The ranks of the current log."""
        return set() if self._log is None else self._log.left_out

    def begin(self, number: int = 0) -> None:
        """Begins a log after a barrier in which the ranks have agreed on a number."""
        self._log, self.period = None, (self._num_cleanings, number)
        if self._board is not None:
            self._log = LossLog(self._board.at(f"losses {self._num_cleanings} {number}"), self._rank)

    def clean(self) -> None:
        """Begins a log after a cleaning, which every rank makes."""
        self._num_cleanings += 1
        self.begin()

    def report(self, peer: int) -> TransportError | None:
        """Reports that this rank has lost `peer`. Local; waits for no rank.

        Returns:
            None: `peer` is in the log. Otherwise the reason why this rank must not go on: the log cannot be reached, or
            the rank that the error names goes on without this one.
        """
        where = "low-latency calls"
        if self._log is None:
            return None
        try:
            writer = self._log.report(peer)
        except StoreLostError as error:
            detail = f"who is left cannot be agreed on: the store of the process group is lost ({error})"
            return TransportError(where, self._rank, None, detail)
        if writer is None:
            return None
        return TransportError(where, self._rank, writer, "the other ranks went on without this one, which was late")
