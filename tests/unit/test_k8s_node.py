"""`hybrid-ep k8s mark-node` against an API server that keeps one node and merges patches as the real one does."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from hybrid_ep import env
from hybrid_ep.cli import main
from hybrid_ep.cluster.doctor.model import Report, Result, Severity, Status
from hybrid_ep.cluster.doctor.node import Node, Unreadable
from hybrid_ep.cluster.kubernetes import api, node
from hybrid_ep.cluster.kubernetes.api import ApiServer, ConflictError, NodeError
from hybrid_ep.cluster.kubernetes.kernel_log import keep_kernel_log
from hybrid_ep.cluster.kubernetes.metrics import Metrics, serve
from hybrid_ep.cluster.kubernetes.node import (
    ACCEPTED,
    CHANGED,
    CONDITION,
    LABEL,
    MEMORY,
    UNDER_LOAD,
    Marking,
    fault_type,
    mark_node,
)
from hybrid_ep.errors import ConfigError
from tests.prerequisites import require_programs
from tests.sim.scenario import load_scenarios

NOON = datetime.datetime(2026, 1, 2, 12, tzinfo=datetime.timezone.utc)
MERGE = "application/strategic-merge-patch+json"


class Server(ThreadingHTTPServer):
    """Node n1, as GET, PATCH and POST see it; `between` is run before a PATCH of the node is looked at."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.node: dict[str, Any] = {
            "metadata": {"name": "n1", "uid": "u1", "labels": {"zone": "a"}, "resourceVersion": "1"},
            "spec": {"taints": [{"key": "gpu", "effect": "NoSchedule"}]},
            "status": {"conditions": [{"type": "Ready", "status": "True"}]},
        }
        self.events: list[dict[str, Any]] = []
        self.between: list[Callable[[], None]] = []
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
        node = self.server.node
        if self.path.endswith("/status"):
            assert self.headers["Content-Type"] == MERGE
            assert list(body) == ["status"]
            given = {each["type"]: each for each in body["status"]["conditions"]}
            others = [each for each in node["status"]["conditions"] if each["type"] not in given]
            node["status"]["conditions"] = [*others, *given.values()]
        elif "spec" in body:
            assert self.headers["Content-Type"] == "application/merge-patch+json"
            if self.server.between:
                self.server.between.pop()()
            if body["metadata"]["resourceVersion"] != node["metadata"]["resourceVersion"]:
                return self.answer(409)
            node["spec"] |= body["spec"]
        else:
            assert self.headers["Content-Type"] == MERGE
            for name, values in body["metadata"].items():
                node["metadata"].setdefault(name, {}).update(values)
        return self.answer()

    def do_POST(self) -> None:
        assert self.path == "/api/v1/namespaces/default/events"
        self.server.events.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.answer()

    def answer(self, code: int = 200) -> None:
        allowed = self.headers["Authorization"] == "Bearer secret" and not self.path.startswith("/api/v1/nodes/n2")
        self.send_response(code if allowed else 403)
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


def conditions_of(server: Server) -> dict[str, str]:
    """Status by type, of the faults."""
    found = {each["type"]: each["status"] for each in server.node["status"]["conditions"]}
    return {name: status for name, status in found.items() if name.endswith("Fault")}


def test_fault_has_a_condition_and_events_of_its_own(server: Server) -> None:
    """True while it is there; a check that never failed has none. Each change is one event."""
    name = fault_type("gpu.check0")
    assert name == "HybridEPGpuCheck0Fault"
    seen = []
    for status in (Status.PASS, Status.FAIL, Status.FAIL, Status.UNKNOWN, Status.PASS, Status.PASS):
        mark_node(server.api, "n1", report(status, Status.PASS), NOON)
        seen.append((conditions_of(server).get(name), len(server.events)))
    assert seen == [(None, 0), ("True", 1), ("True", 1), ("Unknown", 1), ("False", 2), ("False", 2)]
    assert set(conditions_of(server)) == {name}
    came, went = server.events
    assert (came["type"], came["reason"]) == ("Warning", "HybridEPFaultConfirmed")
    assert came["message"] == "gpu.check0: 7 (expected 8). Reseat it."
    assert came["involvedObject"] == {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "u1"}
    assert (went["type"], went["reason"]) == ("Normal", "HybridEPFaultGone")


