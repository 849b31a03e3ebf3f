"""The doctor's findings as a condition and a label of the Kubernetes node, for people and for schedulers.

`kubectl describe node` then shows which check failed and its remedy, and a job keeps away from such nodes by the label.
A doctor that gives no report is a finding, too: what it said before no longer holds, so the node becomes unknown.

Speaks to the API server as any Pod may: its service account's token, one GET and two PATCHes; nothing else is needed.
"""

from __future__ import annotations

import datetime
import json
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hybrid_ep import env
from hybrid_ep.doctor.model import Report, Status
from hybrid_ep.errors import ConfigError, HybridEPError

__all__ = ["CONDITION", "LABEL", "ApiServer", "NodeError", "condition_of", "examine_node", "mark_node"]

CONDITION = "HybridEPFit"
LABEL = "hybrid-ep/doctor"
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_REQUEST_S = 30.0
_DOCTOR_S = 300.0
_MESSAGE_CHARS = 1024
_WORDS = {
    Status.PASS: ("True", "ChecksPassed"),
    Status.FAIL: ("False", "FaultConfirmed"),
    Status.UNKNOWN: ("Unknown", "NotAllReadable"),
}


class NodeError(HybridEPError):
    """The node could not be examined, or the API server could not be reached or refused."""


@dataclass(frozen=True)
class ApiServer:
    """Where and how to reach the API server.

    Attributes:
        url: without a path.
        token: of the service account.
        context: knows the cluster's certificate authority; None for plain http.
    """

    url: str
    token: str
    context: ssl.SSLContext | None = None

    @classmethod
    def of_this_pod(cls) -> ApiServer:
        """From what Kubernetes gives every Pod.

        Raises:
            ConfigError: this is no Pod, or it has no service account.
        """
        host, port = env.KUBERNETES_HOST.get(), env.KUBERNETES_PORT.get()
        if not host or not (_ACCOUNT / "token").is_file():
            raise ConfigError(
                f"{env.KUBERNETES_HOST.name}={host!r} and {_ACCOUNT}/token do not say where the cluster is; "
                "allowed: in a Pod with a service account"
            )
        address = f"[{host}]" if ":" in host else host
        context = ssl.create_default_context(cafile=str(_ACCOUNT / "ca.crt"))
        return cls(f"https://{address}:{port}", (_ACCOUNT / "token").read_text().strip(), context)

    def request(self, method: str, path: str, body: object = None, kind: str = "application/json") -> Any:
        """Sends one request and returns the parsed answer.

        Raises:
            NodeError: it could not be reached, or refused.
        """
        headers = {"Authorization": f"Bearer {self.token}", "Accept": "application/json", "Content-Type": kind}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=_REQUEST_S, context=self.context) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            said = error.read(500).decode(errors="replace")
            raise NodeError(f"{method} {path}: {error.code} {error.reason}: {said}") from error
        except (OSError, ValueError) as error:
            raise NodeError(f"{method} {self.url}{path}: {error}") from error


def examine_node(options: Sequence[str] = ()) -> Report:
    """Runs ``hybrid-ep doctor`` in a process of its own, so that a driver that hangs does not hang the reporter.

    Raises:
        NodeError: it did not end in time or gave no report.
    """
    start = "from hybrid_ep.cli import main; main()"
    command = [sys.executable, "-c", start, "doctor", "--json", *options]
    try:
        doctor = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        raise NodeError(f"the doctor cannot be started: {error}") from error
    try:
        said, complained = doctor.communicate(timeout=_DOCTOR_S)
        return Report.from_json(json.loads(said))
    except subprocess.TimeoutExpired as error:
        # NOTE: not waited for, as subprocess.run would: what hangs inside a driver does not die of being killed.
        doctor.kill()
        raise NodeError(f"the doctor did not end within {_DOCTOR_S:g} s") from error
    except (ValueError, KeyError, TypeError) as error:
        why = complained.strip() or f"it ended with {doctor.returncode} and said {said.strip()[:80]!r}"
        raise NodeError(f"the doctor gave no report: {why}") from error


def condition_of(found: Report | NodeError, known: dict[str, Any] | None, now: datetime.datetime) -> dict[str, str]:
    """What was found as a node condition.

    Args:
        found: the doctor's report, or why there is none.
        known: the condition that the node has now; its time of change is kept while the status stays.
        now: with a time zone.
    """
    if isinstance(found, NodeError):
        status, reason, message = "Unknown", "NoReport", str(found)
    else:
        status, reason = _WORDS[found.status]
        lines = [
            f"{result.id}: {result.seen} (expected {result.expected}). {result.remedy}"
            for result in found.results
            if result.shown_as in ("fail", "unknown") and result.status is found.status
        ]
        message = " | ".join(lines) or f"{len(found.results)} checks"
    stamp = now.astimezone(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    changed = known["lastTransitionTime"] if known and known.get("status") == status else stamp
    return {
        "type": CONDITION,
        "status": status,
        "reason": reason,
        "message": message if len(message) <= _MESSAGE_CHARS else message[: _MESSAGE_CHARS - 1] + "…",
        "lastHeartbeatTime": stamp,
        "lastTransitionTime": changed,
    }


def mark_node(server: ApiServer, node: str, found: Report | NodeError, now: datetime.datetime) -> dict[str, str]:
    """Writes the condition and the label ``hybrid-ep/doctor=pass|fail|unknown``; returns the condition.

    Without a report the node is unknown, whatever it was before.

    Raises:
        NodeError: the API server could not be reached, or refused.
    """
    path = f"/api/v1/nodes/{quote(node)}"
    conditions = server.request("GET", path).get("status", {}).get("conditions", [])
    known = next((condition for condition in conditions if condition["type"] == CONDITION), None)
    condition = condition_of(found, known, now)
    label = Status.UNKNOWN if isinstance(found, NodeError) else found.status
    # A strategic merge joins conditions by their type, and leaves those of others alone.
    merge = "application/strategic-merge-patch+json"
    server.request("PATCH", f"{path}/status", {"status": {"conditions": [condition]}}, merge)
    server.request("PATCH", path, {"metadata": {"labels": {LABEL: label.value}}}, merge)
    return condition
