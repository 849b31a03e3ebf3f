"""The output of the model: gathered once, then shown as tables in 80 columns or as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from hybrid_ep.checks import require_int
from hybrid_ep.cluster.model.limits import Excess, Stop, SweepPoint, find_excesses, find_stops, sweep_domains
from hybrid_ep.cluster.model.machine import Machine
from hybrid_ep.cluster.model.memory import memory_of
from hybrid_ep.cluster.model.predict import Prediction, predict
from hybrid_ep.cluster.model.question import Question
from hybrid_ep.cluster.model.simulate import Tail, simulate_tail
from hybrid_ep.cluster.model.traffic import HOPS, expected_rows
from hybrid_ep.report.tables import NOTHING, Cell, DataTable
from hybrid_ep.report.units import format_bytes, format_microseconds

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
        console.print(table.to_rich())
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


def _times(report: ModelReport) -> DataTable:
    """Each step of both calls, in the order in which they come."""
    calls = report.predictions
    fixed = dict.fromkeys(name for one in calls for name in one.fixed)
    rows = [[name, *(_time(one.fixed.get(name)) for one in calls)] for name in fixed]
    for name in dict.fromkeys(name for one in calls for name in one.rows):
        is_slowest = [not one.serial and one.rows.get(name) == max(one.rows.values()) for one in calls]
        cells = [_time(one.rows.get(name)) + " ◄" * slow for one, slow in zip(calls, is_slowest, strict=True)]
        rows.append([f"rows: {name}", *cells])
    rows.append(["whole call", *(_time(one.total_us) for one in calls)])
    rows.append(["bottleneck", *(one.bottleneck for one in calls)])
    return DataTable(["time", *(one.call for one in calls)], rows)


def _traffic(report: ModelReport) -> DataTable:
    traffics = [prediction.traffic for prediction in report.predictions]
    rows = [
        [name, *(f"{format_bytes(each.hops[name].mean)}, {format_bytes(each.hops[name].most)}" for each in traffics)]
        for name in HOPS
        if any(traffic.hops[name].most for traffic in traffics)
    ]
    if report.question.num_domains > 1:
        records = [traffic.record for traffic in traffics if traffic.record]
        rows.append(["record; records of a chunk", *(f"{one.num_bytes} B; {one.per_chunk}" for one in records)])
        rows.append(["chunks and credits sent", *(f"{one.messages} + {one.credits}" for one in traffics)])
        rows.append(["control", *(format_bytes(one.control_bytes) for one in traffics)])
        rows.append(["in flight to a peer", *(format_bytes(one.in_flight) for one in traffics)])
    return DataTable(["bytes of a rank: mean, most loaded", *(one.call for one in report.predictions)], rows)


def _memory(report: ModelReport) -> DataTable:
    parts = {**report.memory, "all": sum(report.memory.values())}
    return DataTable(
        ["memory of the most loaded rank", "bytes"], [[n, format_bytes(size)] for n, size in parts.items()]
    )


def _sweep(report: ModelReport) -> DataTable:
    rows = []
    for point in report.sweep:
        cells = [str(point.num_domains), point.dispatch.bottleneck, f"{point.remote_domains:.2f}"]
        cells += [_time(point.dispatch.total_us), _time(point.combine.total_us)]
        is_asked = point.num_domains == report.question.num_domains
        rows.append([Cell(text, style="bold" if is_asked else "") for text in cells])
    return DataTable(
        ["domains", "bottleneck of dispatch", "to domains", "dispatch", "combine"], rows, num_text_columns=2
    )


def _time(microseconds: float | None) -> str:
    return NOTHING if microseconds is None else format_microseconds(microseconds)
