"""The host's time of calls, beside a trivial call of torch.

    python benchmarks/host_time.py --ranks 2
    python benchmarks/host_time.py --ranks 2 --impl hybrid_ep --impl deep_ep   # beside another module with a Buffer

A host's speed changes within seconds. So all calls of a group, of all implementations, and the trivial call take turns.

- In a row: until a call has returned, in rows of calls after a barrier. The first calls of a row are not counted, for
  which caches of the host are cold. No call waits for the GPU. On a CPU a call does its work before it returns.
- After a barrier: one call, until it has returned, and until the GPU is done, of the slower rank; medians and 99th
  percentiles. The order of calls changes from run to run. The first runs are not counted: in them the pools of slots
  grow. A loop that only reads the clock shows how often the host itself stops. Then how often torch's allocator asked
  CUDA for memory, which takes a millisecond.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import click
import torch
import torch.distributed as dist

import hybrid_ep
from hybrid_ep.bench.machine import rank_device
from hybrid_ep.bench.results import percentile
from hybrid_ep.bench.timing import time_host, time_until_done
from hybrid_ep.quantize import cast_to_fp8
from hybrid_ep.testing.cluster import VirtualCluster

_NUM_SKIPPED = 2
_LOW_LATENCY_IN_A_ROW = 10
_NORMAL_IN_A_ROW = 7  # a dispatch waits for the eighth before it, so a group has one
_WARMUPS_AFTER_A_BARRIER = 20
_TRIVIAL = "tensor.add_(1)"
_LOOP_SECONDS = 200e-6
_LOOP = "loop that reads the clock for 200 µs"
_OWN = "hybrid_ep"

Calls = dict[str, Callable[[], object]]
Shape = tuple[int, int, int, int]  # tokens of a rank, hidden size, top-k, experts
Times = dict[str, tuple[list[float], list[float]]]  # microseconds until calls returned, and until the device was done


def _routing(num_tokens: int, num_topk: int, num_experts: int, device: torch.device) -> torch.Tensor:
    return torch.rand(num_tokens, num_experts).topk(num_topk).indices.to(device)


def _low_latency_calls(buffer: Any, shape: Shape, device: torch.device, label: str, *, has_hook: bool) -> Calls:
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


def _normal_calls(buffer: Any, shape: Shape, device: torch.device) -> tuple[Calls, Calls]:
    """Dispatch of bf16 rows with a bound, and combine. Then the layout, dispatches with it that wait, and all three."""
    num_tokens, hidden, num_topk, num_experts = shape
    x = torch.randn(num_tokens, hidden, device=device).bfloat16()
    quantized = cast_to_fp8(x)
    topk_idx = _routing(num_tokens, num_topk, num_experts, device)
    weights = torch.rand(num_tokens, num_topk, device=device)
    last: list[tuple] = []  # type: ignore[type-arg]  # results of the latest dispatch

    def layout() -> tuple:  # type: ignore[type-arg]
        return buffer.get_dispatch_layout(topk_idx, num_experts)  # type: ignore[no-any-return]

    def dispatch(counted: tuple, bound: int = 0, sent: Any = x) -> tuple:  # type: ignore[type-arg]
        per_rank, _, per_expert, is_in_rank, _ = counted
        return buffer.dispatch(  # type: ignore[no-any-return]
            sent,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=topk_idx,
            topk_weights=weights,
            num_worst_tokens=bound,
        )

    counted, bound = layout(), num_tokens * dist.get_world_size()

    def with_a_bound() -> None:
        last[:] = [dispatch(counted, bound)]

    def combine() -> None:
        buffer.combine(last[0][0], last[0][4])

    def pair() -> None:
        received, *_, handle, _ = dispatch(layout())
        buffer.combine(received, handle)

    in_a_row: Calls = {"dispatch with a bound": with_a_bound, "combine": combine}
    return in_a_row, {
        "layout": layout,
        "layout and dispatch": lambda: dispatch(layout()),
        "layout and dispatch, FP8": lambda: dispatch(layout(), sent=quantized),
        "combine": combine,
        "layout, dispatch and combine": pair,
    }


def _hybrid_calls(buffer: hybrid_ep.HybridEPBuffer, shape: Shape, device: torch.device) -> tuple[list[Calls], Calls]:
    """Dispatch of bf16 rows with a bound, and combine with probabilities; by expert also along the handle.

    Then the same without a bound.
    """
    num_tokens, hidden, num_topk, num_experts = shape
    x = torch.randn(num_tokens, hidden, device=device).bfloat16()
    topk_idx = _routing(num_tokens, num_topk, num_experts, device)
    weights = torch.rand(num_tokens, num_topk, device=device)
    routing = {"topk_idx": topk_idx, "topk_weights": weights, "num_of_experts": num_experts}
    bound = num_tokens * dist.get_world_size()
    bounded: list[Any] = []
    exact: list[Any] = []
    by_expert: list[Any] = []

    def dispatch_bounded() -> None:
        bounded[:] = buffer.dispatch(x, **routing, num_dispatched_tokens=bound)

    def dispatch() -> None:
        exact[:] = buffer.dispatch(x, **routing)

    def dispatch_by_expert() -> None:
        by_expert[:] = buffer.dispatch_with_permute(
            hidden=x,
            **routing,
            num_permuted_tokens=2 * num_tokens * num_topk,  # twice as many as with equal loads
            non_blocking=True,
        )

    def along() -> None:
        buffer.dispatch_with_permute(hidden=x, handle=by_expert[4])

    def combine_by_expert() -> None:
        buffer.combine_with_unpermute(hidden=by_expert[0], probs=by_expert[1], handle=by_expert[4])

    return [
        {
            "HybridEPBuffer.dispatch with a bound": dispatch_bounded,
            "HybridEPBuffer.combine with probs": lambda: buffer.combine(bounded[0], bounded[1], bounded[3]),
        },
        {"dispatch_with_permute with a bound": dispatch_by_expert, "combine_with_unpermute": combine_by_expert},
        {"dispatch_with_permute along a handle": along},
    ], {
        "HybridEPBuffer.dispatch": dispatch,
        "HybridEPBuffer.combine with probs": lambda: buffer.combine(exact[0], exact[1], exact[3]),
    }


def _elastic_calls(buffer: hybrid_ep.ElasticBuffer, shape: Shape, device: torch.device) -> list[Calls]:
    """Dispatch of bf16 rows without a host sync, along its handle, and combine; rows by source."""
    num_tokens, hidden, num_topk, num_experts = shape
    x = torch.randn(num_tokens, hidden, device=device).bfloat16()
    topk_idx = _routing(num_tokens, num_topk, num_experts, device)
    weights = torch.rand(num_tokens, num_topk, device=device)
    last: list[Any] = []

    def dispatch() -> None:
        last[:] = buffer.dispatch(x, topk_idx, weights, num_experts=num_experts, do_cpu_sync=False)

    return [
        {
            "ElasticBuffer.dispatch without a sync": dispatch,
            "ElasticBuffer.combine": lambda: buffer.combine(last[0], last[3], last[2]),
        },
        {"ElasticBuffer.dispatch along a handle": lambda: buffer.dispatch(x, handle=last[3])},
    ]


def _open(kind: Any, num_nvl_bytes: int, num_rdma_bytes: int, **options: Any) -> Any:
    """A buffer; `destroy` is allowed."""
    if "explicitly_destroy" in inspect.signature(kind).parameters:
        options["explicitly_destroy"] = True
    return kind(dist.group.WORLD, num_nvl_bytes, num_rdma_bytes, **options)


def _calls_of(
    name: str, low_latency: Shape, normal: Shape, device: torch.device, stack: contextlib.ExitStack
) -> tuple[list[tuple[Calls, int]], Calls]:
    """The calls of an implementation: groups of those in a row, and how many of each; then those after a barrier."""
    kind, num_ranks = importlib.import_module(name).Buffer, dist.get_world_size()
    num_tokens, hidden, _, num_experts = low_latency
    num_bytes = kind.get_low_latency_rdma_size_hint(num_tokens, hidden, num_ranks, num_experts)
    options = {"low_latency_mode": True, "num_qps_per_rank": max(1, num_experts // num_ranks)}
    plain = _open(kind, 0, num_bytes, **options)
    configs = kind.get_dispatch_config(num_ranks), kind.get_combine_config(num_ranks)
    nvl_bytes = max(config.get_nvl_buffer_size_hint(2 * normal[1], num_ranks) for config in configs)
    buffer = _open(kind, nvl_bytes, 0)
    buffers: list[Any] = [plain, buffer]
    pair = _low_latency_calls(plain, low_latency, device, "", has_hook=False)
    in_a_row, done = _normal_calls(buffer, normal, device)
    hooks = _low_latency_calls(plain, low_latency, device, " with a hook", has_hook=True)
    groups = [(pair, _LOW_LATENCY_IN_A_ROW), (hooks, _LOW_LATENCY_IN_A_ROW), (in_a_row, _NORMAL_IN_A_ROW)]
    if name == _OWN:
        shrinking = _open(kind, 0, num_bytes, enable_shrink=True, **options)
        hybrid = hybrid_ep.HybridEPBuffer(dist.group.WORLD, normal[1], normal[0], normal[3] // num_ranks)
        elastic = hybrid_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=normal[0])
        buffers += [shrinking, hybrid, elastic]
        shrinking_calls = _low_latency_calls(shrinking, low_latency, device, ", enable_shrink", has_hook=False)
        hybrid_in_a_row, hybrid_done = _hybrid_calls(hybrid, normal, device)
        groups.append((shrinking_calls, _LOW_LATENCY_IN_A_ROW))
        groups += [(calls, _NORMAL_IN_A_ROW) for calls in hybrid_in_a_row + _elastic_calls(elastic, normal, device)]
        done |= hybrid_done
    for opened in buffers:
        stack.callback(opened.destroy if hasattr(opened, "destroy") else opened.close)
    in_a_row["dispatch with a bound"]()  # what combine takes
    both = tuple(pair.values())
    return groups, done | {"low-latency dispatch and combine": lambda: [call() for call in both]}


def _read_the_clock() -> None:
    end = time.perf_counter() + _LOOP_SECONDS
    while time.perf_counter() < end:
        pass


def _measure(
    names: tuple[str, ...], low_latency: Shape, normal: Shape, num_rows: int, num_runs: int, device: str
) -> tuple[list[dict[str, list[float]]], Times, int]:
    """Microseconds of each call that counts, by its name, for each group; then those after a barrier.

    Last, how often torch asked CUDA for memory in the latter.
    """
    at = rank_device(device)
    number = torch.zeros(1, device=at)
    trivial: Calls = {_TRIVIAL: lambda: number.add_(1)}
    with contextlib.ExitStack() as stack:
        made = {name: _calls_of(name, low_latency, normal, at, stack) for name in names}

        def of_all(calls: dict[str, Calls]) -> Calls:
            named = {f"{call}, {name}": run for name, group in calls.items() for call, run in group.items()}
            return trivial | (named if len(names) > 1 else next(iter(calls.values())))

        times = []
        for i in range(max(len(groups) for groups, _ in made.values())):
            calls = of_all({name: groups[i][0] for name, (groups, _) in made.items() if i < len(groups)})
            in_a_row = next(groups[i][1] for groups, _ in made.values() if i < len(groups))
            times.append(time_host(calls, device, num_rows=num_rows, in_a_row=in_a_row, num_skipped=_NUM_SKIPPED))
        before = _num_allocations(device)
        done = time_until_done(
            {_LOOP: _read_the_clock} | of_all({name: calls for name, (_, calls) in made.items()}),
            num_warmups=_WARMUPS_AFTER_A_BARRIER,
            num_runs=num_runs,
            device=device,
            in_any_order=True,
        )
        allocations = _num_allocations(device) - before
        dist.barrier()
    return times, {name: (found.host_microseconds, found.microseconds) for name, found in done.items()}, allocations


def _num_allocations(device: str) -> int:
    """How often torch's allocator has asked CUDA for memory."""
    return int(torch.cuda.memory_stats()["num_device_alloc"]) if device == "cuda" else 0


