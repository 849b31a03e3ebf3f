"""Which rank holds which experts after ranks were lost or came: pure functions, the same on every rank.

Survivors keep their experts, so that no weights are moved between them. Experts that no survivor holds are loaded into
slots whose expert has other replicas, and into the slots of new ranks. If these are too few, every rank gets another
slot.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_ep.balance.placement import ExpertPlacement
from hybrid_ep.checks import require
from hybrid_ep.errors import ConfigError, TopologyError

_EMPTY = -1


class Load(NamedTuple):
    """An expert whose weights a rank must load.

    Attributes:
        rank: that loads them.
        layer, expert: whose weights.
        slot: of the rank, in which they are served.
    """

    rank: int
    layer: int
    expert: int
    slot: int


class Roster(NamedTuple):
    """The ranks of a new group.

    Attributes:
        ranks: who has each new rank: an old rank, or −1 − n for the n-th newcomer.
        num_ranks_per_domain: of the new group.
    """

    ranks: tuple[int, ...]
    num_ranks_per_domain: int


class Succession(NamedTuple):
    """A placement that follows another.

    Attributes:
        placement: over the new ranks.
        kept: ``[R, layers, P/R]`` int64: the old slot of the same rank whose weights each slot takes; −1 where they
            are loaded.
        loads: what is loaded, by rank, layer and slot.
    """

    placement: ExpertPlacement
    kept: Tensor
    loads: tuple[Load, ...]


def arrange(
    survivors: Sequence[int], old_per_domain: int, hosts: Sequence[str], num_ranks_per_domain: int | None = None
) -> Roster:
    """Orders the ranks of a new group by domain.

    Survivors keep their order. A newcomer joins the smallest domain of its host that has lost ranks, or else a new one.
    Domains that are left with different sizes are divided: a domain of the new group has as many ranks as their
    greatest common divisor.

    Args:
        survivors: old ranks, ascending.
        old_per_domain: ranks of an old domain.
        hosts: of the survivors, then of the newcomers.
        num_ranks_per_domain: the size asked for; None = the greatest common divisor.

    Raises:
        TopologyError: the size asked for does not divide every domain.
    """
    domains: dict[int, list[int]] = {}
    host_of: dict[int, str] = {}
    for rank, host in zip(survivors, hosts, strict=False):
        domains.setdefault(rank // old_per_domain, []).append(rank)
        host_of[rank // old_per_domain] = host
    for newcomer, host in enumerate(hosts[len(survivors) :]):
        open_ones = [idx for idx, ranks in domains.items() if host_of[idx] == host and len(ranks) < old_per_domain]
        idx = min(open_ones, key=lambda idx: (len(domains[idx]), idx), default=max(domains, default=-1) + 1)
        domains.setdefault(idx, []).append(-1 - newcomer)
        host_of[idx] = host
    sizes = [len(ranks) for _, ranks in sorted(domains.items())]
    common = math.gcd(*sizes)
    size = common if num_ranks_per_domain is None else num_ranks_per_domain
    if size < 1 or common % size:
        allowed = [n for n in range(1, common + 1) if common % n == 0]
        raise TopologyError(
            f"num_ranks_per_domain is {size}, with domains of {sizes} ranks left; allowed: {allowed}, which divide each"
        )
    return Roster(tuple(rank for _, ranks in sorted(domains.items()) for rank in ranks), size)


def succeed(
    placement: ExpertPlacement,
    roster: Roster,
    can_load: Sequence[bool],
    *,
    weight: Tensor | None = None,
    max_slots: int | None = None,
    refused: Collection[tuple[int, int]] = (),
) -> Succession:
    """Returns the placement for the ranks of a new group. Local, deterministic.

    Args:
        placement: over the old ranks.
        roster: the new ranks.
        can_load: for each new rank, whether it can load experts; newcomers can.
        weight: ``[layers, E]`` loads; None = all experts alike.
        max_slots: of a rank; None = as many as it takes.
        refused: (layer, expert) that could not be loaded.

    Raises:
        ConfigError: arguments do not fit, or a newcomer has nothing that it could load.
    """
    loads = torch.ones(placement.num_layers, placement.num_experts, dtype=torch.float64, device="cpu")
    if weight is not None:
        loads = placement.require_weight(weight)
    num_slots = placement.num_slots
    most = num_slots + placement.num_experts if max_slots is None else max_slots
    require(most >= num_slots, "max_slots", most, f"≥ {num_slots}, as ranks have")
    held = [
        [list(experts[r * num_slots : (r + 1) * num_slots]) if r >= 0 else [] for r in roster.ranks]
        for experts in placement.experts
    ]
    bad = [{expert for at, expert in refused if at == layer} for layer in range(placement.num_layers)]
    for width in range(num_slots, most + 1):
        layers = [_Layer(*one, width, can_load) for one in zip(held, loads.tolist(), bad, strict=True)]
        if not any(can_load) or all(one.missing <= one.refused for one in layers):
            break
    for layer in layers:
        layer.fill()
    unserved = tuple(tuple(sorted(layer.missing)) for layer in layers)
    made = dataclasses.replace(
        placement,
        experts=tuple(tuple(expert for slots in layer.slots for expert in slots) for layer in layers),
        num_ranks=len(roster.ranks),
        num_ranks_per_domain=roster.num_ranks_per_domain,
        version=placement.version + 1,
        lost_ranks=(),
        unserved=unserved if any(unserved) else (),
    )
    kept = torch.tensor([layer.kept for layer in layers], device="cpu").transpose(0, 1)
    needed = (kept == _EMPTY).nonzero().tolist()
    return Succession(made, kept, tuple(Load(r, at, layers[at].slots[r][slot], slot) for r, at, slot in needed))


class _Layer:
    """The slots of one layer while they are filled.

    Args:
        held: the experts of each rank, in the order of its slots; [] of a newcomer.
        weight: of each expert.
        refused: experts that could not be loaded.
        width: slots of each rank.
        can_load: for each rank.

    Attributes:
        slots, kept: of each rank, as in `Succession`.
        missing: experts without a slot.
    """

    def __init__(
        self, held: list[list[int]], weight: list[float], refused: set[int], width: int, can_load: Sequence[bool]
    ) -> None:
        self.slots = [experts + [_EMPTY] * (width - len(experts)) for experts in held]
        self.kept = [[*range(len(experts)), *[_EMPTY] * (width - len(experts))] for experts in held]
        self.refused, self._weight, self._can_load = refused, weight, can_load
        self._is_new = [not experts for experts in held]
        self._copies = [0] * len(weight)
        for expert in (expert for experts in held for expert in experts):
            self._copies[expert] += 1
        self.missing = {expert for expert, copies in enumerate(self._copies) if copies == 0}
        for expert in sorted(self.missing - refused, key=lambda expert: (-weight[expert], expert)):
            found = self._best_slot()
            if found is not None:
                self._put(*found, expert)
                self.missing.remove(expert)

    def fill(self) -> None:
        """Fills the slots that are left: a newcomer's with the experts of most load per replica, a survivor's with
        further replicas of its own experts.
        """
        for rank, slots in enumerate(self.slots):
            for slot, there in enumerate(slots):
                if there != _EMPTY:
                    continue
                if self._is_new[rank]:
                    self._put(rank, slot, self._fullest(slots))
                    continue
                filled = [i for i, expert in enumerate(slots) if expert != _EMPTY]
                best = max(filled, key=lambda i: (self.kept[rank][i] != _EMPTY, self._share(slots[i]), -i))
                self._put(rank, slot, slots[best])
                self.kept[rank][slot] = self.kept[rank][best]

    def _share(self, expert: int) -> float:
        """Load of one replica."""
        return self._weight[expert] / max(1, self._copies[expert])

    def _best_slot(self) -> tuple[int, int] | None:
        """The slot for an expert that is missing: on the emptiest rank that can load and has a slot to spare."""
        best: tuple[float, int, int] | None = None
        for rank, slots in enumerate(self.slots):
            if not self._can_load[rank]:
                continue
            spare = [slot for slot, expert in enumerate(slots) if expert == _EMPTY]
            spare = spare or [slot for slot, expert in enumerate(slots) if self._copies[expert] > 1]
            if not spare:
                continue
            load = sum(self._share(expert) for expert in slots if expert != _EMPTY)
            slot = min(spare, key=lambda slot: (0.0 if slots[slot] == _EMPTY else self._share(slots[slot]), slot))
            if best is None or (load, rank) < best[:2]:
                best = load, rank, slot
        return None if best is None else best[1:]

    def _put(self, rank: int, slot: int, expert: int) -> None:
        there = self.slots[rank][slot]
        if there != _EMPTY:
            self._copies[there] -= 1
        self._copies[expert] += 1
        self.slots[rank][slot], self.kept[rank][slot] = expert, _EMPTY

    def _fullest(self, slots: list[int]) -> int:
        """The expert of most load per replica; an expert that is not in `slots` yet comes first."""
        allowed = [expert for expert in range(len(self._weight)) if expert not in self.refused | self.missing]
        if not allowed:
            raise ConfigError("the experts that a new rank could load are 0; allowed: ≥ 1")
        return max(allowed, key=lambda expert: (expert not in slots, self._share(expert), -expert))
