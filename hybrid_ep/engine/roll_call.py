"""A rendezvous of all ranks of a buffer, at the store of their group.

It ends at the timeout, and its error names the missing ranks. A collective of the group would wait for the group's own
timeout, of many minutes, and name no rank. A rank that comes to a meeting that had ended goes on to the next one. So a
rank that has met alone does not miss the others for good.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from hybrid_ep.core.board import Board, StoreLostError, rendezvous
from hybrid_ep.errors import TimeoutError, TransportError

__all__ = ["RollCall", "roll_call_among"]

_LATE = "the other ranks have given up on this one, which was late"
_MIN_TIMEOUT_S = 1.0  # processes that start together are some milliseconds apart


class RollCall:
    """The rendezvous of one buffer, one after the other.

    Args:
        group: the ranks; None for a single one.
        rank: this rank in `group`.
        timeout_s: how long to wait for the others.
        number: of the buffer among those of the group, equal at all ranks.
        ranks: the numbers that errors give to the ranks of `group`; None = 0, 1, ...

    Attributes:
        lost: ranks that errors have named; an engine puts its own set here.
        timeout_s: how long it waits for the others.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        rank: int,
        timeout_s: float,
        number: int,
        *,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.lost: set[int] = set()
        self.group, self.rank = group, rank
        self.num_ranks = 1 if group is None else dist.get_world_size(group)
        self.ranks = range(self.num_ranks) if ranks is None else ranks
        self.timeout_s = max(timeout_s, _MIN_TIMEOUT_S)
        self._board = None if group is None or self.num_ranks == 1 else Board.of(group).at(f"buffer {number}/memory")
        self._num_meetings: Counter[str] = Counter()  # of each step, that this rank has come to

    def gather(self, where: str, text: str, *, others_wait_s: float = 0.0) -> dict[int, str]:
        """Returns each rank's text, in the order of the group, when all have come. Collective.

        Args:
            where: the step, for errors.
            text: of this rank.
            others_wait_s: for how long another rank may still wait elsewhere, for one that has come here already.

        Raises:
            TimeoutError: a rank has not come in time.
            TransportError: the store cannot be reached.
        """
        me = self.ranks[self.rank]
        if self._board is None:
            return {me: text}
        told, is_late, limit_s = None, False, self.timeout_s + others_wait_s
        while told is None:
            self._num_meetings[where] += 1
            board = self._board.at(f"{where}/{self._num_meetings[where]}")
            told = _meet(board, where, me, self.ranks, text, limit_s, self.lost, is_late)
            is_late = True
        return told


def roll_call_among(group: dist.ProcessGroup, rank: int, ranks: range, timeout_s: float, number: int) -> RollCall:
    """The roll call of some ranks of `group`, this one among them. Makes a group of them; collective over them.

    Raises:
        TimeoutError: a rank has not come in time.
        TransportError: the ranks cannot be connected.
    """
    if len(ranks) == 1:
        return RollCall(None, 0, timeout_s, number, ranks=ranks)
    where, limit_s = "a group of ranks that map each other's memory", max(timeout_s, _MIN_TIMEOUT_S)
    # torch would name no rank. So ranks that have not come are found before torch waits for them.
    board = Board.of(group).at(f"buffer {number}/ranks {ranks[0]}-{ranks[-1]} by {ranks.step}")
    if _meet(board, where, rank, ranks, "", limit_s, set()) is None:
        raise TimeoutError(where, rank, None, _LATE, timeout_s=limit_s)
    try:
        made: dist.ProcessGroup = dist.new_group(
            [dist.get_global_rank(group, member) for member in ranks],
            timeout=timedelta(seconds=limit_s),
            backend=dist.get_backend(group),
            use_local_synchronization=True,
        )
    except RuntimeError as error:
        raise TransportError(where, rank, None, f"ranks {list(ranks)} cannot be connected: {error}") from error
    return RollCall(made, ranks.index(rank), timeout_s, number, ranks=ranks)


def _meet(
    board: Board,
    where: str,
    rank: int,
    ranks: Sequence[int],
    text: str,
    timeout_s: float,
    lost: set[int],
    is_late: bool = False,
) -> dict[int, str] | None:
    """Returns the text of each of `ranks` when all have come; None if the others had given up this rank before it came.

    Adds to `lost` the rank that an error names as missing.

    Args:
        board, rank, ranks, text, timeout_s: as in `rendezvous`.
        where: the step, for errors.
        lost: ranks that errors have named.
        is_late: this rank has missed the meeting before, at which the others may have waited for it.

    Raises:
        TimeoutError: a rank has not come in time.
        TransportError: the store cannot be reached.
    """
    try:
        joined = rendezvous(board, rank, ranks, text, timeout_s=timeout_s)
    except StoreLostError as error:
        raise TransportError(where, rank, None, f"the store of the process group is lost ({error})") from error
    missing = sorted(set(ranks) - set(joined.members))
    if rank in missing:
        return None
    if is_late and missing:
        raise TimeoutError(where, rank, missing[0], _LATE, timeout_s=timeout_s)
    if missing:
        detail = f"ranks {missing} have not come" if len(missing) > 1 else "it has not come"
        lost.add(missing[0])
        raise TimeoutError(where, rank, missing[0], detail, timeout_s=timeout_s)
    return {member: joined.texts[member] for member in ranks}
