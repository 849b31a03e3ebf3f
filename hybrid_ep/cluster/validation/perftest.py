"""NIC to NIC bandwidth and latency between two nodes by perftest: one rank on each node, as mpirun starts them.

Each GPU's nearest NIC on one node writes to the NIC at the same position on the other. NICs write one after the other,
so that a sum does not hide a slow path: one way, both ways, and small messages for the latency. Then all NICs write at
once. NICs for storage and management are left out, because their networks may not join the nodes. Bandwidth is of GPU
memory if both nodes have GPUs: by perftest if it supports CUDA on both, otherwise by the verbs transport
(nic_meeting.py). The result names the memory and the program.

Rank 0 listens. Rank 1 connects, again and again until the listener is there, and reports. A NIC that fails the first
measurement is left out of the others, on both sides.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from hybrid_ep.errors import ConfigError
from hybrid_ep.topology import Topology

FIRST_PORT = 18515  # perftest's own default; each measurement of each NIC has a port of its own
_BANDWIDTH, _LATENCY = "ib_write_bw", "ib_write_lat"
_RETRY_S = 0.3
_MESSAGE_BYTES = 1 << 20
_SECONDS = 2


class Step(NamedTuple):
    """One measurement of one NIC.

    Attributes:
        metric: its name.
        program: of perftest.
        options: of the program.
        column: of perftest's table, from the row below the header.
        unit: of the value there.
    """

    metric: str
    program: str
    options: tuple[str, ...]
    column: int
    unit: str


_OF_BANDWIDTH = (f"--size={_MESSAGE_BYTES}", f"--duration={_SECONDS}", "--report_gbits")
ONE_WAY = Step("write", _BANDWIDTH, _OF_BANDWIDTH, 3, "Gb/s")
BOTH_WAYS = Step("write both ways", _BANDWIDTH, (*_OF_BANDWIDTH, "--bidirectional"), 3, "Gb/s")
LATENCY = Step("latency", _LATENCY, ("--size=8", "--iters=1000"), 4, "µs")  # the typical one
AT_ONCE = Step("write at once", _BANDWIDTH, _OF_BANDWIDTH, 3, "Gb/s")
_STEPS = (ONE_WAY, BOTH_WAYS, LATENCY)


class Memory(NamedTuple):
    """Which memory is written: of GPUs (`gpus`: NIC → its nearest GPU), or the host's; and what is said of it."""

    gpus: dict[str, int]
    options: tuple[str, ...]
    said: str


_HOST = Memory({}, (), "host memory")


def listen(topology: Topology, gid_index: int | None, limit_s: float, memory: Memory | None = None) -> None:
    """Rank 0: listens on each NIC in turn, for at most `limit_s` each. Rank 1 reports what went wrong.

    `memory` is as in `write_to`.
    """
    names, memory = nics_of_gpus(topology), memory or choose_memory(topology)
    command = partial(_command, topology, memory, gid_index)
    sound = set(names)
    for step in _STEPS:
        for number, name in enumerate(names):
            if name in sound and not _listened(command(step, name, number), limit_s) and step is ONE_WAY:
                sound.discard(name)
    with ThreadPoolExecutor(max(1, len(names))) as pool:
        for number, name in enumerate(names):
            if name in sound:
                pool.submit(_listened, command(AT_ONCE, name, number), limit_s)


def listen_once(topology: Topology, gid_index: int | None, step: Step, name: str, number: int, limit_s: float) -> None:
    """Rank 0: one measurement of one NIC, of host memory."""
    _listened(_command(topology, _HOST, gid_index, step, name, number), limit_s)


def write_once(
    topology: Topology, gid_index: int | None, step: Step, name: str, number: int, limit_s: float, address: str
) -> float:
    """Rank 1: one measurement of one NIC, of host memory.

    Raises:
        ConfigError: it did not get through within the limit.
    """
    return _write(_command(topology, _HOST, gid_index, step, name, number, address), step, limit_s)


def _listened(command: Sequence[str], limit_s: float) -> bool:
    quiet = subprocess.DEVNULL
    try:
        return subprocess.run(command, stdout=quiet, stderr=quiet, timeout=limit_s, check=False).returncode == 0
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False


def write_to(
    address: str, topology: Topology, gid_index: int | None, limit_s: float, memory: Memory | None = None
) -> dict[str, Any]:
    """Rank 1: writes from each NIC to the one that listens.

    Args:
        address: of rank 0's node.
        topology: of this node.
        gid_index: of Ethernet ports.
        limit_s: for each NIC and measurement.
        memory: that is written; None = what this node would take.

    Returns:
        The job's result: ``ok``, ``status``, ``reason`` and ``metrics``: of the slowest NIC ``write``,
        ``write both ways`` (Gb/s) and ``latency`` (µs), the sum ``write at once``, and each NIC's ``write``. The reason
        also says through which memory.
    """
    names = nics_of_gpus(topology)
    if not names:
        return {"ok": True, "status": "skipped", "reason": "no active RDMA NIC on this node", "metrics": []}
    memory = memory or choose_memory(topology)
    command = partial(_command, topology, memory, gid_index, address=address)
    seen: dict[str, dict[str, float]] = {}
    faults: dict[str, str] = {}
    for step in _STEPS:
        for number, name in enumerate(names):
            if name in faults:
                continue
            try:
                value = _write(command(step, name, number), step, limit_s)
            except FileNotFoundError:
                if step.program == _BANDWIDTH:
                    reason = f"{_BANDWIDTH} is not installed (package perftest)"
                    return {"ok": False, "status": "unknown", "reason": reason, "metrics": []}
                break
            except ConfigError as error:
                faults[name] = f"{step.metric}: {error}" if step is not ONE_WAY else str(error)
            else:
                seen.setdefault(step.metric, {})[name] = value
    sound = [(number, name) for number, name in enumerate(names) if name not in faults]
    with ThreadPoolExecutor(max(1, len(sound))) as pool:
        running = {
            name: pool.submit(_write, command(AT_ONCE, name, number), AT_ONCE, limit_s) for number, name in sound
        }
        for name, figure in running.items():
            try:
                seen.setdefault(AT_ONCE.metric, {})[name] = figure.result()
            except ConfigError as error:
                faults[name] = f"{AT_ONCE.metric}: {error}"
    reason = "; ".join([*(f"{name}: {fault}" for name, fault in faults.items()), memory.said])
    return {
        "ok": not faults,
        "status": "fail" if faults else "pass",
        "reason": reason,
        "metrics": metrics_of(seen),
    }


