"""A rendezvous to map memory: all ranks raise what one rank lacks, and name a rank that does not come in time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

import hybrid_ep
from hybrid_ep.agree.roll_call import RollCall, roll_call_among
from hybrid_ep.engine.cuda.symmetric import SymmetricMemory
from hybrid_ep.testing.cluster import VirtualCluster

NUM_RANKS = 3
LIMIT_S = 60.0


def _map(number: int, failing: int, at: str) -> str:
    """Maps memory where torch's part fails at one rank."""
    rank = dist.get_rank()
    local = torch.zeros(64, dtype=torch.uint8)
    handle = SimpleNamespace(buffer_ptrs=[local.data_ptr()] * NUM_RANKS)
    fails = mock.Mock(side_effect=RuntimeError("no such handle"))
    works = {"empty": mock.Mock(return_value=local), "rendezvous": mock.Mock(return_value=handle)}
    if rank == failing:
        works[at] = fails
    roll_call = RollCall(dist.group.WORLD, rank, 20.0, number)
    with (
        mock.patch.object(symm_mem, "empty", works["empty"]),
        mock.patch.object(symm_mem, "rendezvous", works["rendezvous"]),
        mock.patch.object(torch.cuda, "synchronize"),
        mock.patch.object(torch.cuda, "device", mock.MagicMock()),
    ):
        try:
            SymmetricMemory.allocate(64, roll_call, torch.device("cpu"))
        except hybrid_ep.HybridEPError as error:
            return f"{type(error).__name__}: {error}"
    return "mapped"


def _hang(number: int, failing: int) -> str:
    """One rank fails in torch's part and the others wait for it; ranks are called 10, 11, ..."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    store = dist.distributed_c10d._get_process_group_store(group)
    before = store.timeout
    local = torch.zeros(64, dtype=torch.uint8)
    fails = mock.Mock(side_effect=RuntimeError("no such handle"))
    waits = mock.Mock(side_effect=lambda *_: store.get(f"handles of {number} that nobody sends"))
    roll_call = RollCall(group, rank, 1.0, number, ranks=range(10, 10 + NUM_RANKS))
    with (
        mock.patch.object(symm_mem, "empty", mock.Mock(return_value=local)),
        mock.patch.object(symm_mem, "rendezvous", fails if rank == failing else waits),
        mock.patch.object(torch.cuda, "device", mock.MagicMock()),
    ):
        try:
            SymmetricMemory.allocate(64, roll_call, torch.device("cpu"))
        except hybrid_ep.HybridEPError as error:
            assert store.timeout == before
            return f"{type(error).__name__}: {error}"
    return "mapped"


def _group_without(number: int, absent: int) -> tuple[str, int | None]:
    """The ranks of a subgroup meet, without one of them."""
    rank, ranks = dist.get_rank(), range(1, NUM_RANKS)
    if rank in ranks and rank != absent:
        group = dist.group.WORLD
        assert group is not None
        try:
            roll_call_among(group, rank, ranks, 1.0, number)
        except hybrid_ep.TimeoutError as error:
            return str(error), error.peer
    return "", None


def _come_late(number: int, late: int) -> tuple[str, int | None, float]:
    """Meets twice; the late rank comes when the others have given it up."""
    rank = dist.get_rank()
    roll_call = RollCall(dist.group.WORLD, rank, 1.5, number)
    assert roll_call.gather("first", str(rank)) == {r: str(r) for r in range(NUM_RANKS)}
    dist.barrier()
    if rank == late:
        time.sleep(3.0)
    begin = time.monotonic()
    try:
        roll_call.gather("second", "")
    except hybrid_ep.TimeoutError as error:
        return str(error), error.peer, time.monotonic() - begin
    return "met", None, 0.0


def _meet_alone(number: int, alone: int) -> str:
    """One rank comes to a meeting that the others do not have; then all meet."""
    rank = dist.get_rank()
    roll_call = RollCall(dist.group.WORLD, rank, 1.5, number)
    if rank == alone:
        with pytest.raises(hybrid_ep.TimeoutError, match="it has not come; ranks"):
            roll_call.gather("step", "alone")
    dist.barrier()
    return ", ".join(roll_call.gather("step", str(rank)).values())


@pytest.fixture(scope="module")
def cluster() -> Iterator[VirtualCluster]:
    with VirtualCluster(NUM_RANKS) as started:
        yield started


def test_what_one_rank_cannot_map_all_are_told(cluster: VirtualCluster) -> None:
    assert cluster.run(_map, 0, -1, "rendezvous", limit_s=LIMIT_S) == ["mapped"] * NUM_RANKS
    told = cluster.run(_map, 1, 1, "rendezvous", limit_s=LIMIT_S)
    assert told == [told[0]] * NUM_RANKS
    assert told[0].startswith(
        "TopologyError: the 3 ranks of the group cannot map each other's GPU memory: rank 1: no such"
    )
    told = cluster.run(_map, 2, 2, "empty", limit_s=LIMIT_S)
    assert told == [told[0]] * NUM_RANKS
    assert told[0].startswith("ConfigError: bytes of symmetric memory are 64, which rank 2 does not have: no such")


def test_a_wait_of_torch_for_handles_ends(cluster: VirtualCluster) -> None:
    told = cluster.run(_hang, 5, 1, limit_s=LIMIT_S)
    assert told == [told[0]] * NUM_RANKS
    assert told[0].startswith("TopologyError: ")
    assert "rank 11: no such handle" in told[0]


def test_a_group_is_made_of_ranks_that_have_come(cluster: VirtualCluster) -> None:
    told = cluster.run(_group_without, 6, 2, limit_s=LIMIT_S)
    assert told[1][1] == 2
    assert told[1][0].endswith("rank 1 waited 1 s for rank 2: it has not come")


def test_a_rank_that_has_met_alone_meets_the_others(cluster: VirtualCluster) -> None:
    assert cluster.run(_meet_alone, 7, 1, limit_s=LIMIT_S) == ["0, 1, 2"] * NUM_RANKS


def test_a_late_rank_is_named_in_time_and_told_so(cluster: VirtualCluster) -> None:
    results = cluster.run(_come_late, 3, 1, limit_s=LIMIT_S)
    assert [peer for _, peer, _ in results] == [1, 0, 1]
    assert "it has not come" in results[0][0]
    assert "have given up on this one, which was late" in results[1][0]
    assert all(waited < 6.0 for _, _, waited in results)
