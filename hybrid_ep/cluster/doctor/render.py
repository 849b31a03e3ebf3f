"""A report as a table for people and as JUnit XML for CI."""

from __future__ import annotations

from xml.etree import ElementTree

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hybrid_ep.cluster.doctor.model import Report, Result, Severity, Status

__all__ = ["STYLES", "junit_suite", "render", "to_junit"]

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
    return Text(
        f"{report.status.value}: {counts or 'nothing was checked'} in {report.duration_s:.1f} s{rest}",
        style=STYLES[report.status.value],
    )


def to_junit(report: Report) -> str:
    """The report as one JUnit file."""
    return ElementTree.tostring(junit_suite(report), encoding="unicode", xml_declaration=True) + "\n"


def junit_suite(report: Report) -> ElementTree.Element:
    """JUnit XML: a confirmed fault is a failure, an unknown is an error, a warning passes with its text as output."""
    failures = sum(result.shown_as == "fail" for result in report.results)
    errors = sum(_is_error(result) for result in report.results)
    suite = ElementTree.Element(
        "testsuite",
        name=f"hybrid-ep doctor {report.host}",
        tests=str(len(report.results)),
        failures=str(failures),
        errors=str(errors),
        time=f"{report.duration_s:.3f}",
    )
    for result in report.results:
        case = ElementTree.SubElement(suite, "testcase", classname=f"doctor.{result.group}", name=result.id)
        detail = f"seen: {result.seen}\nexpected: {result.expected}\nsource: {result.source}\nremedy: {result.remedy}"
        if result.shown_as == "fail":
            ElementTree.SubElement(case, "failure", message=result.seen).text = detail
        elif _is_error(result):
            ElementTree.SubElement(case, "error", message=result.seen).text = detail
        elif result.status is not Status.PASS:
            ElementTree.SubElement(case, "system-out").text = f"{result.shown_as}\n{detail}"
    return suite


def _is_error(result: Result) -> bool:
    return result.status is Status.UNKNOWN and result.severity is Severity.ERROR
