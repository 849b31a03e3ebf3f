"""On every rank: takes one candidate through the check and, if it is right, through the timing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from hybrid_ep.bench.expected import check_combined, check_received, expert_factor, row_counts
from hybrid_ep.bench.plan import BenchPlan, Candidate
from hybrid_ep.bench.subjects import open_subject
from hybrid_ep.bench.timing import Times, time_calls
from hybrid_ep.workload import make_batch

__all__ = ["RankMeasurement", "measure"]


@dataclass(frozen=True)
class RankMeasurement:
    """What one rank measured of one candidate.

    Attributes:
        engine: what moved the tokens.
        problems: what is wrong, in words; then nothing was timed.
        times: operation → time of each run.
        num_rows: rows that cross to this rank in one dispatch, those of its own tokens included.
        num_remote_rows: those that come from other ranks.
        device: name of the GPU, or ``CPU``.
    """

    engine: str
    problems: list[str]
    times: dict[str, Times]
    num_rows: int
    num_remote_rows: int
    device: str


def measure(candidate: Candidate, plan: BenchPlan) -> RankMeasurement:
    """Checks, then times. Collective: no rank times unless every rank found its result right."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    on_gpu = plan.device == "cuda"
    batch = make_batch(plan.workload, rank, torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu")
    subject = open_subject(candidate, plan, batch)
    try:
        dispatched = subject.dispatch()
        problems = check_received(subject.received(dispatched), plan, rank, num_ranks)
        outputs = subject.outputs(dispatched, expert_factor(rank))
        problems += check_combined(subject.combine(dispatched, outputs), batch, plan, rank, num_ranks)
        times: dict[str, Times] = {}
        if not _anywhere(bool(problems), on_gpu):

            def dispatch() -> None:
                nonlocal dispatched
                dispatched = subject.dispatch()

            def combine() -> None:
                subject.combine(dispatched, outputs)

            times = time_calls(
                {"dispatch": dispatch, "combine": combine, **subject.further_calls(dispatched, outputs)},
                num_warmups=plan.num_warmups,
                num_runs=plan.num_runs,
                device=plan.device,
            )
        num_rows, num_remote_rows = row_counts(plan, rank, num_ranks)
        device = torch.cuda.get_device_name() if on_gpu else "CPU"
        return RankMeasurement(subject.engine, problems, times, num_rows, num_remote_rows, device)
    finally:
        subject.close()


def _anywhere(flag: bool, on_gpu: bool) -> bool:
    """Whether the flag is set on any rank."""
    total = torch.tensor([int(flag)], device="cuda" if on_gpu else "cpu")
    dist.all_reduce(total)
    return bool(total.item())
