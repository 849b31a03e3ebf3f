"""The result of a check for other programs: SARIF 2.1.0 for code hosts and editors, JUnit XML for CI."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

from hybrid_ep._version import __version__
from hybrid_ep.cluster.kubernetes.check import CheckResult, known_rules
from hybrid_ep.cluster.kubernetes.manifest import Level, Problem

_SARIF_LEVEL = {Level.ERROR: "error", Level.WARNING: "warning", Level.HINT: "note"}


def to_sarif(result: CheckResult) -> str:
    """The whole document. What kustomize built is placed at its kustomization.yaml."""
    rules = [{"id": name, "shortDescription": {"text": text}} for name, text in known_rules().items()]
    notes = [{"level": "warning", "message": {"text": f"not checked: {line}"}} for line in result.unchecked]
    run = {
        "tool": {"driver": {"name": "hybrid-ep k8s check", "version": __version__, "rules": rules}},
        "invocations": [{"executionSuccessful": not notes, "toolExecutionNotifications": notes}],
        "results": [_sarif_result(problem) for problem in result.problems],
    }
    document = {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}
    return json.dumps(document, indent=2)


def _sarif_result(problem: Problem) -> dict[str, object]:
    source = Path(problem.source)
    file = source / "kustomization.yaml" if source.is_dir() else source
    place: dict[str, object] = {"artifactLocation": {"uri": file.as_posix()}}
    if problem.line:
        place["region"] = {"startLine": problem.line}
    logical = {"fullyQualifiedName": f"{problem.name} {problem.path}".strip()}
    found: dict[str, object] = {
        "ruleId": problem.rule,
        "level": _SARIF_LEVEL[problem.level],
        "message": {"text": problem.message},
        "locations": [{"physicalLocation": place, "logicalLocations": [logical]}],
    }
    if problem.silenced:
        found["suppressions"] = [{"kind": "inSource", "justification": problem.silenced}]
    return found


def to_junit(result: CheckResult) -> str:
    """A suite for each source and a case for each object; errors and warnings fail it, hints are its output."""
    root = ElementTree.Element("testsuites", name="hybrid-ep k8s check")
    sources = dict.fromkeys([*result.checked, *(problem.source for problem in result.problems)])
    for source in sources:
        suite = ElementTree.SubElement(root, "testsuite", name=source)
        of_problems = [problem.name for problem in result.problems if problem.source == source]
        names = dict.fromkeys([*result.checked.get(source, []), *of_problems])
        failures = 0
        for name in names:
            case = ElementTree.SubElement(suite, "testcase", classname=source, name=name or "build")
            found = [problem for problem in result.open if (problem.source, problem.name) == (source, name)]
            lines = [f"{p.level.value} {p.path}: {p.rule}: {p.message}" for p in found]
            if any(problem.level is not Level.HINT for problem in found):
                failures += 1
                ElementTree.SubElement(case, "failure", message=lines[0]).text = "\n".join(lines)
            elif lines:
                ElementTree.SubElement(case, "system-out").text = "\n".join(lines)
        suite.set("tests", str(len(names)))
        suite.set("failures", str(failures))
    if result.unchecked:
        count = str(len(result.unchecked))
        suite = ElementTree.SubElement(root, "testsuite", name="not checked", tests=count, errors=count)
        for line in result.unchecked:
            case = ElementTree.SubElement(suite, "testcase", classname="not checked", name=line)
            ElementTree.SubElement(case, "error", message=line)
    return f"<?xml version='1.0' encoding='utf-8'?>\n{ElementTree.tostring(root, encoding='unicode')}"
