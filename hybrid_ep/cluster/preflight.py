"""`hybrid-ep preflight`: is this host, and are all hosts of its gang together, fit for the job that starts next?

It runs once on each host: as an init container, in a Slurm prolog, or before the job's own command.

1. The doctor examines the GPUs that this host was given. Dispatch and combine run on this host alone.
2. The hosts meet at the first one by HTTP. It knows which hosts have not come, and compares the others' reports.
3. Dispatch and combine run on all of them, by torchrun. The first host judges them by its profile.
4. If that fails or is slow although each host passes alone, the first host has it halved (`validation.bisection`).

Every host ends with the same verdict, and says whether it is itself to blame. What hosts send each other are results
and names of jobs, never commands. The library is started only as a command, so no torch is loaded here.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import platform
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import click

from hybrid_ep import env
from hybrid_ep._version import __version__
from hybrid_ep.cluster.doctor.compare import compare
from hybrid_ep.cluster.doctor.model import Report, Result, Severity, Status, clean, to_junit
from hybrid_ep.cluster.kubernetes.api import NodeError
from hybrid_ep.cluster.kubernetes.node import examine_node
from hybrid_ep.cluster.validation.bisection import Bisection, Run, bisect
from hybrid_ep.cluster.validation.causes import cause_of
from hybrid_ep.cluster.validation.formats import to_ctrf
from hybrid_ep.cluster.validation.judge import Job, Profiles, judge
from hybrid_ep.cluster.validation.record import judge_output
from hybrid_ep.errors import ConfigError
from hybrid_ep.inputs import Seconds
from hybrid_ep.launcher import find_launcher
from hybrid_ep.outputs import OutputFile
from hybrid_ep.report.units import shorten_names

_PROGRAM = (sys.executable, "-c", "from hybrid_ep.cli import main; main()")
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
_OF_LAUNCHERS = ("PET_", "TORCHELASTIC_", "OMPI_", "PMIX_")
_DOCTOR_S = 300.0
_POLL_S = 20.0  # that the first host keeps a question which it cannot answer yet
_PATIENCE_S = 60.0  # without an answer of the first host, after it has once answered
_GRACE_S = 30.0  # for a host to report a job that it had to end
_JOB_PORTS = 16  # jobs that follow each other take different ports
_MOST_BYTES = 64 << 20
_LOG_CHARS = 4000
_TERMINATION_LOG = Path("/dev/termination-log")
_TERMINATION_BYTES = 4096  # of which kubelet keeps no more
_TIMED_OUT, _NO_ANSWER = 124, 255


class Gang(NamedTuple):
    """The hosts that one job will run on.

    Attributes:
        source: what says so, for people.
        num_nodes: hosts, or Pods.
        rank: of this one.
        address: of the first.
        port: where they meet; jobs take the ports above it.
        id: that all of them know; may be empty.
        names: of the hosts by rank, as far as they are known before they meet.
    """

    source: str
    num_nodes: int
    rank: int
    address: str
    port: int
    id: str = ""
    names: tuple[str, ...] = ()

    def name_of(self, rank: int) -> str:
        """For a host that has not come."""
        return f"rank {rank} ({self.names[rank]})" if rank < len(self.names) else f"rank {rank}"


def find_gang(
    nodes: int | None = None,
    node_rank: int | None = None,
    address: str | None = None,
    port: int | None = None,
    *,
    limit_s: float = 600.0,
) -> Gang:
    """Returns the gang of this host, from options, or from the variables of what has started it.

    Args:
        nodes, node_rank, address, port: torchrun's options of these names. With `nodes` no variable is read but the
            index of an Indexed Job, in place of `node_rank` and, by the Pod's name, of `address`.
        limit_s: how long to wait until GANG_CONFIG_DIR lists all Pods.

    Raises:
        ConfigError: the gang is described in part, or contradicts itself.
    """
    port = port or env.MASTER_PORT.get()
    lws, pet = env.LWS_GROUP_SIZE.get(), env.PET_NNODES.get()
    launcher = find_launcher() if nodes is None and pet is None and lws is None else None
    if nodes is not None:
        index = env.JOB_COMPLETION_INDEX.get()
        rank = index if node_rank is None else node_rank
        address = address or _first_of_job(index)
        found = Gang("options", nodes, -1 if rank is None else rank, address or "", port, env.GANG_ID.get())
    elif folder := env.GANG_CONFIG_DIR.get():
        found = _listed_gang(Path(folder), limit_s)
    elif lws is not None:
        found = Gang("LeaderWorkerSet", lws, _natural(env.LWS_WORKER_INDEX), env.LWS_LEADER_ADDRESS.get(), port)
    elif pet is not None:
        found = Gang("PET_*", pet, _natural(env.PET_NODE_RANK), env.PET_MASTER_ADDR.get(), port)
    elif launcher is not None:
        if launcher.local_rank:
            raise ConfigError(f"{launcher.name} has started several processes on this host; allowed: one on each")
        found = Gang(launcher.name, launcher.num_ranks, launcher.rank, env.MASTER_ADDR.get(), port)
    else:
        return Gang("nothing that starts several", 1, 0, "", port)
    if not 0 <= found.rank < found.num_nodes or (found.num_nodes > 1 and not found.address):
        raise ConfigError(
            f"{found.source}: {found.num_nodes} nodes, this one is {found.rank}, the first is at {found.address!r}; "
            "allowed: nodes from 0 on, and the address of the first"
        )
    return found


def _first_of_job(index: int | None) -> str:
    """The name of the first Pod of an Indexed Job with a Service, or of a JobSet's Job: names end with the index."""
    host, _, domain = socket.getfqdn().partition(".")
    return f"{host.removesuffix(f'-{index}')}-0.{domain}" if domain and host.endswith(f"-{index}") else ""


