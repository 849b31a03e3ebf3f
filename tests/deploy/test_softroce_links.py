"""The transports `verbs` and `libfabric` on real RDMA devices: Soft-RoCE in a throw-away virtual machine."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from typing import Any

import pytest

from hybrid_ep import _C
from tests.prerequisites import require
from tests.sim.softroce_links import PORT_DOWN_AFTER_S, PORT_TIMEOUT_S
from tests.sim.softroce_vm import MissingPrerequisite, run_in_vm

pytestmark = pytest.mark.cluster
_VERBS = "verbs on rxe0 port 1 (GID 1), "


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What tests/sim/softroce_links.py has printed, by step."""
    require(_C.has_verbs, "the verbs transport (libibverbs-dev when the package was built)")
    require(_C.has_fabric, "the libfabric transport (libfabric-dev when the package was built)")
    steps = "devices two two-pairs two-nics classed four unordered libfabric refusals port-down"
    command = f"{shlex.quote(sys.executable)} -m tests.sim.softroce_links {steps}"
    try:
        said = run_in_vm(command, tmp_path_factory.mktemp("softroce"), num_nics=4, limit_s=540)
    except MissingPrerequisite as reason:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(reason))
    found: dict[str, Any] = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    return found


def test_active_devices(results: dict[str, Any]) -> None:
    assert results["devices"] == ["rxe0", "rxe1", "rxe2", "rxe3"]


@pytest.mark.parametrize(
    ("step", "num_ends", "said"),
    [
        ("classed", 2, f"{_VERBS}2 queue pairs a peer, rings in pinned host memory"),
        ("two", 2, f"{_VERBS}2 queue pairs a peer, rings in pinned host memory"),
        ("two-pairs", 2, f"{_VERBS}4 queue pairs a peer, rings in pinned host memory"),
        ("four", 4, f"{_VERBS}2 queue pairs a peer, rings in pinned host memory"),
        ("unordered", 2, f"{_VERBS}2 queue pairs a peer, rings in pinned host memory, unordered"),
        ("libfabric", 2, "libfabric provider verbs;ofi_rxm on rxe0, rings in pinned host memory"),
    ],
)
def test_every_chunk_arrives(results: dict[str, Any], step: str, num_ends: int, said: str) -> None:
    """Chunks, flags and credits between all ends, over slots that are used again, and the ends close in order."""
    found = results[step]
    assert found["failures"] == [None] * num_ends
    num_peers = num_ends - 1
    for figures, num_chunks in zip(found["figures"], (12, 9), strict=True):
        assert [one[1:] for one in figures] == [[num_chunks * num_peers, num_chunks * num_peers, 0]] * num_ends
    assert found["closed"] == [True] * num_ends
    assert found["describe"] == said


def test_several_nics_of_a_rank(results: dict[str, Any]) -> None:
    """Chunks go over both NICs of each end, and every one is right."""
    found = results["two-nics"]
    assert found["failures"] == [None] * 2
    assert [[one[1:] for one in figures] for figures in found["figures"]] == [[[12, 12, 0]] * 2, [[9, 9, 0]] * 2]
    nics = "rxe0 port 1 (GID 1), rxe2 port 1 (GID 1)"
    assert found["describe"] == f"verbs on {nics}, 4 queue pairs a peer, rings in pinned host memory"


def test_traffic_class_is_that_of_the_packets(results: dict[str, Any]) -> None:
    assert results["classed"]["types_of_service"] == [104]


def test_what_cannot_be_opened_is_named(results: dict[str, Any]) -> None:
    assert results["refusals"] == {
        "device": "RDMA device 'rxe9' cannot be opened; there are: rxe0, rxe1, rxe2, rxe3",
        "gid": "rxe0 port 1 has no GID with index 200",
        "port": "rxe0 port 3 does not exist",
        "service level": "service level is 16; allowed: 0 to 15",
        "traffic class": "traffic class is 256; allowed: 0 to 255",
        "mtu": "MTU is 1500; allowed: 0, 256, 512, 1024, 2048 or 4096",
        "queue pairs": "queue pairs per peer is 5; allowed: 1 to 4",
    }


def test_port_that_goes_down_is_told_in_time(results: dict[str, Any]) -> None:
    """An end names its peer, its device and the status of its work request, if it was sending when the port went down.

    An end whose last chunk had been acknowledged has nothing to retry. If its own port is down, it reports the port.
    Otherwise it waits for the peer until the kernel's timeout.
    """
    found = results["port-down"]
    assert [one[1:] for one in found["before"]] == [[4, 4, 0]] * 2
    failed = [i for i, failure in enumerate(found["failures"]) if failure is not None]
    assert failed
    for i in failed:
        peer, device, detail = found["failures"][i]
        assert found["figures"][i][0] < PORT_DOWN_AFTER_S + PORT_TIMEOUT_S
        if (i, peer, device, detail) == (1, -1, "rxe1 port 1", "the port is down"):
            continue
        assert (peer, device) == (1 - i, f"rxe{i} port 1")
        # Mostly that the retries are over. Soft-RoCE may refuse a repeated packet before, or find an error of its own.
        assert re.match(r"[A-Za-z ]+ \(status [1-9]\d*, ", detail)
        assert "flush" not in detail.lower()  # which follows from the error, and does not say what it was
