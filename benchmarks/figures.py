"""The runs that the README and docs quote: `make bench`, or by hand

    python benchmarks/figures.py [--ranks 4 --ranks 2] [--quick] [--only figures] [--out benchmarks/results]

Plans only: `hybrid-ep bench` checks, times, and compares with the wire. All groups of plans become one file of each
machine: GPU_{ranks}gpu.json, after --only with the names of the groups.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import torch

from hybrid_ep.bench.command import measure_with_progress, print_to_terminal, write_document
from hybrid_ep.bench.launch import open_ranks
from hybrid_ep.bench.plan import BenchPlan, Candidate
from hybrid_ep.bench.results import BenchReport
from hybrid_ep.workload import Workload, default_workload_sizes

RESULTS = Path(__file__).resolve().parent / "results"
GROUPS = ("figures", "low_latency", "batch_sizes")
DTYPES = ("bf16", "fp8")
LOW_LATENCY_EXPERTS = 288


def plans_of(group: str, device: str, *, quick: bool) -> Iterator[BenchPlan]:
    """The plans of a group; `quick` leaves out what takes long."""

    def plan(
        mode: str, dtype: str, *, sms: tuple[int | None, ...] = (16,), routing: str = "uniform", **sizes: int
    ) -> BenchPlan:
        size = default_workload_sizes(device, mode) | sizes
        workload = Workload(size["tokens"], size["hidden"], size["topk"], size["experts"], dtype, routing)
        candidates = tuple(Candidate("hybrid_ep", num_sms) for num_sms in sms)
        runs = 10 if quick else 100 if mode == "low-latency" else 30
        return BenchPlan(workload, mode, candidates, num_warmups=3, num_runs=runs, no_sync=False, device=device)

    for dtype in DTYPES:
        if group == "figures":
            yield plan("normal", dtype, sms=(8, 16, 32) if quick else (8, 12, 16, 24, 32))
            yield plan("permute", dtype)
            yield plan("normal", dtype, routing="hot")
        elif group == "batch_sizes":
            for tokens in (256,) if quick else (256, 1024, 8192, 32768):  # figures has 4096
                yield plan("normal", dtype, tokens=tokens)
        else:
            experts = {"experts": LOW_LATENCY_EXPERTS} if device == "cuda" else {}
            for tokens in (1, 128) if quick else (1, 8, 64, 128, 512):
                yield plan("low-latency", dtype, sms=(None,), tokens=tokens, **experts)


def file_name(report: BenchReport, device: str, only: tuple[str, ...]) -> str:
    """``h200_2gpu`` or ``2cpu``, after `only` with the names of the groups."""
    if device == "cpu":
        return "_".join([f"{report.num_ranks}cpu", *only])
    model = re.search(r"\b[A-Z]+\d+\w*", report.device)
    gpu = re.sub(r"\W+", "_", model[0] if model else report.device).lower()
    return "_".join([f"{gpu}_{report.num_ranks}gpu", *only])


@click.command(help=__doc__.splitlines()[0])
@click.option("--ranks", type=int, multiple=True, help="Numbers of GPUs, one after the other; default: all, and 2.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--only", type=click.Choice(GROUPS), multiple=True, help="These groups alone.")
@click.option("--quick", is_flag=True, help="Fewer sizes and runs; only on all GPUs; printed, and not written.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help=f"Default: {RESULTS.name}, unless quick.")
@click.pass_context
def main(
    ctx: click.Context, ranks: tuple[int, ...], device: str, only: tuple[str, ...], quick: bool, out: Path | None
) -> None:
    most = torch.cuda.device_count()
    numbers = dict.fromkeys(ranks or ([most] if quick or most < 2 else [most, 2]))
    out = out or (None if quick else RESULTS)
    ok = True
    for num_ranks in numbers:
        with open_ranks(num_ranks, device, None) as run:
            plans = [one for group in only or GROUPS for one in plans_of(group, device, quick=quick)]
            report = measure_with_progress(plans, run)
            print_to_terminal(report)
            if out is not None:
                write_document(report, out, file_name(report, device, only))
            ok = ok and report.ok
    ctx.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
