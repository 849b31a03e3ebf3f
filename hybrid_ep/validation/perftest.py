"""NIC to NIC bandwidth between two nodes by perftest's ib_write_bw: one rank on each node, as mpirun starts them.

Each GPU's nearest NIC on one node writes to the NIC at the same position on the other. NICs write one after the other,
so that the sum does not hide a slow path. Others, for storage and management, may be in networks in which nodes do not
meet. Rank 0 listens; rank 1 connects, again and again until the listener is there, and reports.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from typing import Any

from hybrid_ep.errors import ConfigError
from hybrid_ep.topology import Topology

__all__ = ["FIRST_PORT", "listen", "write_to"]

FIRST_PORT = 18515  # perftest's own default; NIC number i uses FIRST_PORT + i
_PROGRAM = "ib_write_bw"
_RETRY_S = 0.3
_MESSAGE_BYTES = 1 << 20
_SECONDS = 2


def listen(topology: Topology, gid_index: int | None, limit_s: float) -> None:
    """Rank 0: listens on each NIC in turn, for at most `limit_s` each; whatever goes wrong is rank 1's to report."""
    for number, name in enumerate(_nics(topology)):
        try:
            subprocess.run(
                _command(topology, name, number, gid_index),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=limit_s,
                check=False,
            )
        except (FileNotFoundError, subprocess.TimeoutExpired):
            continue


def write_to(address: str, topology: Topology, gid_index: int | None, limit_s: float) -> dict[str, Any]:
    """Rank 1: writes from each NIC to the one that listens.

    Returns:
        The job's result: ``ok``, ``status``, ``reason`` and ``metrics``: ``write``, the slowest NIC's bandwidth in
        Gb/s, and that of each.
    """
    names = _nics(topology)
    if not names:
        return {"ok": True, "status": "skipped", "reason": "no active RDMA NIC on this node", "metrics": []}
    gbps: dict[str, float] = {}
    faults: dict[str, str] = {}
    for number, name in enumerate(names):
        try:
            gbps[name] = _write(_command(topology, name, number, gid_index, address), limit_s)
        except FileNotFoundError:
            reason = f"{_PROGRAM} is not installed (package perftest)"
            return {"ok": False, "status": "unknown", "reason": reason, "metrics": []}
        except ConfigError as error:
            faults[name] = str(error)
    slowest = [{"name": "write", "value": min(gbps.values()), "unit": "Gb/s"}] if gbps else []
    each = [{"name": f"write {name}", "value": value, "unit": "Gb/s"} for name, value in gbps.items()]
    reason = "; ".join(f"{name}: {fault}" for name, fault in faults.items())
    return {"ok": not faults, "status": "fail" if faults else "pass", "reason": reason, "metrics": slowest + each}


def _nics(topology: Topology) -> list[str]:
    active = [column for column, nic in enumerate(topology.nics) if nic.is_active]
    if topology.gpus and active:
        least = [min(row[column] for column in active) for row in topology.nic_distances]
        rows = list(zip(topology.nic_distances, least, strict=True))
        active = [column for column in active if any(row[column] == nearest for row, nearest in rows)]
    return [topology.nics[column].name for column in active]


def _command(
    topology: Topology, name: str, number: int, gid_index: int | None, address: str | None = None
) -> list[str]:
    command = [_PROGRAM, f"--ib-dev={name}", f"--port={FIRST_PORT + number}", f"--size={_MESSAGE_BYTES}"]
    command += [f"--duration={_SECONDS}", "--report_gbits", "--CPU-freq"]
    nic = next(nic for nic in topology.nics if nic.name == name)
    if gid_index is not None and any(port.link_layer == "Ethernet" for port in nic.ports):
        command.append(f"--gid-index={gid_index}")
    return [*command, address] if address else command


def _write(command: Sequence[str], limit_s: float) -> float:
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
            return _average(done.stdout)
        said = next((line.strip() for line in reversed((done.stdout + done.stderr).splitlines()) if line.strip()), said)
        time.sleep(_RETRY_S)
    raise ConfigError(f"no connection within {limit_s:g} s: {said}")


def _average(table: str) -> float:
    """The column "BW average" of the row below the header."""
    lines = iter(table.splitlines())
    for line in lines:
        if line.split()[:1] == ["#bytes"]:
            columns = next(lines, "").split()
            try:
                return float(columns[3])
            except (IndexError, ValueError):
                break
    raise ConfigError(f"{_PROGRAM} printed no bandwidth")
