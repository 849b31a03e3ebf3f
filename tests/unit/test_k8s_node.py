"""`hybrid-ep k8s mark-node` against an API server that keeps one node and merges patches as the real one does."""

from __future__ import annotations

import datetime
import json
import shutil
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from hybrid_ep import env
from hybrid_ep.cli import main
from hybrid_ep.doctor.model import Report, Result, Severity, Status
from hybrid_ep.errors import ConfigError
from hybrid_ep.k8s import node
from hybrid_ep.k8s.node import CONDITION, LABEL, ApiServer, NodeError, mark_node
from tests.prerequisites import require_programs

NOON = datetime.datetime(2026, 1, 2, 12, tzinfo=datetime.timezone.utc)
MERGE = "application/strategic-merge-patch+json"


class Server(ThreadingHTTPServer):
    """Node n1, as GET and PATCH see it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.node: dict[str, Any] = {
            "metadata": {"name": "n1", "labels": {"zone": "a"}},
            "status": {"conditions": [{"type": "Ready", "status": "True"}]},
        }
        self.api = ApiServer(f"http://127.0.0.1:{self.server_port}", "secret")

    @property
    def condition(self) -> dict[str, str]:
        (found,) = (each for each in self.node["status"]["conditions"] if each["type"] == CONDITION)
        return found


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.answer()

    def do_PATCH(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.headers["Content-Type"] == MERGE
        if self.path.endswith("/status"):
            assert list(body) == ["status"]
            given = {each["type"]: each for each in body["status"]["conditions"]}
            others = [each for each in self.server.node["status"]["conditions"] if each["type"] not in given]
            self.server.node["status"]["conditions"] = [*others, *given.values()]
        else:
            self.server.node["metadata"]["labels"] |= body["metadata"]["labels"]
        self.answer()

    def answer(self) -> None:
        allowed = self.headers["Authorization"] == "Bearer secret" and self.path.startswith("/api/v1/nodes/n1")
        self.send_response(200 if allowed else 403)
        self.end_headers()
        self.wfile.write(json.dumps(self.server.node if allowed else {"message": "not yours"}).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def report(*statuses: Status, severity: Severity = Severity.ERROR) -> Report:
    results = tuple(
        Result(f"gpu.check{i}", "gpu", "t", status, severity, "7", "8", "NVML", "Reseat it.")
        for i, status in enumerate(statuses)
    )
    return Report("0", "n1", "hgx-h100", "given", 0.1, results)


@pytest.mark.parametrize(
    ("given", "status", "label", "message"),
    [
        (report(Status.PASS, Status.PASS), "True", "pass", "2 checks"),
        (report(Status.FAIL, severity=Severity.WARNING), "True", "pass", "1 checks"),
        (
            report(Status.FAIL, Status.PASS, Status.UNKNOWN),
            "False",
            "fail",
            "gpu.check0: 7 (expected 8). Reseat it.",
        ),
        (report(Status.PASS, Status.UNKNOWN), "Unknown", "unknown", "gpu.check1: 7 (expected 8). Reseat it."),
    ],
    ids=["healthy", "warning", "faulty", "unreadable"],
)
def test_node_says_what_the_doctor_found(server: Server, given: Report, status: str, label: str, message: str) -> None:
    mark_node(server.api, "n1", given, NOON)
    assert (server.condition["status"], server.condition["message"]) == (status, message)
    assert server.node["metadata"]["labels"] == {"zone": "a", LABEL: label}
    assert {"type": "Ready", "status": "True"} in server.node["status"]["conditions"]


def test_time_of_change_stays_while_the_status_does(server: Server) -> None:
    minute = datetime.timedelta(minutes=1)
    for i, status in enumerate((Status.PASS, Status.PASS, Status.FAIL)):
        mark_node(server.api, "n1", report(status), NOON + i * minute)
        heartbeat, changed = server.condition["lastHeartbeatTime"], server.condition["lastTransitionTime"]
        assert heartbeat == f"2026-01-02T12:0{i}:00Z"
        assert changed == f"2026-01-02T12:0{2 if status is Status.FAIL else 0}:00Z"


def test_long_message_is_cut(server: Server) -> None:
    mark_node(server.api, "n1", report(*[Status.FAIL] * 100), NOON)
    assert len(server.condition["message"]) == 1024


def test_refusal_says_what_the_server_said(server: Server) -> None:
    with pytest.raises(NodeError, match=r"GET /api/v1/nodes/n2: 403 Forbidden: .*not yours"):
        mark_node(server.api, "n2", report(Status.PASS), NOON)


def test_unreachable_server_is_named() -> None:
    with pytest.raises(NodeError, match=r"http://127\.0\.0\.1:1/"):
        ApiServer("http://127.0.0.1:1", "").request("GET", "/api/v1/nodes/n1")


def test_command_runs_the_doctor_with_its_options(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.NODE_NAME.name, "n1")
    monkeypatch.setattr(ApiServer, "of_this_pod", classmethod(lambda cls: server.api))
    done = CliRunner().invoke(main, ["k8s", "mark-node", "--profile", "cpu", "--check", "software.packages"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["node"] == "n1"
    assert (server.condition["status"], server.condition["message"]) == ("True", "1 checks")


def make_doctor(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Lets a shell script stand for the doctor."""
    (folder / "python").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setattr(node, "_DOCTOR_S", 0.3)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo no profile fits >&2; exit 2", "the doctor gave no report: no profile fits"),
        ("echo '{'; kill -9 $$", "the doctor gave no report: it ended with -9 and said '{'"),
        ("echo '{\"host\": 1}'", "the doctor gave no report: it ended with 0 and said"),
        ("exec sleep 60", "the doctor did not end within 0.3 s"),
        (None, "the doctor cannot be started: "),
    ],
    ids=["refuses", "killed", "speaks of something else", "hangs", "absent"],
)
def test_node_is_unknown_where_the_doctor_gives_no_report(
    server: Server, script: str | None, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that was fit stays no fit node: jobs keep away, the reason is there to read, and the command fails."""
    mark_node(server.api, "n1", report(Status.PASS), NOON)
    monkeypatch.setenv(env.NODE_NAME.name, "n1")
    monkeypatch.setattr(ApiServer, "of_this_pod", classmethod(lambda cls: server.api))
    make_doctor(tmp_path, monkeypatch, script or "")
    if script is None:
        (tmp_path / "python").unlink()
    done = CliRunner().invoke(main, ["k8s", "mark-node"])
    assert done.exit_code == 1
    assert says in done.stderr
    assert (server.condition["status"], server.condition["reason"]) == ("Unknown", "NoReport")
    assert server.condition["message"].startswith(says)
    assert server.condition["lastTransitionTime"] > "2026-01-02T12:00:00Z"
    assert server.node["metadata"]["labels"] == {"zone": "a", LABEL: "unknown"}


def test_doctor_that_cannot_be_killed_does_not_hang_the_reporter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that waits inside a driver: nobody may wait for it."""
    make_doctor(tmp_path, monkeypatch, "exec sleep 60")
    immortal: list[subprocess.Popen[str]] = []
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "kill", lambda doctor: immortal.append(doctor))
        with pytest.raises(NodeError, match="did not end"):
            node.examine_node()
    (doctor,) = immortal
    assert doctor.poll() is None
    doctor.kill()
    doctor.communicate()


