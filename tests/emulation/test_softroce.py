"""The emulated kernels between domains over real networks of a virtual machine: Soft-RoCE devices by the transports
`verbs` and `libfabric`, and tcp where netem loses and delays packets.
"""

from __future__ import annotations

import json
import operator
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from hybrid_ep import _C
from tests.emulation.bare_low_latency import LOST_RANK, LowLatencyEnd
from tests.emulation.bare_ranks import Rank
from tests.prerequisites import require
from tests.sim.softroce_kernels import KILLED_RANK, LOST_TIMEOUT_S, ROUNDS_WITH_A_LOSS, num_rounds
from tests.sim.softroce_vm import MissingPrerequisite, run_in_vm

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

# The call that meets the fault may begin after it, and an emulated machine is slow.
LIMIT_S = 2 * LOST_TIMEOUT_S


@pytest.fixture(scope="module")
def results(emulated_module: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What tests/sim/softroce_kernels.py has printed, by step."""
    require(_C.has_verbs, "the verbs transport (libibverbs-dev when the package was built)")
    require(_C.has_fabric, "the libfabric transport (libfabric-dev when the package was built)")
    command = f"{shlex.quote(sys.executable)} -m tests.sim.softroce_kernels {shlex.quote(str(emulated_module))}"
    try:
        said = run_in_vm(command, tmp_path_factory.mktemp("softroce"), num_nics=4, memory_mb=1536, limit_s=540)
    except MissingPrerequisite as reason:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(reason))
    found: dict[str, Any] = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    return found


@pytest.mark.parametrize(
    ("step", "num_ranks", "num_pairs"),
    [
        ("two", 2, 2),
        ("two-pairs", 2, 4),
        ("four", 4, 1),
        ("two-by-two", 4, 2),
        ("low-latency-two", 2, 2),
        ("low-latency-two-by-two", 4, 2),
        ("low-latency-fp8", 4, 2),
    ],
)
def test_rows_and_sums_over_verbs(results: dict[str, Any], step: str, num_ranks: int, num_pairs: int) -> None:
    """Every rank has found each received row and each sum right, in every round."""
    link = f"verbs on rxe{{}} port 1 (GID 1), {num_pairs} queue pairs a peer, rings in pinned host memory"
    rounds = _rounds_of(step)
    want = [{"rounds": rounds, "link": link.format(rank), "closed": True} for rank in range(num_ranks)]
    assert results[step] == want


@pytest.mark.parametrize("step", ["libfabric", "low-latency-libfabric"])
def test_rows_and_sums_over_libfabric(results: dict[str, Any], step: str) -> None:
    link = "libfabric provider verbs;ofi_rxm on rxe{}, rings in pinned host memory"
    want = [{"rounds": _rounds_of(step), "link": link.format(rank), "closed": True} for rank in range(2)]
    assert results[step] == want


@pytest.mark.parametrize("step", ["port-down", "low-latency-port-down"])
def test_a_port_that_goes_down(results: dict[str, Any], step: str) -> None:
    """Port of rank 1. A rank whose write fails names the peer, its NIC and the verbs status.

    Which ranks have a write on its way depends on the moment. Without one, rank 1 reports its port, and rank 0 that
    nothing has come from rank 1.
    """
    found = results[step]
    ranks = found["ranks"]
    failed_writes = [
        _reports(said, "TransportError", 1 - rank, rf"rxe{rank} port 1: .* \(status \d+, ")
        for rank, said in enumerate(ranks)
    ]
    without_a_write = [
        _reports(ranks[0], "TimeoutError", 1, "rank 0 waited"),
        _reports(ranks[1], "TransportError", None, "rxe1 port 1: the port is down"),
    ]
    assert any(failed_writes), found
    assert all(map(operator.or_, failed_writes, without_a_write)), found
    assert max(found["seconds"]) < LIMIT_S


def test_a_rank_that_is_killed(results: dict[str, Any]) -> None:
    """Of three domains: the two others name it."""
    found = results["killed"]
    assert found["ranks"][KILLED_RANK] == {"killed": True}
    for rank in (0, 2):
        said = found["ranks"][rank]
        assert said["error"] in ("TransportError", "TimeoutError"), said
        assert said["peer"] == KILLED_RANK, said
    assert max(found["seconds"]) < LIMIT_S


def test_ranks_that_go_on_without_a_killed_one(results: dict[str, Any]) -> None:
    """They name it in one call, and the rows and sums of the later calls lack it alone."""
    found = results["low-latency-killed"]
    assert found[LOST_RANK] == {"killed": True}
    for rank in (0, 1, 2):
        said = found[rank]
        assert (said.get("named"), said["rounds"], said.get("error")) == (LOST_RANK, ROUNDS_WITH_A_LOSS, None), said
        assert said["seconds"] < LIMIT_S


def _reports(said: dict[str, Any], error: str, peer: int | None, text: str) -> bool:
    return (said["error"], said["peer"]) == (error, peer) and re.search(text, said["text"]) is not None


def test_chunks_over_tcp_that_loses_packets(results: dict[str, Any]) -> None:
    """Packets were lost, and every chunk is right."""
    found = results["lossy-links"]
    assert found["lost"] > 0
    links = found["links"]
    assert [[one[1:] for one in figures] for figures in links["figures"]] == [[[12, 12, 0]] * 2, [[9, 9, 0]] * 2]
    assert (links["failures"], links["closed"]) == ([None] * 2, [True] * 2)


@pytest.mark.parametrize("step", ["lossy", "low-latency-lossy"])
def test_rows_and_sums_over_tcp_that_loses_packets(results: dict[str, Any], step: str) -> None:
    found = results[step]
    assert found["lost"] > 0
    assert [(said["rounds"], said["closed"]) for said in found["ranks"]] == [(_rounds_of(step), True)] * 2


def test_a_network_that_goes_silent(results: dict[str, Any]) -> None:
    """Every packet is lost from some call on: both ranks name the other, and what tcp says."""
    found = results["silent"]
    for rank, said in enumerate(found["ranks"]):
        assert (said["error"], said["peer"]) == ("TransportError", 1 - rank), said
        assert "tcp to 127.0.0.1" in said["text"]
    assert max(found["seconds"]) < LIMIT_S


def _rounds_of(step: str) -> int:
    return num_rounds(LowLatencyEnd if step.startswith("low-latency") else Rank)
