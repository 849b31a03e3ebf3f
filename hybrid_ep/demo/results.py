"""What a demo found, as data: the terminal, the pictures, the page and `--json` all show this and compute nothing.

The bytes that other methods would send are counted exactly from the same routing, as the library counts its own
traffic: bytes that a rank sends to other ranks, within the domain and between domains. For the alternatives only rows
and fp8 scales are counted. The library's measured bytes also have its metadata (routing, weights, counts). So the
comparison favours the alternatives.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from hybrid_ep.demo.lose_rank import LossResult
from hybrid_ep.demo.settings import Path, Settings
from hybrid_ep.demo.skew import SkewResult
from hybrid_ep.demo.verify import FP8_ALLOWED_RMS


@dataclass(frozen=True)
class PathResult:
    """One way through the library under one routing, over all ranks.

    Attributes:
        path: which way.
        routing: ``skewed`` or ``uniform``.
        max_error: largest |result − float64 reference|.
        rms_error: root-mean-square error as a fraction of the reference's root mean square.
        worst_of_allowed: largest error as a fraction of what its element is allowed; good up to 1.
        counts_match: every expert received exactly the tokens that were routed to it.
        milliseconds: phase → median over ranks.
    """

    path: Path
    routing: str
    max_error: float
    rms_error: float
    worst_of_allowed: float
    counts_match: bool
    milliseconds: dict[str, float]

    @property
    def problems(self) -> list[str]:
        """The faults in words; empty = good."""
        found = []
        if not self.worst_of_allowed <= 1:
            found.append(f"an error is {self.worst_of_allowed:.3g} × what is allowed")
        if self.path.dtype == "fp8" and not self.rms_error <= FP8_ALLOWED_RMS:
            found.append(f"the rms error is {self.rms_error:.2%}; allowed: {FP8_ALLOWED_RMS:.2%}")
        if not self.counts_match:
            found.append("an expert received other tokens than were routed to it")
        return [f"{self.path.title}, {self.path.dtype}, {self.routing} routing: {problem}" for problem in found]


@dataclass(frozen=True)
class WireResult:
    """Bytes that all ranks together sent in one step, and the bytes that other methods would have sent.

    Attributes:
        step: e.g. ``dispatch bf16``.
        routing: ``skewed`` or ``uniform``.
        measured: what the library counted as it sent.
        all_to_all: one copy of a row for each of its experts.
        all_gather: every row to every rank, once to each domain.
    """

    step: str
    routing: str
    measured: HopBytes
    all_to_all: HopBytes
    all_gather: HopBytes


@dataclass(frozen=True)
class DemoResult:
    """Everything that a demo found.

    Attributes:
        settings: what was asked for.
        engine: the engine that moved the tokens.
        paths: every way, every routing.
        wire: bytes of dispatch and combine through `Buffer`, every routing.
        load: routing → tokens of each expert.
        losses: of each training step.
        seconds: how long the whole demo took.
        skew: policies of balance under a skewed router; empty where it was not asked for.
        loss: what became of a job that lost a rank; None where it was not asked for.
    """

    settings: Settings
    engine: str
    paths: tuple[PathResult, ...]
    wire: tuple[WireResult, ...]
    load: dict[str, list[int]]
    losses: list[float]
    seconds: float
    skew: tuple[SkewResult, ...] = ()
    loss: LossResult | None = None

    @property
    def problems(self) -> list[str]:
        """Everything that is wrong, in words; empty = good."""
        found = [problem for result in self.paths for problem in result.problems]
        found += [problem for policy in self.skew for problem in policy.problems]
        found += [] if self.loss is None else self.loss.problems
        if not self.losses[-1] < self.losses[0]:
            found.append(f"the loss did not fall: {self.losses[0]:.3g} at first, {self.losses[-1]:.3g} at last")
        return found

    @property
    def ok(self) -> bool:
        """Whether every check passed."""
        return not self.problems

    def largest_error(self, dtype: str) -> PathResult:
        """The result with the largest error among those of a dtype."""
        return max((result for result in self.paths if result.path.dtype == dtype), key=lambda r: r.max_error)

    def to_json(self) -> dict[str, Any]:
        """One JSON document."""
        # JSON has no NaN, and a loss that went wrong is one.
        losses = [loss if math.isfinite(loss) else None for loss in self.losses]
        return {**asdict(self), "losses": losses, "ok": self.ok, "problems": self.problems}


@dataclass(frozen=True)
class HopBytes:
    """Bytes sent by all ranks together.

    Attributes:
        within_domain: to ranks of the same domain.
        between_domains: to ranks of other domains.
    """

    within_domain: int
    between_domains: int


def all_to_all_bytes(topk_idx: list[Tensor], num_experts: int, num_ranks_per_domain: int, row_bytes: int) -> HopBytes:
    """A plain all-to-all: one copy of a row for each column of its top-k, straight to the expert's rank.

    Args:
        topk_idx: for each rank, ``[T, K]`` int64, global expert or −1.
        num_experts: E, a multiple of the ranks.
        num_ranks_per_domain: divides the ranks.
        row_bytes: bytes of one row.

    Returns:
        Σ over ranks r and copies of (row_bytes where the expert's rank ≠ r), by domain. Combine sends as much back,
        with the bytes of its own rows.
    """
    num_local_experts = num_experts // len(topk_idx)
    within = between = 0
    for rank, routing in enumerate(topk_idx):
        owner = routing[routing >= 0] // num_local_experts
        same_domain = owner // num_ranks_per_domain == rank // num_ranks_per_domain
        within += int((same_domain & (owner != rank)).sum())
        between += int((~same_domain).sum())
    return HopBytes(within * row_bytes, between * row_bytes)


def all_gather_bytes(num_tokens: list[int], num_ranks_per_domain: int, row_bytes: int) -> HopBytes:
    """An all-gather at its best: every row goes once to every other domain, and from there to all ranks within it.

    Args:
        num_tokens: of each rank.
        num_ranks_per_domain: divides the ranks.
        row_bytes: bytes of one row.

    Returns:
        (D − 1) crossings between domains and D × (R/D − 1) within them for each token. The way back, a reduce-scatter,
        sends as much, with the bytes of its own rows.
    """
    num_domains = len(num_tokens) // num_ranks_per_domain
    total = sum(num_tokens) * row_bytes
    return HopBytes(total * num_domains * (num_ranks_per_domain - 1), total * (num_domains - 1))


def tokens_per_expert(topk_idx: list[Tensor], num_experts: int) -> list[int]:
    """How often the tokens of all ranks choose each expert."""
    chosen = torch.cat([routing.flatten() for routing in topk_idx])
    counts: list[int] = torch.bincount(chosen[chosen >= 0], minlength=num_experts).tolist()
    return counts
