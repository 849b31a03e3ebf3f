"""A report as a table for people."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hybrid_ep.cluster.doctor.model import Report, Result, Status

# How a terminal shows what `Result.shown_as` says.
STYLES = {"pass": "green", "fail": "bold red", "warn": "yellow", "unknown": "magenta"}


def render(report: Report) -> RenderableType:
    """Table of all results, the remedies of those that did not pass, and one line that sums it up."""
    title = Text(f"{report.host}: profile {report.profile} ({report.profile_source})")
    table = Table(title=title, title_justify="left")
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("seen")
    table.add_column("expected")
    for result in report.results:
        style = STYLES[result.shown_as]
        table.add_row(result.id, Text(result.shown_as, style=style), Text(result.seen), Text(result.expected))
    return Group(table, *_remedies(report.results), _summary(report))


def _remedies(results: tuple[Result, ...]) -> list[Text]:
    wrong = [result for result in results if result.status is Status.FAIL]
    return [Text.assemble((result.id, STYLES[result.shown_as]), f": {result.remedy}") for result in wrong]


def _summary(report: Report) -> Text:
    shown = [result.shown_as for result in report.results]
    counts = ", ".join(f"{shown.count(name)} {name}" for name in STYLES if name in shown)
    rest = f"; {len(report.not_applicable)} checks do not apply to this profile" if report.not_applicable else ""
    if report.profile == "cpu":
        rest += "; no GPU was expected (--profile NAME expects some)"
    return Text(
        f"{report.status.value}: {counts or 'nothing was checked'} in {report.duration_s:.1f} s{rest}",
        style=STYLES[report.status.value],
    )
