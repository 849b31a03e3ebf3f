"""A rendezvous of all ranks of a buffer, at the store of their group.

It ends at the timeout, and its error names the missing ranks. A collective of the group would wait for the group's own
timeout, of many minutes, and name no rank.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import torch.distributed as dist

from hybrid_ep.agree.board import Board
from hybrid_ep.agree.group import connect
from hybrid_ep.agree.rendezvous import meet
from hybrid_ep.errors import TimeoutError, TransportError

MIN_TIMEOUT_S = 1.0  # processes that start together are some milliseconds apart


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
        self.num_ranks = 1 if group is None else group.size()
        self.ranks = range(self.num_ranks) if ranks is None else ranks
        self.timeout_s = max(timeout_s, MIN_TIMEOUT_S)
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
        me, board = self.ranks[self.rank], self._board
        if board is None:
            return {me: text}

        def next_board() -> Board:
            self._num_meetings[where] += 1
            return board.at(f"{where}/{self._num_meetings[where]}")

        try:
            return meet(next_board, where, me, self.ranks, text, timeout_s=self.timeout_s + others_wait_s)
        except TimeoutError as error:
            if error.peer is not None:
                self.lost.add(error.peer)
            raise


def gather_all(
    group: dist.ProcessGroup, what: str, text: str, *, timeout_s: float, where: str, missed: str = "it has not come"
) -> tuple[list[str], int]:
    """As `RollCall.gather`, of all ranks of a group that have no buffer together yet.

    Args:
        group: of the ranks.
        what: name of the purpose, equal at all ranks.
        text: of this rank.
        timeout_s: how long to wait.
        where, missed: as in `meet`.

    Returns:
        The texts by rank, and the number of the meeting. Meetings for `what` are counted, failed ones too.
    """
    board, rank, num_ranks = Board.of(group), group.rank(), group.size()
    number = 0

    def next_board() -> Board:
        nonlocal number
        number = board.count(f"{what}s of rank {rank}") - 1
        return board.at(f"{what} {number}/meeting")

    texts = meet(next_board, where, rank, range(num_ranks), text, timeout_s=timeout_s, missed=missed)
    return list(texts.values()), number


def roll_call_among(group: dist.ProcessGroup, rank: int, ranks: range, timeout_s: float, number: int) -> RollCall:
    """The roll call of some ranks of `group`, this one among them. Makes a group of them; collective over them.

    Raises:
        TimeoutError: a rank has not come in time.
        TransportError: the ranks cannot be connected.
    """
    if len(ranks) == 1:
        return RollCall(None, 0, timeout_s, number, ranks=ranks)
    where, limit_s = "a group of ranks that map each other's memory", max(timeout_s, MIN_TIMEOUT_S)
    # torch would name no rank. So ranks that have not come are found before torch waits for them.
    board = Board.of(group).at(f"buffer {number}/ranks {ranks[0]}-{ranks[-1]} by {ranks.step}")
    numbers = itertools.count()
    meet(lambda: board.at(str(next(numbers))), where, rank, ranks, "", timeout_s=limit_s)
    at = board.at("group")
    try:
        made = connect(
            at,
            at.name,
            [dist.get_global_rank(group, member) for member in ranks],
            ranks.index(rank),
            backend=dist.get_backend(group),
            timeout_s=limit_s,
        )
    except RuntimeError as error:
        raise TransportError(where, rank, None, f"ranks {list(ranks)} cannot be connected: {error}") from error
    return RollCall(made, ranks.index(rank), timeout_s, number, ranks=ranks)
