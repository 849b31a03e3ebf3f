"""The doctor's findings for Prometheus, and whether they are fresh.

A finding that is too old is left out, and the node's status becomes unknown: a doctor that hangs must not look like a
node that passes. The time of the last report stays, so that an alert can compute its age.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from hybrid_ep.cluster.doctor.model import Report, Status
from hybrid_ep.errors import ConfigError, HybridEPError

_FRESH_INTERVALS = 3
_RUN_S = 300.0  # the longest run of the doctor
_STATUSES = tuple(status.value for status in Status)


@dataclass
class Metrics:
    """What the last runs of the doctor found.

    Attributes:
        node: its name.
        interval_s: between two runs; a report is fresh for three of them and the longest run.
        clock: Unix time in seconds.
    """

    node: str
    interval_s: float
    clock: Callable[[], float] = time.time
    _report: Report | None = None
    _reported_s: float = 0.0
    _turned_s: float = 0.0
    _counts: dict[str, int] = field(default_factory=lambda: {"report": 0, "no_report": 0, "not_written": 0})
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._turned_s = self.clock()

    def note(self, found: Report | HybridEPError) -> None:
        """Takes what a run found; an error means that there is no report."""
        with self._lock:
            self._turned_s = self.clock()
            if isinstance(found, Report):
                self._report, self._reported_s = found, self._turned_s
            self._counts["report" if isinstance(found, Report) else "no_report"] += 1

    def note_not_written(self) -> None:
        """Counts findings that the API server did not take."""
        with self._lock:
            self._counts["not_written"] += 1

    @property
    def is_alive(self) -> bool:
        """Whether a run ended, with or without a report, within three intervals and the longest run."""
        return self._is_fresh(self._turned_s)

    def _is_fresh(self, when_s: float) -> bool:
        return self.clock() - when_s <= _FRESH_INTERVALS * self.interval_s + _RUN_S

    def render(self) -> str:
        """In Prometheus' text format 0.0.4."""
        with self._lock:
            report = self._report if self._is_fresh(self._reported_s) else None
            status = report.status if report else Status.UNKNOWN
            families = [
                _family(
                    "node_status",
                    "What the doctor found, 1 for the status that holds; unknown without a fresh report.",
                    [({"status": word}, int(word == status.value)) for word in _STATUSES],
                ),
                _family(
                    "check_status",
                    "How each check ended, 1 for the status that holds; absent without a fresh report.",
                    [
                        (
                            {"check": result.id, "severity": result.severity.value, "status": word},
                            int(word == result.status.value),
                        )
                        for result in (report.results if report else ())
                        for word in _STATUSES
                    ],
                ),
                _family("last_report_timestamp_seconds", "When the last report came; 0: never.", self._reported_s),
                _family("interval_seconds", "Time between two runs.", self.interval_s),
                _family("duration_seconds", "How long the last run took.", report.duration_s if report else 0.0),
                _family(
                    "runs_total",
                    "Runs of the doctor, by what came of them.",
                    [({"result": word}, self._counts[word]) for word in ("report", "no_report")],
                    kind="counter",
                ),
                _family(
                    "not_written_total",
                    "Findings that the API server did not take.",
                    self._counts["not_written"],
                    kind="counter",
                ),
            ]
        return "".join(self._lines(*family) for family in families)

    def _lines(self, name: str, help_text: str, kind: str, rows: Iterable[tuple[dict[str, str], float]]) -> str:
        lines = [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
        for labels, value in rows:
            words = ",".join(f'{key}="{_escaped(text)}"' for key, text in {"node": self.node, **labels}.items())
            lines.append(f"{name}{{{words}}} {value!r}")
        return "\n".join(lines) + "\n"


Family = tuple[str, str, str, "list[tuple[dict[str, str], float]]"]


def _family(
    name: str, help_text: str, rows: float | list[tuple[dict[str, str], float]], *, kind: str = "gauge"
) -> Family:
    return f"hybrid_ep_doctor_{name}", help_text, kind, rows if isinstance(rows, list) else [({}, rows)]


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class _Server(ThreadingHTTPServer):
    """On all addresses of the node, of both families where there are two."""

    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    daemon_threads = True

    def __init__(self, port: int, metrics: Metrics) -> None:
        self.metrics = metrics
        super().__init__(("", port), _Handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10  # of a client that connects and sends nothing

    def do_GET(self) -> None:
        """/metrics, and /healthz for the kubelet."""
        if self.path == "/metrics":
            self._answer(200, self.server.metrics.render())
        elif self.path == "/healthz":
            alive = self.server.metrics.is_alive
            self._answer(200 if alive else 503, "ok\n" if alive else "no run ended within three intervals\n")
        else:
            self._answer(404, "allowed: /metrics, /healthz\n")

    def _answer(self, code: int, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes leave no lines in the log."""


def serve(port: int, metrics: Metrics) -> ThreadingHTTPServer:
    """Answers on this port from a thread of its own, until the process ends or `shutdown` is called.

    Args:
        port: 0 takes a free one; `server_port` of the answer has it.

    Raises:
        ConfigError: the port cannot be opened.
    """
    try:
        server = _Server(port, metrics)
    except OSError as error:
        raise ConfigError(f"metrics port {port} cannot be opened: {error.strerror}; allowed: a free port") from error
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server
