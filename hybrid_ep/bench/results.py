"""What all ranks measured, put together: times over runs and ranks, bytes by both definitions, bandwidth."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from hybrid_ep._version import __version__
from hybrid_ep.bench.measure import RankMeasurement
from hybrid_ep.bench.plan import BenchPlan, Candidate

__all__ = ["BenchResult", "Operation", "Outcome", "summarize"]


@dataclass(frozen=True)
class Operation:
    """One operation of one candidate over all runs and ranks.

    A run is over when its slowest rank is done, so `min_us`, `median_us` and `max_us` are over the runs' slowest ranks.
    Bandwidth is the mean rank's bytes over the median run.

    Attributes:
        name: ``dispatch``, ``combine``, or a part or another form of one of them.
        min_us, median_us, max_us: over runs, µs.
        p50_us, p99_us: for each rank, over runs, µs.
        host_us: until a call returned to the host, median over runs of the slowest rank, µs.
        rows_bytes: bytes of all received rows, a rank's own included; mean over ranks.
        remote_rows_bytes: bytes of rows from other ranks only; mean over ranks.
        most_rows_bytes: bytes of all received rows of the busiest rank.
        gbps: GB/s of `rows_bytes`.
        remote_gbps: GB/s of `remote_rows_bytes`.
    """

    name: str
    min_us: float
    median_us: float
    max_us: float
    p50_us: list[float]
    p99_us: list[float]
    host_us: float
    rows_bytes: float
    remote_rows_bytes: float
    most_rows_bytes: int
    gbps: float
    remote_gbps: float


@dataclass(frozen=True)
class Outcome:
    """One candidate.

    Attributes:
        candidate: who.
        engine: what moved its tokens.
        problems: what is wrong, in words; then `operations` is empty.
        operations: what was timed.
    """

    candidate: Candidate
    engine: str
    problems: list[str]
    operations: list[Operation]


@dataclass(frozen=True)
class BenchResult:
    """A whole benchmark.

    Attributes:
        plan: what was asked for.
        num_ranks: of the group.
        device: name of the GPUs, or ``CPU``.
        versions: of hybrid_ep and torch.
        outcomes: of each candidate.
    """

    plan: BenchPlan
    num_ranks: int
    device: str
    versions: dict[str, str]
    outcomes: list[Outcome]

    @property
    def ok(self) -> bool:
        """Whether every candidate moved every row right."""
        return not any(outcome.problems for outcome in self.outcomes)

    def describe(self) -> str:
        """One line for people."""
        return f"{self.plan.mode} mode, {self.num_ranks} ranks on {self.device}: {self.plan.workload.describe()}"

    def to_json(self) -> dict[str, Any]:
        """One JSON document."""
        return {**asdict(self), "ok": self.ok}


def summarize(plan: BenchPlan, measurements: list[list[RankMeasurement]]) -> BenchResult:
    """Puts together what each rank measured of each candidate."""
    import torch

    outcomes = []
    for candidate, ranks in zip(plan.candidates, measurements, strict=True):
        problems = [problem for rank in ranks for problem in rank.problems]
        operations = [_operation(name, plan, ranks) for name in ranks[0].times]
        outcomes.append(Outcome(candidate, ranks[0].engine, problems, operations))
    versions = {"hybrid_ep": __version__, "torch": torch.__version__}
    return BenchResult(plan, len(measurements[0]), measurements[0][0].device, versions, outcomes)


def _operation(name: str, plan: BenchPlan, ranks: list[RankMeasurement]) -> Operation:
    by_rank = [rank.times[name].microseconds for rank in ranks]
    slowest = [max(run) for run in zip(*by_rank, strict=True)]
    median_us = statistics.median(slowest)
    row_bytes = plan.row_bytes(name)
    rows_bytes = row_bytes * statistics.fmean(rank.num_rows for rank in ranks)
    remote_rows_bytes = row_bytes * statistics.fmean(rank.num_remote_rows for rank in ranks)
    return Operation(
        name=name,
        min_us=min(slowest),
        median_us=median_us,
        max_us=max(slowest),
        p50_us=[_percentile(times, 50) for times in by_rank],
        p99_us=[_percentile(times, 99) for times in by_rank],
        host_us=max(statistics.median(rank.times[name].host_microseconds) for rank in ranks),
        rows_bytes=rows_bytes,
        remote_rows_bytes=remote_rows_bytes,
        most_rows_bytes=row_bytes * max(rank.num_rows for rank in ranks),
        gbps=rows_bytes / median_us / 1e3,
        remote_gbps=remote_rows_bytes / median_us / 1e3,
    )


def _percentile(values: list[float], percent: int) -> float:
    """The smallest value that is at least as large as `percent` of all (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]