def metrics_of(seen: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    """The worst NIC of each measurement, the sum of those at once, and each NIC's `write`."""
    found = []
    for step in (*_STEPS, AT_ONCE):
        if values := seen.get(step.metric, {}).values():
            value = sum(values) if step is AT_ONCE else max(values) if step.unit == "µs" else min(values)
            found.append({"name": step.metric, "value": value, "unit": step.unit})
    each = seen.get(ONE_WAY.metric, {}).items()
    return found + [{"name": f"{ONE_WAY.metric} {name}", "value": value, "unit": "Gb/s"} for name, value in each]


def perftest_obstacle() -> str:
    """Why perftest cannot use GPU memory here; empty where it can."""
    usage = _usage()
    if usage is None:
        return f"{_BANDWIDTH} is not installed (package perftest)"
    return "" if "--use_cuda" in usage else f"{_BANDWIDTH} was built without CUDA"


def _usage() -> str | None:
    try:
        shown = subprocess.run([_BANDWIDTH, "--help"], capture_output=True, text=True, errors="replace", check=False)
    except FileNotFoundError:
        return None
    return shown.stdout + shown.stderr


def choose_memory(topology: Topology) -> Memory:
    """GPU memory where there is any and perftest can use it; host memory is never passed off as it."""
    usage = _usage() if topology.gpus else None
    if usage is None:
        return _HOST
    if "--use_cuda" not in usage:
        return Memory({}, (), f"host memory: {perftest_obstacle()}")
    options = ("--use_cuda_dmabuf",) if "--use_cuda_dmabuf" in usage else ()
    return Memory(nearest_gpus(topology), options, "GPU memory")


def nearest_gpus(topology: Topology) -> dict[str, int]:
    """NIC → the position of its nearest GPU."""
    return {
        nic.name: min(range(len(topology.gpus)), key=lambda gpu, column=column: topology.nic_distances[gpu][column])  # type: ignore[misc]
        for column, nic in enumerate(topology.nics)
    }


def nics_of_gpus(topology: Topology) -> list[str]:
    """The active NICs that are nearest to some GPU; without GPUs all that are active."""
    active = [column for column, nic in enumerate(topology.nics) if nic.is_active]
    if topology.gpus and active:
        least = [min(row[column] for column in active) for row in topology.nic_distances]
        rows = list(zip(topology.nic_distances, least, strict=True))
        active = [column for column in active if any(row[column] == nearest for row, nearest in rows)]
    return [topology.nics[column].name for column in active]


def _command(
    topology: Topology,
    memory: Memory,
    gid_index: int | None,
    step: Step,
    name: str,
    number: int,
    address: str | None = None,
) -> list[str]:
    steps = (*_STEPS, AT_ONCE)
    port = FIRST_PORT + steps.index(step) * len(topology.nics) + number
    command = [step.program, f"--ib-dev={name}", f"--port={port}", *step.options, "--CPU-freq"]
    if step.program == _BANDWIDTH and name in memory.gpus:
        command += [f"--use_cuda={memory.gpus[name]}", *memory.options]
    nic = next(nic for nic in topology.nics if nic.name == name)
    if gid_index is not None and any(port.link_layer == "Ethernet" for port in nic.ports):
        command.append(f"--gid-index={gid_index}")
    return [*command, address] if address else command


def _write(command: Sequence[str], step: Step, limit_s: float) -> float:
    """Runs the client until it has measured.

    Raises:
        ConfigError: it did not get through within the limit; with what it said last.
    """
    deadline = time.monotonic() + limit_s
    said = "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False)
        except subprocess.TimeoutExpired:
            break
        if done.returncode == 0:
            return _figure(done.stdout, step)
        said = next((line.strip() for line in reversed((done.stdout + done.stderr).splitlines()) if line.strip()), said)
        time.sleep(_RETRY_S)
    raise ConfigError(f"no connection within {limit_s:g} s: {said}")


def _figure(table: str, step: Step) -> float:
    """The step's column of the row below the header."""
    lines = iter(table.splitlines())
    for line in lines:
        if line.split()[:1] == ["#bytes"]:
            columns = next(lines, "").split()
            try:
                return float(columns[step.column])
            except (IndexError, ValueError):
                break
    raise ConfigError(f"{step.program} printed no {step.metric}")
