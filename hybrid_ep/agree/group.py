"""Process groups that are made from a store alone.

torch makes a group from ranks of the default group, in whose registry it looks for all groups. Programs have others
too: wrappers of groups, which they destroy and make again under one object, and groups that they make without the
registry. A buffer on one of these works on a group of the same ranks that is made here, over a store of its own.
"""

from __future__ import annotations

import contextlib
import socket
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

from hybrid_ep.agree.board import Board, StoreLostError
from hybrid_ep.agree.within import UnfinishedError, run_within
from hybrid_ep.errors import TransportError

_MORE_S = 0.5  # for gloo to report by itself that it could not connect
_STRANGERS = 1 << 20  # numbers, in this process, of ranks that are not in its default group
# What `registered` has made. The key is the group itself, because it may have no name.
_made_for: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def connect(
    board: Board, name: str, numbers: Sequence[int], rank: int, *, backend: str, timeout_s: float
) -> dist.ProcessGroup:
    """Makes a group that torch's registry knows. Collective over its ranks.

    Args:
        board: of this group only; it becomes the group's board.
        name: of the group, equal at all ranks and of no other group of the job.
        numbers: of its ranks in the registry. In a process that has a default group, its rank there is among them.
        rank: this rank.
        backend: as `torch.distributed.get_backend_config` returns it.
        timeout_s: how long it may take, but for half a second. gloo tries again, each time up to the limit, where a
            rank dies while it connects.

    Raises:
        RuntimeError: a rank did not come.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def make() -> dist.ProcessGroup:
        with contextlib.nullcontext() if device is None else torch.cuda.device(device):
            made: dist.ProcessGroup
            made, _ = c10d._new_process_group_helper(
                len(numbers),
                rank,
                list(numbers) if dist.is_initialized() else [],
                c10d.Backend(backend),
                PrefixStore(board.name, board.store),
                name,  # type: ignore[arg-type]
                timeout=timedelta(seconds=timeout_s),
            )
        return made

    with _without_split():
        try:
            group = run_within(timeout_s + _MORE_S, make, discard=_forget, name="hybrid_ep connects")
        except UnfinishedError as error:
            raise RuntimeError(f"the group has not connected within {timeout_s:g} s") from error
    c10d._world.pg_group_ranks[group] = {number: i for i, number in enumerate(numbers)}
    board.assign(group)
    # The limit was for connecting; collectives of the group get torch's default.
    with contextlib.suppress(RuntimeError):
        c10d._set_pg_timeout(c10d.default_pg_timeout, group)
    return group


def numbers_of_strangers(rank: int, num_ranks: int) -> list[int]:
    """Returns numbers for `connect` of ranks that share no default group with this one, whose rank is `rank`."""
    numbers = [_STRANGERS + i for i in range(num_ranks)]
    if dist.is_initialized():
        numbers[rank] = dist.get_rank()
    return numbers


def registered(group: dist.ProcessGroup, timeout_s: float) -> dist.ProcessGroup:
    """Returns the group if torch's registry knows it, or else one of the same ranks, over gloo. Collective.

    The second is made with the first call for a group, and serves all later ones.

    Args:
        group: with `rank`, `size`, and what `torch.distributed.all_gather_object` needs.
        timeout_s: how long the ranks may take to come.

    Raises:
        TransportError: a rank did not come. It is not known which one.
    """
    made = _made_for.get(group, group)
    if made in c10d._world.pg_map:
        return made
    rank, size = group.rank(), group.size()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def gather(mine: Any) -> list[Any]:
        gathered: list[Any] = [None] * size
        with contextlib.nullcontext() if device is None else torch.cuda.device(device):
            dist.all_gather_object(gathered, mine, group)
        return gathered

    def make() -> tuple[Store, str]:
        store = store_among(rank, size, gather)
        return store, Board(store, "hybrid_ep").decide("name", uuid.uuid4().hex)

    try:
        store, name = run_within(timeout_s, make, name="hybrid_ep gathers")
        board, numbers = Board(store, f"hybrid_ep/{name}"), numbers_of_strangers(rank, size)
        made = connect(board, f"hybrid_ep/{name}", numbers, rank, backend="gloo", timeout_s=timeout_s)
    except (RuntimeError, StoreLostError, UnfinishedError) as error:
        where = f"gathering among the {size} ranks of a group"
        raise TransportError(where, rank, None, f"within {timeout_s:g} s: {str(error).splitlines()[0]}") from error
    _made_for[group] = made
    return made


def store_among(rank: int, num_ranks: int, gather: Callable[[Any], list[Any]]) -> Store:
    """Returns a store that rank 0 opens. Collective.

    Args:
        rank: this rank.
        num_ranks: how many there are.
        gather: returns the values of all ranks by rank; collective.
    """
    store = None
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, num_ranks, is_master=True, wait_for_workers=False)  # on all interfaces
    addresses = gather((socket.gethostname(), None if store is None else store.port))
    host, port = addresses[0]
    if store is None:
        is_here = all(name == host for name, _ in addresses)
        store = TCPStore("127.0.0.1" if is_here else host, port, num_ranks, is_master=False)
    return store


def _forget(group: dist.ProcessGroup) -> None:
    """Gives up a group that was connected too late."""
    c10d._world.pg_group_ranks[group] = {}
    with contextlib.suppress(RuntimeError, ValueError):
        dist.destroy_process_group(group)


@contextlib.contextmanager
def _without_split() -> Iterator[None]:
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
