"""Measures the cuda engine and the wire under it in one run, and writes JSON, Markdown and a picture.

    python benchmarks/figures.py --out benchmarks/results [--gpus N] [--quick]

Every figure is of a whole call of the public interface, layout included where the caller must make one: CUDA events
around it, inputs out of L2, ranks lined up before each call, median over calls, mean over ranks. Bytes are those of all
rows that a rank receives, its own included. The wire's limit is measured by wire_limit.cu, which moves the same rows
with no counts, no order and no metadata.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hybrid_ep
from hybrid_ep.cluster import VirtualCluster
from hybrid_ep.config import Config
from hybrid_ep.quantize import cast_to_fp8

HERE = Path(__file__).resolve().parent
FLUSH_BYTES = 256 << 20  # several times the L2
AHEAD_CYCLES = 2_000_000  # about 1 ms


@dataclass(frozen=True)
class Shape:
    """One workload of every rank."""

    tokens: int = 4096
    hidden: int = 7168
    topk: int = 8
    experts: int = 256
    skewed: bool = False  # one expert takes 30 % of the tokens


@dataclass(frozen=True)
class Figure:
    """One measured call.

    Attributes:
        call: what was called.
        gpus, num_sms: how it was called.
        shape: with what.
        us: microseconds, mean over ranks of the median over calls.
        us_worst_rank: of the slowest rank.
        cpu_us: microseconds until the call returned to Python; None for calls that wait for counts.
        gb_per_s: received bytes over time.
    """

    call: str
    gpus: int
    num_sms: int
    shape: Shape
    us: float
    us_worst_rank: float
    cpu_us: float | None
    gb_per_s: float


def draw_topk(shape: Shape, rank: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(rank)
    scores = torch.rand(shape.tokens, shape.experts, device="cuda", generator=generator)
    if shape.skewed:
        scores[:, 0] = torch.where(torch.rand(shape.tokens, device="cuda", generator=generator) < 0.3, 2.0, -1.0)
    return scores.topk(shape.topk, 1).indices


def time_call(call: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Device microseconds and host microseconds, medians."""
    # The device sleeps first, so that the host is ahead of it, as it is between the layers of a model.
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    ready = torch.zeros(1, device="cuda")
    device_us, host_us = [], []
    for _ in range(3):
        call()
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(AHEAD_CYCLES)
        dist.all_reduce(ready)
        flush.zero_()
        begin.record()
        host_begin = time.perf_counter()
        call()
        host_us.append(1e6 * (time.perf_counter() - host_begin))
        end.record()
        end.synchronize()
        device_us.append(1e3 * begin.elapsed_time(end))
    return statistics.median(device_us), statistics.median(host_us)


