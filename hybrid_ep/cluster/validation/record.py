"""From what a test job printed to its result in the results folder.

A job is a program that prints one JSON document somewhere in its output: `hybrid-ep bench --json` or `hybrid-ep
validation nic-bandwidth`. It passed if it ended with 0, the document is there and reports a pass.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybrid_ep.cluster.validation.causes import telling_lines
from hybrid_ep.cluster.validation.results import JobFile, Metric

__all__ = ["CLIQUES", "judge_output", "record", "record_node", "remove_jobs", "write_job"]

CLIQUES = "-cliques"  # ends the name of a result that is no test job's: it comes from the nodes' reports

_OPERATIONS = ("dispatch", "combine")
_TIMED_OUT = 124  # exit status of timeout(1)
_KILLED = 137


def record(folder: Path, name: str, kind: str, hosts: tuple[str, ...], exit_code: int, output: str) -> JobFile:
    """Judges a job and writes its result and its log; arguments as `judge_output`."""
    (folder / "jobs").mkdir(exist_ok=True)
    job = judge_output(name, kind, hosts, exit_code, output)
    if job.log:
        (folder / job.log).write_text(output.rstrip() + "\n", encoding="utf-8")
    write_job(folder, job)
    return job


def judge_output(name: str, kind: str, hosts: tuple[str, ...], exit_code: int, output: str) -> JobFile:
    """Judges a job by its exit code and its output.

    Args:
        name, kind, hosts: as in `JobFile`.
        exit_code: of the launcher, e.g. mpirun or timeout.
        output: stdout and stderr, in whatever order.
    """
    document = next(_documents(output), None)
    metrics: tuple[Metric, ...] = ()
    if document is not None:
        metrics = tuple(_metrics(document))
        good = document["ok"] and not exit_code
        status = document.get("status", "pass" if good else "fail")
        reason = _reason(document) or ("" if good else f"ended with {exit_code}: {_why(output)}")
    elif exit_code in (_TIMED_OUT, _KILLED):
        status, reason = "fail", f"did not end in time; last said: {_why(output)}"
    elif exit_code:
        status, reason = "fail", f"ended with {exit_code}: {_why(output)}"
    else:
        status, reason = "unknown", f"ended with 0 and left no result; last said: {_last_line(output)}"
    return JobFile(name, kind, hosts, status, reason, metrics, f"jobs/{name}.log" if output.strip() else "")


def write_job(folder: Path, job: JobFile) -> None:
    """Writes ``jobs/NAME.json``."""
    (folder / "jobs").mkdir(exist_ok=True)
    text = json.dumps({**asdict(job), "log": job.log or None}, indent=2)
    (folder / "jobs" / f"{job.name}.json").write_text(text + "\n", encoding="utf-8")


def record_node(folder: Path, host: str, output: str) -> str:
    """Writes ``nodes/HOST.json`` from what the doctor printed, or why there is no report; returns its status."""
    report = next((found for found in _objects(output) if "results" in found and "status" in found), None)
    tree = report or {"unreachable": f"the doctor gave no report: {_why(output)}"}
    (folder / "nodes").mkdir(exist_ok=True)
    (folder / "nodes" / f"{host}.json").write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    return str(report["status"]) if report else str(tree["unreachable"])


def remove_jobs(folder: Path) -> int:
    """Removes results and logs of test jobs; returns how many."""
    found = [path for path in (folder / "jobs").glob("*.json") if not path.stem.endswith(CLIQUES)]
    for path in found:
        path.unlink()
        path.with_suffix(".log").unlink(missing_ok=True)
    return len(found)


def _documents(output: str) -> Iterator[dict[str, Any]]:
    """JSON objects that are a job's result."""
    yield from (found for found in _objects(output) if "ok" in found)


def _objects(output: str) -> Iterator[dict[str, Any]]:
    decoder = json.JSONDecoder()
    place = 0
    while (place := output.find("{", place)) >= 0:
        try:
            found, end = decoder.raw_decode(output, place)
        except ValueError:
            place += 1
            continue
        if isinstance(found, dict):
            yield found
        place = end


def _reason(document: dict[str, Any]) -> str:
    outcomes = document.get("outcomes", [])
    problems = [problem for outcome in outcomes for problem in outcome["problems"]]
    # Rows crossed between domains without the kernels; readers of their bandwidth must know.
    problems += [
        f"between domains by engine {outcome['engine']}"
        for outcome in outcomes
        if outcome.get("num_ranks_per_domain") and outcome["engine"] != "cuda"
    ]
    return "; ".join(problems) or str(document.get("reason", ""))


def _metrics(document: dict[str, Any]) -> Iterator[Metric]:
    """Bandwidth (of all received rows) and median time of the two operations; or what the document lists itself.

    The bench's other forms of them (routing given, cached …) stay in the log.
    """
    for outcome in document.get("outcomes", []):
        for operation in outcome["operations"]:
            if operation["name"] not in _OPERATIONS:
                continue
            yield Metric(operation["name"], operation["gbps"], "GB/s")
            yield Metric(f"{operation['name']} time", operation["median_us"], "µs")
    for metric in document.get("metrics", []):
        yield Metric(str(metric["name"]), float(metric["value"]), str(metric["unit"]))


def _why(output: str) -> str:
    """Every line that names a cause, a few at most; where none does, the last one."""
    return "; ".join(telling_lines(map(str.strip, output.splitlines()))) or _last_line(output)


def _last_line(output: str) -> str:
    """The last line that is not one of mpirun's notes, which it frames with dashes; else how the first note begins."""
    said: list[str] = []
    noted: list[str] = []
    in_note = False
    for line in map(str.strip, output.splitlines()):
        if line.startswith("-----"):
            in_note = not in_note
        elif line:
            (noted if in_note else said).append(line)
    return said[-1] if said else noted[0] if noted else "nothing"
