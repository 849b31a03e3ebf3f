"""A report as JUnit XML for CI."""

from __future__ import annotations

from xml.etree import ElementTree

from hybrid_ep.cluster.doctor.model import Report, Result, Severity, Status

__all__ = ["junit_suite", "to_junit"]


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