@click.command(help=__doc__)
@click.option("--ranks", default=2, show_default=True)
@click.option("--low-latency-tokens", default=128, show_default=True)
@click.option("--low-latency-experts", default=288, show_default=True)
@click.option("--tokens", default=4096, show_default=True)
@click.option("--experts", default=256, show_default=True)
@click.option("--hidden", default=7168, show_default=True)
@click.option("--topk", default=8, show_default=True)
@click.option("--rows", default=30, show_default=True, help="Of calls that follow each other, of each group.")
@click.option("--runs", default=100, show_default=True, help="Of calls after a barrier.")
@click.option("--impl", "names", multiple=True, default=(_OWN,), show_default=True, help="A module with a Buffer.")
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
    runs: int,
    names: tuple[str, ...],
    device: str,
) -> None:
    low_latency = low_latency_tokens, hidden, topk, low_latency_experts
    normal = tokens, hidden, topk, experts
    with VirtualCluster(ranks, device=device) as cluster:
        measured = cluster.run(_measure, names, low_latency, normal, rows, runs, device, limit_s=600)
    print("In a row, rank 0")
    for times in measured[0][0]:
        trivial = median(times[_TRIVIAL])
        for name, values in times.items():
            print(f"{name:52} {median(values):8.1f} µs {median(values) / trivial:6.1f} of the trivial call beside it")
    print("After a barrier: until it returned and p99, until done and p99, of the slower rank in each run")
    for name in measured[0][1]:
        host, done = (
            [max(of_ranks) for of_ranks in zip(*(times[name][i] for _, times, _ in measured), strict=True)]
            for i in range(2)
        )
        columns = median(host), percentile(host, 99), median(done), percentile(done, 99)
        print(f"{name:52}", *(f"{value:8.1f} µs" for value in columns))
    if device == "cuda":
        print(f"torch asked CUDA for memory {max(number for *_, number in measured)} times")


if __name__ == "__main__":
    main()
