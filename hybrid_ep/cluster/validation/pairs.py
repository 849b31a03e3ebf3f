"""Bandwidth between hosts: every figure that jobs of two hosts measured, by metric."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from hybrid_ep.cluster.validation.judge import Job

__all__ = ["HostFigure", "PairFigure", "PairTable", "pair_tables"]

_FEWEST_PAIRS = 3  # from which on a host's median says something


@dataclass(frozen=True)
class PairFigure:
    """A bandwidth that a job of two hosts measured.

    Attributes:
        job: which.
        metric, value, unit, least: as in `hybrid_ep.cluster.validation.judge.JudgedMetric`; ``nic`` stands before the
            metric of such a job.
    """

    job: Job
    metric: str
    value: float
    unit: str
    least: float | None


@dataclass(frozen=True)
class HostFigure:
    """The median over all pairs that a host was in."""

    name: str
    median: float


@dataclass(frozen=True)
class PairTable:
    """One bandwidth over all pairs that were tested.

    Attributes:
        metric, unit: what.
        median: of all pairs.
        figures: the slowest first.
        hosts: those with three pairs or more, the slowest first: one that is slow with everyone stands out.
    """

    metric: str
    unit: str
    median: float
    figures: tuple[PairFigure, ...]
    hosts: tuple[HostFigure, ...]

    @property
    def has_floor(self) -> bool:
        """Whether there is something to compare it with."""
        return any(figure.least is not None for figure in self.figures)

    def share(self, value: float) -> str:
        """A value as a percentage of the median."""
        return f"{value / self.median:.0%}" if self.median else ""


def pair_tables(jobs: Iterable[Job]) -> list[PairTable]:
    """Every bandwidth (units per second: more is better) of jobs on exactly two hosts; that of most pairs first."""
    found: dict[tuple[str, str], list[PairFigure]] = defaultdict(list)
    for job in jobs:
        for metric in job.metrics if len(job.hosts) == 2 else ():
            if metric.unit.endswith("/s"):
                name = metric.name if job.kind == "pair" else f"{job.kind} {metric.name}"
                figure = PairFigure(job, name, metric.value, metric.unit, metric.least)
                found[name, metric.unit].append(figure)
    tables = [_table(metric, unit, figures) for (metric, unit), figures in found.items()]
    return sorted(tables, key=lambda table: -len(table.figures))


def _table(metric: str, unit: str, figures: list[PairFigure]) -> PairTable:
    by_host: dict[str, list[float]] = defaultdict(list)
    for figure in figures:
        for host in figure.job.hosts:
            by_host[host].append(figure.value)
    hosts = [HostFigure(host, median(values)) for host, values in by_host.items() if len(values) >= _FEWEST_PAIRS]
    slowest = sorted(figures, key=lambda figure: figure.value)
    middle = median(figure.value for figure in figures)
    return PairTable(metric, unit, middle, tuple(slowest), tuple(sorted(hosts, key=lambda host: host.median)))
