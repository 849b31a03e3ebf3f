"""The validation as Markdown, for a ticket or a merge request."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from hybrid_ep.cluster.doctor.model import Status
from hybrid_ep.cluster.validation.cluster import MOST_TABLES, Cluster
from hybrid_ep.report.tables import DataTable

__all__ = ["to_markdown"]

_MOST_PAIRS = 10


def to_markdown(cluster: Cluster) -> str:
    """The whole report: everything that did not pass, every node that is not fit, the slowest pairs."""
    return "\n".join(_lines(cluster)) + "\n"


def _lines(cluster: Cluster) -> Iterator[str]:
    yield f"# {_text(cluster.title)}\n"
    yield f"{_text(cluster.started_text)}. **{cluster.status.value}**: {_text(cluster.headline)}.\n"
    if cluster.unfit:
        yield "## Not fit\n"
        yield from _table(
            ("node", "check", "seen", "remedy"),
            [(node.name, worst.id, worst.seen, worst.remedy) for node in cluster.unfit for worst in node.problems[:1]],
        )
    to_dos = cluster.to_dos()
    if to_dos:
        yield "## What to do\n"
        yield from _table(
            ("check", "result", "nodes", "seen", "expected", "remedy"),
            [
                (
                    *(t.result.id, t.result.shown_as, ", ".join(t.hosts) or "between nodes"),
                    *(t.seen, t.result.expected, t.result.remedy),
                )
                for t in to_dos
            ],
        )
    if cluster.findings.results:
        yield "## Between nodes\n"
        yield from _table(
            ("check", "result", "seen", "expected", "remedy"),
            [(r.id, r.shown_as, r.seen, r.expected, r.remedy) for r in cluster.findings.results],
        )
    if cluster.jobs:
        yield "## Test jobs\n"
        yield ", ".join(f"{count} {status}" for status, count in cluster.counts.items() if count) + ".\n"
        wrong = [job for job in cluster.jobs if job.status != "pass"]
        if wrong:
            yield from _table(
                ("job", "result", "hosts", "reason", "remedy"),
                [(job.name, job.status, ", ".join(job.hosts), job.reason, job.remedy) for job in wrong],
            )
    for pairs in cluster.pair_tables[:MOST_TABLES]:
        yield f"## Slowest pairs: {_text(pairs.metric)}\n"
        yield f"{len(pairs.figures)} pairs, median {pairs.median:.4g} {_text(pairs.unit)}.\n"
        rows = [
            (
                " – ".join(figure.job.hosts),
                f"{figure.value:.4g}",
                pairs.share(figure.value),
                "" if figure.least is None else f"≥ {figure.least:.4g}",
            )
            for figure in pairs.figures[:_MOST_PAIRS]
        ]
        yield from _table(("hosts", pairs.unit, "of median", "expected"), rows)
        if pairs.hosts:
            hosts = [(host.name, f"{host.median:.4g}", pairs.share(host.median)) for host in pairs.hosts[:_MOST_PAIRS]]
            yield from _table(("host, median of its pairs", pairs.unit, "of median"), hosts)
    passed = sum(node.report.status is Status.PASS for node in cluster.nodes)
    yield f"{passed} of {len(cluster.nodes)} nodes passed every check; report.json has each result."


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield from DataTable(list(map(_text, columns)), [list(map(_text, row)) for row in rows], len(columns)).to_markdown()
    yield ""


def _text(text: str) -> str:
    """One line of plain text: nothing in it is markup."""
    plain = re.sub(r"([\\`*_\[\]<>&|~#])", r"\\\1", " ".join(text.split()))
    return plain.replace("\\<", "&lt;").replace("\\>", "&gt;").replace("\\&", "&amp;").replace("\\|", "&#124;")