def _natural(variable: env.Variable[int | None]) -> int:
    value = variable.get()
    return -1 if value is None else value


def _listed_gang(folder: Path, limit_s: float) -> Gang:
    """The gang that NVSentinel's preflight lists: a file for each key, and a line ``Pod;address;rank`` for each Pod.

    Source: its configuration guide and checks (github.com/NVIDIA/NVSentinel, docs/configuration/preflight.md).
    """
    name, deadline = env.POD_NAME.get() or platform.node(), time.monotonic() + limit_s
    while True:
        text = {key: _text_of(folder / key) for key in ("expected_count", "peers", "master_addr", "master_port")}
        peers = [line.split(";") for line in text["peers"].splitlines() if line.strip()]
        try:
            expected, port = int(text["expected_count"] or 0), int(text["master_port"] or env.MASTER_PORT.get())
            pods = {int(peer[2]): peer[0].strip() for peer in peers}
        except (ValueError, IndexError):
            raise ConfigError(f"{folder} does not list a gang: {text}; allowed: lines Pod;address;rank") from None
        if 0 < expected <= len(pods):
            break
        if time.monotonic() > deadline:
            listed = ", ".join(pods.values()) or "none"
            raise ConfigError(f"{folder} lists {len(pods)} of {expected or '?'} Pods after {limit_s:g} s: {listed}")
        time.sleep(1.0)
    names = tuple(pods.get(rank, "") for rank in range(expected))
    if name not in names:
        raise ConfigError(f"{env.POD_NAME.name} is {name!r}; allowed: a Pod that {folder} lists: {', '.join(names)}")
    address = text["master_addr"] or next(peer[1].strip() for peer in peers if int(peer[2]) == 0)
    return Gang(f"{folder}", expected, names.index(name), address, port, env.GANG_ID.get(), names)


