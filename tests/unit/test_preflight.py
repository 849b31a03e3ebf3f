"""`hybrid-ep preflight`: which gang a host belongs to, how hosts meet and blame one of them, and the report as CTRF."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner

from hybrid_ep import env
from hybrid_ep.cli import main
from hybrid_ep.cluster import preflight
from hybrid_ep.cluster.doctor.drift import changes
from hybrid_ep.cluster.doctor.model import Result, Status
from hybrid_ep.cluster.preflight import Gang, find_gang
from hybrid_ep.cluster.validation.formats import to_ctrf
from hybrid_ep.errors import ConfigError
from tests.sim.cluster import make_report, make_result

SCHEMA = json.loads((Path(__file__).resolve().parents[1] / "data" / "ctrf.schema.json").read_text())
LWS = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "a.b"}
PET = {"PET_NNODES": "4", "PET_NODE_RANK": "3", "PET_MASTER_ADDR": "t-node-0-0.t"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "10.0.0.1"}
MPIRUN = {f"OMPI_COMM_WORLD_{name}": value for name, value in (("RANK", "1"), ("SIZE", "2"), ("LOCAL_RANK", "0"))}
SRUN = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "MASTER_ADDR": "n1"}
GANG = {"expected_count": "2", "peers": "b;10.0.0.2;1\na;10.0.0.1;0;nccl", "master_addr": "", "master_port": "29600"}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in env.VARIABLES:
        if not variable.name.startswith("HYBRID_EP"):
            monkeypatch.delenv(variable.name, raising=False)


@pytest.mark.parametrize(
    ("variables", "options", "gang"),
    [
        ({}, {}, (1, 0, "", 29500)),
        (LWS, {}, (2, 1, "a.b", 29500)),
        (PET, {}, (4, 3, "t-node-0-0.t", 29500)),
        (TORCHRUN, {}, (2, 1, "10.0.0.1", 29500)),
        ({**MPIRUN, "MASTER_ADDR": "w0", "MASTER_PORT": "1234"}, {}, (2, 1, "w0", 1234)),
        (SRUN, {}, (2, 0, "n1", 29500)),
        (LWS, {"nodes": 3, "node_rank": 2, "address": "h", "port": 99}, (3, 2, "h", 99)),
        ({"JOB_COMPLETION_INDEX": "1"}, {"nodes": 2}, (2, 1, "job-0.svc.ns", 29500)),
        ({"GANG_ID": "g", "POD_NAME": "b"}, {}, (2, 1, "10.0.0.1", 29600)),
    ],
    ids=["alone", "lws", "trainer", "torchrun", "mpirun", "srun", "options", "indexed job", "nvsentinel"],
)
def test_what_has_started_a_host_says_its_gang(
    variables: dict[str, str],
    options: dict[str, Any],
    gang: tuple[Any, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: "job-1.svc.ns")
    for name, content in GANG.items():
        (tmp_path / name).write_text(content)
    for name, value in variables.items() | ({("GANG_CONFIG_DIR", str(tmp_path))} if "GANG_ID" in variables else set()):
        monkeypatch.setenv(name, value)
    found = find_gang(**options)
    assert (found.num_nodes, found.rank, found.address, found.port) == gang
    assert (found.id, found.names) == (("g", ("a", "b")) if "GANG_ID" in variables else ("", ()))


@pytest.mark.parametrize(
    ("variables", "files", "said"),
    [
        ({"LWS_GROUP_SIZE": "2"}, {}, "2 nodes, this one is -1, the first is at ''"),
        ({**TORCHRUN, "LOCAL_RANK": "1"}, {}, "several processes on this host; allowed: one on each"),
        ({"POD_NAME": "c"}, GANG, "POD_NAME is 'c'; allowed: a Pod that .* lists: a, b"),
        ({"POD_NAME": "a"}, {**GANG, "expected_count": "3"}, "lists 2 of 3 Pods after 0.1 s: b, a"),
        ({"POD_NAME": "a"}, {**GANG, "peers": "a;10.0.0.1"}, "allowed: lines Pod;address;rank"),
        ({"POD_NAME": "a"}, {"expected_count": ""}, r"lists 0 of \? Pods after 0.1 s: none"),
    ],
)
def test_half_a_gang_is_refused(
    variables: dict[str, str], files: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    for name, value in {**variables, **({"GANG_CONFIG_DIR": str(tmp_path)} if files else {})}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        find_gang(limit_s=0.1)


def meet(num_hosts: int, bad: set[str], monkeypatch: pytest.MonkeyPatch, *, absent: int = -1) -> list[list[Result]]:
    """A gang of threads on this machine, whose jobs fail with the bad hosts; what each host is told of the gang."""
    jobs: dict[str, set[str]] = {}
    here = threading.local()
    lock = threading.Lock()

    def run(words: Sequence[str], limit_s: float) -> tuple[int, str]:
        key = next(word for word in words if word.startswith("--master-port"))
        size = int(next(word for word in words if word.startswith("--nnodes")).partition("=")[2])
        with lock:
            members = jobs.setdefault(key, set())
            members.add(here.name)
        while len(members) < size:
            time.sleep(0.01)
        failed = bool(members & bad)
        return int(failed), json.dumps({"ok": not failed, "reason": "NCCL error" if failed else "", "metrics": []})

    def examine(name: str, settings: object) -> Any:
        here.name = name
        return preflight._Host(make_report(name, make_result(Status.PASS)), 1)

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setattr(preflight, "_run", run)
    monkeypatch.setattr(preflight, "_examine", examine)
    monkeypatch.setattr(preflight, "_JOB_PORTS", 10**6)
    settings = preflight._Settings("cpu", [], [], None, 8, 30.0)
    told: list[list[Result]] = [[] for _ in range(num_hosts)]

    def take_part(rank: int) -> None:
        gang = Gang("test", num_hosts, rank, "127.0.0.1", port, "g")
        told[rank] = preflight._meet(gang, f"host-{rank}", settings, 3.0 if absent >= 0 else 30.0)[1]

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(num_hosts) if rank != absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


@pytest.mark.parametrize(
    ("num_hosts", "bad", "last", "seen"),
    [
        (4, set(), "gang.job", ""),
        (6, {"host-3"}, "gang.bisection", "host-3 makes jobs fail (NCCL error)"),
        (2, {"host-1"}, "gang.job", "NCCL error"),
        (4, {f"host-{rank}" for rank in range(4)}, "gang.bisection", "no job with them passed"),
    ],
    ids=["sound", "one", "two hosts", "all"],
)
def test_all_hosts_are_told_the_same(
    num_hosts: int, bad: set[str], last: str, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = meet(num_hosts, bad, monkeypatch)
    assert all(results == told[0] for results in told)
    assert told[0][-1].id == last
    assert (told[0][-1].status is Status.FAIL) == bool(bad)
    assert seen in told[0][-1].seen


def test_host_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    told = meet(3, set(), monkeypatch, absent=1)
    assert told[0] == told[2]
    assert [result.seen for result in told[0]] == ["rank 1 has not come within 3 s"]


def test_ctrf_fits_its_schema() -> None:
    results = [make_result(status) for status in Status]
    document = json.loads(to_ctrf([make_report("a", *results), make_report("b")], 1.0))
    jsonschema.Draft7Validator(SCHEMA).validate(document)
    assert [test["status"] for test in document["results"]["tests"]] == ["passed", "failed", "skipped"]
    document["results"]["tests"][0]["status"] = "unknown"
    assert not jsonschema.Draft7Validator(SCHEMA).is_valid(document)


def test_verdict_is_where_kubelet_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    monkeypatch.setenv("LWS_GROUP_SIZE", "2")
    done = CliRunner().invoke(main, ["preflight", "--termination-log", str(log)])
    assert (done.exit_code, log.read_text()[:34]) == (2, "unknown: LeaderWorkerSet: 2 nodes,")
    monkeypatch.delenv("LWS_GROUP_SIZE")
    monkeypatch.setattr(preflight, "_meet", lambda *_: [][0])
    done = CliRunner().invoke(main, ["preflight", "--termination-log", str(log)])
    assert (done.exit_code, log.read_text()[:33]) == (2, "unknown: internal error: IndexErr")


def test_answer_that_is_cut_off_is_asked_for_again() -> None:
    """The first host may end while it answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            for body in (b"{", b"{}"):
                connection, _ = server.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n" + body)

        threading.Thread(target=answer, daemon=True).start()
        client = preflight._Client(Gang("test", 2, 1, "127.0.0.1", server.getsockname()[1]))
        assert client.say({"bye": True}, 5.0) == {}


def test_changes_are_named_by_what_differs() -> None:
    before = make_report("a").facts
    gpus = [*before["gpus"][:7], {**before["gpus"][7], "uuid": "new"}]
    now = {**before, "driver": "590", "gpus": gpus, "tree": None, "nic_firmware": ["1", "2"]}
    found = {result.id: result for result in changes(before, now)}
    assert found["drift.driver"].seen == "580.95.05 → 590"
    assert found["drift.gpus"].seen == "7: uuid: a → new"
    assert found["drift.nic_firmware"].seen == "1 → 2; gone: 28.43.2026; new: 1; new: 2"
    assert (found["drift.tree"].status, found["drift.kernel"].status) == (Status.UNKNOWN, Status.PASS)
    assert {result.shown_as for result in found.values()} == {"pass", "warn", "unknown"}
