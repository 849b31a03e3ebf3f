"""Ranks are killed inside calls of the emulated cuda engine; survivors name them, and may go on without them."""

from __future__ import annotations

import functools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from hybrid_ep.testing.cluster import RankError, VirtualCluster
from tests.battery.cases import Case
from tests.emulation.conftest import UNREAD
from tests.emulation.engine import run
from tests.multi_gpu.lost_ranks import CALLS_IN_A_ROW

NUM_RANKS = 3
TIMEOUT_S = 12.0  # above the longest call of ranks that share two cores
LIMIT_S = 100.0


def _lose_one(module: Path, *, low_latency: bool, shrink: bool, seed: int) -> tuple[int, list[Any]]:
    """Kills a rank some time into its calls; returns it and what the survivors return."""
    alive = list(range(NUM_RANKS))
    run_here = functools.partial(run, str(module), seed)
    with VirtualCluster(NUM_RANKS) as cluster:
        join = ("multi_gpu.lost_ranks.join", alive, low_latency, shrink, TIMEOUT_S)
        cluster.run(run_here, *join, limit_s=LIMIT_S)
        call = "multi_gpu.lost_ranks.go_on_after_loss" if shrink else "multi_gpu.lost_ranks.call_until_lost"
        cluster.start(run_here, UNREAD, call)
        time.sleep(0.5 + 0.3 * seed)
        lost = alive.pop(seed % NUM_RANKS)
        os.kill(cluster.process_id(lost), signal.SIGKILL)
        with pytest.raises(RankError):
            cluster.collect([lost], limit_s=LIMIT_S)
        return lost, cluster.collect(alive, limit_s=LIMIT_S)


_KINDS = ("normal", "low_latency", "shrink")


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        # The other seeds are other ranks and moments of the same loss.
        pytest.param(kind, seed, marks=[] if seed == place else pytest.mark.slow)
        for place, kind in enumerate(_KINDS)
        for seed in range(NUM_RANKS)
    ],
)
def test_survivors_name_the_lost_rank(emulated_module: Path, kind: str, seed: int) -> None:
    lost, named = _lose_one(emulated_module, low_latency=kind != "normal", shrink=kind == "shrink", seed=seed)
    assert named == [lost] * (NUM_RANKS - 1)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_sums_that_wait_for_a_stalled_rank_leave_the_name_to_senders(emulated_module: Path, seed: int) -> None:
    lost = 2
    run_here = functools.partial(run, str(emulated_module), seed)
    with VirtualCluster(NUM_RANKS) as cluster:
        join = ("multi_gpu.lost_ranks.join", list(range(NUM_RANKS)), False, False, TIMEOUT_S)
        cluster.run(run_here, *join, limit_s=LIMIT_S)
        named = cluster.run(run_here, "multi_gpu.lost_ranks.lose_one_before_combine", lost, limit_s=LIMIT_S)
    assert named == [lost, lost, None]


_MANY = Case("3x1_more_chunks_than_slots", 3, 3000, hidden=16, topk=3, num_experts=3, num_ranks_per_domain=1)
_GRIDS = {
    "2x2": Case("2x2", 4, 40, num_ranks_per_domain=2),
    "3x1": Case("3x1", 3, 40, num_experts=12, num_ranks_per_domain=1),
    "3x2": Case("3x2", 6, 20, num_experts=12, num_ranks_per_domain=2),
}


@pytest.mark.parametrize(
    ("case", "place", "seed"),
    [
        (_GRIDS["2x2"], "combine", 3),
        pytest.param(_GRIDS["2x2"], "combine", 0, marks=pytest.mark.slow),
        (_GRIDS["3x1"], "combine", 1),
        pytest.param(_GRIDS["3x2"], "combine", 5, marks=pytest.mark.slow),
        (_GRIDS["2x2"], "has told its domain", 3),
        pytest.param(_GRIDS["3x2"], "has told its domain", 2, marks=pytest.mark.slow),
        (_GRIDS["3x1"], "has told one other domain", 2),
        pytest.param(_GRIDS["3x1"], "has told one other domain", 0, marks=pytest.mark.slow),
        (_GRIDS["3x1"], "has sent one verdict", 2),
        pytest.param(_GRIDS["3x1"], "has sent one verdict", 1, marks=pytest.mark.slow),
        (_GRIDS["3x2"], "has sent one verdict", 4),
        pytest.param(_GRIDS["2x2"], "has agreed on a combine", 3, marks=pytest.mark.slow),
        (_GRIDS["3x2"], "has agreed on a combine", 0),
        pytest.param(_MANY, "has sent some records", 2, marks=pytest.mark.slow),
        pytest.param(_MANY, "has sent some records", 0, marks=pytest.mark.slow),
        pytest.param(_MANY, "has sent some rows home", 2, marks=pytest.mark.slow),
        pytest.param(_MANY, "has sent some rows home", 1, marks=pytest.mark.slow),
    ],
    ids=lambda value: value.id if isinstance(value, Case) else str(value).replace(" ", "_"),
)
def test_survivors_between_domains_name_a_rank_that_ended(
    emulated_module: Path, case: Case, place: str, seed: int
) -> None:
    """The windows of peers are mapped, so that no link tells of the loss."""
    lost, timeout_s = seed % case.num_ranks, 3 * TIMEOUT_S if case is _MANY else TIMEOUT_S
    survivors = [rank for rank in range(case.num_ranks) if rank != lost]
    run_here = functools.partial(run, str(emulated_module), seed)
    variables = {"HYBRID_EP_ENGINE": "cuda", "HYBRID_EP_TRANSPORT": "loopback"}
    with VirtualCluster(case.num_ranks, variables=variables) as cluster:
        cluster.start(run_here, "emulation.ended_ranks.call_until_a_rank_ends", case, lost, place, timeout_s)
        named = cluster.collect(survivors, limit_s=LIMIT_S)
    assert named == [lost] * len(survivors)