def test_warning_is_no_fault_of_the_node(server: Server) -> None:
    mark_node(server.api, "n1", report(Status.FAIL, severity=Severity.WARNING), NOON)
    assert (conditions_of(server), server.events) == ({}, [])


def test_check_that_no_longer_applies_is_no_fault(server: Server) -> None:
    mark_node(server.api, "n1", report(Status.FAIL), NOON)
    mark_node(server.api, "n1", replace(report(), not_applicable=("gpu.check0", "gpu.check1")), NOON)
    assert conditions_of(server) == {fault_type("gpu.check0"): "False"}


def test_silent_doctor_leaves_faults_and_sends_one_event(server: Server) -> None:
    mark_node(server.api, "n1", report(Status.FAIL), NOON)
    for _ in range(2):
        mark_node(server.api, "n1", NodeError("it did not end"), NOON)
    assert conditions_of(server) == {fault_type("gpu.check0"): "True"}
    assert [event["reason"] for event in server.events] == ["HybridEPFaultConfirmed", "HybridEPNoReport"]


def test_change_since_the_node_was_accepted_is_an_event(server: Server) -> None:
    seen = []
    for status, driver in (
        (Status.FAIL, "1"),
        (Status.PASS, "1"),
        (Status.PASS, "1"),
        (Status.PASS, "2"),
        (Status.PASS, "2"),
    ):
        mark_node(server.api, "n1", replace(report(status), facts={"driver": driver}), NOON, Marking(changes=True))
        types = {each["type"]: each["status"] for each in server.node["status"]["conditions"]}
        seen.append((ACCEPTED in server.node["metadata"].get("annotations", {}), types.get(CHANGED)))
    assert seen == [(False, None), (True, None), (True, "False"), (True, "True"), (True, "True")]
    assert [event["reason"] for event in server.events].count("HybridEPNodeChanged") == 1
    assert server.events[-1]["message"].startswith("drift.driver: 1 → 2 (expected as it was")
    assert server.node["metadata"]["labels"][LABEL] == "pass"  # a change is no fault


def test_taint_comes_with_a_fault_and_goes_with_a_pass(server: Server) -> None:
    others = [{"key": "gpu", "effect": "NoSchedule"}]
    ours = {"key": LABEL, "value": "fail", "effect": "NoExecute"}
    wanted = [(Status.FAIL, [*others, ours]), (Status.UNKNOWN, [*others, ours]), (Status.PASS, others)]
    for status, taints in wanted:
        mark_node(server.api, "n1", report(status), NOON, Marking(taint="NoExecute"))
        assert server.node["spec"]["taints"] == taints
    mark_node(server.api, "n1", report(Status.FAIL), NOON)
    assert server.node["spec"]["taints"] == others  # nobody asked for one


def test_taint_of_somebody_else_is_not_lost(server: Server) -> None:
    """It comes between our reading and our writing."""

    def drain() -> None:
        server.node["metadata"]["resourceVersion"] = "2"
        server.node["spec"]["taints"].append({"key": "drain", "effect": "NoSchedule"})

    server.between.append(drain)
    mark_node(server.api, "n1", report(Status.FAIL), NOON, Marking(taint="NoSchedule"))
    assert [taint["key"] for taint in server.node["spec"]["taints"]] == ["gpu", "drain", LABEL]


def test_node_that_changes_all_the_time_is_an_error(server: Server) -> None:
    server.between += [lambda: server.node["metadata"].update(resourceVersion=str(len(server.between) + 7))] * 9
    with pytest.raises(ConflictError, match="409"):
        mark_node(server.api, "n1", report(Status.FAIL), NOON, Marking(taint="NoSchedule"))


def test_fault_under_load_keeps_jobs_away_until_it_is_old(server: Server) -> None:
    under_load = Marking(UNDER_LOAD)
    labels = []
    for found, now, marking in (
        (Status.FAIL, NOON, under_load),
        (Status.PASS, NOON, Marking()),
        (Status.PASS, NOON + datetime.timedelta(days=8), Marking()),
        (Status.FAIL, NOON + datetime.timedelta(days=9), under_load),
        (Status.PASS, NOON + datetime.timedelta(days=9), under_load),
    ):
        mark_node(server.api, "n1", report(found), now, marking)
        labels.append(server.node["metadata"]["labels"][LABEL])
    assert labels == ["fail", "fail", "pass", "fail", "pass"]
    assert server.condition["status"] == "True"


