"""Process groups of the ranks that are left, made from the store, without the lost ranks.

torch makes a group from ranks of the default group, whose numbers are equal in every process. Here a process may have
come later, and its default group is the first one that it joined. So such a process gets the store and the name of the
group's board, and ranks are numbered by their index in the group.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

from hybrid_ep.agree.board import Board
from hybrid_ep.agree.within import UnfinishedError, run_within

__all__ = ["Lineage", "abandon", "board_of", "follow", "job_of", "lineage_of", "make_group", "root_board"]

_LOG = logging.getLogger(__name__)
_STRANGERS = 1 << 20  # numbers, in this process, of ranks that are not in its default group
_MORE_S = 0.5  # for gloo to report by itself that it could not connect


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
    """Makes the group of the ranks of a rendezvous. Collective over them.

    Args:
        board: of this group only.
        name: of the group, of no other in the life of the job.
        members: for each rank, its rank in `parent`, or None.
        rank: this rank.
        parent: the group that this rank was in before, None: none.
        backend: as `torch.distributed.get_backend_config` returns it.
        timeout_s: how long it may take, but for half a second. gloo tries again, each time up to the limit, where a
            rank dies while it connects.

    Raises:
        RuntimeError: a rank did not come.
    """
    is_first = not dist.is_initialized()
    numbers: list[int] = []
    if not is_first:
        known = [] if parent is None else dist.get_process_group_ranks(parent)
        # A process is asked for as rank `number` of its default group; those that are not in it need numbers as well.
        numbers = [_STRANGERS + i if old is None or not known else known[old] for i, old in enumerate(members)]
        numbers[rank] = dist.get_rank()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def connect() -> dist.ProcessGroup:
        with contextlib.nullcontext() if device is None else torch.cuda.device(device):
            made: dist.ProcessGroup
            made, _ = c10d._new_process_group_helper(
                len(members),
                rank,
                numbers,
                c10d.Backend(backend),
                PrefixStore(board.name, board.store),
                name,  # type: ignore[arg-type]
                timeout=timedelta(seconds=timeout_s),
            )
        return made

    with _without_split():
        try:
            group = run_within(timeout_s + _MORE_S, connect, discard=_forget, name="hybrid_ep connects")
        except UnfinishedError as error:
            raise RuntimeError(f"the group has not connected within {timeout_s:g} s") from error
    if is_first:
        c10d._update_default_pg(group)
        numbers = list(range(len(members)))
    c10d._world.pg_group_ranks[group] = {number: i for i, number in enumerate(numbers)}
    board.assign(group)
    # The limit was for connecting; collectives of the group get torch's default.
    with contextlib.suppress(RuntimeError):
        c10d._set_pg_timeout(c10d.default_pg_timeout, group)
    return group


def _forget(group: dist.ProcessGroup) -> None:
    """Gives up a group that was connected too late."""
    c10d._world.pg_group_ranks[group] = {}
    abandon(group)


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


@contextlib.contextmanager
def _without_split():  # type: ignore[no-untyped-def]
    """A default group that is bound to a GPU would split its communicator, which needs every rank of it."""
    default = dist.group.WORLD if dist.is_initialized() else None
    bound = None if default is None else default.bound_device_id
    if default is not None and bound is not None:
        default.bound_device_id = None
    try:
        yield
    finally:
        if default is not None and bound is not None:
            default.bound_device_id = bound
