"""How far `hybrid-ep model` is from what was measured and published, and how far its simulation is from it.

    python benchmarks/model.py [--simulate]

Prints what docs/figures_h100.md sums up.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from hybrid_ep.cluster.model.predict import predict
from hybrid_ep.cluster.model.question import GPU_MEMORY, MODES, Machine, Question
from hybrid_ep.cluster.model.simulate import Tail, simulate_tail
from hybrid_ep.cluster.model.traffic import expected_rows
from hybrid_ep.errors import ConfigError
from hybrid_ep.workload import Workload

RESULTS = Path(__file__).resolve().parent / "results"
LIMIT = 0.15
GRIDS = ((8, 1), (2, 8), (4, 8), (8, 8), (16, 8))


# Calls of which every step runs on the GPU, or hides what runs on the host. A plain dispatch that waits for its counts
# also waits for the host.
_COMPARED = {
    "normal": ("dispatch: no sync", "dispatch: cached", "combine"),
    "permute": ("dispatch", "dispatch: cached", "combine"),
    "low-latency": (
        "dispatch",
        "combine",
        "dispatch: graph",
        "combine: graph",
        "dispatch: graph of 20",
        "combine: graph of 20",
    ),
}
_DEFAULT_SMS = 16


@dataclass(frozen=True)
class Comparison:
    """One measured call of one NVLink domain.

    Attributes:
        source: name of the file.
        gpu: ``H100`` or ``H200``.
        num_ranks, mode, dtype, routing, num_tokens, num_sms, operation: what was measured.
        measured_us: the median.
        model_us: of the model.
    """

    source: str
    gpu: str
    num_ranks: int
    mode: str
    dtype: str
    routing: str
    num_tokens: int
    num_sms: int | None
    operation: str
    measured_us: float
    model_us: float

    @property
    def error(self) -> float:
        return self.model_us / self.measured_us - 1


def compare_results(paths: Iterable[Path]) -> list[Comparison]:
    """Compares with what `hybrid-ep bench --json` wrote: calls of this library on GPUs of one domain.

    Raises:
        ConfigError: a file is of other GPUs.
    """
    return [one for path in paths for one in _compare(path.stem, json.loads(path.read_text(encoding="utf-8")))]


def _compare_call(
    source: str, gpu: str, num_ranks: int, mode: str, workload: Workload, num_sms: int | None, operation: str, us: float
) -> Comparison:
    """Compares with one measured call; `us` is its median."""
    asked = Question(
        workload,
        1,
        num_ranks,
        mode,
        num_sms or _DEFAULT_SMS,
        is_cached=operation.endswith("cached"),
        in_graph=operation.endswith("graph of 20"),
        machine=Machine(memory=GPU_MEMORY[gpu]),
    )
    model_us = predict(asked)[operation.startswith("combine")].total_us
    return Comparison(
        source,
        gpu,
        num_ranks,
        mode,
        workload.dtype,
        workload.routing,
        workload.num_tokens,
        num_sms,
        operation,
        us,
        model_us,
    )


def _compare(source: str, report: dict[str, Any]) -> list[Comparison]:
    gpu = next((name for name in GPU_MEMORY if name in report["device"]), None)
    if gpu is None:
        raise ConfigError(
            f"{source} is of {report['device']}; allowed: GPUs whose name contains {' or '.join(GPU_MEMORY)}"
        )
    found = []
    for outcome in report["outcomes"]:
        plan, candidate = outcome["plan"], outcome["candidate"]
        mode, num_sms = plan["mode"], candidate["num_sms"]
        if mode not in MODES or candidate["implementation"] != "hybrid_ep" or outcome["engine"] != "cuda":
            continue
        workload = Workload(**plan["workload"])
        for operation in outcome["operations"]:
            name, us = operation["name"], operation["median_us"]
            if name in _COMPARED[mode]:
                found.append(_compare_call(source, gpu, report["num_ranks"], mode, workload, num_sms, name, us))
    return found


class Published(NamedTuple):
    """A figure of others for 8 ranks a domain and 400 Gbit/s a rank, top-8 of 256.

    Attributes:
        who: measured it.
        num_domains: D.
        call: ``dispatch`` or ``combine``.
        low_latency: of 128 tokens; otherwise 4096.
        dtype: of the rows.
        time_us: or None.
        gbps: or None: rows that a rank sends, once to each domain, its own included, in GB/s.
    """

    who: str
    num_domains: int
    call: str
    low_latency: bool = False
    dtype: str = "bf16"
    time_us: float | None = None
    gbps: float | None = None


PUBLISHED = (
    Published("Hybrid-EP, kernel", 2, "dispatch", time_us=1530),
    Published("Hybrid-EP, call", 2, "dispatch", gbps=57),
    Published("DeepEP V2, 12 SMs", 2, "dispatch", gbps=90),
    Published("DeepEP V2, 12 SMs", 2, "combine", gbps=81),
    Published("DeepEP V2, 6 SMs", 4, "dispatch", gbps=61),
    Published("DeepEP V2, 6 SMs", 4, "combine", gbps=61),
    Published("DeepEP V1, 24 SMs", 2, "dispatch", gbps=43),
    Published("DeepEP V1, 24 SMs", 2, "combine", gbps=43),
    Published("UCCL-EP, ConnectX-7", 2, "dispatch", gbps=82),
    Published("pplx-garden", 2, "dispatch", True, "fp8", time_us=110),
    Published("pplx-garden", 2, "combine", True, "fp8", time_us=186),
)


class Paced(NamedTuple):
    """Calls over loopback with the rate of a NIC, on four H100: docs/figures_h100.md has them too.

    Attributes:
        num_domains: D.
        size: ranks of a domain.
        gbytes_per_s: of each rank's link, HYBRID_EP_LOOPBACK_RATE.
        dispatch_us, cached_us, combine_us: medians of whole calls.
    """

    num_domains: int
    size: int
    gbytes_per_s: float
    dispatch_us: float
    cached_us: float
    combine_us: float


PACED = (
    Paced(2, 1, 25, 2480, 2451, 2404),
    Paced(2, 1, 50, 1300, 1268, 1234),
    Paced(2, 1, 100, 705, 679, 649),
    Paced(4, 1, 50, 3348, 3318, 3260),
    Paced(2, 2, 50, 1310, 1284, 1279),
    Paced(2, 2, 100, 743, 720, 840),
)
TIMER_US = 5.4  # in each of these figures


def question(num_domains: int, size: int, num_tokens: int, *, mode: str = "normal", dtype: str = "bf16") -> Question:
    num_experts = -(-256 // (num_domains * size)) * num_domains * size
    return Question(Workload(num_tokens, 7168, 8, num_experts, dtype), num_domains, size, mode)


def paced_question(run: Paced) -> Question:
    """A flag is stored by the kernel itself: no proxy, and the latency of NVLink."""
    asked = question(run.num_domains, run.size, 4096)
    link = {"nic_gbits": 8 * run.gbytes_per_s, "nic_efficiency": 1.0, "nic_latency_us": 1.0, "proxy_us": 0.1}
    return replace(asked, machine=replace(asked.machine, **link))


def published_row(figure: Published) -> str:
    mode, num_tokens = ("low-latency", 128) if figure.low_latency else ("normal", 4096)
    asked = question(figure.num_domains, 8, num_tokens, mode=mode, dtype=figure.dtype)
    model_us = predict(asked)[figure.call == "combine"].total_us
    theirs_us = figure.time_us
    if theirs_us is None:
        assert figure.gbps is not None
        rows = num_tokens * expected_rows(asked).at_domain.sum()
        theirs_us = rows * asked.workload.combine_row_bytes / figure.gbps / 1e3
    said = f"{figure.gbps:g} GB/s" if figure.gbps else f"{figure.time_us:g} µs"
    return (
        f"| {figure.who} | {figure.num_domains} | {mode} {figure.call} | {said} | {theirs_us:.0f} | {model_us:.0f} | "
        f"{100 * (model_us / theirs_us - 1):+.0f} % |"
    )


def print_measured(found: list[Comparison]) -> None:
    click.echo("| GPUs | calls | figures | mean error | largest | beyond 15 % |\n|---|---|---|---|---|---|")
    groups: dict[tuple[str, str, int], list[float]] = {}
    for one in found:
        calls = f"{one.mode}, 20 in a graph" if one.operation.endswith("graph of 20") else one.mode
        groups.setdefault((calls, one.gpu, one.num_ranks), []).append(one.error)
    for (mode, gpu, num_ranks), of_group in sorted(
        groups.items(), key=lambda group: (group[0][0] != "normal", group[0])
    ):
        errors = np.array(of_group)
        largest = errors[np.abs(errors).argmax()]
        click.echo(
            f"| {num_ranks} × {gpu} | {mode} | {len(errors)} | {100 * np.abs(errors).mean():.1f} % | "
            f"{100 * largest:+.0f} % | {int((np.abs(errors) > LIMIT).sum())} |"
        )
    click.echo("\n| GPUs | call | tokens | measured, µs | model, µs | error |\n|---|---|---|---|---|---|")
    for one in found:
        if abs(one.error) > LIMIT:
            click.echo(
                f"| {one.num_ranks} × {one.gpu} | {one.mode} {one.operation}, {one.dtype} | {one.num_tokens} | "
                f"{one.measured_us:.1f} | {one.model_us:.1f} | {100 * one.error:+.0f} % |"
            )


def print_paced() -> None:
    click.echo("\n| domains × ranks | GB/s | call | measured, µs | model, µs | error |\n|---|---|---|---|---|---|")
    for run in PACED:
        asked = paced_question(run)
        dispatch, combine = predict(asked)
        cached = predict(replace(asked, is_cached=True))[0]
        calls = (("dispatch", dispatch), ("cached dispatch", cached), ("combine", combine))
        for (call, of_model), us in zip(calls, (run.dispatch_us, run.cached_us, run.combine_us), strict=True):
            measured_us = us - TIMER_US
            click.echo(
                f"| {run.num_domains} × {run.size} | {run.gbytes_per_s:g} | {call} | {measured_us:.0f} | "
                f"{of_model.total_us:.0f} | {100 * (of_model.total_us / measured_us - 1):+.0f} % |"
            )


def print_simulated() -> None:
    click.echo(
        "\n| domains × ranks | tokens | call | model, µs | median | 99 % | slowest |\n|---|---|---|---|---|---|---|"
    )
    num_tokens = 4096
    for num_domains, size in GRIDS:
        for tail in simulate_tail(question(num_domains, size, num_tokens), 3 if num_domains < 16 else 1, 0):
            over = (f"{100 * (us / tail.model_us - 1):+.1f} %" for us in (tail.median_us, tail.p99_us, tail.max_us))
            click.echo(
                f"| {num_domains} × {size} | {num_tokens} | {tail.call} | {tail.model_us:.0f} | "
                + " | ".join(over)
                + " |"
            )


def print_disturbed() -> None:
    """One slow rank, and routings that all want the same: over the model, or over the simulation without them."""
    even = question(8, 8, 4096)
    base = simulate_tail(even, 1, 0)
    click.echo("\n| 8 × 8 | dispatch, median | slowest | combine, median | slowest |\n|---|---|---|---|---|")
    for factor in (1.5, 2.0, 4.0):
        tails = simulate_tail(even, 1, 0, straggler=factor)
        cells = (f"{us / first.median_us:.2f}" for tail, first in zip(tails, base, strict=True) for us in ends(tail))
        click.echo(f"| one rank {factor:g} × slower | " + " | ".join(cells) + " |")
    for routing, exponent in (("hot", 1.0), ("skewed", 0.6), ("skewed", 1.5)):
        asked = replace(even, workload=replace(even.workload, routing=routing, exponent=exponent))
        tails = simulate_tail(asked, 1, 0)
        cells = (f"{us / first.median_us:.2f}" for tail, first in zip(tails, base, strict=True) for us in ends(tail))
        model = (f"{tail.model_us / first.model_us:.2f}" for tail, first in zip(tails, base, strict=True))
        name = f"skew {exponent * 5:g}" if routing == "skewed" else routing
        click.echo(f"| {name}; the model: {', '.join(model)} | " + " | ".join(cells) + " |")


def ends(tail: Tail) -> tuple[float, float]:
    return tail.median_us, tail.max_us


@click.command(help=__doc__.splitlines()[0])
@click.option("--simulate", is_flag=True, help="Simulate as well: some minutes.")
def main(simulate: bool) -> None:
    print_measured(compare_results(sorted(RESULTS.glob("*.json"))))
    click.echo(
        "\n| who | domains | call | published | µs | model, µs | model / published − 1 |\n|---|---|---|---|---|---|---|"
    )
    for figure in PUBLISHED:
        click.echo(published_row(figure))
    print_paced()
    if simulate:
        print_simulated()
        print_disturbed()


if __name__ == "__main__":
    main()
