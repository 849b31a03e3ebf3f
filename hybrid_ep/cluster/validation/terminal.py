"""The validation in a terminal: what to do comes first, in a screen or two, even for a thousand nodes."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from hybrid_ep.cluster.doctor.render import STYLES
from hybrid_ep.cluster.validation.cluster import MOST_TABLES, Cluster
from hybrid_ep.report.names import shorten_names
from hybrid_ep.report.tables import Cell, DataTable

__all__ = ["render"]

_MOST = 12  # rows of a table
_MOST_NAMES = 6  # hosts in a cell


def render(cluster: Cluster) -> RenderableType:
    """Headline; what to do; jobs that did not pass; the slowest pairs; one line that sums it up."""
    parts: list[RenderableType] = [Text(f"{cluster.title}, {cluster.started_text}", style="bold")]
    parts.append(Text(cluster.headline + ".", style=STYLES["fail" if cluster.unfit else "pass"]))
    parts += [*_to_dos(cluster), *_jobs(cluster), *_pairs(cluster)]
    status = cluster.status.value
    jobs = ", ".join(f"{count} {name}" for name, count in cluster.counts.items() if count) or "none"
    fit = f"{len(cluster.fit)} of {len(cluster.nodes)} nodes fit"
    parts.append(Text(f"{status}: {fit}; test jobs: {jobs}", style=STYLES[status]))
    return Group(*parts)


def _status(name: str) -> Cell:
    return Cell(name, style=STYLES[name])


def _rest(shown: int, total: int, what: str) -> list[RenderableType]:
    return [Text(f"and {total - shown} more {what}; report.html has all", style="dim")] if total > shown else []


def _to_dos(cluster: Cluster) -> list[RenderableType]:
    to_dos = cluster.to_dos()
    if not to_dos:
        return []
    rows: list[list[str | Cell]] = []
    for to_do in to_dos[:_MOST]:
        hosts = shorten_names(to_do.hosts, _MOST_NAMES) or "between nodes"
        rows.append([to_do.result.id, _status(to_do.result.shown_as), hosts, to_do.seen, to_do.result.remedy])
    table = DataTable(["check", "", "nodes", "seen", "remedy"], rows, num_text_columns=5, title="what to do")
    return [table.to_rich(), *_rest(_MOST, len(to_dos), "checks")]


def _jobs(cluster: Cluster) -> list[RenderableType]:
    wrong = [job for job in cluster.jobs if job.status in ("fail", "unknown")]
    wrong.sort(key=lambda job: job.status)
    if not wrong:
        return []
    rows: list[list[str | Cell]] = [
        [job.name, _status(job.status), shorten_names(job.hosts, _MOST_NAMES), job.reason, job.remedy]
        for job in wrong[:_MOST]
    ]
    table = DataTable(["job", "", "hosts", "reason", "remedy"], rows, num_text_columns=5, title="test jobs")
    return [table.to_rich(), *_rest(_MOST, len(wrong), "jobs")]


def _pairs(cluster: Cluster) -> list[RenderableType]:
    tables: list[RenderableType] = []
    for pairs in cluster.pair_tables[:MOST_TABLES]:
        title = f"slowest of {len(pairs.figures)} pairs: {pairs.metric}, median {pairs.median:.4g} {pairs.unit}"
        rows = []
        for figure in pairs.figures[:3]:
            least = "" if figure.least is None else f"≥ {figure.least:.4g}"
            rows.append([" – ".join(figure.job.hosts), f"{figure.value:.4g}", pairs.share(figure.value), least])
        tables.append(DataTable(["hosts", pairs.unit, "of median", "expected"], rows, title=title).to_rich())
    return tables
