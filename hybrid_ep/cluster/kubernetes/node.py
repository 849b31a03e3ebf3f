"""Writes the doctor's findings to the node's object: conditions, a label, events, and a taint if asked for.

`kubectl describe node` then shows which check failed and its remedy, and a job can avoid such nodes by the label. A
doctor that gives no report is a finding, too: the node becomes unknown, whatever its last report was.

The node's conditions hold the last report: an event is sent when one of them changes. The counters that the doctor
keeps between runs are an annotation of the node, so that no Pod needs a disk.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import gzip
import json
import re
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hybrid_ep.cluster.doctor.drift import FACTS, changes
from hybrid_ep.cluster.doctor.model import Report, Result, Severity, Status
from hybrid_ep.cluster.kubernetes.api import ApiServer, ConflictError, NodeError

CONDITION = "HybridEPFit"
UNDER_LOAD = "HybridEPFitUnderLoad"
LABEL = "hybrid-ep/doctor"
CHANGED = "HybridEPChanged"
MEMORY = "hybrid-ep/doctor-counters"
ACCEPTED = "hybrid-ep/accepted"
_DOCTOR_S = 300.0
_MESSAGE_CHARS = 1024
_MEMORY_BYTES = 64 << 10  # of the 256 KiB that Kubernetes allows for all annotations of an object
_CONFLICTS = 5  # with others who change the node's taints, before it is given up until the next run
_LOAD_HOLDS = datetime.timedelta(days=7)  # for so long a fault under load keeps the label `fail`
_MERGE = "application/strategic-merge-patch+json"
_WORDS = {
    Status.PASS: ("True", "ChecksPassed"),
    Status.FAIL: ("False", "FaultConfirmed"),
    Status.UNKNOWN: ("Unknown", "NotAllReadable"),
}
_FAULT_WORDS = {
    Status.PASS: ("False", "CheckPassed"),
    Status.FAIL: ("True", "FaultConfirmed"),
    Status.UNKNOWN: ("Unknown", "NotReadable"),
}


@dataclass(frozen=True)
class Marking:
    """What is written besides the node's condition, its label and events.

    Attributes:
        condition: `CONDITION`, or `UNDER_LOAD` for findings of the active checks.
        taint: the effect of the taint ``hybrid-ep/doctor=fail`` that an unfit node gets; empty: taints are left alone.
        memory: the doctor's state file after this run, kept in the annotation; empty: the annotation is left alone.
        changes: whether the node's facts are kept in an annotation when it first passes, and compared with it later.
    """

    condition: str = CONDITION
    taint: str = ""
    memory: bytes = b""
    changes: bool = False


def examine_node(options: Sequence[str] = (), *, limit_s: float | None = None) -> Report:
    """Runs ``hybrid-ep doctor`` in a process of its own, so that a driver that hangs does not hang the reporter.

    Args:
        options: the doctor's.
        limit_s: how long it may take; default: five minutes.

    Raises:
        NodeError: it did not end in time or gave no report.
    """
    limit_s = _DOCTOR_S if limit_s is None else limit_s
    start = "from hybrid_ep.cli import main; main()"
    command = [sys.executable, "-c", start, "doctor", "--json", *options]
    try:
        doctor = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        raise NodeError(f"the doctor cannot be started: {error}") from error
    try:
        said, complained = doctor.communicate(timeout=limit_s)
        return Report.from_json(json.loads(said))
    except subprocess.TimeoutExpired as error:
        # NOTE: not waited for, as subprocess.run would: what hangs inside a driver does not die of being killed.
        doctor.kill()
        raise NodeError(f"the doctor did not end within {limit_s:g} s") from error
    except (ValueError, KeyError, TypeError) as error:
        why = complained.strip() or f"it ended with {doctor.returncode} and said {said.strip()[:80]!r}"
        raise NodeError(f"the doctor gave no report: {why}") from error


def examine_and_remember(
    server: ApiServer, node: str, options: Sequence[str], limit_s: float | None = None
) -> tuple[Report, bytes]:
    """`examine_node` with the counters of the last run, from the node's annotation; without, where it cannot be read.

    Returns:
        the report, and the doctor's state file after the run; empty where there is none.

    Raises:
        NodeError: as `examine_node`.
    """
    try:
        annotations = server.request("GET", _path(node)).get("metadata", {}).get("annotations") or {}
    except NodeError:  # is raised when the findings are written
        return examine_node(options, limit_s=limit_s), b""
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder, "doctor.json")
        if known := _unpacked(annotations.get(MEMORY, "")):
            state.write_bytes(known)
        report = examine_node([f"--state={state}", *options], limit_s=limit_s)
        return report, state.read_bytes() if state.exists() else b""


def condition_of(
    found: Report | NodeError, known: dict[str, Any] | None, now: datetime.datetime, name: str = CONDITION
) -> dict[str, str]:
    """What was found as a node condition.

    Args:
        found: the doctor's report, or why there is none.
        known: the condition that the node has now; its time of change is kept while the status stays.
        now: with a time zone.
        name: `CONDITION` or `UNDER_LOAD`.
    """
    if isinstance(found, NodeError):
        return _condition(name, "Unknown", "NoReport", str(found), known, now)
    status, reason = _WORDS[found.status]
    lines = [
        _line(result)
        for result in found.results
        if result.shown_as in ("fail", "unknown") and result.status is found.status
    ]
    return _condition(name, status, reason, " | ".join(lines) or f"{len(found.results)} checks", known, now)


def fault_type(check_id: str) -> str:
    """The condition of one check: ``gpu.row_remap`` → ``HybridEPGpuRowRemapFault``."""
    return f"HybridEP{''.join(part.capitalize() for part in re.split(r'[._]', check_id))}Fault"


def mark_node(
    server: ApiServer,
    node: str,
    found: Report | NodeError,
    now: datetime.datetime,
    marking: Marking = Marking(),  # noqa: B008 (frozen)
) -> dict[str, str]:
    """Writes the conditions, the label ``hybrid-ep/doctor=pass|fail|unknown``, the taint and events.

    Without a report the node is unknown, whatever it was before; conditions of single faults then stay as they are.

    Returns:
        the condition that sums up.

    Raises:
        NodeError: the API server could not be reached, or refused.
    """
    read = server.request("GET", _path(node))
    known = {condition["type"]: condition for condition in read.get("status", {}).get("conditions", [])}
    condition = condition_of(found, known.get(marking.condition), now, marking.condition)
    faults = [] if isinstance(found, NodeError) else list(_fault_conditions(found, known, now))
    annotations = {MEMORY: packed} if (packed := _packed(marking.memory)) else {}
    if marking.changes and not isinstance(found, NodeError):
        accepted = _unpacked((read.get("metadata", {}).get("annotations") or {}).get(ACCEPTED, ""))
        if accepted:
            faults.append(_changed(json.loads(accepted), found, known.get(CHANGED), now))
        elif found.status is Status.PASS:
            facts = {fact.key: found.facts.get(fact.key) for fact in FACTS}
            annotations[ACCEPTED] = _packed(json.dumps(facts).encode())
    # A strategic merge joins conditions by their type, and leaves those of others alone.
    server.request("PATCH", f"{_path(node)}/status", {"status": {"conditions": [condition, *faults]}}, _MERGE)
    label = _label({**known, marking.condition: condition}, now)
    metadata: dict[str, Any] = {"labels": {LABEL: label.value}}
    if annotations:
        metadata["annotations"] = annotations
    server.request("PATCH", _path(node), {"metadata": metadata}, _MERGE)
    if marking.taint and label is not Status.UNKNOWN:  # a fault that cannot be seen any more may still be there
        _set_taint(server, node, marking.taint if label is Status.FAIL else "")
    for kind, reason, message in _changes([condition, *faults], known):
        server.request("POST", "/api/v1/namespaces/default/events", _event(read, node, kind, reason, message, now))
    return condition


def _path(node: str) -> str:
    return f"/api/v1/nodes/{quote(node)}"


def _line(result: Result) -> str:
    return f"{result.id}: {result.seen} (expected {result.expected}). {result.remedy}"


def _condition(
    name: str, status: str, reason: str, message: str, known: dict[str, Any] | None, now: datetime.datetime
) -> dict[str, str]:
    stamp = _stamp(now)
    changed = known["lastTransitionTime"] if known and known.get("status") == status else stamp
    return {
        "type": name,
        "status": status,
        "reason": reason,
        "message": _shortened(message),
        "lastHeartbeatTime": stamp,
        "lastTransitionTime": changed,
    }


def _fault_conditions(
    report: Report, known: dict[str, dict[str, Any]], now: datetime.datetime
) -> Iterator[dict[str, str]]:
    """One for each fault, and for each check that had one; True means that the fault is there."""
    for result in report.results:
        name = fault_type(result.id)
        if result.severity is Severity.ERROR and (result.status is Status.FAIL or name in known):
            status, reason = _FAULT_WORDS[result.status]
            yield _condition(name, status, reason, _line(result), known.get(name), now)
    for check_id in report.not_applicable:
        if (name := fault_type(check_id)) in known:
            message = f"{check_id}: the profile {report.profile} does not ask for it"
            yield _condition(name, "False", "NotApplicable", message, known[name], now)


def _changed(
    accepted: dict[str, Any], report: Report, known: dict[str, Any] | None, now: datetime.datetime
) -> dict[str, str]:
    """Whether the node's facts differ from those with which it was accepted."""
    changed = [result for result in changes(accepted, report.facts) if result.status is Status.FAIL]
    message = " | ".join(_line(result) for result in changed) or "as it was when it was accepted"
    status, reason = ("True", "FactsDiffer") if changed else ("False", "FactsAgree")
    return _condition(CHANGED, status, reason, message, known, now)


