"""Process groups of the ranks that are left, made from the store, without the lost ranks.

A process may have come later, and its default group is the first one that it joined. So such a process gets the store
and the name of the group's board.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

from hybrid_ep.agree.board import Board
from hybrid_ep.agree.group import connect, numbers_of_strangers


@dataclass
class Lineage:
    """The origin of a group.

    Attributes:
        board: of the group and of all that followed and will follow it.
        origin: of the generations, equal at all ranks and used by no other group of the store: digest of the attempt
            that made this group, or for a group of the caller, number of its first buffer that recovers.
        generation: of the last attempt to make a group.
        is_left_out: whether the others have gone on without this rank.
    """

    board: Board
    origin: str
    generation: int = 0
    is_left_out: bool = False

    @property
    def attempt(self) -> str:
        """The name of the last attempt, equal at all who take part, and of no other attempt of the job."""
        return f"generation {self.origin}{self.generation}"


# A process may destroy its groups and make others of the same names, with other processes.
_lineages: WeakKeyDictionary[dist.ProcessGroup, Lineage] = WeakKeyDictionary()


def root_board(store: Store, name: str) -> Board:
    """Returns the board of a job, for all groups that it will have.

    Args:
        store: as the processes of the job pass it to `init_process_group`.
        name: of the job.
    """
    return Board(PrefixStore("hybrid_ep.elastic", store), name)


def lineage_of(group: dist.ProcessGroup, number: int) -> Lineage:
    """Returns the lineage of a group, which begins with it unless it was made here.

    Args:
        group: of the buffer that recovers.
        number: of the buffer among those of the group.
    """
    if group not in _lineages:
        follow(group, Lineage(board_of(group), f"{number}-"))
    return _lineages[group]


def board_of(group: dist.ProcessGroup) -> Board:
    """Returns the board of the job that a group is of."""
    known = _lineages.get(group)
    if known is not None:
        return known.board
    store = Board.of(group).store
    if isinstance(store, PrefixStore):  # of the default group, which newcomers are not in
        store = store.underlying_store
    return root_board(store, "world" if group is dist.group.WORLD else Board.of(group).name)


def job_of(group: dist.ProcessGroup) -> str:
    """Returns the name by which `join` finds the job whose first buffer is on this group."""
    return board_of(group).name


def follow(group: dist.ProcessGroup, lineage: Lineage) -> None:
    """Records the lineage of a group."""
    _lineages[group] = lineage


def make_group(
    board: Board,
    name: str,
    members: Sequence[int | None],
    rank: int,
    *,
    parent: dist.ProcessGroup | None,
    backend: str,
    timeout_s: float,
) -> dist.ProcessGroup:
    """Makes the group of the ranks of a rendezvous; a process without a default group gets it as such. Collective.

    Args:
        members: for each rank, its rank in `parent`, or None.
        parent: the group that this rank was in before, None: none.
        board, name, rank, backend, timeout_s: as in `agree.group.connect`.

    Raises:
        RuntimeError: a rank did not come.
    """
    is_first = not dist.is_initialized()
    numbers = list(range(len(members)))
    if not is_first:
        known = [] if parent is None else dist.get_process_group_ranks(parent)
        # A process is asked for as rank `number` of its default group; those that are not in it need numbers as well.
        others = numbers_of_strangers(rank, len(members))
        numbers = [others[i] if old is None or not known else known[old] for i, old in enumerate(members)]
        numbers[rank] = dist.get_rank()
    group = connect(board, name, numbers, rank, backend=backend, timeout_s=timeout_s)
    if is_first:
        c10d._update_default_pg(group)
    return group


def abandon(group: dist.ProcessGroup) -> None:
    """Gives up a group that has lost a rank. Local; waits for no rank.

    NCCL's kernels wait for the lost rank, so its communicator is aborted. The group is destroyed if `make_group` made
    it; a group that the caller made is not.
    """
    name = group.group_name
    with contextlib.suppress(RuntimeError, AttributeError):
        backend = group._get_backend(torch.device("cuda"))
        if dist.is_nccl_available() and isinstance(backend, dist.ProcessGroupNCCL):
            backend.abort()
    if name.startswith("hybrid_ep.elastic") and group is not dist.group.WORLD:
        with contextlib.suppress(RuntimeError, ValueError):
            dist.destroy_process_group(group)
