"""What a demo found, as data: the terminal, the pictures, the page and `--json` all show this and compute nothing."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from hybrid_ep.demo.lose_rank import LossResult
from hybrid_ep.demo.settings import Path, Settings
from hybrid_ep.demo.skew import SkewResult
from hybrid_ep.demo.traffic import HopBytes
from hybrid_ep.demo.verify import FP8_ALLOWED_RMS

__all__ = ["DemoResult", "PathResult", "WireResult"]


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