def _label(conditions: dict[str, dict[str, Any]], now: datetime.datetime) -> Status:
    """What jobs may rely on. A fault under load counts until it is found gone, or is too old to hold."""
    under_load = conditions.get(UNDER_LOAD, {})
    if under_load.get("status") == "False":
        seen = datetime.datetime.fromisoformat(under_load["lastHeartbeatTime"].replace("Z", "+00:00"))
        if now - seen <= _LOAD_HOLDS:
            return Status.FAIL
    status = conditions.get(CONDITION, {}).get("status")
    return next((label for label, (word, _) in _WORDS.items() if word == status), Status.UNKNOWN)


def _set_taint(server: ApiServer, node: str, effect: str) -> None:
    """Gives the node the taint, or takes it away where `effect` is empty; those of others stay.

    The list of taints is replaced as a whole, so the request holds the version that was read, and is made again where
    somebody else was faster.
    """
    for attempt in range(_CONFLICTS):
        read = server.request("GET", _path(node))
        taints = read.get("spec", {}).get("taints") or []
        wanted = [taint for taint in taints if taint["key"] != LABEL]
        wanted += [{"key": LABEL, "value": Status.FAIL.value, "effect": effect}] if effect else []
        if wanted == taints:
            return
        version = read["metadata"]["resourceVersion"]
        body = {"metadata": {"resourceVersion": version}, "spec": {"taints": wanted}}
        try:
            server.request("PATCH", _path(node), body, "application/merge-patch+json")
        except ConflictError:
            if attempt == _CONFLICTS - 1:
                raise
        else:
            return


