"""`recover` and `join`: a new group, buffer and placement over those who are there.

Each step ends with a rendezvous in the store, under a generation number. A rendezvous has one outcome, which all ranks
read. So ranks never go on in two groups, and no answer of a lost rank is needed. attempt.py makes one attempt.

    survivors ─ rendezvous ─► who is left ─┬─► group and buffer ─ rendezvous ─► load experts ─ rendezvous ─► go on
    newcomers ─ wait ─► are let in ────────┘     ▲                    │
                                                 └── a rank could not, or did not come: next generation
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from hybrid_ep.agree.board import Board, StoreLostError
from hybrid_ep.agree.rendezvous import rendezvous
from hybrid_ep.balance.placement import ExpertPlacement
from hybrid_ep.buffers.base import BaseBuffer
from hybrid_ep.checks import require, require_int, require_seconds
from hybrid_ep.core.host import host_name
from hybrid_ep.elastic.attempt import (
    KINDS,
    MARGIN_S,
    Attempt,
    LeftOutError,
    LoadExpert,
    Recovered,
    Round,
    close,
    left_out,
)
from hybrid_ep.elastic.group import Lineage, abandon, board_of, lineage_of, root_board
from hybrid_ep.errors import ConfigError, TimeoutError, TransportError

__all__ = ["join", "recover", "waiting"]

B = TypeVar("B", bound=BaseBuffer)
_MIN_TIMEOUT_S = 1.0  # processes do not come at the same millisecond
_GRACE_S = 0.3  # for a rank that others take for lost: it may be alive
_POLL_S = 0.05
_WHERE = "recover"


def recover(
    buffer: B,
    placement: ExpertPlacement,
    load_expert: LoadExpert | None = None,
    *,
    lost: Collection[int] = (),
    weight: Tensor | None = None,
    num_ranks_per_domain: int | None = None,
    max_slots: int | None = None,
    timeout_s: float | None = None,
    load_timeout_s: float = 300.0,
) -> Recovered[B]:
    """Makes a new group, buffer and placement for the ranks that are left and for those that wait in `join`.

    Collective over the survivors. Call it at each of them when a call has raised TransportError, or when the job asks
    for it. A rank that has not called it within `timeout_s` and two seconds is left out. On the cuda engine a rank may
    find the loss a call later, and the others wait for it as much longer.

    The old buffer is closed, and NCCL communicators of its group are aborted. Its handles cannot be used any more; its
    results keep their memory. Survivors keep their order, and their experts in their slots. An expert that no survivor
    holds is loaded into a slot whose expert has another replica. If there are too few of these, every rank gets more
    slots.

    Args:
        buffer: on the group that has lost a rank, a `Buffer` or a `HybridEPBuffer`.
        placement: in use, the same on all ranks.
        load_expert: called as ``load_expert(layer, expert)`` on the rank that is to hold the expert; what it returns is
            in `Report.loaded`. If it raises, the expert is named in `Report.failed`, and the job goes on without it.
        lost: ranks that the caller knows to be lost, beside those that errors of `buffer` have named.
        weight: ``[layers, E]`` loads ≥ 0, the same on all ranks: an expert is loaded by the rank with the smallest
            load. None = all experts have the same load.
        num_ranks_per_domain: of the new group; None = the greatest common divisor of what is left of each domain.
        max_slots: the most slots of a layer that a rank may have afterwards, at least as many as now; an expert without
            a slot is not served. None = as many as it takes.
        timeout_s: seconds that survivors wait for each other, at least 1; None = those of the buffer.
        load_timeout_s: seconds that loading may take.

    Returns:
        The new buffer, of the same class and options, the placement and the report.

    Raises:
        ConfigError: an argument does not fit; the old buffer stays open then. Or an argument differs between ranks, or
            a newcomer finds no expert that it could load.
        TopologyError: the ranks that are left cannot be divided into domains of the size asked for.
        TransportError: the store is lost, the others have gone on without this rank, or no group could be connected.
    """
    begin = time.monotonic()
    require(isinstance(buffer, BaseBuffer), "buffer", type(buffer).__name__, " or ".join(KINDS))
    group, rank = buffer.registered_group, buffer.rank
    if group is None or buffer.group_size == 1:
        raise ConfigError("the buffer has 1 rank; allowed: ≥ 2, so that one may be lost")
    require(isinstance(placement, ExpertPlacement), "placement", type(placement).__name__, "an ExpertPlacement")
    found, wanted = placement.num_ranks, buffer.group_size
    require(found == wanted, "ranks of placement", found, f"{wanted}, as of the buffer")
    require(load_expert is None or callable(load_expert), "load_expert", load_expert, "a function or None")
    kinds = [name for name, kind in KINDS.items() if type(buffer) is kind]
    require(bool(kinds), "class of the buffer", type(buffer).__name__, " or ".join(KINDS))
    lineage = lineage_of(group, buffer.number)
    if lineage.is_left_out:
        raise left_out(rank, None)
    timeout_s = buffer.timeout_s if timeout_s is None else require_seconds("timeout_s", timeout_s)
    require_seconds("load_timeout_s", load_timeout_s)
    if num_ranks_per_domain is not None:
        require_int("num_ranks_per_domain", num_ranks_per_domain, minimum=1)
    if max_slots is not None:
        require_int("max_slots", max_slots, minimum=placement.num_slots)
    are_ranks = isinstance(lost, Collection) and set(lost) <= set(range(buffer.group_size))
    require(are_ranks, "lost", repr(lost), f"ranks of 0 … {buffer.group_size - 1}")
    terms = {
        "kind": kinds[0],
        "options": buffer.options(),
        "backend": dist.get_backend_config(group),
        "placement": placement.to_json(),
        "weight": None if weight is None else placement.require_weight(weight).tolist(),
        "num_ranks_per_domain": num_ranks_per_domain,
        "old_num_ranks_per_domain": buffer.grid.num_ranks_per_domain,
        "max_slots": max_slots,
        "timeout_s": max(timeout_s, _MIN_TIMEOUT_S),
        "buffer_timeout_s": max(buffer.timeout_s, _MIN_TIMEOUT_S),
        "load_timeout_s": load_timeout_s,
    }
    ranks, gone = set(range(buffer.group_size)), {*lost, *buffer.lost, *placement.lost_ranks} - {rank}
    lag_s = buffer.lag_s
    close(buffer)  # its errors are those that made the caller recover
    loaded: dict[tuple[int, int], Any] = {}
    problem = ""
    try:
        for _ in range(buffer.group_size + 1):
            lineage.generation += 1
            round_ = _meet_survivors(lineage, rank, terms, load_expert is not None, ranks, gone, lag_s)
            lag_s = 0.0  # whoever comes to the next one was at this one
            attempt = Attempt(lineage, round_, rank, group)
            made = attempt.run(load_expert, loaded, begin)
            if isinstance(made, Recovered):
                abandon(group)
                return made
            ranks, gone, problem = set(round_.survivors), made, attempt.problem
    except StoreLostError as error:
        raise TransportError(_WHERE, rank, None, f"the store of the process group is lost ({error})") from error
    detail = f"{buffer.group_size + 1} attempts have failed" + (f", the last at {problem}" if problem else "")
    raise TransportError(_WHERE, rank, min(gone, default=None), detail)


def join(store: Store, load_expert: LoadExpert, *, job: str = "world", timeout_s: float = 600.0) -> Recovered[Any]:
    """Waits until the ranks of a job call `recover`, and joins the new group. Blocks the host.

    Call it in a new process, whose default group of `torch.distributed` the new group becomes, or on a rank that the
    others have left out. Class and options of the buffer, engine and timeouts are those of the job.

    Args:
        store: as the processes of the job pass it to `init_process_group`; where that has made it from the environment,
            ``PrefixStore("default_pg", TCPStore(MASTER_ADDR, MASTER_PORT))``.
        load_expert: as for `recover`; it gives the experts of all slots of this rank.
        job: ``"world"`` where the job's first buffer was on the default group; otherwise the `job_of` that group.
        timeout_s: seconds to wait for a `recover`.

    Returns:
        As `recover`.

    Raises:
        ConfigError, TopologyError: an argument does not fit, or `recover` raises it at the survivors.
        TimeoutError: no `recover` has let it in within `timeout_s`.
        TransportError: the store is lost.
    """
    begin = time.monotonic()
    require(isinstance(store, Store), "store", type(store).__name__, "a torch.distributed.Store")
    require(callable(load_expert), "load_expert", load_expert, "a function")
    require(isinstance(job, str), "job", repr(job), "a str")
    require_seconds("timeout_s", timeout_s)
    lineage = Lineage(root_board(store, job), "")
    rank = dist.get_rank() if dist.is_initialized() else 0
    loaded: dict[tuple[int, int], Any] = {}
    try:
        while True:
            ticket = lineage.board.count("tickets")
            lineage.board.write(f"newcomer {ticket}", json.dumps(host_name()))
            while (note := lineage.board.read(f"admission {ticket}")) is None:
                if time.monotonic() - begin >= timeout_s:
                    lineage.board.write(f"newcomer {ticket}", "")
                    raise TimeoutError("join", rank, None, "no rank has admitted it", timeout_s=timeout_s)
                time.sleep(_POLL_S)
            lineage.generation, lineage.origin, *fields = json.loads(note)
            attempt = Attempt(lineage, Round(*fields), -ticket, None)
            try:
                made = attempt.run(load_expert, loaded, begin)
            except LeftOutError:
                continue
            if isinstance(made, Recovered):
                return made
    except StoreLostError as error:
        raise TransportError("join", rank, None, f"the store of the process group is lost ({error})") from error


def waiting(buffer: BaseBuffer) -> int:
    """Returns how many processes wait in `join`. Local: let one rank ask, and broadcast when to `recover`.

    Args:
        buffer: of the job; 0 are waiting where it has no process group.

    Raises:
        ConfigError: `buffer` is no buffer.
        TransportError: the store is lost.
    """
    require(isinstance(buffer, BaseBuffer), "buffer", type(buffer).__name__, " or ".join(KINDS))
    if buffer.registered_group is None:
        return 0
    try:
        return len(_newcomers(board_of(buffer.registered_group)))
    except StoreLostError as error:
        raise TransportError(
            "waiting", buffer.rank, None, f"the store of the process group is lost ({error})"
        ) from error


def _newcomers(board: Board) -> dict[int, str]:
    """The hosts of those who wait, by ticket."""
    count = int(board.read("tickets") or 0)
    notes = {ticket: board.read(f"newcomer {ticket}") for ticket in range(1, count + 1)}
    return {ticket: json.loads(note) for ticket, note in notes.items() if note}


def _meet_survivors(
    lineage: Lineage, rank: int, terms: dict[str, Any], can_load: bool, ranks: set[int], gone: set[int], lag_s: float
) -> Round:
    """Agrees with the other survivors on who is left, and lets in who waits.

    Waits for `lag_s` longer than the terms say.

    Raises:
        ConfigError: the ranks want different things.
        TransportError: the others did not wait for this rank.
    """
    board = lineage.board
    digests = {name: hashlib.sha256(json.dumps(value).encode()).hexdigest() for name, value in terms.items()}
    text = json.dumps([digests, host_name(), can_load, _newcomers(board)])
    joined = rendezvous(
        board.at(f"{lineage.attempt}/survivors"),
        rank,
        ranks,
        text,
        # Another survivor may have begun to wait for this one only when this one came here.
        timeout_s=terms["timeout_s"] + MARGIN_S + lag_s,
        lost=gone,
        grace_s=_GRACE_S,
    )
    if rank not in joined.members:
        lineage.is_left_out = True
        raise left_out(rank, min(joined.members))
    told = [json.loads(joined.texts[member]) for member in joined.members]
    for member, (theirs, *_) in zip(joined.members, told, strict=True):
        for name, digest in told[0][0].items():
            if theirs[name] != digest:
                first = joined.members[0]
                raise ConfigError(f"{name} differs between ranks {first} and {member}; allowed: the same on every rank")
    newcomers = {int(ticket): host for one in told for ticket, host in one[3].items()}
    tickets = sorted(newcomers)
    hosts = [*(one[1] for one in told), *(newcomers[ticket] for ticket in tickets)]
    round_ = Round(terms, joined.members, tickets, hosts, [*(one[2] for one in told), *[True] * len(tickets)])
    for ticket in tickets:
        board.write(f"admission {ticket}", json.dumps([lineage.generation, lineage.origin, *round_]))
        board.write(f"newcomer {ticket}", "")
    return round_
