"""Ranks for the benchmark: started here as a virtual cluster, or those that torchrun or mpirun have started."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from hybrid_ep import env
from hybrid_ep.bench.measure import RankMeasurement, measure
from hybrid_ep.bench.plan import BenchPlan, Candidate
from hybrid_ep.cluster import VirtualCluster
from hybrid_ep.errors import ConfigError

__all__ = ["Launcher", "find_launcher", "measure_all"]


class Launcher(NamedTuple):
    """Who this process is in a group that somebody else has started.

    Attributes:
        name: ``torchrun`` or ``mpirun``.
        rank: this process.
        num_ranks: of the group.
        local_rank: within its node; says which GPU.
    """

    name: str
    rank: int
    num_ranks: int
    local_rank: int


def find_launcher() -> Launcher | None:
    """Returns who this process is, or None where it was started by hand.

    Raises:
        ConfigError: a launcher's variables are there in part.
    """
    for name, rank, size, local in (
        ("torchrun", env.RANK, env.WORLD_SIZE, env.LOCAL_RANK),
        ("mpirun", env.MPI_RANK, env.MPI_SIZE, env.MPI_LOCAL_RANK),
    ):
        values = rank.get(), size.get(), local.get()
        if values[0] is not None:
            if values[1] is None or values[2] is None:
                raise ConfigError(f"{rank.name} is set; allowed: together with {size.name} and {local.name}")
            return Launcher(name, values[0], values[1], values[2])
    return None


def measure_all(
    plan: BenchPlan, num_ranks: int, launcher: Launcher | None, begin: Callable[[Candidate], None]
) -> list[list[RankMeasurement]]:
    """Measures every candidate.

    Args:
        plan: what to measure.
        num_ranks: how many ranks to start; the launcher's number where there is one.
        launcher: whose group to join.
        begin: is told which candidate comes next.

    Returns:
        For each candidate, what each rank measured; the same on every rank of a launcher.
    """
    results = []
    if launcher is None:
        # On a machine with GPUs, an engine chosen by itself would not take the CPU's tensors.
        variables = {env.ENGINE.name: "torch"} if plan.device == "cpu" else {}
        with VirtualCluster(num_ranks, device=plan.device, variables=variables) as cluster:
            for candidate in plan.candidates:
                begin(candidate)
                results.append(cluster.run(measure, candidate, plan))
        return results
    _join(launcher, plan.device)
    try:
        for candidate in plan.candidates:
            begin(candidate)
            gathered: list[RankMeasurement | None] = [None] * launcher.num_ranks
            dist.all_gather_object(gathered, measure(candidate, plan))
            results.append([measurement for measurement in gathered if measurement is not None])
    finally:
        dist.destroy_process_group()
    return results


def _join(launcher: Launcher, device: str) -> None:
    # torchrun may keep the store in its agent, which only env:// knows; mpirun sets no variables that env:// reads.
    meet = "env://" if launcher.name == "torchrun" else f"tcp://{env.MASTER_ADDR.get()}:{env.MASTER_PORT.get()}"
    if device == "cuda":
        gpu = torch.device("cuda", launcher.local_rank)
        torch.cuda.set_device(gpu)
        dist.init_process_group(
            "nccl", init_method=meet, rank=launcher.rank, world_size=launcher.num_ranks, device_id=gpu
        )
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=meet, rank=launcher.rank, world_size=launcher.num_ranks)
