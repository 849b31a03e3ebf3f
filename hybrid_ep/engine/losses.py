"""Which ranks the others go on without: a log in the store of the group, in one order for all.

Kernels mask a rank that does not come, each rank's by themselves. A rank that was late masks the others likewise, and
would go on alone. So a rank that has lost another writes so to the log, before it goes on. Nobody writes after an entry
that he has not read. A rank that finds itself there has been left out, and writes no more: others never find it in
the log as the writer of a later entry. Nobody waits for anybody.
"""

from __future__ import annotations

from hybrid_ep.engine.board import Board

__all__ = ["Losses"]


class Losses:
    """The log of one buffer, as far as this rank has read it.

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
        """Reads on, and writes that this rank goes on without `peer` unless somebody has; local, and waits for nobody.

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
