"""The output of the model: one JSON document, and the same figures as tables in 80 columns."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console

from hybrid_ep.checks import require_int
from hybrid_ep.cluster.model.limits import find_excesses, find_stops, memory_of, sweep_domains
from hybrid_ep.cluster.model.predict import Prediction
from hybrid_ep.cluster.model.question import Machine, Question
from hybrid_ep.cluster.model.simulate import simulate_tail
from hybrid_ep.cluster.model.traffic import HOPS, expected_rows
from hybrid_ep.report.tables import NOTHING, Cell, DataTable
from hybrid_ep.report.units import format_bytes, format_microseconds


def answer(question: Question, *, num_simulations: int = 0, seed: int = 0, straggler: float = 1.0) -> dict[str, Any]:
    """Answers a question with the JSON document of `hybrid-ep model --json`.

    Args:
        question: the grid, the workload and the hardware.
        num_simulations: runs of the simulation between domains, each with a seed of its own.
        seed: of the first.
        straggler: how many times slower one rank is in the simulation.

    Raises:
        ConfigError: a simulation was asked for that there is not: in one domain, or of other than normal calls.
    """
    require_int("simulate", num_simulations, minimum=0)
    sweep, excesses = sweep_domains(question), find_excesses(question)
    asked = next(point for point in sweep if point.num_domains == question.num_domains)
    tails = simulate_tail(question, num_simulations, seed, straggler=straggler) if num_simulations else []
    return {
        "num_domains": question.num_domains,
        "num_ranks_per_domain": question.num_ranks_per_domain,
        "workload": asdict(question.workload),
        "mode": question.mode,
        "num_sms": question.num_sms,
        "machine": asdict(question.machine),
        "sources": Machine.sources(),
        "remote_domains_per_token": asked.remote_domains,
        "calls": [_call_json(prediction) for prediction in (asked.dispatch, asked.combine)],
        "memory_bytes": memory_of(question, expected_rows(question)),
        "fits": not excesses,
        "excesses": [excess._asdict() for excess in excesses],
        "sweep": [
            {
                "num_domains": point.num_domains,
                "remote_domains_per_token": point.remote_domains,
                "dispatch_us": point.dispatch.total_us,
                "combine_us": point.combine.total_us,
                "dispatch_bottleneck": point.dispatch.bottleneck,
                "combine_bottleneck": point.combine.bottleneck,
            }
            for point in sweep
        ],
        "stops": [stop._asdict() for stop in find_stops(sweep)],
        "simulated": [tail._asdict() for tail in tails],
    }


def _call_json(prediction: Prediction) -> dict[str, Any]:
    link = prediction.traffic.link
    return {
        "call": prediction.call,
        "total_us": prediction.total_us,
        "fixed_us": prediction.fixed,
        "rows_us": prediction.rows,
        "bottleneck": prediction.bottleneck,
        "hop_bytes": {name: hop._asdict() for name, hop in prediction.traffic.hops.items()},
        **link._asdict(),
        # There are no records in one domain.
        "record_bytes": link.record_bytes or None,
        "records_per_chunk": link.records_per_chunk or None,
    }


def print_answer(question: Question, document: dict[str, Any], console: Console) -> None:
    """Prints an answer as tables that fit 80 columns."""
    machine, calls = question.machine, document["calls"]
    domains = "1 domain" if question.num_domains == 1 else f"{question.num_domains} domains"
    graph = ", in a CUDA graph" if question.in_graph else ""
    console.print(f"{domains} × {question.num_ranks_per_domain} ranks, {question.mode}{graph}")
    console.print(question.workload.describe())
    console.print(
        f"network {machine.nic_gbits:g} Gbit/s a rank, {machine.nic_latency_us:g} µs; NVLink {machine.nvlink:g} GB/s "
        f"each way; a token goes to {document['remote_domains_per_token']:.2f} other domains"
    )
    names = [call["call"] for call in calls]
    parts = document["memory_bytes"] | {"all": sum(document["memory_bytes"].values())}
    memory = [[name, format_bytes(num_bytes)] for name, num_bytes in parts.items()]
    sweep = [_sweep_row(point, question.num_domains) for point in document["sweep"]]
    sweep_columns = ["domains", "bottleneck of dispatch", "to domains", "dispatch", "combine"]
    for table in (
        DataTable(["time", *names], _time_rows(calls, serial=question.mode == "low-latency")),
        DataTable(["bytes of a rank: mean, most loaded", *names], _traffic_rows(calls)),
        DataTable(["memory of the most loaded rank", "bytes"], memory),
        DataTable(sweep_columns, sweep, num_text_columns=2),
    ):
        console.print(table.to_rich())
    for tail in document["simulated"]:
        console.print(
            f"simulated {tail['call']}: median {_time(tail['median_us'])}, 99 % {_time(tail['p99_us'])}, "
            f"slowest {_time(tail['max_us'])} of {tail['num_samples']} ranks; model {_time(tail['model_us'])}"
        )
    for stop in document["stops"]:
        console.print(f"from {stop['num_domains']} domains on: {stop['what']}")
    for excess in document["excesses"]:
        console.print(
            f"[bold]too large[/]: {excess['name']} is {excess['value']}; allowed: ≤ {excess['limit']}. "
            f"It would take: {excess['change']}"
        )


def _time_rows(calls: list[dict[str, Any]], *, serial: bool) -> list[list[str]]:
    """Each step of both calls, in the order in which they come; `◄` marks the hop that sets the time."""
    fixed = dict.fromkeys(name for call in calls for name in call["fixed_us"])
    rows = [[name, *(_time(call["fixed_us"].get(name)) for call in calls)] for name in fixed]
    for name in dict.fromkeys(name for call in calls for name in call["rows_us"]):
        times = [(call["rows_us"].get(name), max(call["rows_us"].values())) for call in calls]
        rows.append([f"rows: {name}", *(_time(us) + " ◄" * (us == most and not serial) for us, most in times)])
    rows.append(["whole call", *(_time(call["total_us"]) for call in calls)])
    return [*rows, ["bottleneck", *(call["bottleneck"] for call in calls)]]


def _traffic_rows(calls: list[dict[str, Any]]) -> list[list[str]]:
    hops = [call["hop_bytes"] for call in calls]
    rows = [
        [name, *(f"{format_bytes(of_call[name]['mean'])}, {format_bytes(of_call[name]['most'])}" for of_call in hops)]
        for name in HOPS
        if any(of_call[name]["most"] for of_call in hops)
    ]
    if calls[0]["record_bytes"]:
        records = (f"{call['record_bytes']} B; {call['records_per_chunk']}" for call in calls)
        rows.append(["record; records of a chunk", *records])
        rows.append(["chunks and credits sent", *(f"{call['chunks']} + {call['credits']}" for call in calls)])
        rows.append(["control", *(format_bytes(call["control_bytes"]) for call in calls)])
        rows.append(["in flight to a peer", *(format_bytes(call["in_flight_bytes_per_peer"]) for call in calls)])
    return rows


def _sweep_row(point: dict[str, Any], num_domains: int) -> list[Cell]:
    cells = [str(point["num_domains"]), point["dispatch_bottleneck"], f"{point['remote_domains_per_token']:.2f}"]
    cells += [_time(point["dispatch_us"]), _time(point["combine_us"])]
    return [Cell(text, style="bold" if point["num_domains"] == num_domains else "") for text in cells]


def _time(microseconds: float | None) -> str:
    return NOTHING if microseconds is None else format_microseconds(microseconds)