def test_a_rank_that_was_late_does_not_go_on_alone(emulated_module: Path) -> None:
    run_here = functools.partial(run, str(emulated_module), 1)
    with VirtualCluster(NUM_RANKS) as cluster:
        join = ("multi_gpu.lost_ranks.join", list(range(NUM_RANKS)), True, True, TIMEOUT_S)
        cluster.run(run_here, *join, limit_s=LIMIT_S)
        late = 1
        cluster.start(run_here, "multi_gpu.lost_ranks.go_on_together", late)
        time.sleep(1.0)
        os.kill(cluster.process_id(late), signal.SIGSTOP)
        time.sleep(1.5 * TIMEOUT_S)
        os.kill(cluster.process_id(late), signal.SIGCONT)
        results = cluster.collect(limit_s=2 * LIMIT_S)
        for rank in {0, 2}:
            told, status = results[rank]
            assert len(told) == 1
            assert f"rank {rank} waited {TIMEOUT_S:g} s for rank {late}" in told[0]
            assert status == [0, 1, 0]
        told, _ = results[late]
        assert "the other ranks went on without this one, which was late" in told[-1]
        assert told[1:] == [told[-1]] * (CALLS_IN_A_ROW - 1)
        cluster.run(run_here, "multi_gpu.lost_ranks.meet_again", limit_s=LIMIT_S)


@pytest.mark.parametrize(
    ("step", "lost"),
    [
        ("some", 2),
        pytest.param("some", 0, marks=pytest.mark.slow),
        pytest.param("dispatch", 1, marks=pytest.mark.slow),
        pytest.param("receive", 0, marks=pytest.mark.slow),
        ("combine", 1),
    ],
)
def test_survivors_go_on_without_a_rank_that_was_killed_after(emulated_module: Path, step: str, lost: int) -> None:
    """In one domain. If its dispatch has reached some ranks only, these wait for one that waits for the lost rank."""
    run_here = functools.partial(run, str(emulated_module), 0)
    survivors = [rank for rank in range(NUM_RANKS) if rank != lost]
    with VirtualCluster(NUM_RANKS) as cluster:
        cluster.start(run_here, "multi_gpu.lost_ranks.join_and_lose_one_after", TIMEOUT_S, step, lost)
        assert cluster.collect(survivors, limit_s=LIMIT_S) == [lost] * len(survivors)


def test_ranks_wait_for_one_that_finds_the_loss_a_call_later(emulated_module: Path) -> None:
    """In one domain. The dispatch of the lost rank has reached a rank that pauses before its combine."""
    run_here = functools.partial(run, str(emulated_module), 0)
    call = "multi_gpu.lost_ranks.join_and_lose_one_after", TIMEOUT_S, "some", 2, False, 0.9 * TIMEOUT_S
    with VirtualCluster(NUM_RANKS) as cluster:
        cluster.start(run_here, *call)
        assert cluster.collect([0, 1], limit_s=LIMIT_S) == [2] * 2


def test_rows_that_one_cta_has_dropped_are_not_announced(emulated_module: Path) -> None:
    with VirtualCluster(2) as cluster:
        cluster.run(run, str(emulated_module), 0, "emulation.dropped_rows.check_dropped_rows", 11, limit_s=LIMIT_S)


def test_ranks_a_call_ahead_name_the_rank_that_was_lost(emulated_module: Path) -> None:
    """And not the rank of their own domain that has lost it."""
    with VirtualCluster(4) as cluster:
        named = cluster.run(
            run, str(emulated_module), 0, "emulation.lost_links.lose_link_of_last_peers", TIMEOUT_S, limit_s=LIMIT_S
        )
    assert named == [(3, 1), (3, 0), (1, 1), (1, 0)]
