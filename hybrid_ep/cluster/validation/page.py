"""The validation as one HTML file that loads nothing else.

What must be readable without JavaScript is written as HTML: summary, what to do, findings, jobs, slowest pairs,
topology. page.js draws the matrix and the heat map from one block of JSON, because these grow with nodes × checks and
hosts². This JSON has every text once, and a cell is two indices, so the file stays small for a thousand nodes.
"""

from __future__ import annotations

import base64
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from hybrid_ep._version import __version__
from hybrid_ep.cluster.doctor.model import Result, Severity, Status
from hybrid_ep.cluster.doctor.registry import GROUPS
from hybrid_ep.cluster.validation.cluster import MOST_TABLES, Cluster, Node
from hybrid_ep.cluster.validation.culprits import GROUP
from hybrid_ep.cluster.validation.judge import Job, PairTable
from hybrid_ep.cluster.validation.results import read_log_tail
from hybrid_ep.report.page import CSS

_MOST_PAIRS, _MOST_HOSTS = 8, 4
_MOST_PICTURES = 6
_MOST_JOBS = 20  # that passed or were skipped; of those that did not, twenty times as many
_LOG_BYTES = 400_000  # of all tails together
_LETTERS = {"pass": "p", "fail": "f", "warn": "w", "unknown": "u"}


def to_html(cluster: Cluster, folder: Path) -> str:
    """Returns the page; `folder` is where the jobs' logs are."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    jobs = _shown_jobs(cluster)
    return environment.from_string(_file("page.html")).render(
        cluster=cluster,
        version=__version__,
        css=Markup(CSS + _file("page.css")),
        script=Markup(_file("page.js")),
        data=_script_text(_data(cluster)),
        cards=_cards(cluster),
        to_dos=cluster.to_dos(),
        pair_tables=cluster.pair_tables[:MOST_TABLES],
        most_pairs=_MOST_PAIRS,
        most_hosts=_MOST_HOSTS,
        jobs=list(_with_tails(jobs, folder)),
        num_jobs_left_out=len(cluster.jobs) - len(jobs),
        left_out=_left_out(cluster, jobs),
        pictures=_pictures(cluster),
        most_pictures=_MOST_PICTURES,
    )


def _file(name: str) -> str:
    return resources.files("hybrid_ep.cluster.validation").joinpath(name).read_text(encoding="utf-8")


def _script_text(tree: Any) -> Markup:
    """JSON for a script element: no text in it can end the element, because it has no "<"."""
    text = json.dumps(tree, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c"))


def _cards(cluster: Cluster) -> list[tuple[str, str, str]]:
    """The numbers at the head of the page: text, meaning, style."""
    decisive = [
        result.status for node in cluster.nodes for result in node.report.results if result.severity is Severity.ERROR
    ]
    counts = {status: decisive.count(status) for status in Status}
    warnings = sum(result.shown_as == "warn" for node in cluster.nodes for result in node.report.results)
    findings = [result for result in cluster.findings.results if result.status is not Status.PASS]
    jobs = cluster.counts
    ran = jobs["pass"] + jobs["fail"] + jobs["unknown"]
    cards = [
        (cluster.status.value, f"all in all; exit status {cluster.status.exit_code}", _style(cluster.status)),
        (f"{len(cluster.fit)} of {len(cluster.nodes)}", "nodes are fit for test jobs", _good(not cluster.unfit)),
        (
            f"{counts[Status.FAIL]:,}",
            f"faults on nodes; {counts[Status.UNKNOWN]:,} unknown, {warnings:,} warnings",
            _good(not counts[Status.FAIL]),
        ),
        (
            f"{len(cluster.findings.results) - len(findings)} of {len(cluster.findings.results)}",
            "comparisons between nodes passed",
            _good(not findings),
        ),
    ]
    if cluster.jobs:
        skipped = f"; {jobs['skipped']:,} skipped" if jobs["skipped"] else ""
        cards.append((f"{jobs['pass']:,} of {ran:,}", f"test jobs passed{skipped}", _good(jobs["pass"] == ran)))
    return cards


def _style(status: Status) -> str:
    return {Status.PASS: "good", Status.FAIL: "bad", Status.UNKNOWN: ""}[status]


def _good(good: bool) -> str:
    return "good" if good else "bad"


# ---- jobs ----


def _shown_jobs(cluster: Cluster) -> list[Job]:
    """What did not pass, then jobs of the whole group, then the rest, within a limit of bytes."""
    wrong = [job for job in cluster.jobs if job.status in ("fail", "unknown")]
    rest = [job for job in cluster.jobs if job.status not in ("fail", "unknown")]
    rest.sort(key=lambda job: job.kind != "group")
    wrong.sort(key=lambda job: job.status)
    return wrong[: 20 * _MOST_JOBS] + rest[:_MOST_JOBS]


def _left_out(cluster: Cluster, shown: list[Job]) -> str:
    counts = cluster.counts
    for job in shown:
        counts[job.status] -= 1
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count)


def _with_tails(jobs: list[Job], folder: Path) -> Iterator[tuple[Job, str]]:
    bytes_left = _LOG_BYTES
    for job in jobs:
        tail = read_log_tail(folder, job.log) if job.log and bytes_left > 0 else ""
        bytes_left -= len(tail)
        yield job, tail


# ---- topology ----


@dataclass(frozen=True)
class _Picture:
    """One topology, and the nodes that look like it."""

    hosts: tuple[str, ...]
    base64: str


def _pictures(cluster: Cluster) -> list[_Picture]:
    """Every different picture, the most common first. Nodes sent them, so they are shown as images: no script runs."""
    found: dict[str, list[str]] = defaultdict(list)
    for node in cluster.nodes:
        svg = node.report.facts.get("topology_svg")
        if isinstance(svg, str) and svg.startswith("<svg"):
            found[svg].append(node.name)
    common = sorted(found.items(), key=lambda item: -len(item[1]))
    return [_Picture(tuple(hosts), base64.b64encode(svg.encode()).decode()) for svg, hosts in common]


# ---- what page.js draws from ----


class _Index:
    """Gives each different value its number, in the order of arrival."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def __call__(self, value: Any) -> int:
        return self.numbers.setdefault(value, len(self.numbers))


