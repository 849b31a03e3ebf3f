"""Runs inside the Soft-RoCE machine: examines its NICs, healthy and with each fault, and writes reports to a folder.

One process does all steps, because starting Python is what takes long in an emulated machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_ep.doctor import Node, Selection, examine, load_profile
from hybrid_ep.topology import probe
from hybrid_ep.topology.verbs_readers import READERS, VerbsDevice

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


def main(folder: Path) -> None:
    """Writes healthy.json, topology.json, what each verbs reader says, and one report for each step."""
    (folder / "site.yaml").write_text(SITE)
    _examine(folder, "healthy")
    (folder / "topology.json").write_text(json.dumps(probe().to_json()))
    for name, read in READERS.items():
        (folder / f"reader {name}.json").write_text(json.dumps(_answer(read)))
    for step in STEPS:
        subprocess.run(step.break_it.split(), check=True)
        _examine(folder, step.name)
        subprocess.run(step.mend_it.split(), check=True)
        time.sleep(1)  # the port becomes active again


if __name__ == "__main__":
    main(Path(sys.argv[1]))
