"""The validation as JUnit XML: a suite for each node, one for findings between nodes, one for the test jobs."""

from __future__ import annotations

from xml.etree import ElementTree

from hybrid_ep._version import __version__
from hybrid_ep.cluster.doctor.model import Report, Result, Severity, Status, junit_suite
from hybrid_ep.cluster.validation.cluster import Cluster
from hybrid_ep.cluster.validation.judge import Job

__all__ = ["to_junit"]


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


def _result(job: Job) -> Result:
    figures = ", ".join(f"{metric.name} {metric.text}" for metric in job.metrics)
    seen = "; ".join(part for part in (job.reason, figures, f"on {', '.join(job.hosts)}") if part)
    where = (job.expected, job.log or f"jobs/{job.name}.json", job.remedy)
    return Result(job.name, job.kind, f"{job.kind} job", Status(job.status), Severity.ERROR, seen, *where)