def test_counters_are_remembered_by_the_node(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor gets the annotation's content as its state file, and the annotation what the doctor leaves there."""
    monkeypatch.setenv(env.NODE_NAME.name, "n1")
    monkeypatch.setattr(ApiServer, "of_this_pod", classmethod(lambda cls: server.api))
    said = json.dumps(report(Status.PASS).to_json())
    make_doctor(
        tmp_path,
        monkeypatch,
        "for word; do case $word in --state=*) place=${word#--state=};; esac; done\n"
        f"[ ! -f $place ] || cat $place >>{tmp_path}/known; printf x >>$place\necho '{said}'",
    )
    for _ in range(3):
        done = CliRunner().invoke(main, ["k8s", "mark-node", "--remember"])
        assert done.exit_code == 0, done.output
    assert (tmp_path / "known").read_text() == "x" + "xx"
    server.node["metadata"]["annotations"][MEMORY] = "damaged"
    assert CliRunner().invoke(main, ["k8s", "mark-node", "--remember"]).exit_code == 0
    assert (tmp_path / "known").read_text() == "x" + "xx"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--metrics-port", "0"], "--metrics-port without --every"),
        (["--remember", "--under-load"], "--remember with --under-load"),
        (["--taint", "Never"], "'Never' is not one of"),
    ],
)
def test_options_that_do_not_go_together(words: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.NODE_NAME.name, "n1")
    done = CliRunner().invoke(main, ["k8s", "mark-node", *words])
    assert done.exit_code == 2
    assert says in done.output


def test_active_checks_write_a_condition_of_their_own(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env.NODE_NAME.name, "n1")
    monkeypatch.setattr(ApiServer, "of_this_pod", classmethod(lambda cls: server.api))
    said = json.dumps(report(Status.FAIL).to_json())
    make_doctor(tmp_path, monkeypatch, f"echo \"$*\" >{tmp_path}/asked\necho '{said}'")
    done = CliRunner().invoke(main, ["k8s", "mark-node", "--under-load", "--taint", "NoSchedule"])
    assert done.exit_code == 1, done.output
    assert (tmp_path / "asked").read_text().endswith("doctor --json --active\n")
    assert {each["type"] for each in server.node["status"]["conditions"]} >= {UNDER_LOAD, fault_type("gpu.check0")}
    assert server.node["metadata"]["labels"][LABEL] == "fail"
    assert server.node["spec"]["taints"][-1]["key"] == LABEL


def scrape(metrics: Metrics, path: str = "/metrics") -> tuple[int, str]:
    server = serve(0, metrics)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    finally:
        server.shutdown()
        server.server_close()


def test_metrics_say_what_was_found() -> None:
    metrics = Metrics("n1", 600, clock=lambda: 1000.0)
    metrics.note(report(Status.FAIL, Status.UNKNOWN))
    code, text = scrape(metrics)
    assert code == 200
    rows = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    name = "hybrid_ep_doctor"
    assert {row: value for row, value in rows.items() if row.endswith('status="fail"}')} == {
        f'{name}_node_status{{node="n1",status="fail"}}': "1",
        f'{name}_check_status{{node="n1",check="gpu.check0",severity="error",status="fail"}}': "1",
        f'{name}_check_status{{node="n1",check="gpu.check1",severity="error",status="fail"}}': "0",
    }
    assert rows[f'{name}_last_report_timestamp_seconds{{node="n1"}}'] == "1000.0"
    assert rows[f'{name}_runs_total{{node="n1",result="report"}}'] == "1"
    kinds = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(kinds) == len(set(kinds)) == 7