def _data(cluster: Cluster) -> dict[str, Any]:
    """Nodes, checks and pairs.

    Returns:
        ``texts``; ``checks``, the columns; ``wants``, [expected, source, remedy] as numbers of texts; ``shapes``, a
        number of `wants` for each column; ``nodes``, each with a letter of its status and the text that was seen for
        each column, and its shape; ``pairs``, for each bandwidth the hosts' numbers and the values, slowest first.
    """
    texts, wants, shapes = _Index(), _Index(), _Index()
    columns = _columns(cluster)
    nodes = [_node_data(node, list(columns), texts, wants, shapes) for node in cluster.nodes]
    number = {node.name: index for index, node in enumerate(cluster.nodes)}
    return {
        "texts": list(texts.numbers),
        "checks": [{"id": check.id, "group": check.group, "title": check.title} for check in columns.values()],
        "wants": list(wants.numbers),
        "shapes": list(shapes.numbers),
        "nodes": nodes,
        "pairs": [_pairs_data(pairs, number) for pairs in cluster.pair_tables],
    }


def _columns(cluster: Cluster) -> dict[str, Result]:
    """Every check of any node, by group in the doctor's order; groups that it does not know come last."""
    found: dict[str, Result] = {}
    for node in cluster.nodes:
        for result in node.report.results:
            found.setdefault(result.id, result)
    order = {group: index for index, group in enumerate(("node", GROUP, *GROUPS))}
    return dict(sorted(found.items(), key=lambda item: (order.get(item[1].group, len(order)), item[1].group)))


def _node_data(node: Node, columns: list[str], texts: _Index, wants: _Index, shapes: _Index) -> dict[str, Any]:
    by_id = {result.id: result for result in node.report.results}
    not_applicable = set(node.report.not_applicable)
    letters, seen, shape = "", [], []
    for check_id in columns:
        result = by_id.get(check_id)
        if result is None:
            letters += "n" if check_id in not_applicable else "-"
            seen.append(0)
            shape.append(0)
        else:
            letters += _LETTERS[result.shown_as]
            seen.append(texts(result.seen))
            shape.append(wants((texts(result.expected), texts(result.source), texts(result.remedy))))
    return {
        "name": node.name,
        "platform": node.platform,
        "domain": node.domain,
        "fit": node.is_fit,
        "status": letters,
        "seen": seen,
        "shape": shapes(tuple(shape)),
    }


def _pairs_data(pairs: PairTable, number: dict[str, int]) -> dict[str, Any]:
    figures = [figure for figure in pairs.figures if all(host in number for host in figure.job.hosts)]
    return {
        "metric": pairs.metric,
        "unit": pairs.unit,
        "median": pairs.median,
        "a": [number[figure.job.hosts[0]] for figure in figures],
        "b": [number[figure.job.hosts[1]] for figure in figures],
        "v": [figure.value for figure in figures],
    }
