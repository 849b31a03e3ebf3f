"""All ranks of a buffer meet at the store of their group.

Nobody is waited for beyond the timeout, and who is missing is named. A collective of the group would wait for its own
timeout, of many minutes, and name nobody.
"""

from __future__ import annotations

import torch.distributed as dist

from hybrid_ep.core.board import Board, StoreLostError, meet
from hybrid_ep.errors import TimeoutError, TransportError

__all__ = ["RollCall"]

_MIN_TIMEOUT_S = 1.0  # processes that come together do not come at the same millisecond


class RollCall:
    """The meetings of one buffer.

    Args:
        group: the ranks; None for a single one.
        rank: this rank.
        timeout_s: how long to wait for the others.
        number: of the buffer among those of the group, equal at all ranks.

    Attributes:
        lost: ranks that errors have named; an engine puts its own set here.
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, timeout_s: float, number: int) -> None:
        self.lost: set[int] = set()
        self.group, self.rank = group, rank
        self.num_ranks = 1 if group is None else dist.get_world_size(group)
        self._timeout_s = max(timeout_s, _MIN_TIMEOUT_S)
        self._board = None if group is None or self.num_ranks == 1 else Board.of(group).at(f"buffer {number}/memory")
        self._num_meetings = 0

    def gather(self, where: str, text: str) -> list[str]:
        """Returns each rank's text, by rank, when all have come. Collective.

        Args:
            where: the step, for errors.
            text: of this rank.

        Raises:
            TimeoutError: a rank has not come in time.
            TransportError: the store cannot be reached.
        """
        if self._board is None:
            return [text]
        self._num_meetings += 1
        board, ranks = self._board.at(str(self._num_meetings)), range(self.num_ranks)
        try:
            meeting = meet(board, self.rank, ranks, text, timeout_s=self._timeout_s)
        except StoreLostError as error:
            detail = f"the store of the process group is lost ({error})"
            raise TransportError(where, self.rank, None, detail) from error
        missing = sorted(set(ranks) - set(meeting.members))
        if self.rank in missing:
            detail = "the other ranks have given up on this one, which was late"
            raise TimeoutError(where, self.rank, meeting.members[0], detail, timeout_s=self._timeout_s)
        if missing:
            detail = f"ranks {missing} have not come" if len(missing) > 1 else "it has not come"
            self.lost.add(missing[0])
            raise TimeoutError(where, self.rank, missing[0], detail, timeout_s=self._timeout_s)
        return [meeting.texts[rank] for rank in ranks]
