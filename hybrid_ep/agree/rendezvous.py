"""How ranks meet at the store of their process group, with a deadline.

A rendezvous ends with one outcome, which the store keeps: the ranks that had come when one of them first saw that all
had come, or that the time was up. All ranks read the same outcome. A rank that comes later reads that it is not part of
it. So ranks never go on in two groups that each regard the other as lost. A rank leaves once the others have read the
outcome, because the store may end with its process.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hybrid_ep.agree.board import Board, StoreLostError
from hybrid_ep.errors import TimeoutError, TransportError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_FIRST_POLL_S, _LAST_POLL_S = 0.001, 0.05
_READ_S = 2.0  # that a rank waits until the others have read an outcome; they look for it every 50 ms
_LATE = "the other ranks have given up on this one, which was late"
_VALUE, _REFUSAL = "+", "!"


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


def _look(board: Board, ranks: Iterable[int], came: dict[int, tuple[str, list[int]]]) -> None:
    """Adds to `came` the ranks whose notes have appeared."""
    for rank in ranks:
        if rank not in came and (note := board.read(f"rank {rank}")) is not None:
            text, lost = json.loads(note)
            came[rank] = text, lost


def meet(
    board_of: Callable[[], Board],
    where: str,
    rank: int,
    ranks: Sequence[int],
    text: str,
    *,
    timeout_s: float,
    missed: str = "it has not come",
) -> dict[int, str]:
    """Waits for all of `ranks`, up to a deadline, and returns the text of each, in their order.

    A rank that comes to a meeting which has ended goes on to the next one. So a rank that has met alone does not miss
    the others for good.

    Args:
        board_of: returns the board of this rank's next meeting, equal at all ranks that have come equally often.
        where: the step that the errors name.
        rank, ranks, text, timeout_s: as in `rendezvous`.
        missed: words of the error for what a missing rank has not done.

    Raises:
        TimeoutError: a rank has not come. It names the first one, and lists the others.
        TransportError: the store cannot be reached.
    """
    is_late = False
    try:
        while True:
            met = rendezvous(board_of(), rank, ranks, text, timeout_s=timeout_s)
            missing = sorted(set(ranks) - set(met.members))
            if not missing:
                return {member: met.texts[member] for member in ranks}
            if rank not in missing:
                detail = _LATE if is_late else _listed(missed, missing)
                raise TimeoutError(where, rank, missing[0], detail, timeout_s=timeout_s)
            is_late = True  # the others have given this rank up before it came
    except StoreLostError as error:
        raise error.at_step(where, rank) from error


def _listed(missed: str, missing: list[int]) -> str:
    """What the first missing rank has not done, and all missing ranks where they are several."""
    return missed if len(missing) == 1 else f"{missed}; ranks {missing} are missing"


def exchange(
    store: Store, name: str, rank: int, peers: Sequence[int], value: bytes, timeout_s: float, *, where: str
) -> dict[int, bytes]:
    """Gives `value` to the peers and returns theirs, by rank. A rank goes on as soon as it has them.

    Args:
        store: reached by all of them.
        name: of this exchange, equal at all ranks; used once.
        rank: this rank.
        peers: the ranks whose values are awaited, with or without this one.
        value: of this rank; may be empty.
        timeout_s: how long to wait for all of them.
        where: the step, for the error.

    Raises:
        TimeoutError: some rank has not come; it names the first one and lists the others.
        TransportError: a rank has refused, and says why; or the store cannot be reached.
    """
    deadline, pause = time.monotonic() + timeout_s, _FIRST_POLL_S
    found, board = {rank: value}, Board(store, name)
    try:
        board.write(str(rank), _VALUE + value.hex())
        missing = [peer for peer in peers if peer != rank]
        while missing:
            for peer in missing:
                if (text := board.read(str(peer))) is None:
                    continue
                if text.startswith(_REFUSAL):
                    raise TransportError(where, rank, peer, text.removeprefix(_REFUSAL))
                found[peer] = bytes.fromhex(text.removeprefix(_VALUE))
            missing = [peer for peer in missing if peer not in found]
            if missing and time.monotonic() > deadline:
                detail = _listed("it has published no address", missing)
                raise TimeoutError(where, rank, missing[0], detail, timeout_s)
            if missing:
                time.sleep(pause)
                pause = min(2 * pause, _LAST_POLL_S)
    except StoreLostError as error:
        raise error.at_step(where, rank) from error
    return found


def refuse(store: Store, name: str, rank: int, why: str) -> None:
    """Tells the ranks that wait in `exchange` that this one cannot take part, unless the store is lost."""
    with contextlib.suppress(StoreLostError):
        Board(store, name).write(str(rank), _REFUSAL + why)