def test_old_findings_are_no_metrics() -> None:
    """Neither pass nor fail; the time of the last report stays."""
    now = [1000.0]
    metrics = Metrics("n1", 600, clock=lambda: now[0])
    metrics.note(report(Status.PASS))
    now[0] += 3 * 600 + 301
    _, text = scrape(metrics)
    assert "check_status{" not in text
    assert 'node_status{node="n1",status="unknown"} 1' in text
    assert 'last_report_timestamp_seconds{node="n1"} 1000.0' in text
    assert scrape(metrics, "/healthz")[0] == 503
    metrics.note(NodeError("no report"))
    assert scrape(metrics, "/healthz")[0] == 200
    assert scrape(metrics, "/else")[0] == 404


def test_metrics_port_that_is_taken_is_named() -> None:
    server = serve(0, Metrics("n1", 1))
    with pytest.raises(ConfigError, match=f"metrics port {server.server_port} cannot be opened"):
        serve(server.server_port, Metrics("n1", 1))
    server.shutdown()
    server.server_close()


def test_kernel_log_is_kept_for_a_doctor_that_may_not_read_it(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "kmsg").write_text(
        "6,0,0,-;Linux version 6\n3,7,5000000,-;NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.\n"
    )
    place = tmp_path / "kernel.log"
    keep_kernel_log(Node(tmp_path), place)
    assert place.stat().st_mode & 0o777 == 0o644
    assert [line.message for line in Node(tmp_path, kernel_log=place).kernel_log()] == [
        "first record",
        "NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.",
    ]
    os.utime(place, (0, 0))
    with pytest.raises(Unreadable, match=r"was written .* s ago, expected at most 900"):
        Node(tmp_path, kernel_log=place).kernel_log()
    with pytest.raises(Unreadable, match=r"nowhere"):
        Node(tmp_path, kernel_log=tmp_path / "nowhere").kernel_log()


def test_every_line_that_is_a_fault_is_kept(tmp_path: Path) -> None:
    """Scenarios have a line for each kind of fault."""
    logs = [
        each.files["/dev/kmsg"] or ""
        for each in load_scenarios()
        if "/dev/kmsg" in each.files and each.finds in ("gpu.xid", "host.kernel_log")
    ]
    lines = [line.partition(";")[2] for log in logs for line in log.splitlines()[1:]]
    (tmp_path / "dev").mkdir()
    records = [f"4,{i + 1},{i},-;{line}\n" for i, line in enumerate(lines)]
    (tmp_path / "dev" / "kmsg").write_text("".join(["6,0,0,-;Linux\n", *records]))
    keep_kernel_log(Node(tmp_path), tmp_path / "kept")
    kept = [line.message for line in Node(tmp_path, kernel_log=tmp_path / "kept").kernel_log()]
    assert [line for line in lines if line not in kept] == []


def test_command_that_keeps_the_kernel_log_says_why_it_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(node: Node) -> str:
        raise Unreadable("/dev/kmsg: Operation not permitted")

    monkeypatch.setattr("hybrid_ep.cluster.kubernetes.kernel_log.kernel_records", refuse)
    done = CliRunner().invoke(main, ["k8s", "kernel-log", str(tmp_path / "kernel.log")])
    assert done.exit_code == 1
    assert "the kernel log cannot be read: /dev/kmsg: Operation not permitted" in str(done.output + done.stderr)
    monkeypatch.setattr("hybrid_ep.cluster.kubernetes.kernel_log.kernel_records", lambda node: "")
    done = CliRunner().invoke(main, ["k8s", "kernel-log", str(tmp_path / "no" / "kernel.log")])
    assert "cannot be written: No such file or directory" in str(done.output + done.stderr)


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
    monkeypatch.setattr(
        "hybrid_ep.cluster.kubernetes.command.time", SimpleNamespace(sleep=look)
    )  # subprocess sleeps, too
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
    monkeypatch.setattr(api, "_ACCOUNT", tmp_path)
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
    options = ["doctor", "--profile", "hgx-h100", "--check", "host.memlock", "--sysroot", str(tmp_path)]
    assert CliRunner().invoke(main, [*options, *accept]).exit_code == exit_code


def test_doctor_accepts_no_fault() -> None:
    options = ["doctor", "--profile", "hgx-h100", "--check", "nic.count", "--accept-unknown"]
    assert CliRunner().invoke(main, options).exit_code == 1
