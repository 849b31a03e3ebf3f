"""The balance that each policy reaches on a trace of loads: the numbers behind `hybrid-ep balance`.

A window is judged with the placement made from the loads of the window before, as in service. A trace of one window is
judged with its own placement.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybrid_ep.balance.moves import next_placement
from hybrid_ep.balance.placement import ExpertPlacement, balancedness
from hybrid_ep.checks import require, require_int

COLUMNS = ("policy", "balancedness, mean", "worst layer", "largest load / mean, worst", "moves of a layer and window")


@dataclass(frozen=True)
class Question:
    """The arguments of `hybrid-ep balance`.

    Attributes:
        num_replicas: P.
        num_ranks: R.
        num_ranks_per_domain: divides R.
        num_groups: of experts.
        max_moves: expert weights that the policy of few moves may load, in a layer and window.
    """

    num_replicas: int
    num_ranks: int
    num_ranks_per_domain: int
    num_groups: int
    max_moves: int


@dataclass(frozen=True)
class Outcome:
    """One policy on the whole trace.

    Attributes:
        policy: its name.
        rank_loads: ``[windows, layers, R]`` float64.
        num_moves: expert weights loaded from window to window, mean of a layer.
        placement: for the time after the trace.
    """

    policy: str
    rank_loads: Tensor
    num_moves: float
    placement: ExpertPlacement

    @property
    def balancedness(self) -> Tensor:
        """``[windows, layers]``: mean over largest load."""
        return balancedness(self.rank_loads.flatten(0, 1)).view(self.rank_loads.shape[:2])

    def to_json(self) -> dict[str, Any]:
        """Returns the outcome as JSON types."""
        return {
            "policy": self.policy,
            "balancedness_mean": float(self.balancedness.mean()),
            "balancedness_worst": float(self.balancedness.min()),
            "moves_per_layer_and_window": self.num_moves,
            "balancedness": self.balancedness.tolist(),
            "rank_loads": self.rank_loads.tolist(),
        }


def judge_policies(trace: Tensor, question: Question) -> list[Outcome]:
    """Judges no balance, the global policy, the hierarchical one where it differs, and few moves.

    Args:
        trace: ``[windows, layers, E]`` loads.
        question: sizes.

    Raises:
        ConfigError: sizes do not fit the trace.
    """
    require_int("ranks", question.num_ranks, minimum=1)
    require_int("ranks per domain", question.num_ranks_per_domain, minimum=1)
    num_domains = question.num_ranks // question.num_ranks_per_domain
    fits = num_domains * question.num_ranks_per_domain == question.num_ranks
    require(fits, "ranks per domain", question.num_ranks_per_domain, f"divisors of {question.num_ranks}")
    _, num_layers, num_experts = trace.shape
    require_int("experts of the trace", num_experts, minimum=1, multiple_of=question.num_ranks)
    per_domain = question.num_ranks_per_domain

    def placed(loads: Tensor, num_groups: int) -> ExpertPlacement:
        return ExpertPlacement.from_loads(
            loads, question.num_replicas, question.num_ranks, num_groups=num_groups, num_ranks_per_domain=per_domain
        )

    none = ExpertPlacement.contiguous(num_layers, num_experts, question.num_ranks, per_domain)
    outcomes = [_judge("none", trace, [none] * (len(trace) + 1))]
    # One group cannot be split over domains, so that a replica may be anywhere.
    every = [placed(loads, 1) for loads in trace]
    outcomes.append(_judge("global", trace, [every[0], *every]))
    hierarchical = num_domains > 1 and question.num_groups % num_domains == 0
    if hierarchical:
        every = [placed(loads, question.num_groups) for loads in trace]
        outcomes.append(_judge("hierarchical", trace, [every[0], *every]))
    few = [every[0]]
    for loads in trace:
        few.append(next_placement(few[-1], loads, max_moves=question.max_moves).placement)
    outcomes.append(_judge(f"≤ {question.max_moves} moves", trace, few))
    return outcomes


def _judge(policy: str, trace: Tensor, placements: list[ExpertPlacement]) -> Outcome:
    """`placements[w]` is in force in window w; the last one is for the time after."""
    rank_loads = torch.stack([placement.rank_loads(loads) for placement, loads in zip(placements, trace, strict=False)])
    moves = [float(b.num_moves(a).double().mean()) for a, b in itertools.pairwise(placements)]
    return Outcome(policy, rank_loads, sum(moves) / len(moves), placements[-1])


def table_rows(outcomes: list[Outcome]) -> list[list[str]]:
    """One row for each policy, as in `COLUMNS`."""
    return [
        [
            item.policy,
            f"{float(item.balancedness.mean()):.3f}",
            f"{float(item.balancedness.min()):.3f}",
            f"{1 / float(item.balancedness.min()):.2f}×",
            f"{item.num_moves:.1f}",
        ]
        for item in outcomes
    ]
