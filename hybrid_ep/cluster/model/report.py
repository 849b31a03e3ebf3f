"""The output of the model: gathered once, then shown as tables in 80 columns, as JSON, or as a picture."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from hybrid_ep.checks import require_int
from hybrid_ep.cluster.model.limits import Excess, Stop, SweepPoint, find_excesses, find_stops, sweep_domains
from hybrid_ep.cluster.model.machine import Machine
from hybrid_ep.cluster.model.memory import memory_of
from hybrid_ep.cluster.model.predict import Prediction, predict
from hybrid_ep.cluster.model.question import Question
from hybrid_ep.cluster.model.simulate import Tail, simulate_tail
from hybrid_ep.cluster.model.traffic import HOPS, expected_rows
from hybrid_ep.report.units import format_bytes, unit_of_microseconds

__all__ = ["ModelReport", "answer", "print_report"]


@dataclass(frozen=True)
class ModelReport:
    """The answer to one question.

    Attributes:
        question: what was asked.
        remote_domains: other domains that a token goes to, mean over the ranks.
        predictions: of dispatch and combine.
        memory: bytes of the most loaded rank by part.
        excesses: sizes beyond a limit.
        sweep: the same workload on 1, 2, 4, … domains.
        stops: what becomes worse along the sweep.
        tails: simulated times of the ranks; empty without --simulate.
    """

    question: Question
    remote_domains: float
    predictions: tuple[Prediction, Prediction]
    memory: dict[str, int]
    excesses: list[Excess]
    sweep: list[SweepPoint]
    stops: list[Stop]
    tails: list[Tail]

    def to_json(self) -> dict[str, Any]:
        question = self.question
        return {
            "num_domains": question.num_domains,
            "num_ranks_per_domain": question.num_ranks_per_domain,
            "workload": asdict(question.workload),
            "mode": question.mode,
            "num_sms": question.num_sms,
            "machine": asdict(question.machine),
            "sources": Machine.sources(),
            "remote_domains_per_token": self.remote_domains,
            "calls": [_call_json(prediction) for prediction in self.predictions],
            "memory_bytes": self.memory,
            "fits": not self.excesses,
            "excesses": [asdict(excess) for excess in self.excesses],
            "sweep": [
                {
                    "num_domains": point.num_domains,
                    "remote_domains_per_token": point.remote_domains,
                    "dispatch_us": point.dispatch.total_us,
                    "combine_us": point.combine.total_us,
                    "dispatch_bottleneck": point.dispatch.bottleneck,
                    "combine_bottleneck": point.combine.bottleneck,
                }
                for point in self.sweep
            ],
            "stops": [asdict(stop) for stop in self.stops],
            "simulated": [asdict(tail) for tail in self.tails],
        }


def answer(question: Question, *, num_simulations: int = 0, seed: int = 0, straggler: float = 1.0) -> ModelReport:
    """Answers a question.

    Args:
        question: the grid, the workload and the hardware.
        num_simulations: runs of the simulation between domains, each with a seed of its own.
        seed: of the first.
        straggler: how many times slower one rank is in the simulation.

    Raises:
        ConfigError: a simulation was asked for that there is not: in one domain, or of other than normal calls.
    """
    require_int("simulate", num_simulations, minimum=0)
    rows = expected_rows(question)
    sweep = sweep_domains(question)
    return ModelReport(
        question,
        float(rows.sent_between.mean()) / rows.num_tokens,
        predict(question),
        memory_of(question, rows),
        find_excesses(question),
        sweep,
        find_stops(sweep),
        simulate_tail(question, num_simulations, seed, straggler=straggler) if num_simulations else [],
    )


def _call_json(prediction: Prediction) -> dict[str, Any]:
    traffic = prediction.traffic
    return {
        "call": prediction.call,
        "total_us": prediction.total_us,
        "fixed_us": prediction.fixed,
        "rows_us": prediction.rows,
        "bottleneck": prediction.bottleneck,
        "hop_bytes": {name: hop._asdict() for name, hop in traffic.hops.items()},
        "record_bytes": traffic.record.num_bytes if traffic.record else None,
        "records_per_chunk": traffic.record.per_chunk if traffic.record else None,
        "chunks_to_fullest_peer": traffic.chunks,
        "chunks": traffic.messages,
        "credits": traffic.credits,
        "control_bytes": traffic.control_bytes,
        "in_flight_bytes_per_peer": traffic.in_flight,
    }


def print_report(report: ModelReport, console: Console) -> None:
    """Prints tables that fit 80 columns."""
    question = report.question
    machine = question.machine
    domains = "1 domain" if question.num_domains == 1 else f"{question.num_domains} domains"
    calls = f"{question.mode}, in a CUDA graph" if question.in_graph else question.mode
    console.print(f"{domains} × {question.num_ranks_per_domain} ranks, {calls}")
    console.print(question.workload.describe())
    console.print(
        f"network {machine.nic_gbits:g} Gbit/s a rank, {machine.nic_latency_us:g} µs; "
        f"NVLink {machine.nvlink:g} GB/s each way; a token goes to {report.remote_domains:.2f} other domains"
    )
    for table in (_times(report), _traffic(report), _memory(report), _sweep(report)):
        console.print(table)
    for tail in report.tails:
        console.print(
            f"simulated {tail.call}: median {_time(tail.median_us)}, 99 % {_time(tail.p99_us)}, "
            f"slowest {_time(tail.max_us)} of {tail.num_samples} ranks; model {_time(tail.model_us)}"
        )
    for stop in report.stops:
        console.print(f"from {stop.num_domains} domains on: {stop.what}")
    for excess in report.excesses:
        console.print(
            f"[bold]too large[/]: {excess.name} is {excess.value}; allowed: ≤ {excess.limit}. It would take: "
            f"{excess.change}"
        )


def _times(report: ModelReport) -> Table:
    """Each step of both calls, in the order in which they come."""
    table = Table("time", title_justify="left")
    for prediction in report.predictions:
        table.add_column(prediction.call, justify="right")
    fixed = dict.fromkeys(name for one in report.predictions for name in one.fixed)
    rows = dict.fromkeys(name for one in report.predictions for name in one.rows)
    for name in fixed:
        table.add_row(name, *(_time(one.fixed.get(name)) for one in report.predictions))
    table.add_section()
    for name in rows:
        cells = []
        for one in report.predictions:
            is_slowest = name in one.rows and one.rows[name] == max(one.rows.values())
            cells.append(_time(one.rows.get(name)) + (" ◄" if is_slowest and not one.serial else ""))
        table.add_row(f"rows: {name}", *cells)
    table.add_section()
    table.add_row("whole call", *(_time(one.total_us) for one in report.predictions))
    table.add_row("bottleneck", *(one.bottleneck for one in report.predictions))
    return table


def _traffic(report: ModelReport) -> Table:
    table = Table("bytes of a rank: mean, most loaded")
    for prediction in report.predictions:
        table.add_column(prediction.call, justify="right")
    traffics = [prediction.traffic for prediction in report.predictions]
    for name in HOPS:
        if any(traffic.hops[name].most for traffic in traffics):
            hops = (traffic.hops[name] for traffic in traffics)
            table.add_row(name, *(f"{format_bytes(hop.mean)}, {format_bytes(hop.most)}" for hop in hops))
    if report.question.num_domains == 1:
        return table
    records = [traffic.record for traffic in traffics if traffic.record]
    table.add_row("record; records of a chunk", *(f"{one.num_bytes} B; {one.per_chunk}" for one in records))
    table.add_row("chunks and credits sent", *(f"{one.messages} + {one.credits}" for one in traffics))
    table.add_row("control", *(format_bytes(one.control_bytes) for one in traffics))
    table.add_row("in flight to a peer", *(format_bytes(one.in_flight) for one in traffics))
    return table


def _memory(report: ModelReport) -> Table:
    table = Table("memory of the most loaded rank")
    table.add_column("bytes", justify="right")
    for name, num_bytes in report.memory.items():
        table.add_row(name, format_bytes(num_bytes))
    table.add_section()
    table.add_row("all", format_bytes(sum(report.memory.values())))
    return table


def _sweep(report: ModelReport) -> Table:
    table = Table("domains")
    for name in ("to domains", "dispatch", "combine"):
        table.add_column(name, justify="right")
    table.add_column("bottleneck of dispatch")
    for point in report.sweep:
        is_asked = point.num_domains == report.question.num_domains
        table.add_row(
            str(point.num_domains),
            f"{point.remote_domains:.2f}",
            _time(point.dispatch.total_us),
            _time(point.combine.total_us),
            point.dispatch.bottleneck,
            style="bold" if is_asked else None,
        )
    return table


def _time(microseconds: float | None) -> str:
    if microseconds is None:
        return "–"
    factor, unit = unit_of_microseconds(microseconds)
    value = microseconds / factor
    return f"{value:#.3g} {unit}" if value < 99.95 else f"{value:.0f} {unit}"
