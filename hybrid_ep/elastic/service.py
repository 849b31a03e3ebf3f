"""`recover` and `join`: a new group, buffer and placement over those who are there.

Each step ends with a rendezvous in the store, under a generation number. A rendezvous has one outcome, which all ranks
read. So ranks never go on in two groups, and no answer of a lost rank is needed.

    survivors ─ rendezvous ─► who is left ─┬─► group and buffer ─ rendezvous ─► load experts ─ rendezvous ─► go on
    newcomers ─ wait ─► are let in ────────┘     ▲                    │
                                                 └── a rank could not, or did not come: next generation
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from hybrid_ep.balance.placement import ExpertPlacement
from hybrid_ep.buffers.base import BaseBuffer
from hybrid_ep.buffers.hybrid import HybridEPBuffer
from hybrid_ep.buffers.normal import Buffer
from hybrid_ep.core.board import Board, StoreLostError, rendezvous
from hybrid_ep.core.checks import require, require_int, require_seconds
from hybrid_ep.core.host import host_name
from hybrid_ep.elastic.group import Lineage, abandon, board_of, follow, lineage_of, make_group, root_board
from hybrid_ep.elastic.succession import Roster, arrange, succeed
from hybrid_ep.errors import ConfigError, HybridEPError, TimeoutError, TransportError

__all__ = ["LoadExpert", "Recovered", "Report", "join", "recover", "waiting"]

LoadExpert = Callable[[int, int], Any]
B = TypeVar("B", bound=BaseBuffer)
M = TypeVar("M")
_KINDS: dict[str, type[BaseBuffer]] = {"Buffer": Buffer, "HybridEPBuffer": HybridEPBuffer}
_MIN_TIMEOUT_S = 1.0  # processes do not come at the same millisecond
_GRACE_S = 0.3  # for a rank that others take for lost: it may be alive
_MARGIN_S = 2.0  # ranks do not begin a step at the same millisecond, nor keep to its limit to the millisecond
_CONFIRM_S = 1.0  # for a newcomer to confirm that it is still there
_POLL_S = 0.05
_WHERE = "recover"


@dataclass(frozen=True)
class Report:
    """What a recovery has done.

    Attributes:
        generation: number of the group in the life of the job. It rises; failed attempts have numbers, too.
        ranks: for each rank of the new group, its rank in the group before, or None for a newcomer.
        lost: ranks of the group before that are not in this one.
        unserved: (layer, expert) that no rank holds.
        failed: (layer, expert) → why it could not be loaded.
        loaded: (layer, slot of this rank) → what `load_expert` has returned.
        kept: ``[layers, P/R]`` int64 on the CPU: the old slot of this rank whose weights each slot takes, −1 where they
            are in `loaded`.
        seconds: that the call took on this rank.
    """

    generation: int
    ranks: tuple[int | None, ...]
    lost: tuple[int, ...]
    unserved: tuple[tuple[int, int], ...]
    failed: dict[tuple[int, int], str]
    loaded: dict[tuple[int, int], Any]
    kept: Tensor
    seconds: float


class Recovered(NamedTuple, Generic[B]):
    """What a job goes on with.

    Attributes:
        buffer: on the new group, which is `buffer.group`.
        placement: over its ranks.
        report: what has been done.
    """

    buffer: B
    placement: ExpertPlacement
    report: Report


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
    for it. A rank that has not called it within `timeout_s` and two seconds is left out.

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
    require(isinstance(buffer, BaseBuffer), "buffer", type(buffer).__name__, " or ".join(_KINDS))
    group, rank = buffer.group, buffer.rank
    if group is None or buffer.group_size == 1:
        raise ConfigError("the buffer has 1 rank; allowed: ≥ 2, so that one may be lost")
    require(isinstance(placement, ExpertPlacement), "placement", type(placement).__name__, "an ExpertPlacement")
    found, wanted = placement.num_ranks, buffer.group_size
    require(found == wanted, "ranks of placement", found, f"{wanted}, as of the buffer")
    require(load_expert is None or callable(load_expert), "load_expert", load_expert, "a function or None")
    kinds = [name for name, kind in _KINDS.items() if type(buffer) is kind]
    require(bool(kinds), "class of the buffer", type(buffer).__name__, " or ".join(_KINDS))
    lineage = lineage_of(group, buffer.number)
    if lineage.is_left_out:
        raise _left_out(rank, None)
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
    _close(buffer)  # its errors are those that made the caller recover
    loaded: dict[tuple[int, int], Any] = {}
    problem = ""
    try:
        for _ in range(buffer.group_size + 1):
            lineage.generation += 1
            round_ = _meet_survivors(lineage, rank, terms, load_expert is not None, ranks, gone)
            attempt = _Attempt(lineage, round_, rank, group)
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
            attempt = _Attempt(lineage, _Round(*fields), -ticket, None)
            try:
                made = attempt.run(load_expert, loaded, begin)
            except _LeftOutError:
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
    require(isinstance(buffer, BaseBuffer), "buffer", type(buffer).__name__, " or ".join(_KINDS))
    if buffer.group is None:
        return 0
    try:
        return len(_newcomers(board_of(buffer.group)))
    except StoreLostError as error:
        raise TransportError(
            "waiting", buffer.rank, None, f"the store of the process group is lost ({error})"
        ) from error


class _LeftOutError(TransportError):
    """The others have gone on without this rank."""


class _Round(NamedTuple):
    """What every participant of an attempt knows; JSON can hold it.

    Attributes:
        terms: what the survivors agree on.
        survivors: their ranks in the group before.
        tickets: of the newcomers.
        hosts, can_load: of the survivors, then of the newcomers.
    """

    terms: dict[str, Any]
    survivors: list[int]
    tickets: list[int]
    hosts: list[str]
    can_load: list[bool]

    @property
    def ids(self) -> list[int]:
        """Ids of all participants: the ranks of survivors, and the negated tickets of newcomers."""
        return [*self.survivors, *(-ticket for ticket in self.tickets)]

    def only(self, ids: Collection[int]) -> _Round:
        """Returns the round with only these participants."""
        kept = [i for i, one in enumerate(self.ids) if one in ids]
        return _Round(
            self.terms,
            [rank for rank in self.survivors if rank in ids],
            [ticket for ticket in self.tickets if -ticket in ids],
            [self.hosts[i] for i in kept],
            [self.can_load[i] for i in kept],
        )


def _left_out(rank: int, peer: int | None) -> TransportError:
    return _LeftOutError(_WHERE, rank, peer, "the other ranks went on without this one, which was late; allowed: join")


def _newcomers(board: Board) -> dict[int, str]:
    """The hosts of those who wait, by ticket."""
    count = int(board.read("tickets") or 0)
    notes = {ticket: board.read(f"newcomer {ticket}") for ticket in range(1, count + 1)}
    return {ticket: json.loads(note) for ticket, note in notes.items() if note}


def _meet_survivors(
    lineage: Lineage, rank: int, terms: dict[str, Any], can_load: bool, ranks: set[int], gone: set[int]
) -> _Round:
    """Agrees with the other survivors on who is left, and lets in who waits.

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
        timeout_s=terms["timeout_s"] + _MARGIN_S,
        lost=gone,
        grace_s=_GRACE_S,
    )
    if rank not in joined.members:
        lineage.is_left_out = True
        raise _left_out(rank, min(joined.members))
    told = [json.loads(joined.texts[member]) for member in joined.members]
    for member, (theirs, *_) in zip(joined.members, told, strict=True):
        for name, digest in told[0][0].items():
            if theirs[name] != digest:
                first = joined.members[0]
                raise ConfigError(f"{name} differs between ranks {first} and {member}; allowed: the same on every rank")
    newcomers = {int(ticket): host for one in told for ticket, host in one[3].items()}
    tickets = sorted(newcomers)
    hosts = [*(one[1] for one in told), *(newcomers[ticket] for ticket in tickets)]
    round_ = _Round(terms, joined.members, tickets, hosts, [*(one[2] for one in told), *[True] * len(tickets)])
    for ticket in tickets:
        board.write(f"admission {ticket}", json.dumps([lineage.generation, lineage.origin, *round_]))
        board.write(f"newcomer {ticket}", "")
    return round_