def _text_of(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


class _Settings(NamedTuple):
    """What hosts do: options of the command line."""

    profile: str
    doctor_options: list[str]
    bench_options: list[str]
    ranks: int | None
    experts: int
    limit_s: float

    def bench(self, num_ranks: int) -> list[str]:
        experts = math.ceil(self.experts / num_ranks) * num_ranks
        return ["bench", "--json", "--experts", str(experts), *self.bench_options]


def _run(words: Sequence[str], limit_s: float) -> tuple[int, str]:
    """Runs a program to its end or the limit, with all that it has started; returns exit status and output."""
    known = (env.RANK, env.WORLD_SIZE, env.LOCAL_RANK, env.SLURM_RANK, env.SLURM_SIZE, env.SLURM_LOCAL_RANK)
    environment = env.environment_without(*known, env.MASTER_ADDR, env.MASTER_PORT, prefixes=_OF_LAUNCHERS)
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(words, env=environment, start_new_session=True, **pipes)
    code = None
    for limit, end in ((limit_s, signal.SIGTERM), (5.0, signal.SIGKILL), (5.0, signal.SIGKILL)):
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired as error:
            code, output = _TIMED_OUT, error.output or b""
            with suppress(ProcessLookupError):
                os.killpg(process.pid, end)
        else:
            break
    return process.returncode if code is None else code, output.decode(errors="replace")


def _judged(name: str, platform_of: dict[str, str], code: int, output: str) -> Job:
    """A job on these hosts, judged by their profiles."""
    kind = "pair" if len(platform_of) == 2 else "group"
    return judge(judge_output(name, kind, tuple(platform_of), code, output), platform_of, Profiles())


def _result(check_id: str, title: str, status: Status, seen: str, expected: str, remedy: str = "") -> Result:
    where = (expected, "hybrid-ep preflight", "" if status is Status.PASS else remedy)
    return Result(check_id, "preflight", title, status, Severity.ERROR, seen, *where)


def _result_of(job: Job, check_id: str, title: str) -> Result:
    figures = ", ".join(f"{metric.name} {metric.text}" for metric in job.metrics if metric.unit.endswith("/s"))
    seen = "; ".join(part for part in (job.reason, figures) if part)
    remedy = cause_of(job.reason).remedy
    return _result(check_id, title, Status(job.status), seen, job.expected, remedy)


class _Host(NamedTuple):
    """This host, examined: what the doctor found, and dispatch and combine alone."""

    report: Report
    num_ranks: int


def _without_unread(results: Sequence[Result]) -> tuple[Result, ...]:
    """What a container cannot read is no fault of a host: it stays in the report, and does not decide."""
    return tuple(
        replace(result, severity=Severity.WARNING) if result.status is Status.UNKNOWN else result for result in results
    )


def _examine(name: str, settings: _Settings) -> _Host:
    options = [*settings.doctor_options, *(["--profile", settings.profile] if settings.profile else [])]
    try:
        found = examine_node(options, limit_s=_DOCTOR_S)
    except NodeError as error:
        remedy = "Run hybrid-ep doctor on it by hand."
        silent = _result("preflight.doctor", "the doctor", Status.UNKNOWN, str(error), "a report", remedy)
        return _Host(Report(__version__, name, settings.profile or "?", "", 0.0, (silent,)), settings.ranks or 1)
    found = replace(found, host=name, results=_without_unread(found.results))
    num_ranks = settings.ranks or len(found.facts.get("gpus") or []) or 1
    if found.status is Status.PASS:  # on GPUs with a fault the job may hang
        words = [*_PROGRAM, *settings.bench(num_ranks), "--ranks", str(num_ranks)]
        job = _judged("alone", {name: settings.profile or found.profile}, *_run(words, settings.limit_s))
        alone = _result_of(job, "preflight.alone", "dispatch and combine on this host alone")
        found = replace(found, results=(*found.results, alone))
    return _Host(found, num_ranks)


class _Desk(ThreadingHTTPServer):
    """Where hosts meet: keeps what each has said, and answers with what it shall do next.

    A host that says nothing asks: it is answered when there is an order that it has not seen, or after `_POLL_S`.
    """

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, gang: Gang) -> None:
        self.address_family = socket.AF_INET6 if ":" in gang.address else socket.AF_INET
        self.gang = gang
        self.changed = threading.Condition()
        self.said: dict[int, dict[str, Any]] = {}
        self.orders: dict[int, dict[str, Any]] = {}
        self.seen: dict[int, int] = {}
        self._num_orders = 0
        try:
            super().__init__(("", gang.port), _Handler)
        except OSError as error:
            raise ConfigError(f"port {gang.port} cannot be opened: {error.strerror}; allowed: a free port") from error
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def answer(self, message: dict[str, Any], address: str) -> dict[str, Any]:
        rank, seen = int(message["rank"]), int(message["seen"])
        if message["gang"] != self.gang.id or not 0 <= rank < self.gang.num_nodes:
            raise ValueError(f"rank {rank} of gang {message['gang']!r}; allowed: ranks of gang {self.gang.id!r}")
        with self.changed:
            mine = self.said.setdefault(rank, {"address": self.gang.address if rank == 0 else address})
            mine |= message["say"]
            self.seen[rank] = seen
            self.changed.notify_all()
            poll_s = 0.0 if message["say"] else _POLL_S
            self.changed.wait_for(lambda: self.orders.get(rank, {"number": 0})["number"] > seen, poll_s)
            order = self.orders.get(rank, {"number": 0})
            return order if order["number"] > seen else {}

    def order(self, orders: dict[int, dict[str, Any]]) -> None:
        """Gives each of these hosts something to do."""
        with self.changed:
            self._num_orders += 1
            self.orders |= {rank: {**order, "number": self._num_orders} for rank, order in orders.items()}
            self.changed.notify_all()

    def without(self, key: str, ranks: Sequence[int], limit_s: float) -> list[int]:
        """Waits until all of these hosts have said something; returns those that have not."""
        with self.changed:
            self.changed.wait_for(lambda: all(key in self.said.get(rank, {}) for rank in ranks), limit_s)
            return [rank for rank in ranks if key not in self.said.get(rank, {})]

    def run(self, name: str, groups: Sequence[Sequence[int]], limit_s: float) -> list[tuple[int, str]]:
        """Runs a job on each group of hosts, all at once; returns exit status and output of each."""
        orders: dict[int, dict[str, Any]] = {}
        for number, group in enumerate(groups):
            port = self.gang.port + 1 + (self._num_orders + number) % _JOB_PORTS
            job = {"job": f"{name}-{number}", "num_nodes": len(group), "address": self.said[group[0]]["address"]}
            orders |= {rank: {**job, "port": port, "node_rank": place} for place, rank in enumerate(group)}
        self.order(orders)
        ended = []
        for number, group in enumerate(groups):
            key = f"{name}-{number}"
            self.without(key, group, limit_s + _GRACE_S)
            silent = [_NO_ANSWER, "no connection: it does not answer any more"]
            parts = [(rank, *self.said[rank].get(key, silent)) for rank in group]
            code = next((code for _, code, _ in parts if code), 0)
            told = [f"{self.said[rank]['name']}: {output[-_LOG_CHARS:]}" for rank, code, output in parts[1:] if code]
            ended.append((code, "\n".join([parts[0][2], *told])))
        return ended


