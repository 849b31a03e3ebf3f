"""`next_placement`: a placement that follows the loads, and needs few experts' weights to be loaded.

The placement changes step by step. Each step is the one with the largest gain for each expert that must be loaded.
There are two kinds of steps:

    replace   a slot whose expert has other replicas takes another expert     1 load
    swap      the most loaded rank and another exchange a slot each           2 loads

A step is taken if the largest load of a rank becomes smaller, or if it stays and the loads of the other ranks come
closer together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hybrid_ep.balance.placement import ExpertPlacement
from hybrid_ep.balance.rebalance import Floats, Ints
from hybrid_ep.checks import require, require_instance, require_int

_SPREAD_WEIGHT = 1e-3  # what the spread of the other ranks counts beside the largest load
_LEAST_GAIN = 1e-6  # of the mean load


class NextPlacement(NamedTuple):
    """A placement, what it costs to get there, and what is left.

    Attributes:
        placement: its version is one more than that of the present one.
        num_moves: ``[layers]`` int64, expert weights that ranks must load.
        balancedness: ``[layers]`` float64 under the given loads; 1 − this is the imbalance that is left.
    """

    placement: ExpertPlacement
    num_moves: Tensor
    balancedness: Tensor


def next_placement(present: ExpertPlacement, weight: Tensor, *, max_moves: int) -> NextPlacement:
    """Improves a placement for new loads by few moves. Local, and the same on every rank that passes the same.

    If each expert has all its replicas in one domain, they stay in that domain.

    Args:
        present: the placement in use.
        weight: ``[layers, E]`` loads.
        max_moves: expert weights that may be loaded in each layer, ≥ 0.

    Raises:
        ConfigError: `weight` does not fit the placement, `max_moves` is negative, or the placement has lost ranks or
            experts that are not served.
    """
    require_int("max_moves", max_moves, minimum=0)
    require_instance("present", present, ExpertPlacement, "ExpertPlacement")
    require(not present.lost_ranks, "lost ranks of the placement", list(present.lost_ranks), "none")
    require(not present.unserved, "unserved experts of the placement", list(present.unserved), "none")
    loads = present.require_weight(weight).numpy()
    slots = present.phy2log.view(present.num_layers, present.num_ranks, present.num_slots).numpy().copy()
    for layer, experts in enumerate(slots):
        _Layer(loads[layer], experts, present.num_ranks_per_domain).improve(max_moves)
    placement = present.replaced_by(tuple(map(tuple, slots.reshape(present.num_layers, -1).tolist())))
    return NextPlacement(placement, placement.num_moves(present), placement.balancedness(weight))


class _Layer:
    """One layer while it changes.

    Args:
        loads: ``[E]``.
        slots: ``[R, S]`` experts; changed in place.
        num_ranks_per_domain: ranks of a domain.
    """

    def __init__(self, loads: Floats, slots: Ints, num_ranks_per_domain: int) -> None:
        self.loads, self.slots = loads, slots
        num_ranks = len(slots)
        self.copies = np.zeros((len(loads), num_ranks))  # of expert e on rank r
        np.add.at(self.copies, (slots, np.arange(num_ranks)[:, None]), 1)
        in_domain = self.copies.reshape(len(loads), -1, num_ranks_per_domain).any(2)
        closed = bool((in_domain.sum(1) == 1).all())
        self.may = np.repeat(in_domain, num_ranks_per_domain, 1) if closed else np.ones(self.copies.shape, bool)

    def improve(self, max_moves: int) -> None:
        left = max_moves
        while left > 0:
            count = self.copies.sum(1)
            load = (self.loads / count) @ self.copies
            now, least = float(self._badness(load[None])[0]), _LEAST_GAIN * float(load.mean())
            fullest = int(load.argmax())
            replace = self._best_replace(count, load, fullest, now)
            swap = self._best_swap(count, load, fullest, now) if left >= 2 else None
            gain, change = max(
                (step for step in (replace, swap) if step is not None), key=lambda step: step[0], default=(0.0, [])
            )
            if gain <= least:
                return
            for rank, slot, expert in change:
                self.copies[self.slots[rank, slot], rank] -= 1
                self.copies[expert, rank] += 1
                self.slots[rank, slot] = expert
            left -= len(change)

    @staticmethod
    def _badness(load: Floats) -> Floats:
        """``[n, R]`` loads → what is to be made small, ``[n]``."""
        bad: Floats = load.max(1) + _SPREAD_WEIGHT * load.std(1)
        return bad

    def _best_replace(self, count: Floats, load: Floats, fullest: int, now: float) -> _Step | None:
        """The best replacement of a replica whose expert has others.

        On the most loaded rank any expert may replace it, on another rank an expert of the most loaded rank.
        """
        rank, slot = np.nonzero(count[self.slots] > 1)
        wanted = np.unique(self.slots[fullest])
        everyone = np.arange(len(self.loads))
        pairs: list[npt.NDArray[np.int64]] = []
        for here, candidates in ((rank == fullest, everyone), (rank != fullest, wanted)):
            index, expert = np.meshgrid(np.nonzero(here)[0], candidates, indexing="ij")
            pairs.append(np.stack([index.ravel(), expert.ravel()]))
        index, expert = np.concatenate(pairs, 1)
        rank, slot = rank[index], slot[index]
        fits = (self.copies[expert, rank] == 0) & self.may[expert, rank]
        rank, slot, expert = rank[fits], slot[fits], expert[fits]
        if not rank.size:
            return None
        gone = self.slots[rank, slot]
        at = np.eye(len(load))[rank]
        new = load + self._change(gone, count, -1, at) + self._change(expert, count, 1, at)
        bad = self._badness(new)
        best = int(bad.argmin())
        return now - float(bad[best]), [(int(rank[best]), int(slot[best]), int(expert[best]))]

    def _change(self, expert: Ints, count: Floats, by: int, at: Floats) -> Floats:
        """Change of the ranks' loads, ``[n, R]``, when an expert gets one replica more or less on a rank."""
        before = (self.loads / count)[expert][:, None] * self.copies[expert]
        after = (self.loads[expert] / (count[expert] + by))[:, None] * (self.copies[expert] + by * at)
        change: Floats = after - before
        return change

    def _best_swap(self, count: Floats, load: Floats, fullest: int, now: float) -> _Step | None:
        share = self.loads / count
        mine, rank, slot = (
            part.ravel()
            for part in np.meshgrid(*map(np.arange, (self.slots.shape[1], *self.slots.shape)), indexing="ij")
        )
        out, back = self.slots[fullest, mine], self.slots[rank, slot]
        fits = (share[out] > share[back]) & (self.copies[out, rank] == 0) & (self.copies[back, fullest] == 0)
        fits &= self.may[out, rank] & self.may[back, fullest]
        mine, rank, slot, out, back = (part[fits] for part in (mine, rank, slot, out, back))
        if not rank.size:
            return None
        moved = (share[out] - share[back])[:, None]
        new = load + moved * (np.eye(len(load))[rank] - np.eye(len(load))[fullest])
        bad = self._badness(new)
        best = int(bad.argmin())
        change = [(fullest, int(mine[best]), int(back[best])), (int(rank[best]), int(slot[best]), int(out[best]))]
        return (now - float(bad[best])) / 2, change


_Step = tuple[float, list[tuple[int, int, int]]]  # gain for a load; (rank, slot, new expert) of each load
