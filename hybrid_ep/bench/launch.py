"""Ranks for the benchmark: started here as a virtual cluster, or those that torchrun or mpirun have started."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

import torch
import torch.distributed as dist

from hybrid_ep import env
from hybrid_ep.bench.machine import command_line, device_name, versions
from hybrid_ep.bench.measure import RankMeasurement, measure
from hybrid_ep.bench.plan import BALANCE, BenchPlan, Candidate
from hybrid_ep.bench.results import WIRE, BenchReport, summarize
from hybrid_ep.bench.timing import time_floor, time_host_floor
from hybrid_ep.bench.wire import measure_wire
from hybrid_ep.launcher import Launcher
from hybrid_ep.testing.cluster import VirtualCluster

Run = Callable[..., list[Any]]


@contextmanager
def open_ranks(num_ranks: int, device: str, launcher: Launcher | None) -> Iterator[Run]:
    """Starts ranks, or joins the launcher's.

    Args:
        num_ranks: how many to start; the launcher's number where there is one.
        device: ``cpu`` or ``cuda``.
        launcher: whose group to join.

    Yields:
        `run(function, *args)`, which calls the function on every rank and returns the results by rank, on every rank
        of a launcher.
    """
    if launcher is None:
        # On a machine with GPUs, an engine chosen by itself would not take the CPU's tensors.
        variables = {env.ENGINE.name: "torch"} if device == "cpu" else {}
        with VirtualCluster(num_ranks, device=device, variables=variables) as cluster:
            yield cluster.run
        return
    _join(launcher, device)

    def run(function: Callable[..., Any], *args: Any) -> list[Any]:
        gathered: list[Any] = [None] * launcher.num_ranks
        dist.all_gather_object(gathered, function(*args))
        return gathered

    try:
        yield run
    finally:
        dist.destroy_process_group()


def measure_all(plans: Sequence[BenchPlan], run: Run, begin: Callable[[BenchPlan, str], None]) -> BenchReport:
    """Measures every candidate of every plan, on the same ranks.

    Args:
        plans: what to measure; at least one, all on the same device.
        run: of `open_ranks`.
        begin: is called with what comes next.

    Returns:
        What was measured; the same on every rank of a launcher.
    """
    device = plans[0].device
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    names = run(device_name, device)
    by_rank = run(time_floor, device, max(plan.num_runs for plan in plans))
    floor_us = statistics.median(max(times) for times in zip(*by_rank, strict=True))
    host_floor_us = max(map(statistics.median, run(time_host_floor, device)))
    results = []
    for plan in plans:
        wire = None
        if plan.wire:
            begin(plan, WIRE)
            wire = run(measure_wire, plan)
        measurements = []
        for candidate in plan.candidates:
            begin(plan, candidate.title)
            measurements.append(run(_measurement_of(plan.mode), candidate, plan))
        results.append(summarize(plan, wire, measurements))
    return BenchReport(command_line(), date, len(names), names[0], versions(device), floor_us, host_floor_us, results)


def _measurement_of(mode: str) -> Callable[[Candidate, BenchPlan], RankMeasurement]:
    """The function that measures one candidate in this mode."""
    if mode != BALANCE:
        return measure
    from hybrid_ep.bench.balance import measure_balance  # only here: its import of DTensors takes a second

    return measure_balance


def _join(launcher: Launcher, device: str) -> None:
    # torchrun may keep the store in its agent, which only env:// knows; mpirun sets no variables that env:// reads.
    init_method = "env://" if launcher.name == "torchrun" else f"tcp://{env.MASTER_ADDR.get()}:{env.MASTER_PORT.get()}"
    if device == "cuda":
        gpu = torch.device("cuda", launcher.local_rank)
        torch.cuda.set_device(gpu)
        dist.init_process_group(
            "nccl", init_method=init_method, rank=launcher.rank, world_size=launcher.num_ranks, device_id=gpu
        )
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=init_method, rank=launcher.rank, world_size=launcher.num_ranks)
