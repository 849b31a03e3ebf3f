"""Loses one rank or two at random moments of a random job, again and again, and checks that the others go on.

    python -m tests.multi_process.recovery_trials --trials 200 --seed 0
    python -m tests.multi_process.recovery_trials --trials 20 --device cuda    # ranks share the GPUs; the cuda engine

A trial is a job of 2 to 8 ranks that dispatches, computes and combines through one of the buffers. A rank is killed,
stopped, or hangs; in some trials a second one is killed while the first is recovered from. The survivors must end in
one group of all of them, with every expert that one of them holds or loads, and every row of every step must be right.
A rank that was stopped or hung, and goes on afterwards, must be told that it is left out. A trial is a function of the
seed and its number, but for the moments in which the operating system delivers signals.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep import Buffer, HybridEPBuffer, TransportError, env
from hybrid_ep.agree.board import Board
from hybrid_ep.agree.rendezvous import rendezvous
from hybrid_ep.balance import ExpertPlacement
from hybrid_ep.elastic import recover
from hybrid_ep.testing.cluster import RankError, VirtualCluster

TIMEOUT_S = 5.0
_GPU_TIMEOUT_S = 10.0  # ranks that share a GPU take turns of milliseconds
_GPU_VARIABLES = {env.ENGINE.name: "cuda", env.TRANSPORT.name: "tcp", env.TCP_ADDRESS.name: "127.0.0.1"}
_LIMIT_S = 90.0
_NUM_STEPS_AFTER = 2
_HIDDEN, _TOPK, _TOKENS = 128, 2, 6
_HOWS = ("kill", "stop", "hang")
_CALLS = ("normal", "permute", "low latency")


@dataclass(frozen=True)
class Trial:
    """One job and what it loses.

    Attributes:
        seed: of everything below.
        how: the first victim is killed or stopped from outside, or hangs in its experts.
        calls: which buffer the job uses.
        num_ranks, num_ranks_per_domain: of the job.
        num_slots: of each rank.
        can_load: whether experts that nobody holds can be loaded.
        victims: ranks that are lost; the second kills itself during the recovery.
        after_s: when the first is lost, after all have begun; and the second, after it has begun to recover.
        device: of the tokens: ``cpu`` with the torch engine, ``cuda`` with the cuda engine.
    """

    seed: str
    how: str
    calls: str
    num_ranks: int
    num_ranks_per_domain: int
    num_slots: int
    can_load: bool
    victims: tuple[int, ...]
    after_s: tuple[float, float]
    device: str = "cpu"

    @property
    def timeout_s(self) -> float:
        """Of the buffers."""
        return TIMEOUT_S if self.device == "cpu" else _GPU_TIMEOUT_S

    @classmethod
    def draw(cls, seed: int, number: int, device: str = "cpu") -> Trial:
        """Returns a trial at random."""
        draw = random.Random(f"{seed}/{number}")
        num_ranks, per_domain = draw.choice([(2, 2), (3, 3), (4, 4), (4, 2), (6, 3), (8, 8), (8, 4)])
        num_victims = 2 if num_ranks > 2 and draw.random() < 0.35 else 1
        victims = tuple(draw.sample(range(num_ranks), num_victims))
        how, calls = draw.choice(_HOWS), draw.choice(_CALLS)
        after_s = draw.uniform(0.0, 0.4), draw.uniform(0.0, 0.6)
        slots = draw.choice([2, 3])
        can_load = draw.random() < 0.7
        return cls(f"{seed}/{number}", how, calls, num_ranks, per_domain, slots, can_load, victims, after_s, device)

    def placement(self) -> ExpertPlacement:
        """Two experts of each rank, and replicas of others in further slots."""
        num_experts = 2 * self.num_ranks
        layer = []
        for rank in range(self.num_ranks):
            layer += [2 * rank, 2 * rank + 1, (2 * rank + 5) % num_experts][: self.num_slots]
        return ExpertPlacement((tuple(layer),), num_experts, self.num_ranks, self.num_ranks_per_domain)


@dataclass
class Told:
    """What one rank has seen.

    Attributes:
        ranks: the ranks, as numbered at first, of the last group; () where it was left out.
        generations: of the groups that it was in.
        served: experts of the last placement.
        num_steps: that were right.
        wrong: what was not.
        left_out: what a rank that could not go on was told.
        noticed: when errors came, and `recovered` when the next group was there, by one clock for all.
    """

    ranks: tuple[int, ...] = ()
    generations: list[int] = field(default_factory=list)
    served: tuple[int, ...] = ()
    num_steps: int = 0
    wrong: list[str] = field(default_factory=list)
    left_out: str = ""
    noticed: list[float] = field(default_factory=list)
    recovered: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """What came of a trial.

    Attributes:
        trial: which one.
        problems: what went wrong, in words.
        seconds: of the slowest recovery, from the moment in which the last survivor was told.
        num_steps: that were checked.
    """

    trial: Trial
    problems: list[str]
    seconds: float
    num_steps: int


class Job:
    """What a rank has: a buffer, a placement, and in each slot the "weights" of its expert, which is its factor."""

    def __init__(self, buffer: Buffer | HybridEPBuffer, placement: ExpertPlacement) -> None:
        self.buffer, self.placement = buffer, placement
        first = buffer.rank * placement.num_slots
        self.factors = [factor_of(e) for e in placement.experts[0][first : first + placement.num_slots]]
        self.ranks = tuple(range(placement.num_ranks))

    def take(self, recovered: Any) -> None:
        """Goes on after a recovery: factors stay in their slots or come from `load_expert`."""
        report = recovered.report
        old, slots = self.factors, report.kept[0].tolist()
        self.factors = [report.loaded[0, i] if slot < 0 else old[slot] for i, slot in enumerate(slots)]
        self.buffer, self.placement = recovered.buffer, recovered.placement
        self.ranks = tuple(-1 if rank is None else self.ranks[rank] for rank in report.ranks)


def factor_of(expert: int) -> float:
    """What an expert multiplies with; sums of two of them times a token are exact in bf16."""
    return float(expert % 16 + 1)


def step(job: Job, number: int, hang_s: float = 0.0, device: str = "cpu") -> str:
    """Takes tokens through the experts and back; returns what is wrong, or "".

    Args:
        job: of this rank.
        number: of the step, which the tokens depend on.
        hang_s: how long the experts take.
        device: of the tokens.
    """
    buffer, placement = job.buffer, job.placement
    rank, num_slots = buffer.rank, placement.num_slots
    generator = torch.Generator().manual_seed(number * 1000 + rank)
    num_tokens = int(torch.randint(0, _TOKENS + 1, (), generator=generator))
    x = torch.randint(1, 8, (num_tokens, 1), generator=generator).expand(-1, _HIDDEN).bfloat16().contiguous()
    order = torch.rand(num_tokens, placement.num_experts, generator=generator)
    topk_idx = order.argsort(1)[:, :_TOPK].contiguous()
    x, topk_idx, weights = (tensor.to(device) for tensor in (x, topk_idx, torch.ones(num_tokens, _TOPK)))
    slots = placement.on(device, rank).map_topk(0, topk_idx)
    factors = torch.tensor(job.factors, device=device)
    if isinstance(buffer, HybridEPBuffer):
        tokens, _, _, per_expert, handle = buffer.dispatch_with_permute(
            hidden=x, topk_idx=slots, topk_weights=weights, num_of_experts=placement.num_replicas
        )
        time.sleep(hang_s)
        scale = factors.repeat_interleave(per_expert.long().to(device))
        combined, _ = buffer.combine_with_unpermute(
            hidden=(tokens.float() * scale.unsqueeze(1)).bfloat16(), handle=handle
        )
    elif buffer.low_latency_mode:
        received, _, low_handle, _, _ = buffer.low_latency_dispatch(
            x, slots, _TOKENS, placement.num_replicas, use_fp8=False
        )
        assert isinstance(received, Tensor)
        time.sleep(hang_s)
        y = (received.nan_to_num(0).float() * factors.view(num_slots, 1, 1)).bfloat16()
        combined, _, _ = buffer.low_latency_combine(y, slots, weights, low_handle)
    else:
        per_rank, _, per_slot, in_rank, _ = buffer.get_dispatch_layout(slots, placement.num_replicas)
        received, idx, _, _, handle, _ = buffer.dispatch(
            x,
            topk_idx=slots,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_slot,
        )
        assert isinstance(received, Tensor)
        assert idx is not None
        time.sleep(hang_s)
        scale = torch.where(idx >= 0, factors[idx.clamp_min(0)], 0.0).sum(1, keepdim=True)
        combined, _, _ = buffer.combine((received.float() * scale).bfloat16(), handle)
    served = torch.tensor(
        [e not in (placement.unserved[0] if placement.unserved else ()) for e in range(placement.num_experts)]
    )
    factor = torch.tensor([factor_of(e) for e in range(placement.num_experts)], dtype=torch.float64)
    want = x.double().cpu() * torch.where(served, factor, 0.0)[topk_idx.cpu()].sum(1, keepdim=True)
    got = combined.double().cpu()
    buffer.raise_pending()  # a call that does not wait for the GPU tells a lost rank only now
    if torch.equal(got, want):
        return ""
    return f"step {number}, rank {rank}: {int((got != want).any(1).sum())} of {num_tokens} rows are wrong"


_jobs: list[Job] = []  # of this rank's process


def _prepare(trial: Trial) -> None:
    _jobs.append(Job(_make_buffer(trial), trial.placement()))


def _make_buffer(trial: Trial) -> Buffer | HybridEPBuffer:
    per_domain = trial.num_ranks_per_domain
    if trial.calls == "permute":
        return HybridEPBuffer(
            None,
            _HIDDEN,
            _TOKENS,
            trial.num_slots,
            num_of_hybrid_ep_ranks_per_nvlink_domain=per_domain,
            timeout_s=trial.timeout_s,
        )
    is_low = trial.calls == "low latency"
    return Buffer(low_latency_mode=is_low, num_ranks_per_domain=per_domain, timeout_s=trial.timeout_s)


def _work(trial: Trial) -> Told:
    """Steps until a rank is lost, goes on without it, and steps some more."""
    rank, job, told = dist.get_rank(), _jobs[0], Told()
    draw = random.Random(f"{trial.seed}/{rank}")
    begin, number, left = time.monotonic(), 0, -1
    lost: list[int] = []
    while True:
        try:
            if left == 0:
                lost = _missing_at_the_end(job, told, trial.timeout_s)
                if not lost:
                    told.ranks = job.ranks
                    unserved = job.placement.unserved[0] if job.placement.unserved else ()
                    told.served = tuple(sorted(set(range(job.placement.num_experts)) - set(unserved)))
                    return told
                raise TransportError("end", rank, None, f"ranks {lost} did not come")
            time.sleep(draw.choice([0.0, 0.0, draw.uniform(0.0, 0.02)]))  # ranks are never in step
            is_hanging = (
                trial.how == "hang" and rank == trial.victims[0] and time.monotonic() - begin > trial.after_s[0]
            )
            problem = step(job, number, 4 * trial.timeout_s if is_hanging and left < 0 else 0.0, trial.device)
            told.wrong += [problem] if problem else []
            told.num_steps += not problem
            number, left = number + 1, left - (left > 0)
            if time.monotonic() - begin > _LIMIT_S / 2:
                told.wrong.append(f"rank {rank} lost nobody")
                return told
        except TransportError:
            told.noticed.append(time.monotonic())
            if trial.victims[1:] == (rank,):
                threading.Timer(trial.after_s[1], os.kill, (os.getpid(), signal.SIGKILL)).start()
            try:
                recovered = recover(
                    job.buffer,
                    job.placement,
                    _load_slowly if trial.can_load else None,
                    lost=lost,
                    load_timeout_s=2 * trial.timeout_s,
                )
            except TransportError as error:
                told.left_out = str(error)
                return told
            told.recovered.append(time.monotonic())
            told.generations.append(recovered.report.generation)
            job.take(recovered)
            number, left, lost = 1000 * recovered.report.generation, _NUM_STEPS_AFTER, []


def _missing_at_the_end(job: Job, told: Told, timeout_s: float) -> list[int]:
    """Nobody ends before all have: one that has not been told yet could not recover without the others."""
    board = Board.of(dist.group.WORLD).at(f"end of {told.generations[-1]}")
    num_ranks = job.placement.num_ranks
    joined = rendezvous(board, job.buffer.rank, range(num_ranks), "", timeout_s=3 * timeout_s)
    return sorted(set(range(num_ranks)) - set(joined.members))


def _load_slowly(layer: int, expert: int) -> float:
    time.sleep(0.05)
    return factor_of(expert)


def _run_one(trial: Trial) -> Outcome:
    survivors = [rank for rank in range(trial.num_ranks) if rank not in trial.victims]
    first = trial.victims[0]
    problems: list[str] = []
    on_gpu = trial.device == "cuda"
    with VirtualCluster(
        trial.num_ranks,
        device=trial.device,
        ranks_share_gpus=on_gpu,
        variables=_GPU_VARIABLES if on_gpu else None,
    ) as cluster:
        pid = cluster.process_id(first)
        try:
            cluster.run(_prepare, trial)
            cluster.start(_work, trial)
            if trial.how != "hang":
                time.sleep(trial.after_s[0])
                os.kill(pid, signal.SIGKILL if trial.how == "kill" else signal.SIGSTOP)
            told: list[Told] = cluster.collect(survivors, limit_s=_LIMIT_S)
            if trial.how != "kill":
                os.kill(pid, signal.SIGCONT)
                (late,) = cluster.collect([first], limit_s=_LIMIT_S)
                if late.ranks or late.wrong:
                    problems.append(f"rank {first} was not told that it is left out: {late}")
        except RankError as error:
            return Outcome(trial, [str(error)], 0.0, 0)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    problems += [problem for one in told for problem in one.wrong]
    problems += _judge(trial, survivors, told)
    told_of = [one for one in told if one.recovered]
    seconds = max((one.recovered[0] for one in told_of), default=0.0) - max(
        (one.noticed[0] for one in told_of), default=0.0
    )
    return Outcome(trial, problems, seconds, sum(one.num_steps for one in told))


def _judge(trial: Trial, survivors: list[int], told: list[Told]) -> list[str]:
    """What is wrong with the group and the placement that the survivors have ended with."""
    # The second victim may have come to the end before its time.
    allowed = [tuple(survivors), tuple(sorted([*survivors, *trial.victims[1:]]))]
    problems = [
        f"rank {rank} ended with ranks {one.ranks}, not {survivors} {one.left_out}"
        for rank, one in zip(survivors, told, strict=True)
        if one.ranks not in allowed or one.ranks != told[0].ranks
    ]
    before = trial.placement()
    held = {e for rank in survivors for e in before.experts[0][rank * trial.num_slots : (rank + 1) * trial.num_slots]}
    want = set(range(before.num_experts)) if trial.can_load else held
    for rank, one in zip(survivors, told, strict=True):
        if not want <= set(one.served):
            problems.append(f"rank {rank} ended without experts {sorted(want - set(one.served))}")
        if one.num_steps < _NUM_STEPS_AFTER:
            problems.append(f"rank {rank} made {one.num_steps} steps, not {_NUM_STEPS_AFTER}")
    return problems


def run(
    num_trials: int,
    seed: int,
    *,
    first: int = 0,
    at_once: int = 1,
    device: str = "cpu",
    begin_within_s: float = float("inf"),
) -> list[Outcome]:
    """Runs trials and returns their outcomes.

    Args:
        num_trials: how many.
        seed: of all trials.
        first: number of the first trial.
        at_once: trials that run beside each other.
        device: of the tokens.
        begin_within_s: a trial that has not begun by then is left out.
    """
    trials = [Trial.draw(seed, first + i, device) for i in range(num_trials)]
    deadline = time.monotonic() + begin_within_s
    with ThreadPoolExecutor(at_once) as pool:
        outcomes = pool.map(lambda trial: _run_one(trial) if time.monotonic() < deadline else None, trials)
        return [outcome for outcome in outcomes if outcome is not None]


def main() -> int:
    """Prints the statistics; 1 where anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--begin-within-s", type=float, default=float("inf"), help="Begin no trial later than that.")
    given = parser.parse_args()
    outcomes = run(
        given.trials,
        given.seed,
        first=given.first,
        at_once=given.at_once,
        device=given.device,
        begin_within_s=given.begin_within_s,
    )
    failed = [outcome for outcome in outcomes if outcome.problems]
    for how in _HOWS:  # with one loss
        of_kind = [outcome for outcome in outcomes if outcome.trial.how == how and len(outcome.trial.victims) == 1]
        seconds = sorted(outcome.seconds for outcome in of_kind if not outcome.problems)
        if seconds:
            print(
                f"{how}: {len(of_kind)} trials, {len(of_kind) - len(seconds)} failed; recovered within "
                f"{seconds[len(seconds) // 2]:.2f} s (median), {seconds[-1]:.2f} s (slowest) of the last error"
            )
    twice = sorted(o.seconds for o in outcomes if len(o.trial.victims) == 2 and not o.problems)
    if twice:
        print(f"{len(twice)} trials with a second loss during the recovery: slowest {twice[-1]:.2f} s")
    print(f"{len(outcomes)} trials, {sum(o.num_steps for o in outcomes)} steps checked, {len(failed)} trials failed")
    for outcome in failed:
        print(f"  {outcome.trial}\n    " + "\n    ".join(problem[-1500:] for problem in outcome.problems))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
