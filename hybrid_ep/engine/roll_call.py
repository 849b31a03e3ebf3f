"""A rendezvous of all ranks of a buffer, at the store of their group.

It ends at the timeout, and its error names the missing ranks. A collective of the group would wait for the group's own
timeout, of many minutes, and name no rank.
"""

from __future__ import annotations

import torch.distributed as dist

from hybrid_ep.core.board import Board, StoreLostError, rendezvous
from hybrid_ep.errors import TimeoutError, TransportError

__all__ = ["RollCall", "roll_call_among"]

_MIN_TIMEOUT_S = 1.0  # processes that come together do not come at the same millisecond


class RollCall:
    """The rendezvous of one buffer, one after the other.

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
            joined = rendezvous(board, self.rank, ranks, text, timeout_s=self._timeout_s)
        except StoreLostError as error:
            detail = f"the store of the process group is lost ({error})"
            raise TransportError(where, self.rank, None, detail) from error
        missing = sorted(set(ranks) - set(joined.members))
        if self.rank in missing:
            detail = "the other ranks have given up on this one, which was late"
            raise TimeoutError(where, self.rank, joined.members[0], detail, timeout_s=self._timeout_s)
        if missing:
            detail = f"ranks {missing} have not come" if len(missing) > 1 else "it has not come"
            self.lost.add(missing[0])
            raise TimeoutError(where, self.rank, missing[0], detail, timeout_s=self._timeout_s)
        return [joined.texts[rank] for rank in ranks]


def roll_call_among(group: dist.ProcessGroup, rank: int, ranks: range, timeout_s: float, number: int) -> RollCall:
    """The roll call of some ranks of `group`, this one among them. Makes a group of them; collective over them."""
    if len(ranks) == 1:
        return RollCall(None, 0, timeout_s, number)
    members = [dist.get_global_rank(group, member) for member in ranks]
    made: dist.ProcessGroup = dist.new_group(members, backend=dist.get_backend(group), use_local_synchronization=True)
    return RollCall(made, ranks.index(rank), timeout_s, number)
