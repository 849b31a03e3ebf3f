"""Runs inside the Soft-RoCE machine: examines its NICs, healthy and with each fault, and writes reports to a folder.

One process does all steps, because starting Python is what takes long in an emulated machine.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybrid_ep import _C
from hybrid_ep.cluster.doctor import Node, Selection, Unreadable, examine, load_profile
from hybrid_ep.cluster.doctor.active.gpu_direct import End, window_bytes, write_by_verbs
from hybrid_ep.topology import probe
from hybrid_ep.topology.node_probe import READERS, VerbsDevice

GPU_DIRECT_CHUNK = 16384  # Soft-RoCE loses connections where much is on its way, or is repeated
SITE = """
extends: cpu
nic: {count: 2, link_layer: [Ethernet], mtu: 4096, roce_gid_index: 1}
"""


@dataclass(frozen=True)
class Step:
    """One fault: the command that makes it, the one that undoes it, and what the doctor has to say."""

    name: str
    break_it: str
    mend_it: str
    check_id: str
    seen: str


STEPS = (
    Step("port down", "ip link set nic1 down", "ip link set nic1 up", "nic.state", "rxe1/1: DOWN"),
    Step("small MTU", "ip link set nic1 mtu 1500", "ip link set nic1 mtu 4200", "nic.mtu", "rxe1/1: 1024 bytes"),
    Step(
        "no GID",
        "ip addr del 10.77.0.2/24 dev nic1",
        "ip addr add 10.77.0.2/24 dev nic1",
        "nic.gid",
        "rxe1/1: GID 1 is empty",
    ),
    Step("NIC missing", "rdma link delete rxe1", "rdma link add rxe1 type rxe netdev nic1", "nic.count", "1: rxe0"),
)


def _examine(folder: Path, name: str) -> None:
    with closing(Node()) as node:
        profile = load_profile(str(folder / "site.yaml"))
        report = examine(node, profile, "given", Selection(groups=("nic",)))
    (folder / f"{name}.json").write_text(json.dumps(report.to_json()))


def _answer(read: Callable[[], list[VerbsDevice]]) -> dict[str, Any]:
    try:
        return {"devices": read()}
    except (ImportError, RuntimeError) as error:
        return {"reason": str(error)}


class HostMemory:
    """In the place of a GPU's memory: the NIC registers it as it would with nvidia-peermem."""

    def __init__(self, num_bytes: int, *, is_open: bool = True) -> None:
        self._map = mmap.mmap(-1, num_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        if not is_open:  # then the kernel has no pages to pin
            assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(self.address), num_bytes, 0) == 0
        self._is_open = is_open

    def write(self, offset: int, content: bytes) -> None:
        if self._is_open:
            self._map[offset : offset + len(content)] = content

    def read(self, offset: int, num_bytes: int) -> bytes:
        return self._map[offset : offset + num_bytes]


def _write_between_nics() -> dict[str, Any]:
    """What the doctor's GPUDirect measurement says of rxe0 and rxe1: with memory they take, and with other memory."""
    found: dict[str, Any] = {}
    for name, is_open in (("taken", True), ("refused", False)):

        def open_end(idx: int, gpu_idx: int, nic: str, gid_index: int | None, is_open: bool = is_open) -> End:
            memory = HostMemory(window_bytes(GPU_DIRECT_CHUNK), is_open=is_open)
            return End(idx, nic, memory, _C, gid_index=gid_index, chunk_bytes=GPU_DIRECT_CHUNK, timeout_s=600.0)

        try:
            pair = (0, "rxe0", 1, "rxe1")
            for both in (False, True):
                (written,) = write_by_verbs([pair], 1, bidirectional=both, seconds=1.0, open_end=open_end)
                found[f"{name}, {'both ways' if both else 'one way'}"] = asdict(written)
        except Unreadable as error:
            found[name] = str(error)
    return found


def main(folder: Path) -> None:
    """Writes healthy.json, topology.json, gpu_direct.json, what each verbs reader says, and a report for each step."""
    (folder / "site.yaml").write_text(SITE)
    _examine(folder, "healthy")
    (folder / "topology.json").write_text(json.dumps(probe().to_json()))
    for name, read in READERS.items():
        (folder / f"reader {name}.json").write_text(json.dumps(_answer(read)))
    if _C.has_verbs:
        (folder / "gpu_direct.json").write_text(json.dumps(_write_between_nics()))
    for step in STEPS:
        subprocess.run(step.break_it.split(), check=True)
        _examine(folder, step.name)
        subprocess.run(step.mend_it.split(), check=True)
        time.sleep(1)  # the port becomes active again


if __name__ == "__main__":
    main(Path(sys.argv[1]))