class _Handler(BaseHTTPRequestHandler):
    server: _Desk
    timeout = 60

    def do_POST(self) -> None:
        """One message of a host."""
        try:
            length = int(self.headers["Content-Length"])
            if length > _MOST_BYTES:
                raise ValueError(f"{length} bytes; allowed: {_MOST_BYTES}")
            code, answer = 200, self.server.answer(json.loads(self.rfile.read(length)), self.client_address[0])
        except (ValueError, KeyError, TypeError) as error:
            code, answer = 400, {"error": f"{type(error).__name__}: {error}"}
        body = json.dumps(answer).encode()
        with suppress(OSError):  # a host that is gone asks again, or is missed
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Messages leave no lines in the log."""


class _Lost(Exception):  # noqa: N818 - an answer that did not come, which is a result
    """The first host does not answer."""


class _Client:
    """A host's side of the meeting."""

    def __init__(self, gang: Gang) -> None:
        host = "127.0.0.1" if gang.rank == 0 and ":" not in gang.address else gang.address
        host = "::1" if gang.rank == 0 and ":" in gang.address else host
        self._url = f"http://[{host}]:{gang.port}/" if ":" in host else f"http://{host}:{gang.port}/"
        self._gang, self._seen = gang, 0
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def say(self, say: dict[str, Any], patience_s: float = _PATIENCE_S) -> dict[str, Any]:
        """Says something, as often as it takes, and returns the next order, or nothing.

        Raises:
            _Lost: no answer for so long.
            ConfigError: the first host is of another gang.
        """
        deadline = time.monotonic() + patience_s
        body = json.dumps({"gang": self._gang.id, "rank": self._gang.rank, "seen": self._seen, "say": say}).encode()
        while True:
            try:
                request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
                with self._opener.open(request, timeout=_POLL_S + 10) as answer:
                    order: dict[str, Any] = json.load(answer)
                self._seen = order.get("number", self._seen)
                return order
            except urllib.error.HTTPError as error:
                raise ConfigError(f"{self._url} refuses: {error.read(500).decode(errors='replace')}") from error
            except (OSError, ValueError, http.client.HTTPException) as error:  # also an answer that is cut off
                if time.monotonic() > deadline:
                    where = f"{self._gang.name_of(0)} at {self._gang.address} port {self._gang.port}"
                    raise _Lost(f"{where} does not answer within {patience_s:g} s: {error}") from error
                time.sleep(0.5)

    def next_order(self, say: dict[str, Any]) -> dict[str, Any]:
        order = self.say(say)
        while not order:
            order = self.say({})
        return order