def test_command_goes_on_where_the_doctor_gives_no_report(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(seconds: float) -> None:
        seen.append(server.node["metadata"]["labels"][LABEL])
        if len(seen) == 2:
            raise SystemExit(7)

    seen: list[str] = []
    monkeypatch.setenv(env.NODE_NAME.name, "n1")
    monkeypatch.setattr(ApiServer, "of_this_pod", classmethod(lambda cls: server.api))
    monkeypatch.setattr("hybrid_ep.k8s.command.time", SimpleNamespace(sleep=look))  # subprocess sleeps, too
    make_doctor(tmp_path, monkeypatch, "exit 2")
    done = CliRunner().invoke(main, ["k8s", "mark-node", "--every", "600"])
    assert done.exit_code == 7
    assert seen == ["unknown", "unknown"]


def test_pod_speaks_to_its_own_cluster_only(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the files and variables that Kubernetes gives a Pod, over TLS; another authority's server is refused."""
    require_programs("openssl")
    for name in ("own", "other"):
        make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=cluster"
        options = [*make.split(), "-addext", "subjectAltName=IP:127.0.0.1"]
        files = ["-keyout", str(tmp_path / f"{name}.key"), "-out", str(tmp_path / f"{name}.crt")]
        subprocess.run([*options, *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "own.crt", tmp_path / "own.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    (tmp_path / "token").write_text("secret\n")
    monkeypatch.setattr(node, "_ACCOUNT", tmp_path)
    monkeypatch.setenv(env.KUBERNETES_HOST.name, "127.0.0.1")
    monkeypatch.setenv(env.KUBERNETES_PORT.name, str(server.server_port))
    shutil.copy(tmp_path / "own.crt", tmp_path / "ca.crt")
    mark_node(ApiServer.of_this_pod(), "n1", report(Status.PASS), NOON)
    assert server.condition["status"] == "True"
    shutil.copy(tmp_path / "other.crt", tmp_path / "ca.crt")
    with pytest.raises(NodeError, match="CERTIFICATE_VERIFY_FAILED"):
        mark_node(ApiServer.of_this_pod(), "n1", report(Status.FAIL), NOON)
    assert server.condition["status"] == "True"


def test_outside_of_a_cluster_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env.KUBERNETES_HOST.name, raising=False)
    with pytest.raises(ConfigError, match="in a Pod with a service account"):
        ApiServer.of_this_pod()
    monkeypatch.delenv(env.NODE_NAME.name, raising=False)
    assert CliRunner().invoke(main, ["k8s", "mark-node"]).exit_code == 2


@pytest.mark.parametrize(("accept", "exit_code"), [([], 2), (["--accept-unknown"], 0)])
def test_doctor_can_accept_what_a_pod_cannot_read(accept: list[str], exit_code: int, tmp_path: Path) -> None:
    options = ["doctor", "--profile", "hgx-h100", "--check", "host.governor", "--sysroot", str(tmp_path)]
    assert CliRunner().invoke(main, [*options, *accept]).exit_code == exit_code


def test_doctor_accepts_no_fault() -> None:
    options = ["doctor", "--profile", "hgx-h100", "--check", "nic.count", "--accept-unknown"]
    assert CliRunner().invoke(main, options).exit_code == 1