def measure(shape: Shape, calls: list[str], sms: list[int], repeats: int) -> list[tuple[str, int, float, float, float]]:
    """On one rank: (call, SMs, device µs, host µs, received bytes) for each combination."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    topk_idx = draw_topk(shape, rank)
    x = torch.randn(shape.tokens, shape.hidden, device="cuda").to(torch.bfloat16)
    weights = torch.rand(shape.tokens, shape.topk, device="cuda")
    fp8 = cast_to_fp8(x)
    worst = shape.tokens * num_ranks
    results = []
    with hybrid_ep.Buffer(dist.group.WORLD, engine="cuda") as buffer:
        layout = buffer.get_dispatch_layout(topk_idx, shape.experts)

        def dispatch(data: Any, config: Config, *, whole: bool = True, worst_tokens: int = 0) -> tuple[Any, ...]:
            per_rank, _, per_expert, in_rank, _ = (
                buffer.get_dispatch_layout(topk_idx, shape.experts) if whole else layout
            )
            return buffer.dispatch(
                data,
                num_tokens_per_rank=per_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=topk_idx,
                topk_weights=weights,
                num_worst_tokens=worst_tokens,
                config=config,
            )

        recv_x, _, _, _, handle, _ = dispatch(x, Config())
        n = recv_x.shape[0]
        recv_x = recv_x.clone()
        hybrid = hybrid_ep.HybridEPBuffer(
            dist.group.WORLD, shape.hidden, shape.tokens, shape.experts // num_ranks, engine="cuda"
        )
        routing = {"topk_idx": topk_idx, "topk_weights": weights, "num_of_experts": shape.experts}
        permuted_rows, _, _, _, permuted_handle = hybrid.dispatch_with_permute(hidden=x, **routing)
        permuted_rows = permuted_rows.clone()
        bf16_bytes, fp8_bytes = n * shape.hidden * 2, n * shape.hidden * 33 // 32
        table: dict[str, tuple[Callable[[Config], Any], float]] = {
            "layout": (lambda config: buffer.get_dispatch_layout(topk_idx, shape.experts), 0),
            "dispatch bf16": (lambda config: dispatch(x, config), bf16_bytes),
            "dispatch bf16, layout given": (lambda config: dispatch(x, config, whole=False), bf16_bytes),
            "dispatch bf16, no sync": (lambda config: dispatch(x, config, whole=False, worst_tokens=worst), bf16_bytes),
            "dispatch bf16, cached": (lambda config: buffer.dispatch(x, handle=handle, config=config), bf16_bytes),
            "dispatch fp8": (lambda config: dispatch(fp8, config), fp8_bytes),
            "dispatch fp8, layout given": (lambda config: dispatch(fp8, config, whole=False), fp8_bytes),
            "combine bf16": (lambda config: buffer.combine(recv_x, handle, config=config), bf16_bytes),
            "dispatch bf16, permuted": (lambda config: hybrid.dispatch_with_permute(hidden=x, **routing), bf16_bytes),
            "combine bf16, permuted": (
                lambda config: hybrid.combine_with_unpermute(hidden=permuted_rows, handle=permuted_handle),
                bf16_bytes,
            ),
        }
        for name in calls:
            call, num_bytes = table[name]
            for num_sms in sms:
                config = Config(num_sms=num_sms)
                hybrid._num_sms_dispatch = hybrid._num_sms_combine = num_sms
                device_us, host_us = time_call(lambda call=call, config=config: call(config), repeats)
                results.append((name, num_sms, device_us, host_us, num_bytes))
        hybrid.close()
    return results


def figures(cluster: VirtualCluster, shape: Shape, calls: list[str], sms: list[int], repeats: int) -> list[Figure]:
    """The same over all ranks of a cluster."""
    by_rank = cluster.run(measure, shape, calls, sms, repeats, limit_s=240)
    made = []
    for rows in zip(*by_rank, strict=True):
        name, num_sms = rows[0][:2]
        times = [row[2] for row in rows]
        us = statistics.mean(times)
        num_bytes = statistics.mean(row[4] for row in rows)
        cpu_us = statistics.mean(row[3] for row in rows) if "no sync" in name or "combine" in name else None
        made.append(Figure(name, cluster.num_ranks, num_sms, shape, us, max(times), cpu_us, num_bytes / us / 1e3))
        print(_row(made[-1]), flush=True)
    return made


def _row(figure: Figure) -> str:
    cpu = "" if figure.cpu_us is None else f"{figure.cpu_us:.0f}"
    shape = f"{figure.shape.tokens}×{figure.shape.hidden}, top-{figure.shape.topk} of {figure.shape.experts}"
    shape += ", skewed" if figure.shape.skewed else ""
    return (
        f"| {figure.call} | {figure.gpus} | {figure.num_sms} | {shape} | {figure.us:.0f} | {figure.us_worst_rank:.0f} "
        f"| {figure.gb_per_s:.0f} | {cpu} |"
    )


def wire_limit(gpus: int, build_dir: Path) -> list[str]:
    """Builds and runs the probe; its lines are `pattern SMs row-bytes µs GB/s`."""
    binary = build_dir / "wire_limit"
    subprocess.run(
        ["nvcc", "-O3", "-std=c++17", "-arch=native", f"-I{HERE.parent / 'csrc'}", str(HERE / "wire_limit.cu"), "-o",
         str(binary)], check=True, timeout=120,
    )  # fmt: skip
    ran = subprocess.run([str(binary), str(gpus)], check=True, timeout=120, capture_output=True, text=True)
    return ran.stdout.splitlines()


CALLS = [
    "layout",
    "dispatch bf16",
    "dispatch bf16, layout given",
    "dispatch bf16, no sync",
    "dispatch bf16, cached",
    "dispatch fp8",
    "dispatch fp8, layout given",
    "combine bf16",
    "dispatch bf16, permuted",
    "combine bf16, permuted",
]
HEAD = "| call | GPUs | SMs | shape | µs | µs, slowest rank | GB/s | CPU µs |\n|---|---|---|---|---|---|---|---|"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="one shape, few SM counts")
    parser.add_argument("--only", nargs="+", metavar="CALL", help="print these calls alone; nothing is written")
    parser.add_argument("--sms", nargs="+", type=int, default=[8, 12, 16, 24, 32], help="SM counts for --only")
    options = parser.parse_args()
    if options.only:
        with VirtualCluster(options.gpus, device="cuda", variables={"HYBRID_EP_TIMEOUT_S": "20"}) as cluster:
            figures(cluster, Shape(), options.only, options.sms, options.repeats)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    probe = wire_limit(options.gpus, options.out)
    print("\n".join(probe), flush=True)
    print(HEAD, flush=True)
    made: list[Figure] = []
    with VirtualCluster(options.gpus, device="cuda", variables={"HYBRID_EP_TIMEOUT_S": "20"}) as cluster:
        made += figures(cluster, Shape(), CALLS, [16], options.repeats)
        made += figures(cluster, Shape(), ["dispatch bf16", "dispatch fp8", "combine bf16"], [8, 12, 24, 32],
                        options.repeats)  # fmt: skip
        if not options.quick:
            three = ["dispatch bf16", "dispatch fp8", "combine bf16"]
            made += figures(cluster, Shape(skewed=True), three, [16], options.repeats)
            for tokens in (256, 1024, 8192, 32768):
                made += figures(cluster, Shape(tokens=tokens), three, [16], 10)
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "-i", "0"],
        check=True, timeout=30, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    write(options.out, made, probe, driver)


def write(out: Path, made: list[Figure], probe: list[str], driver: str) -> None:
    """JSON for programs, Markdown for people, and bandwidth against SMs as a picture."""
    stamp = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    about = {"date": stamp, "gpu": driver, "torch": torch.__version__, "version": hybrid_ep.__version__}
    gpus = made[0].gpus
    data = {"about": about, "wire": probe, "figures": [asdict(figure) for figure in made]}
    (out / f"figures_{gpus}gpu.json").write_text(json.dumps(data, indent=1) + "\n")
    lines = [f"Measured {stamp} on {gpus} × {driver}; torch {torch.__version__}.", "", HEAD]
    lines += [_row(figure) for figure in made]
    lines += ["", "Wire limit (benchmarks/wire_limit.cu):", "", "```", *probe, "```", ""]
    (out / f"figures_{gpus}gpu.md").write_text("\n".join(lines))
    plot(out / f"figures_{gpus}gpu.png", made)


def plot(path: Path, made: list[Figure]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for call in ("dispatch bf16", "dispatch fp8", "combine bf16"):
        points = sorted((f.num_sms, f.gb_per_s) for f in made if f.call == call and f.shape == Shape())
        axes.plot(*zip(*points, strict=True), marker="o", label=call)
    axes.set_xlabel("SMs")
    axes.set_ylabel("GB/s of received rows, whole call")
    axes.set_ylim(bottom=0)
    axes.set_title(f"{made[0].gpus} GPUs, 4096 tokens × 7168, top-8 of 256")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    main()
