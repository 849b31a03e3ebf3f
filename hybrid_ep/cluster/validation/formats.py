"""The validation as JUnit XML and CTRF, as Markdown for a ticket or a merge request, and in a terminal.

JUnit has a suite for each node, one for findings between nodes, one for the test jobs. In a terminal what to do comes
first, in a screen or two, even for a thousand nodes.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from xml.etree import ElementTree

from rich.console import Group, RenderableType
from rich.text import Text

from hybrid_ep._version import __version__
from hybrid_ep.cluster.doctor.model import Report, Result, Severity, Status, junit_suite
from hybrid_ep.cluster.doctor.render import STYLES
from hybrid_ep.cluster.validation.cluster import MOST_TABLES, Cluster
from hybrid_ep.cluster.validation.judge import Job
from hybrid_ep.report.tables import Cell, DataTable
from hybrid_ep.report.units import shorten_names

_OF_CTRF = {"pass": "passed", "fail": "failed", "warn": "other", "unknown": "skipped"}


def to_junit(cluster: Cluster) -> str:
    """The whole file; a skipped job is skipped there, too."""
    root = ElementTree.Element("testsuites", name=cluster.title)
    root.extend(junit_suite(node.report) for node in cluster.nodes)
    if cluster.findings.results:
        root.append(junit_suite(cluster.findings))
    if cluster.jobs:
        ran = tuple(_result(job) for job in cluster.jobs if job.status != "skipped")
        suite = junit_suite(Report(__version__, "test jobs", "", "", 0.0, ran))
        skipped = [job for job in cluster.jobs if job.status == "skipped"]
        for job in skipped:
            case = ElementTree.SubElement(suite, "testcase", classname=f"doctor.{job.kind}", name=job.name)
            ElementTree.SubElement(case, "skipped", message=job.reason)
        suite.set("tests", str(len(cluster.jobs)))
        suite.set("skipped", str(len(skipped)))
        root.append(suite)
    return f"<?xml version='1.0' encoding='utf-8'?>\n{ElementTree.tostring(root, encoding='unicode')}\n"


def to_ctrf(reports: Iterable[Report], started_s: float) -> str:
    """Reports in the Common Test Report Format (ctrf.io): what is unknown is skipped, a warning is "other".

    Args:
        reports: of hosts, or between them; each is a suite.
        started_s: Unix time of the start; the end is now.
    """
    tests = [
        {
            "name": result.id,
            "status": _OF_CTRF[result.shown_as],
            "rawStatus": result.shown_as,
            "duration": 0,  # of a single check it is not known
            "suite": [report.host, result.group],
            "message": f"{result.seen}; expected: {result.expected}",
            "extra": {"source": result.source, "remedy": result.remedy},
        }
        for report in reports
        for result in report.results
    ]
    counts = Counter(test["status"] for test in tests)
    summary = {status: counts[status] for status in ("passed", "failed", "skipped", "pending", "other")}
    span = {"start": int(started_s * 1000), "stop": int(time.time() * 1000)}
    results = {
        "tool": {"name": "hybrid-ep", "version": __version__},
        "summary": {"tests": len(tests), **summary, **span},
    }
    document = {"reportFormat": "CTRF", "specVersion": "0.0.0", "generatedBy": "hybrid-ep"}
    return json.dumps({**document, "results": {**results, "tests": tests}}, indent=2) + "\n"


def _result(job: Job) -> Result:
    figures = ", ".join(f"{metric.name} {metric.text}" for metric in job.metrics)
    seen = "; ".join(part for part in (job.reason, figures, f"on {', '.join(job.hosts)}") if part)
    where = (job.expected, job.log or f"jobs/{job.name}.json", job.remedy)
    return Result(job.name, job.kind, f"{job.kind} job", Status(job.status), Severity.ERROR, seen, *where)


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