def _changes(conditions: list[dict[str, str]], known: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """(type, reason, message) of the events: faults that came or went, and a doctor that fell silent."""
    for condition in conditions:
        name, before = condition["type"], known.get(condition["type"], {}).get("status")
        if name.endswith("Fault"):
            if condition["status"] == "True" and before != "True":
                yield "Warning", "HybridEPFaultConfirmed", condition["message"]
            elif condition["status"] == "False" and before != "False":
                yield "Normal", "HybridEPFaultGone", condition["message"]
        elif name == CHANGED:
            if condition["status"] == "True" and known.get(name, {}).get("message") != condition["message"]:
                yield "Warning", "HybridEPNodeChanged", condition["message"]
        elif condition["reason"] == "NoReport" and known.get(name, {}).get("reason") != "NoReport":
            yield "Warning", "HybridEPNoReport", condition["message"]


def _event(
    read: dict[str, Any], node: str, kind: str, reason: str, message: str, now: datetime.datetime
) -> dict[str, Any]:
    stamp = _stamp(now)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{node}.", "namespace": "default"},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Node",
            "name": node,
            "uid": read.get("metadata", {}).get("uid", node),
        },
        "type": kind,
        "reason": reason,
        "message": message,
        "source": {"component": "hybrid-ep-doctor", "host": node},
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": 1,
    }


def _stamp(now: datetime.datetime) -> str:
    return now.astimezone(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _shortened(text: str) -> str:
    return text if len(text) <= _MESSAGE_CHARS else text[: _MESSAGE_CHARS - 1] + "…"


def _packed(memory: bytes) -> str:
    """For an annotation; empty where there is nothing, or more than Kubernetes takes."""
    packed = base64.b64encode(gzip.compress(memory, mtime=0)).decode() if memory else ""
    return packed if len(packed) <= _MEMORY_BYTES else ""


def _unpacked(annotation: str) -> bytes:
    """What `_packed` took; nothing where it is damaged: a lost memory is no fault of the node."""
    try:
        return gzip.decompress(base64.b64decode(annotation, validate=True)) if annotation else b""
    except (OSError, EOFError, ValueError, zlib.error, binascii.Error):
        return b""
