"""Kills or stops a rank at a random moment of a random job, again and again, and counts what its survivors name.

    python -m tests.multi_process.lost_rank_trials --kills 200 --stops 200 --seed 0

Every survivor must name the lost rank, within the buffer's timeout of the moment in which it needed that rank. A trial
is a function of the seed and its number, but for the moment in which the operating system delivers the signal.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hybrid_ep import Buffer, TransportError
from hybrid_ep.testing.cluster import RankError, VirtualCluster
from tests.battery import normal
from tests.battery.cases import Case

TIMEOUT_S = 3.0
# A call that begins right before the loss waits for the timeout; what a loaded machine adds is not the buffer's.
_SLACK_S = 1.5
_LIMIT_S = 60.0
_MOST_STARTS = 5


class _NotStartedError(Exception):
    """The ranks of a job could not make their buffers."""


@dataclass(frozen=True)
class Trial:
    """One job and the rank that it loses.

    Attributes:
        seed: of everything below.
        how: ``"kill"`` or ``"stop"``.
        num_ranks, num_ranks_per_domain: of the job.
        low_latency: which calls it makes.
        victim: the rank that is lost.
        after_s: when, after all ranks have begun.
    """

    seed: str
    how: str
    num_ranks: int
    num_ranks_per_domain: int
    low_latency: bool
    victim: int
    after_s: float

    @classmethod
    def draw(cls, seed: int, number: int, how: str) -> Trial:
        """Returns a trial at random."""
        text = f"{seed}/{how}/{number}"
        draw = random.Random(text)
        num_ranks, per_domain = draw.choice([(2, 2), (3, 3), (4, 4), (4, 2), (6, 3), (6, 2)])
        low_latency = draw.random() < 0.3
        return cls(text, how, num_ranks, per_domain, low_latency, draw.randrange(num_ranks), draw.uniform(0.0, 0.6))


@dataclass(frozen=True)
class Outcome:
    """What the survivors of a trial were told.

    Attributes:
        trial: which one.
        named: the rank that each survivor named, by survivor; None: nobody, or no error.
        slowest_s: the longest time from the beginning of a call to its error.
        problem: what else went wrong, or "".
    """

    trial: Trial
    named: dict[int, int | None]
    slowest_s: float
    problem: str

    @property
    def is_right(self) -> bool:
        """Whether every survivor named the lost rank."""
        return not self.problem and all(rank == self.trial.victim for rank in self.named.values())

    @property
    def is_in_time(self) -> bool:
        """Whether every survivor was told within the timeout."""
        return self.slowest_s <= TIMEOUT_S + _SLACK_S


_made: list[Buffer] = []  # of this rank's process


def _prepare(trial: Trial) -> None:
    _made.append(normal.make_buffer(_case(trial), low_latency_mode=True, timeout_s=TIMEOUT_S))


def _case(trial: Trial) -> Case:
    per_domain = trial.num_ranks_per_domain
    return Case("trial", trial.num_ranks, 8, num_experts=4 * trial.num_ranks, num_ranks_per_domain=per_domain)


def _work(trial: Trial) -> tuple[int | None, float]:
    """Calls until a rank is lost; returns whom the error names, and how long the call took."""
    rank, case = dist.get_rank(), _case(trial)
    draw = random.Random(f"{trial.seed}/{rank}")
    inputs = case.inputs(rank)
    end = time.monotonic() + _LIMIT_S / 2
    while time.monotonic() < end:
        time.sleep(draw.choice([0.0, 0.0, 0.0, draw.uniform(0.0, 0.03)]))  # ranks are never in step
        begin = time.monotonic()
        try:
            _call(_made[0], case, inputs, low_latency=trial.low_latency)
        except TransportError as error:
            return error.peer, time.monotonic() - begin
    return None, 0.0


def _call(buffer: Buffer, case: Case, inputs: normal.Inputs, *, low_latency: bool) -> None:
    if not low_latency:
        received, _, _, _, handle, _ = normal.dispatch(buffer, case, inputs)
        buffer.combine(received, handle)
        return
    received, _, handle, _, _ = buffer.low_latency_dispatch(
        inputs.x, inputs.topk_idx, case.max_tokens, case.num_experts, use_fp8=False
    )
    assert isinstance(received, torch.Tensor)
    buffer.low_latency_combine(received, inputs.topk_idx, inputs.topk_weights, handle)


def _run_one(trial: Trial) -> Outcome:
    """A job that does not start loses nobody: on a loaded machine ranks can come too late to make a buffer."""
    for _ in range(_MOST_STARTS - 1):
        with contextlib.suppress(_NotStartedError):
            return _lose_one(trial)
    return _lose_one(trial)


def _lose_one(trial: Trial) -> Outcome:
    survivors = [rank for rank in range(trial.num_ranks) if rank != trial.victim]
    with VirtualCluster(trial.num_ranks) as cluster:
        pid = cluster.process_id(trial.victim)
        try:
            cluster.run(_prepare, trial)
        except RankError as error:
            raise _NotStartedError from error
        cluster.start(_work, trial)
        time.sleep(trial.after_s)
        os.kill(pid, signal.SIGKILL if trial.how == "kill" else signal.SIGSTOP)
        try:
            told = cluster.collect(survivors, limit_s=_LIMIT_S)
        except RankError as error:
            return Outcome(trial, {}, 0.0, str(error))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return Outcome(
        trial,
        {rank: named for rank, (named, _) in zip(survivors, told, strict=True)},
        max(took for _, took in told),
        "",
    )


def run(num_kills: int, num_stops: int, seed: int, *, at_once: int = 1, first: int = 0) -> list[Outcome]:
    """Runs trials and returns their outcomes.

    Args:
        num_kills, num_stops: how many of each.
        seed: of all trials.
        at_once: trials that run beside each other.
        first: number of the first trial.
    """
    trials = [Trial.draw(seed, first + i, "kill") for i in range(num_kills)]
    trials += [Trial.draw(seed, first + i, "stop") for i in range(num_stops)]
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(_run_one, trials))


def main() -> int:
    """Prints the statistics; 1 where a survivor was told wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=4)
    given = parser.parse_args()
    outcomes = run(given.kills, given.stops, given.seed, at_once=given.at_once, first=given.first)
    for how in ("kill", "stop"):
        of_kind = [outcome for outcome in outcomes if outcome.trial.how == how]
        if not of_kind:
            continue
        wrong = [outcome for outcome in of_kind if not outcome.is_right]
        late = [outcome for outcome in of_kind if not outcome.is_in_time]
        slowest = max(outcome.slowest_s for outcome in of_kind)
        told = sum(len(outcome.named) for outcome in of_kind)
        print(
            f"{how}: {len(of_kind)} trials, {told} survivors, {len(wrong)} trials with a wrong name, {len(late)} late; "
            f"slowest error {slowest:.2f} s after its call began (timeout_s {TIMEOUT_S:g})"
        )
        for outcome in wrong + late:
            print(f"  {outcome.trial} {outcome.named} {outcome.problem[-1500:]}")
    return 0 if all(outcome.is_right for outcome in outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