def _lead(desk: _Desk, settings: _Settings, limit_s: float) -> list[Result]:
    """What the first host does for all; returns what holds for the gang as a whole."""
    gang, ranks = desk.gang, range(desk.gang.num_nodes)
    if absent := desk.without("name", ranks, limit_s):
        return [_unfit([f"{gang.name_of(rank)} has not come within {limit_s:g} s" for rank in absent])]
    counts = Counter(desk.said[rank]["name"] for rank in ranks)
    for rank in ranks:  # several Pods of one node
        name = desk.said[rank]["name"]
        desk.said[rank]["name"] = name if counts[name] == 1 else f"{name} (rank {rank})"
    names = [str(desk.said[rank]["name"]) for rank in ranks]
    if silent := desk.without("report", ranks, _DOCTOR_S + settings.limit_s + _GRACE_S):
        return [_unfit([f"{names[rank]} came and then gave no report" for rank in silent])]
    reports = [replace(Report.from_json(desk.said[rank]["report"]), host=names[rank]) for rank in ranks]
    if unfit := [f"{report.host}: {_worst(report)}" for report in reports if report.status is not Status.PASS]:
        status = Status.worst(report.status for report in reports)
        return [_unfit(unfit, status)]
    results = [_result("gang.hosts", "hosts of the gang", Status.PASS, f"{len(names)} hosts", "all come, and are fit")]
    results += _without_unread(compare(reports).results)
    if any(result.shown_as == "fail" for result in results):
        return results
    return results + _run_together(desk, settings, names, reports)


def _run_together(desk: _Desk, settings: _Settings, names: list[str], reports: list[Report]) -> list[Result]:
    """Dispatch and combine of all hosts, and of fewer where these fail or are slow."""
    platform_of = {name: settings.profile or report.profile for name, report in zip(names, reports, strict=True)}

    def run(tag: str, groups: list[list[str]]) -> list[Job]:
        ended = desk.run(tag, [[names.index(name) for name in group] for group in groups], settings.limit_s)
        return [
            _judged(tag, {name: platform_of[name] for name in group}, *end)
            for group, end in zip(groups, ended, strict=True)
        ]

    def lost() -> list[str]:
        return [name for rank, name in enumerate(names) if desk.orders[rank].get("job") not in desk.said[rank]]

    (job,) = run("all", [names])
    whole = _result_of(job, "gang.job", f"dispatch and combine on all {len(names)} hosts")
    if gone := lost():
        return [whole, _unfit([f"{name} does not answer since dispatch and combine began" for name in gone])]
    if job.status != "fail" or len(names) == 2:
        return [whole]
    runs, reasons, found = [Run(frozenset(names), False)], {frozenset(names): job.reason}, bisect(names, {}, [])
    domain_of = {name: _domain(report) for name, report in zip(names, reports, strict=True)}
    num_rounds = 0
    while (found := bisect(names, domain_of, runs)).next_round and num_rounds <= 2 * math.log2(len(names)) + 1:
        num_rounds += 1
        for group, job in zip(found.next_round, run(f"round {num_rounds}", found.next_round), strict=True):
            runs.append(Run(frozenset(group), job.status == "pass"))
            reasons[frozenset(group)] = job.reason
        if gone := lost():
            return [whole, _unfit([f"{name} does not answer since round {num_rounds}" for name in gone])]
    return [whole, _halved(found, runs, reasons)]


def _halved(found: Bisection, runs: list[Run], reasons: dict[frozenset[str], str]) -> Result:
    """What the bisection blames, in one line."""
    failed = [run.hosts for run in runs if not run.passed]
    parts = [
        f"{host} makes jobs fail ({reasons[min((r for r in failed if host in r), key=len)]})" for host in found.blamed
    ]
    parts += [f"{shorten_names(some, 8)} fail together, and pass with others" for some in found.together]
    if found.undecided and not parts:
        parts = [f"one or several of {shorten_names(found.undecided, 8)}: no job with them passed"]
    seen = "; ".join(parts) or "smaller jobs all passed"
    remedy = cause_of(" ".join(reasons[each] for each in failed)).remedy
    title = f"halves of the hosts, in {len(runs) - 1} jobs"
    return _result("gang.bisection", title, Status.FAIL, seen, "every job passes", remedy)


