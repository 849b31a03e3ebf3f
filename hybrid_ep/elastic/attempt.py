"""One attempt of a recovery, as each participant makes it: group, buffer and placement, or who was lost meanwhile.

Each step ends with a rendezvous of the participants. If a rank could not make its part, or did not come, all give up
what they have made. service.py then begins the next attempt.
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

from hybrid_ep.agree.rendezvous import rendezvous
from hybrid_ep.balance.placement import ExpertPlacement
from hybrid_ep.buffers.base import BaseBuffer
from hybrid_ep.buffers.hybrid import HybridEPBuffer
from hybrid_ep.buffers.v1 import Buffer
from hybrid_ep.elastic.group import Lineage, abandon, follow, make_group
from hybrid_ep.elastic.succession import Roster, arrange, succeed
from hybrid_ep.errors import HybridEPError, TransportError

__all__ = [
    "KINDS",
    "MARGIN_S",
    "Attempt",
    "LeftOutError",
    "LoadExpert",
    "Recovered",
    "Report",
    "Round",
    "close",
    "left_out",
]

LoadExpert = Callable[[int, int], Any]
B = TypeVar("B", bound=BaseBuffer)
M = TypeVar("M")
KINDS: dict[str, type[BaseBuffer]] = {"Buffer": Buffer, "HybridEPBuffer": HybridEPBuffer}
MARGIN_S = 2.0  # ranks do not begin a step at the same millisecond, nor keep to its limit to the millisecond
_CONNECTED = "connected"
_UNREACHABLE = (
    "; all of these ranks reach the store, and some cannot reach each other, so no group of fewer was tried; allowed: "
    "to end a process that another one cannot reach, and to recover again"
)
_CONFIRM_S = 1.0  # for a newcomer to confirm that it is still there


@dataclass(frozen=True)
class Report:
    """The outcome of a recovery.

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
    """The buffer and the placement with which a job goes on.

    Attributes:
        buffer: on the new group, which is `buffer.group`.
        placement: over its ranks.
        report: the outcome of the recovery.
    """

    buffer: B
    placement: ExpertPlacement
    report: Report


class Round(NamedTuple):
    """The facts that every participant of an attempt knows, as JSON types.

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

    def only(self, ids: Collection[int]) -> Round:
        """Returns the round with only these participants."""
        kept = [i for i, one in enumerate(self.ids) if one in ids]
        return Round(
            self.terms,
            [rank for rank in self.survivors if rank in ids],
            [ticket for ticket in self.tickets if -ticket in ids],
            [self.hosts[i] for i in kept],
            [self.can_load[i] for i in kept],
        )


class LeftOutError(TransportError):
    """The others have gone on without this rank."""


def left_out(rank: int, peer: int | None) -> TransportError:
    """Returns the error of a rank that the others have not waited for; `peer` is one of them."""
    return LeftOutError(
        "recover", rank, peer, "the other ranks went on without this one, which was late; allowed: join"
    )


class Attempt:
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

    def __init__(self, lineage: Lineage, round_: Round, me: int, parent: dist.ProcessGroup | None) -> None:
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
            raise left_out(self._number, None)
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
        group = self._make(_CONNECTED, connect, abandon, lambda: limit_s + begin - time.monotonic(), ids, rank)
        if isinstance(group, set):
            return group
        origin = hashlib.sha256(name.encode()).hexdigest()[:16] + "-"
        follow(group, Lineage(self._lineage.board, origin, self._lineage.generation))
        kind, options = KINDS[self._terms["kind"]], dict(self._terms["options"])
        buffer = self._make(
            "made",
            lambda: kind.over(group, roster.num_ranks_per_domain, options),
            close,
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
        came, texts = self._rendezvous(what, rank, range(len(ids)), problem, timeout_s() + MARGIN_S)
        if len(came) == len(ids) and not any(texts.values()):
            assert made is not None
            return made
        if made is not None:
            drop(made)
        # The others may have failed because the first did.
        problems = [(*json.loads(texts[r]), r) for r in came if texts[r]]
        self.problem = "rank {2} of the new group: {1}".format(*min(problems)) if problems else ""
        if what == _CONNECTED and len(came) == len(ids):
            self.problem += _UNREACHABLE
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
        weight = (
            None
            if self._terms["weight"] is None
            else torch.tensor(self._terms["weight"], dtype=torch.float64, device="cpu")
        )
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
    close(buffer)
    abandon(group)


def close(buffer: BaseBuffer) -> None:
    """Closes a buffer that is given up. Its errors are not raised."""
    with contextlib.suppress(HybridEPError):
        buffer.close()
