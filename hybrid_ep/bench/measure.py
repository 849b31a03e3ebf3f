"""On every rank: takes one candidate through the check and, if it is right, through the timing.

`count_rows` says how many rows cross to each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep.bench.expected import check_combined, check_received, expert_factor
from hybrid_ep.bench.machine import rank_device
from hybrid_ep.bench.plan import CALLS, BenchPlan, Candidate
from hybrid_ep.bench.subjects import Subject, open_subject
from hybrid_ep.bench.timing import Holding, Times, time_calls, time_host, time_until_done
from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.core.layout import compute_layout
from hybrid_ep.testing.batch import make_batch


@dataclass(frozen=True)
class RankMeasurement:
    """The measurement of one candidate on one rank.

    Attributes:
        engine: what moved the tokens.
        problems: what is wrong, in words; then nothing was timed.
        times: operation → time of each run.
        rows: call → rows that cross to this rank.
        fullest: in mode ``balance``, copies of the most loaded rank over the mean.
        num_ranks_per_domain: where rows cross between domains and are counted; None elsewhere.
    """

    engine: str
    problems: list[str]
    times: dict[str, Times]
    rows: dict[str, RowCounts]
    fullest: float | None = None
    num_ranks_per_domain: int | None = None


def measure(candidate: Candidate, plan: BenchPlan) -> RankMeasurement:
    """Checks, then times. Collective: no rank times unless every rank found its result right."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    on_gpu = plan.device == "cuda"
    batch = make_batch(plan.workload, rank, rank_device(plan.device))
    subject = open_subject(candidate, plan, batch)
    try:
        dispatched = subject.dispatch()
        problems = check_received(subject.received(dispatched), plan, rank, num_ranks)
        outputs = subject.outputs(dispatched, expert_factor(rank))
        problems += check_combined(subject.combine(dispatched, outputs), batch, plan, rank, num_ranks)
        times: dict[str, Times] = {}
        if not anywhere(bool(problems), on_gpu):

            def dispatch() -> None:
                nonlocal dispatched
                dispatched = subject.dispatch()

            def combine() -> None:
                subject.combine(dispatched, outputs)

            calls: dict[str, Callable[[], object]] = {"dispatch": dispatch, "combine": combine}
            calls |= subject.further_calls(dispatched, outputs)
            times = time_calls(calls, num_warmups=plan.num_warmups, num_runs=plan.num_runs, device=plan.device)
            if on_gpu:
                free = {name: call for name, call in calls.items() if name not in subject.waiting_calls}
                for name, microseconds in time_host(free).items():
                    times[name].in_a_row_microseconds = microseconds
                torch.set_default_device(plan.device)
                for name, microseconds in time_host(free).items():
                    times[name].default_device_microseconds = microseconds
                torch.set_default_device(None)
            times |= _time_as_callers_live(subject, plan, calls, outputs)
            times |= {name: times[name].each_of(number) for name, number in subject.num_calls.items()}
        counts = count_rows(batch.topk_idx, plan.workload.num_experts, once_per_expert=plan.mode == "low-latency")
        per_domain = None
        grid = subject.grid
        if grid is not None and grid.num_domains > 1 and plan.mode != "low-latency":  # that packs rows in its own way
            per_domain = grid.num_ranks_per_domain
            counts = counts._replace(crossing=count_crossings(batch.topk_idx, plan.workload.num_experts, grid))
        rows = dict.fromkeys(CALLS, counts)
        return RankMeasurement(subject.engine, problems, times, rows, num_ranks_per_domain=per_domain)
    finally:
        subject.close()


def _time_as_callers_live(
    subject: Subject, plan: BenchPlan, calls: dict[str, Callable[[], object]], outputs: torch.Tensor
) -> dict[str, Times]:
    """Times what a caller feels and a timer on an idle buffer does not: results held, and the wait of an eager call."""
    times: dict[str, Times] = {}
    for name in subject.calls_with_results if plan.num_held else ():
        form = f"{name}{',' if ':' in name else ':'} {plan.num_held} held"
        # One form at a time: what another one holds would count, too.
        held: dict[str, Callable[[], object]] = {form: Holding(calls[name], plan.num_held)}
        # So many that an implementation has got more memory for the results, which may happen step by step.
        num_warmups = max(plan.num_warmups, 4 * plan.num_held + 16)
        times |= time_calls(held, num_warmups=num_warmups, num_runs=plan.num_runs, device=plan.device)

    def both() -> None:
        subject.combine(subject.dispatch(), outputs)

    eager = {name: calls[name] for name in CALLS} | {"dispatch and combine": both}
    until_done = {f"{name}: until done": call for name, call in eager.items()}
    return times | time_until_done(until_done, num_warmups=plan.num_warmups, num_runs=plan.num_runs, device=plan.device)


def anywhere(flag: bool, on_gpu: bool) -> bool:
    """Whether the flag is set on any rank. Collective."""
    total = torch.tensor([int(flag)], device="cuda" if on_gpu else "cpu")
    dist.all_reduce(total)
    return bool(total.item())


class RowCounts(NamedTuple):
    """Rows that one rank receives in one dispatch, or sends back in one combine.

    Attributes:
        total: all of them, those of its own tokens included.
        remote: those of other ranks' tokens.
        crossing: rows between this rank and its peers in other domains, in the direction that has more of them.
    """

    total: int
    remote: int
    crossing: int = 0


def owners(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    """``[T, K]`` int64: the rank of each expert."""
    return topk_idx // (num_experts // num_ranks)


def count_rows(topk_idx: Tensor, num_experts: int, *, once_per_expert: bool) -> RowCounts:
    """Counts what crosses to this rank: once for each rank of a token, or once for each expert. Collective."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if once_per_expert:
        sent = torch.bincount(owners(topk_idx, num_experts, num_ranks).flatten(), minlength=num_ranks)
    else:
        sent = compute_layout(topk_idx, num_experts, num_ranks, num_ranks).num_tokens_per_rank.to(torch.int64)
    every = [torch.empty_like(sent) for _ in range(num_ranks)]
    dist.all_gather(every, sent)
    received = [int(counts[rank]) for counts in every]
    return RowCounts(sum(received), sum(received) - received[rank])


def count_crossings(topk_idx: Tensor, num_experts: int, grid: RankGrid) -> int:
    """Counts the rows that this rank sends to its peers, and those that it receives; returns the larger number.

    A token crosses once to each other domain with an expert of it. Combine sends the same rows back. Collective.
    """
    domains = compute_layout(topk_idx, num_experts, grid.num_ranks, grid.num_ranks_per_domain).num_tokens_per_domain
    sent = domains.to(torch.int64)
    every = [torch.empty_like(sent) for _ in range(grid.num_ranks)]
    dist.all_gather(every, sent)
    others = [idx for idx in range(grid.num_domains) if idx != grid.domain_idx]
    num_sent = sum(int(sent[idx]) for idx in others)
    num_received = sum(int(every[grid.peers[idx]][grid.domain_idx]) for idx in others)
    return max(num_sent, num_received)