def _unfit(who: list[str], status: Status = Status.FAIL) -> Result:
    remedy = "Start the job without the hosts that are named, or repair them; the others wait for them."
    return _result("gang.hosts", "hosts of the gang", status, "; ".join(who), "all come, and are fit", remedy)


def _worst(report: Report) -> str:
    """The result that says why a host does not pass."""
    results = [result for result in report.results if result.severity is Severity.ERROR]
    for status in (Status.FAIL, Status.UNKNOWN):
        for result in results:
            if result.status is status:
                return f"{result.id}: {result.seen}"
    return f"{len(results)} checks passed"


def _domain(report: Report) -> str:
    """The NVLink domain of a host's GPUs that other hosts share, or nothing."""
    gpus = report.facts.get("gpus") or []
    uuid = next((gpu["cluster_uuid"] for gpu in gpus if gpu["cluster_uuid"] and gpu["cluster_uuid"].strip("0-")), None)
    return f"{uuid} {gpus[0]['clique']}" if uuid else ""


def _meet(gang: Gang, name: str, settings: _Settings, limit_s: float) -> tuple[_Host, list[Result]]:
    """Examines this host, and takes part in what the gang does; returns both findings."""
    if gang.num_nodes == 1:
        return _examine(name, settings), []
    desk = _Desk(gang) if gang.rank == 0 else None
    if desk is not None:
        threading.Thread(target=_guarded_lead, args=(desk, settings, limit_s), daemon=True).start()
    client, host = _Client(gang), None
    try:
        client.say({"name": name, "began": True}, limit_s)
        host = _examine(name, settings)
        order = client.next_order({"report": host.report.to_json()})
        while "job" in order:
            words = [*_TORCHRUN, f"--nnodes={order['num_nodes']}", f"--node-rank={order['node_rank']}"]
            words += [f"--nproc-per-node={host.num_ranks}", f"--master-addr={order['address']}"]
            words += [f"--master-port={order['port']}", "--no-python", *_PROGRAM]
            bench = settings.bench(host.num_ranks * int(order["num_nodes"]))
            order = client.next_order({order["job"]: _run([*words, *bench], settings.limit_s)})
        results = [
            Result(**{**each, "status": Status(each["status"]), "severity": Severity(each["severity"])})
            for each in order["end"]
        ]
        with suppress(_Lost):  # it may end before it has answered
            client.say({"bye": True}, 1.0)
    except _Lost as error:
        results = [_unfit([str(error)])]
    if desk is not None:
        desk.without("bye", list(desk.said), _POLL_S)
    return host or _examine(name, settings), results


def _guarded_lead(desk: _Desk, settings: _Settings, limit_s: float) -> None:
    """Whatever happens, every host gets an end."""
    try:
        results = _lead(desk, settings, limit_s)
    except Exception as error:
        said = f"internal error: {type(error).__name__}: {error}"
        results = [_result("gang.hosts", "hosts of the gang", Status.UNKNOWN, said, "a verdict", "Report this.")]
    end = [{**asdict(each), "status": each.status.value, "severity": each.severity.value} for each in results]
    desk.order({rank: {"end": end} for rank in range(desk.gang.num_nodes)})


def _verdict(host: Report, gang: Gang, of_gang: Sequence[Result]) -> tuple[Status, str]:
    """The status of both, and one line that names what is to blame."""
    own = host.status
    ill = [result for result in of_gang if result.severity is Severity.ERROR and result.status is not Status.PASS]
    status = Status.worst([own, *(result.status for result in ill)])
    if own is not Status.PASS:
        said = f"{host.host} (this host): {_worst(host)}"
    elif ill:
        first = max(ill, key=lambda result: (result.status is status, result.id == "gang.bisection", result.id))
        said = f"{first.id}: {first.seen}. {host.host} (this host) passed alone"
    else:
        alone = next((result.seen for result in host.results if result.id == "preflight.alone"), "")
        together = next((result.seen for result in of_gang if result.id == "gang.job"), "")
        said = f"{host.host}: {alone}" + (f". {gang.num_nodes} hosts: {together}" if together else "")
    return status, clean(f"{status.value}: {said}")


