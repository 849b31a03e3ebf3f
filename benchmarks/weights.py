"""Weights of one expert to a spare slot of the next rank, by kernels on some SMs, and by the GPUs' copy engines.

    python benchmarks/weights.py --ranks 2

Kernels are those of `lb_prefetch_weights`: one that writes the spare slots of a `BufferAllocator`, and stages what is
for others; with --by-dispatch those that send rows of a dispatch, as other engines do. A copy engine writes memory that
the ranks share, and nobody is told: that is the wire. On a CPU there are no copy engines, and rows of a dispatch are
sent in any case.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from statistics import median

import click
import torch
import torch.distributed as dist

from hybrid_ep import Buffer, BufferAllocator
from hybrid_ep.bench.machine import rank_device
from hybrid_ep.bench.timing import time_calls
from hybrid_ep.testing.cluster import VirtualCluster

_NUM_TENSORS = 2  # of an expert: up and down


def _copy_by_engine(mine: torch.Tensor) -> Callable[[], object]:
    import torch.distributed._symmetric_memory as symm_mem

    group, num_ranks = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    shared = symm_mem.empty(mine.shape, dtype=mine.dtype, device=mine.device)
    handle = symm_mem.rendezvous(shared, group)
    there = handle.get_buffer((dist.get_rank() + 1) % num_ranks, mine.shape, mine.dtype)
    return lambda: (there.copy_(mine), shared)


def _measure(
    num_bytes: int, num_sms: list[int], num_runs: int, device: str, by_dispatch: bool
) -> dict[str, list[float]]:
    """Microseconds of each run, by call."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    size = num_bytes // 2 // _NUM_TENSORS
    home = [torch.full((1, size), rank + 1.0, dtype=torch.bfloat16, device=rank_device(device)) for _ in range(2)]
    staged = [torch.zeros_like(one) for one in home]
    plan = BufferAllocator()
    direct = [plan.allocate(one.shape, one.dtype) for one in home]
    mapping = torch.arange(num_ranks, device=home[0].device).sub(1).remainder(num_ranks).view(-1, 1)
    nothing = torch.full_like(mapping, -1)
    with Buffer(num_ranks_per_domain=num_ranks) as buffer:
        plan.materialize(buffer)
        if by_dispatch:
            buffer.engine.copy_experts = lambda _: False  # type: ignore[method-assign]
        calls: dict[str, Callable[[], object]] = {
            f"{kind}, {n or buffer.lb_get_theoretical_num_sms()} SMs": functools.partial(
                buffer.lb_prefetch_weights, spare, home, mapping, n
            )
            for kind, spare in (("direct", direct), ("staged", staged))
            for n in num_sms
        }
        calls["no replicas"] = lambda: buffer.lb_prefetch_weights(direct, home, nothing)
        if device == "cuda":
            calls["copy engine"] = _copy_by_engine(torch.cat(home))
        times = time_calls(calls, num_warmups=3, num_runs=num_runs, device=device)
        wrong = [one for one in (*direct, *staged) if not bool((one == (rank - 1) % num_ranks + 1).all())]
    if wrong:
        raise RuntimeError(f"rank {rank} has wrong weights")
    return {name: one.microseconds for name, one in times.items()}


@click.command(help=__doc__)
@click.option("--ranks", default=2, show_default=True)
@click.option("--megabytes", default=44, show_default=True, help="Of an expert, in bf16.")
@click.option("--num-sms", type=int, multiple=True, default=(8, 16, 32, 0), show_default=True, help="0 = the default.")
@click.option("--runs", default=20, show_default=True)
@click.option("--by-dispatch", is_flag=True, help="Send rows of a dispatch.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
def main(ranks: int, megabytes: int, num_sms: tuple[int, ...], runs: int, by_dispatch: bool, device: str) -> None:
    with VirtualCluster(ranks, device=device) as cluster:
        results = cluster.run(_measure, megabytes * 10**6, list(num_sms), runs, device, by_dispatch, limit_s=600)
    for name in results[0]:
        # A run is as long as at its slowest rank.
        slowest = median(max(of_run) for of_run in zip(*(result[name] for result in results), strict=True))
        rate = "" if name == "no replicas" else f"{megabytes * 1000 / slowest:8.1f} GB/s"
        print(f"{name:24} {slowest:8.1f} µs {rate}")


if __name__ == "__main__":
    main()