class _Attempt:
    """One attempt to make group, buffer and placement, as one participant makes it.

    Args:
        lineage: of the group.
        round_: the participants.
        me: id of this participant.
        parent: the group that this participant was in before; None for a newcomer.

    Attributes:
        problem: which new rank was the first that could not make group or buffer, and why; "" if every rank that came
            could. The same at all participants.
    """

    problem = ""

    def __init__(self, lineage: Lineage, round_: _Round, me: int, parent: dist.ProcessGroup | None) -> None:
        self._lineage, self._round, self._me, self._parent = lineage, round_, me, parent
        self._board = lineage.board.at(lineage.attempt)
        self._terms = round_.terms
        self._number = max(me, 0)  # for errors
        self._placement = ExpertPlacement.from_json(self._terms["placement"])

    def run(
        self, load_expert: LoadExpert | None, loaded: dict[tuple[int, int], Any], begin: float
    ) -> Recovered[Any] | set[int]:
        """Makes group, buffer and placement; if that failed, returns the survivors that were lost meanwhile.

        Args:
            load_expert: as for `recover`.
            loaded: (layer, expert) → what it has returned so far; is added to.
            begin: when the call began.
        """
        if self._round.tickets:
            newcomers = [-ticket for ticket in self._round.tickets]  # a process may have ended while it waited
            timeout_s = self._terms["timeout_s"]
            came, _ = self._rendezvous("newcomers", self._me, self._round.ids, "", timeout_s, newcomers)
            self._round = self._round.only(came)
        round_ = self._round
        roster = arrange(
            round_.survivors,
            self._terms["old_num_ranks_per_domain"],
            round_.hosts,
            self._terms["num_ranks_per_domain"],
        )
        # The id of each new rank.
        ids = [rank if rank >= 0 else -round_.tickets[-1 - rank] for rank in roster.ranks]
        rank = ids.index(self._me)
        made = self._connect(roster, ids, rank)
        if isinstance(made, set):
            return made
        group, buffer = made
        try:
            done = self._load(roster, ids, rank, load_expert, loaded)
        except BaseException:
            _drop(group, buffer)
            raise
        if isinstance(done, set):
            _drop(group, buffer)
            return done
        placement, kept, slots, failed = done
        report = Report(
            generation=self._lineage.generation,
            ranks=tuple(one if one >= 0 else None for one in ids),
            lost=tuple(sorted(set(range(self._placement.num_ranks)) - set(ids))),
            unserved=tuple((layer, expert) for layer, experts in enumerate(placement.unserved) for expert in experts),
            failed=failed,
            loaded={(layer, slot): loaded[layer, expert] for layer, slot, expert in slots},
            kept=kept,
            seconds=time.monotonic() - begin,
        )
        return Recovered(buffer, placement, report)

    def _rendezvous(
        self, what: str, me: int, ids: Collection[int], text: str, timeout_s: float, lost: Collection[int] = ()
    ) -> tuple[list[int], dict[int, str]]:
        """Waits for the others of this attempt; returns who came, and their texts.

        Raises:
            TransportError: they did not wait for this one.
        """
        joined = rendezvous(self._board.at(what), me, ids, text, timeout_s=timeout_s, lost=lost, grace_s=_CONFIRM_S)
        if me not in joined.members:
            self._lineage.is_left_out = True
            raise _left_out(self._number, None)
        return joined.members, joined.texts

    def _connect(self, roster: Roster, ids: list[int], rank: int) -> tuple[dist.ProcessGroup, BaseBuffer] | set[int]:
        """Makes group and buffer. If a rank could not, returns the ranks that did not confirm success."""
        name = f"hybrid_ep.elastic/{self._lineage.board.name}/{self._lineage.origin}{self._lineage.generation}"

        def connect() -> dist.ProcessGroup:
            return make_group(
                self._board.at("group"),
                name,
                [one if one >= 0 else None for one in roster.ranks],
                rank,
                parent=self._parent,
                backend=self._terms["backend"],
                timeout_s=self._terms["timeout_s"],
            )

        begin, limit_s = time.monotonic(), self._terms["timeout_s"]
        group = self._make("connected", connect, abandon, lambda: limit_s + begin - time.monotonic(), ids, rank)
        if isinstance(group, set):
            return group
        origin = hashlib.sha256(name.encode()).hexdigest()[:16] + "-"
        follow(group, Lineage(self._lineage.board, origin, self._lineage.generation))
        kind, options = _KINDS[self._terms["kind"]], dict(self._terms["options"])
        buffer = self._make(
            "made",
            lambda: kind.over(group, roster.num_ranks_per_domain, options),
            _close,
            lambda: self._terms["buffer_timeout_s"],
            ids,
            rank,
        )
        if isinstance(buffer, set):
            abandon(group)
            return buffer
        return group, buffer

    def _make(
        self,
        what: str,
        make: Callable[[], M],
        drop: Callable[[M], object],
        timeout_s: Callable[[], float],
        ids: list[int],
        rank: int,
    ) -> M | set[int]:
        """Makes something, and agrees with the others whether all could. If one could not, returns the survivors that
        did not come to the rendezvous after it.

        Args:
            what: the step's name.
            make: collective.
            drop: gives up what this rank has made.
            timeout_s: for how long another rank may go on making it, once this one has succeeded or failed.
            ids: of the new ranks.
            rank: this one's.
        """
        made: M | None = None
        problem, begin = "", time.monotonic()
        try:
            made = make()
        except (RuntimeError, HybridEPError) as error:
            problem = json.dumps([time.monotonic() - begin, str(error)])
        # The rank that `error` names need not be lost: it may fail later, and then come to this rendezvous.
        came, texts = self._rendezvous(what, rank, range(len(ids)), problem, timeout_s() + _MARGIN_S)
        if len(came) == len(ids) and not any(texts.values()):
            assert made is not None
            return made
        if made is not None:
            drop(made)
        # The others may have failed because the first did.
        problems = [(*json.loads(texts[r]), r) for r in came if texts[r]]
        self.problem = "rank {2} of the new group: {1}".format(*min(problems)) if problems else ""
        return {ids[r] for r in range(len(ids)) if r not in came and ids[r] >= 0}

    def _load(
        self,
        roster: Roster,
        ids: list[int],
        rank: int,
        load_expert: LoadExpert | None,
        loaded: dict[tuple[int, int], Any],
    ) -> tuple[ExpertPlacement, Tensor, list[tuple[int, int, int]], dict[tuple[int, int], str]] | set[int]:
        """Loads experts until all that were planned are there; returns who did not come where one did not.

        Otherwise the placement, the old slots that are kept, the (layer, slot, expert) that this rank has loaded, and
        what failed anywhere.
        """
        can_load = [self._round.can_load[self._round.ids.index(one)] for one in ids]
        weight = None if self._terms["weight"] is None else torch.tensor(self._terms["weight"], dtype=torch.float64)
        failed: dict[tuple[int, int], str] = {}
        num_rounds = 0
        while True:
            plan = succeed(
                self._placement,
                roster,
                can_load,
                weight=weight,
                max_slots=self._terms["max_slots"],
                refused=failed,
            )
            mine = [load for load in plan.loads if load.rank == rank]
            if not plan.loads:
                return plan.placement, plan.kept[rank], [], failed
            problems = []
            for load in mine:
                if (load.layer, load.expert) in loaded:
                    continue
                assert load_expert is not None
                try:
                    loaded[load.layer, load.expert] = load_expert(load.layer, load.expert)
                except Exception as error:  # a job goes on without an expert
                    problems.append([load.layer, load.expert, f"rank {rank}: {type(error).__name__}: {error}"])
            num_rounds += 1
            what, text = f"loads {num_rounds}", json.dumps(problems)
            came, texts = self._rendezvous(what, rank, range(len(ids)), text, self._terms["load_timeout_s"])
            if len(came) < len(ids):
                return {ids[r] for r in range(len(ids)) if r not in came and ids[r] >= 0}
            found = {(layer, expert): why for r in came for layer, expert, why in json.loads(texts[r])}
            if not found:
                slots = [(load.layer, load.slot, load.expert) for load in mine]
                return plan.placement, plan.kept[rank], slots, failed
            failed |= found


def _drop(group: dist.ProcessGroup, buffer: BaseBuffer) -> None:
    """Gives up what was made for an attempt."""
    _close(buffer)
    abandon(group)


def _close(buffer: BaseBuffer) -> None:
    with contextlib.suppress(HybridEPError):
        buffer.close()