@click.command()
@click.option("--profile", default="", metavar="NAME|FILE", help="Profile of the hosts, as of `hybrid-ep doctor`.")
@click.option("--nodes", type=click.IntRange(min=1), help="Hosts of the gang; default: what has started them says.")
@click.option("--node-rank", type=click.IntRange(min=0), help="With --nodes: this host's rank.")
@click.option("--master-addr", help="With --nodes: the first host's address.")
@click.option("--master-port", type=click.IntRange(1, 65000), help="Where hosts meet; default: MASTER_PORT, or 29500.")
@click.option("--ranks", type=click.IntRange(min=1), help="Ranks on each host; default: its GPUs, or 1.")
@click.option("--experts", type=click.IntRange(min=1), default=256, show_default=True, help="Experts, at least.")
@click.option("--doctor-options", default="", help="Options of `hybrid-ep doctor`, as one text.")
@click.option("--bench-options", default="", help="Options of `hybrid-ep bench`, as one text.")
@click.option(
    "--gang-timeout", type=Seconds(1, 86400), help="How long hosts wait for each other; default: GANG_TIMEOUT_SECONDS."
)
@click.option(
    "--limit-s", type=Seconds(1, 86400), default=300.0, show_default=True, help="How long one job may take, seconds."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of lines.")
@click.option("--junit", type=OutputFile(), help="Also write JUnit XML.")
@click.option("--ctrf", type=OutputFile(), help="Also write JSON of the Common Test Report Format.")
@click.option(
    "--termination-log",
    type=click.Path(dir_okay=False, path_type=Path),
    default=_TERMINATION_LOG,
    show_default=True,
    help="Where the verdict goes, if there is such a file.",
)
@click.pass_context
def preflight(
    context: click.Context,
    profile: str,
    nodes: int | None,
    node_rank: int | None,
    master_addr: str | None,
    master_port: int | None,
    ranks: int | None,
    experts: int,
    doctor_options: str,
    bench_options: str,
    gang_timeout: float | None,
    limit_s: float,
    as_json: bool,
    junit: Path | None,
    ctrf: Path | None,
    termination_log: Path,
) -> None:
    """Check the hosts of a job before it starts: doctor, dispatch and combine on each host and on all together.

    Run it once on each host. What has started it says which hosts belong together: NVSentinel, a LeaderWorkerSet,
    Kubeflow's Trainer, torchrun, mpirun or srun; otherwise --nodes. It needs torch, as the job does.

    Exit status: 0 = all hosts are fit, 1 = a fault or a slow host, here or on another host, 2 = it cannot be told.
    """
    began = time.time()
    gang_timeout = gang_timeout or env.GANG_TIMEOUT_SECONDS.get()
    settings = _Settings(profile, shlex.split(doctor_options), shlex.split(bench_options), ranks, experts, limit_s)
    log: Callable[[str], None] = lambda line: _note(termination_log, line)  # noqa: E731 - one line, used twice
    try:
        gang = find_gang(nodes, node_rank, master_addr, master_port, limit_s=gang_timeout)
        host, of_gang = _meet(gang, env.NODE_NAME.get() or platform.node(), settings, gang_timeout)
    except ConfigError as error:
        log(f"unknown: {error}")
        raise
    except Exception as error:  # nothing that goes wrong here may look like a fault of the host
        log(said := f"unknown: internal error: {type(error).__name__}: {error}")
        click.echo(said, err=True)
        raise click.exceptions.Exit(2) from error
    report = replace(host.report, results=(*host.report.results, *of_gang))
    status, verdict = _verdict(host.report, gang, of_gang)
    if as_json:
        shown = {**report.to_json(), "status": status.value, "exit_code": status.exit_code, "verdict": verdict}
        click.echo(json.dumps({**shown, "gang": gang._asdict()}, indent=2))
    else:
        for result in report.results:
            if result.status is Status.FAIL or result.group == "preflight":
                click.echo(f"{result.shown_as} {result.id}: {result.seen} {result.remedy}".rstrip())
        click.echo(verdict)
    log(verdict)
    for path, text in ((junit, to_junit(report)), (ctrf, to_ctrf([report], began))):
        if path is not None:
            path.write_text(text, encoding="utf-8")
    context.exit(status.exit_code)


def _note(path: Path, line: str) -> None:
    """Kubelet makes the file, and shows its content as the reason why the container ended."""
    if path.exists():
        with suppress(OSError):
            path.write_bytes(line.encode()[:_TERMINATION_BYTES])
