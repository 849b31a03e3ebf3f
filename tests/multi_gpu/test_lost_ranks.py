"""Ranks are killed at random moments, inside running calls; every survivor names the rank that died.

The ranks of a team have a GPU each, or eight share the GPUs. Ranks that share run in turns, so a rank dies in the
middle of a call, after its rows have reached some ranks and not others.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from hybrid_ep.testing.cluster import RankError, VirtualCluster
from tests.multi_gpu import lost_ranks

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS == 0, reason="no GPU is visible")]
WIDE = 8  # ranks of a team that shares GPUs
NUM_KINDS = 3  # of calls: each takes fresh ranks
LIMIT_S = 60.0


class Reserve:
    """Ranks that wait to be used once: killed, or left behind by a team that broke up."""

    def __init__(self, cluster: VirtualCluster) -> None:
        self.cluster = cluster
        self._next = 0

    def take(self, num_ranks: int) -> list[int]:
        """The next ranks; consecutive ones have different GPUs while there are any."""
        first, self._next = self._next, self._next + num_ranks
        assert self._next <= self.cluster.num_ranks
        return list(range(first, self._next))

    def kill_one_of(self, alive: list[int], chance: random.Random) -> int:
        """Waits for a moment of chance, kills a rank, takes it out of `alive` and returns it."""
        time.sleep(chance.uniform(0.02, 0.5))
        lost = chance.choice(alive)
        os.kill(self.cluster.process_id(lost), signal.SIGKILL)
        alive.remove(lost)
        with pytest.raises(RankError):
            self.cluster.collect([lost], limit_s=LIMIT_S)
        return lost


@pytest.fixture(scope="module")
def reserve() -> Iterator[Reserve]:
    num_ranks = NUM_KINDS * sum(team.num_ranks for team in TEAMS) + 3
    with VirtualCluster(num_ranks, device="cuda", ranks_share_gpus=True) as cluster:
        yield Reserve(cluster)


@dataclass(frozen=True)
class Team:
    """So many ranks, of which so many are killed, one after the other."""

    id: str
    num_ranks: int
    num_losses: int

    @property
    def timeout_s(self) -> float:
        """Ranks that take turns need longer for a call."""
        return 1.0 if self.num_ranks <= NUM_GPUS else 2.0


TEAMS = [Team("a_gpu_each", NUM_GPUS, 1), Team("shared_gpus", WIDE, 2)]
every_team = pytest.mark.parametrize("team", [team for team in TEAMS if team.num_ranks > 1], ids=lambda team: team.id)


@every_team
@pytest.mark.parametrize("low_latency", [False, True], ids=["normal", "low_latency"])
def test_survivors_name_the_lost_rank(reserve: Reserve, team: Team, low_latency: bool) -> None:
    """After each loss the survivors make a new team."""
    chance, alive = random.Random(team.id), reserve.take(team.num_ranks)
    for _ in range(team.num_losses):
        make = (lost_ranks.join, list(alive), low_latency, False, team.timeout_s)
        reserve.cluster.run(*make, ranks=alive, limit_s=LIMIT_S)
        reserve.cluster.start(lost_ranks.call_until_lost, ranks=alive)
        lost = reserve.kill_one_of(alive, chance)
        assert reserve.cluster.collect(alive, limit_s=LIMIT_S) == [lost] * len(alive)


def test_the_messenger_is_not_blamed(reserve: Reserve) -> None:
    """A rank that lacks nothing of the dead one waits for others that do; it names whom they name."""
    members = reserve.take(3)
    reserve.cluster.run(lost_ranks.join, members, False, False, 2.0, ranks=members, limit_s=LIMIT_S)
    first, second, _ = reserve.cluster.run(
        lost_ranks.lose_one_that_reached_some, members, ranks=members, limit_s=LIMIT_S
    )
    assert first == "dispatch: rows: rank 0 waited 2 s for rank 2: rank 1 gave up on it first"
    assert second.startswith("dispatch: counts: rank 1 waited 2 s for rank 2: it is at step")


@every_team
def test_low_latency_goes_on_without_the_lost_rank(reserve: Reserve, team: Team) -> None:
    """One buffer serves the team as long as it lives."""
    chance, alive = random.Random(team.id), reserve.take(team.num_ranks)
    reserve.cluster.run(lost_ranks.join, list(alive), True, True, team.timeout_s, ranks=alive, limit_s=LIMIT_S)
    for _ in range(team.num_losses):
        reserve.cluster.start(lost_ranks.go_on_after_loss, ranks=alive)
        lost = reserve.kill_one_of(alive, chance)
        assert reserve.cluster.collect(alive, limit_s=LIMIT_S) == [lost] * len(alive)
