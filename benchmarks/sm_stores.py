"""How fast SMs store rows: to their own GPU, to the next rank's, and to both.

    python benchmarks/sm_stores.py --ranks 2

Each row is loaded once, by bulk loads, and stored to each of its targets, by bulk stores. Nothing else is done. A
dispatch between two domains of one rank stores each row twice on its own GPU and once to the other one: its own row,
the row that it forwards, and the row that it sends. So the last line is the least that such a dispatch can take.
"""

from __future__ import annotations

from statistics import median

import click
import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep.bench.machine import rank_device
from hybrid_ep.bench.timing import time_calls
from hybrid_ep.bench.wire import Push
from hybrid_ep.testing.cluster import VirtualCluster

_TARGETS = {"own": (0,), "next rank's": (1,), "own and next rank's": (0, 1), "own twice and next rank's": (0, 0, 1)}


def destinations(num_tokens: int, offsets: tuple[int, ...], rank: int, num_ranks: int) -> Tensor:
    """Where each row goes: ``[T, C]`` int64, ``(rank << 32) | row``.

    Args:
        num_tokens: T.
        offsets: of the rank of each column from this one.
        rank: this one.
        num_ranks: R. No two rows of all ranks go to one place if each rank has memory for T × C of them.
    """
    row = torch.arange(num_tokens, dtype=torch.int64)
    return torch.stack(
        [(rank + offset) % num_ranks << 32 | column * num_tokens + row for column, offset in enumerate(offsets)], 1
    )


def _measure(num_tokens: int, row_bytes: int, num_sms: list[int], num_runs: int) -> dict[tuple[str, int], list[float]]:
    """Microseconds of each run, by targets and SMs."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    calls, pushes = {}, []
    for name, offsets in _TARGETS.items():
        dst_rows = destinations(num_tokens, offsets, rank, num_ranks).to(rank_device("cuda"))
        push = Push(dst_rows, row_bytes, rank, num_rows_held=num_tokens * len(offsets))
        pushes.append(push)
        calls |= {(name, n): push.with_sms(n) for n in num_sms}
    times = time_calls({str(key): call for key, call in calls.items()}, num_warmups=3, num_runs=num_runs, device="cuda")
    dist.barrier()  # before memory is freed that others still write
    return {key: times[str(key)].microseconds for key in calls}


@click.command(help=__doc__)
@click.option("--ranks", default=2, show_default=True)
@click.option("--tokens", default=4096, show_default=True, help="Rows of a rank.")
@click.option("--row-bytes", default=14336, show_default=True)
@click.option("--num-sms", type=int, multiple=True, default=(4, 8, 16, 24, 32), show_default=True)
@click.option("--runs", default=20, show_default=True)
def main(ranks: int, tokens: int, row_bytes: int, num_sms: tuple[int, ...], runs: int) -> None:
    with VirtualCluster(ranks, device="cuda") as cluster:
        results = cluster.run(_measure, tokens, row_bytes, list(num_sms), runs, limit_s=600)
    for name, n in results[0]:
        # A run is as long as at its slowest rank.
        slowest = median(max(of_run) for of_run in zip(*(result[name, n] for result in results), strict=True))
        stored = tokens * row_bytes * len(_TARGETS[name]) / slowest / 1000
        print(f"{name:26} {n:3} SMs {slowest:8.1f} µs {stored:8.1f} GB/s {stored / n:6.1f} GB/s of an SM")


if __name__ == "__main__":
    main()
