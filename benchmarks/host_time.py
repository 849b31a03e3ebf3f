"""The host's time of calls that follow each other: until each has returned, beside a trivial call of torch.

    python benchmarks/host_time.py --ranks 2

Dispatch, combine and the trivial call take turns, in rows after a barrier: a host's speed changes within seconds. The
first calls of a row are not counted: caches of the host are cold. No call waits for the GPU. On a CPU a call does its
work before it returns.

Last come a low-latency dispatch and combine until the GPU is done, each pair after a barrier, and the trivial call
likewise.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import click
import torch
import torch.distributed as dist

from hybrid_ep import Buffer
from hybrid_ep.bench.machine import rank_device
from hybrid_ep.bench.timing import time_host, time_until_done
from hybrid_ep.testing.cluster import VirtualCluster

_NUM_SKIPPED = 2
_LOW_LATENCY_IN_A_ROW = 10
_NORMAL_IN_A_ROW = 7  # a dispatch waits for the eighth before it
_TRIVIAL = "tensor.add_(1)"
_NUM_PAIRS = 100

Calls = dict[str, Callable[[], object]]
Shape = tuple[int, int, int, int]  # tokens of a rank, hidden size, top-k, experts


def _routing(num_tokens: int, num_topk: int, num_experts: int, device: torch.device) -> torch.Tensor:
    return torch.rand(num_tokens, num_experts).topk(num_topk).indices.to(device)


def _low_latency_calls(buffer: Buffer, shape: Shape, device: torch.device, label: str, *, has_hook: bool) -> Calls:
    """Dispatch of FP8 rows and combine; with hooks the sends and the receives."""
    num_tokens, hidden, num_topk, num_experts = shape
    num_ranks = dist.get_world_size()
    x = torch.randn(num_tokens, hidden, device=device).bfloat16()
    topk_idx = _routing(num_tokens, num_topk, num_experts, device)
    weights = torch.rand(num_tokens, num_topk, device=device)
    y = torch.zeros(num_experts // num_ranks, num_tokens * num_ranks, hidden, dtype=torch.bfloat16, device=device)
    last: dict[str, tuple] = {}  # type: ignore[type-arg]  # results of the latest call

    def dispatch() -> None:
        last["dispatch"] = buffer.low_latency_dispatch(x, topk_idx, num_tokens, num_experts, return_recv_hook=has_hook)

    def combine() -> None:
        handle = last["dispatch"][2]
        last["combine"] = buffer.low_latency_combine(y, topk_idx, weights, handle, return_recv_hook=has_hook)

    if not has_hook:
        return {f"low-latency dispatch{label}": dispatch, f"low-latency combine{label}": combine}
    return {
        f"low-latency dispatch{label}, send": dispatch,
        f"low-latency dispatch{label}, receive": lambda: last["dispatch"][4](),
        f"low-latency combine{label}, send": combine,
        f"low-latency combine{label}, receive": lambda: last["combine"][2](),
    }


def _normal_calls(buffer: Buffer, shape: Shape, device: torch.device) -> Calls:
    """Dispatch of bf16 rows with a bound, and combine."""
    num_tokens, hidden, num_topk, num_experts = shape
    x = torch.randn(num_tokens, hidden, device=device).bfloat16()
    topk_idx = _routing(num_tokens, num_topk, num_experts, device)
    weights = torch.rand(num_tokens, num_topk, device=device)
    per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
    last: list[tuple] = []  # type: ignore[type-arg]  # results of the latest dispatch

    def dispatch() -> None:
        last[:] = [
            buffer.dispatch(
                x,
                num_tokens_per_rank=per_rank,
                is_token_in_rank=is_in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=topk_idx,
                topk_weights=weights,
                num_worst_tokens=num_tokens * dist.get_world_size(),
            )
        ]

    return {"dispatch with a bound": dispatch, "combine": lambda: buffer.combine(last[0][0], last[0][4])}


def _measure(low_latency: Shape, normal: Shape, num_rows: int, device: str) -> list[dict[str, list[float]]]:
    """Microseconds of each call that counts, by its name, for each group of calls that take turns."""
    at = rank_device(device)
    number = torch.zeros(1, device=at)
    with (
        Buffer(low_latency_mode=True) as plain,
        Buffer(low_latency_mode=True, enable_shrink=True) as shrinking,
        Buffer() as buffer,
    ):
        groups = (
            (_low_latency_calls(plain, low_latency, at, "", has_hook=False), _LOW_LATENCY_IN_A_ROW),
            (_low_latency_calls(plain, low_latency, at, " with a hook", has_hook=True), _LOW_LATENCY_IN_A_ROW),
            (_low_latency_calls(shrinking, low_latency, at, ", enable_shrink", has_hook=False), _LOW_LATENCY_IN_A_ROW),
            (_normal_calls(buffer, normal, at), _NORMAL_IN_A_ROW),
        )
        times = [
            time_host(
                calls | {_TRIVIAL: lambda: number.add_(1)},
                device,
                num_rows=num_rows,
                in_a_row=in_a_row,
                num_skipped=_NUM_SKIPPED,
            )
            for calls, in_a_row in groups
        ]
        pair = tuple(_low_latency_calls(plain, low_latency, at, "", has_hook=False).values())
        until_done: Calls = {
            "low-latency dispatch and combine, until done": lambda: [call() for call in pair],
            _TRIVIAL: lambda: number.add_(1),
        }
        done = time_until_done(until_done, num_runs=_NUM_PAIRS, device=device)
        times.append({name: values.microseconds for name, values in done.items()})
        dist.barrier()
    return times


@click.command(help=__doc__)
@click.option("--ranks", default=2, show_default=True)
@click.option("--low-latency-tokens", default=128, show_default=True)
@click.option("--low-latency-experts", default=288, show_default=True)
@click.option("--tokens", default=4096, show_default=True)
@click.option("--experts", default=256, show_default=True)
@click.option("--hidden", default=7168, show_default=True)
@click.option("--topk", default=8, show_default=True)
@click.option("--rows", default=30, show_default=True, help="Of calls that follow each other, of each group.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
def main(
    ranks: int,
    low_latency_tokens: int,
    low_latency_experts: int,
    tokens: int,
    experts: int,
    hidden: int,
    topk: int,
    rows: int,
    device: str,
) -> None:
    low_latency = low_latency_tokens, hidden, topk, low_latency_experts
    normal = tokens, hidden, topk, experts
    with VirtualCluster(ranks, device=device) as cluster:
        groups = cluster.run(_measure, low_latency, normal, rows, device, limit_s=600)[0]  # of rank 0
    for times in groups:
        trivial = median(times[_TRIVIAL])
        for name, values in times.items():
            print(f"{name:45} {median(values):8.1f} µs {median(values) / trivial:6.1f} of the trivial call beside it")


if __name__ == "__main__":
    main()
