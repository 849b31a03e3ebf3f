"""The measurements of all ranks together: times over runs and ranks, bytes by both definitions, bandwidth, the wire.

A rail is the ranks with the same index in their domains, which are peers, and their NICs.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hybrid_ep.bench.measure import RankMeasurement, RowCounts
from hybrid_ep.bench.plan import BALANCE, CALLS, BenchPlan, Candidate, call_of
from hybrid_ep.bench.timing import Times
from hybrid_ep.bench.wire import RankWire, compared_sms
from hybrid_ep.workload import SKEWS_PER_EXPONENT

WIRE = "the wire alone"
_FABRIC_METRICS = {
    "dispatch": "fabric dispatch",
    "combine": "fabric combine",
    "dispatch: link alone": "link",
}


@dataclass(frozen=True)
class Operation:
    """One operation of one candidate over all runs and ranks.

    A run is over when its slowest rank is done, so `min_us`, `median_us` and `max_us` are over the runs' slowest ranks.
    Bandwidth is the mean rank's bytes over the median run.

    Attributes:
        name: ``dispatch``, ``combine``, or a part or another form of one of them.
        min_us, median_us, max_us: over runs, µs.
        p50_us, p99_us: for each rank, over runs, µs.
        host_us: until a call returned to the host, median over runs of the slowest rank, µs.
        host_in_a_row_us: the same of calls in a row; None where the host waits for the device, and on CPUs.
        host_default_device_us: the same under `torch.set_default_device`.
        rows_bytes: bytes of all received rows, a rank's own included; mean over ranks; 0 for a half of a call and for
            what moves no rows.
        remote_rows_bytes: bytes of rows from other ranks only; mean over ranks.
        most_rows_bytes: bytes of all received rows of the busiest rank.
        gbps: GB/s of `rows_bytes`.
        remote_gbps: GB/s of `remote_rows_bytes`.
        wire_us: what the wire alone takes for these rows with as many SMs, median; None where it was not measured.
        of_wire: `wire_us` over `median_us`; 1 is the limit.
        fabric_gbps: for each rank, GB/s of the rows between it and its peers in other domains, in the direction that
            has more of them, over `p50_us`; empty where there is one domain, or rows are not counted.
    """

    name: str
    min_us: float
    median_us: float
    max_us: float
    p50_us: list[float]
    p99_us: list[float]
    host_us: float
    host_in_a_row_us: float | None
    host_default_device_us: float | None
    rows_bytes: float
    remote_rows_bytes: float
    most_rows_bytes: int
    gbps: float
    remote_gbps: float
    wire_us: float | None
    of_wire: float | None
    fabric_gbps: list[float]


@dataclass(frozen=True)
class Outcome:
    """One candidate.

    Attributes:
        candidate: who.
        engine: what moved its tokens.
        problems: what is wrong, in words; then `operations` is empty.
        operations: what was timed.
        fullest: in mode ``balance``, copies of the most loaded rank over the mean.
        num_ranks_per_domain: of the domains that `Operation.fabric_gbps` is between; None without it.
    """

    candidate: Candidate
    engine: str
    problems: list[str]
    operations: list[Operation]
    fullest: float | None = None
    num_ranks_per_domain: int | None = None


@dataclass(frozen=True)
class BenchResult:
    """One plan, measured.

    Attributes:
        plan: what was asked for.
        outcomes: of each candidate.
        wire: the wire alone, with each number of SMs that a candidate is compared with.
        wire_obstacle: why the wire was not measured though the plan asks for it, or None.
    """

    plan: BenchPlan
    outcomes: list[Outcome]
    wire: list[Outcome]
    wire_obstacle: str | None

    @property
    def ok(self) -> bool:
        """Whether every candidate moved every row right."""
        return not any(outcome.problems for outcome in self.outcomes)


@dataclass(frozen=True)
class BenchReport:
    """All plans that the same ranks have measured.

    Attributes:
        command: the command line of rank 0, with the variables of this library that it had.
        date: when, UTC.
        num_ranks: of the group.
        device: name of the GPUs, or ``CPU``.
        versions: of what took part.
        timer_floor_us: one trivial kernel by the same timer, median over runs of the slowest rank, µs.
        host_floor_us: until one trivial call of torch returned to the host, of calls in a row; median of the slowest
            rank, µs.
        results: of each plan.
    """

    command: str
    date: str
    num_ranks: int
    device: str
    versions: dict[str, str]
    timer_floor_us: float
    host_floor_us: float
    results: list[BenchResult]

    @property
    def ok(self) -> bool:
        """Whether every candidate moved every row right."""
        return all(result.ok for result in self.results)

    def describe(self) -> str:
        """One line for people: what all plans have in common."""
        common = {name: value for name, value in settings(self.results[0].plan).items() if name not in self.varying()}
        parts = ", ".join(f"{name} {value}" for name, value in common.items())
        return f"{self.num_ranks} ranks on {self.device}: {parts}"

    def varying(self) -> list[str]:
        """Names of the settings in which the plans differ."""
        return varying(self.results)

    def to_json(self) -> dict[str, Any]:
        """One JSON document with figures of four digits: all outcomes in one list, each with its plan."""
        about = {name: value for name, value in asdict(self).items() if name != "results"}
        obstacles = [result.wire_obstacle for result in self.results if result.wire_obstacle is not None]
        document: dict[str, Any] = _with_four_digits(
            {
                "ok": self.ok,
                **about,
                "wire_obstacle": obstacles[0] if obstacles else None,
                "metrics": self._fabric_metrics(),
                "outcomes": [_to_json(result, outcome) for result in self.results for outcome in result.outcomes],
                "wire": [_to_json(result, outcome) for result in self.results for outcome in result.wire],
            }
        )
        return document

    def _fabric_metrics(self) -> list[dict[str, Any]]:
        """Returns metrics for the report of a cluster: rows between domains, of the first candidate that has them."""
        outcomes = [outcome for result in self.results for outcome in result.outcomes]
        for outcome in outcomes:
            if outcome.num_ranks_per_domain is not None and outcome.operations:
                found = {operation.name: operation.fabric_gbps for operation in outcome.operations}
                values = {metric: found.get(name, []) for name, metric in _FABRIC_METRICS.items()}
                per_domain = outcome.num_ranks_per_domain
                return [one for name in values if values[name] for one in rail_metrics(name, values[name], per_domain)]
        return []


def _to_json(result: BenchResult, outcome: Outcome) -> dict[str, Any]:
    plan = {name: value for name, value in asdict(result.plan).items() if name != "candidates"}
    return {"plan": plan, **asdict(outcome)}


def _with_four_digits(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_four_digits(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_four_digits(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def document_text(document: dict[str, Any]) -> str:
    """The JSON text of a report's document: one line for each operation and for each other key."""

    def outcome_text(outcome: dict[str, Any]) -> str:
        head = json.dumps({key: value for key, value in outcome.items() if key != "operations"})
        operations = ",\n  ".join(map(json.dumps, outcome["operations"]))
        return f'{head[:-1]}, "operations": [\n  {operations}]}}'

    def value_text(value: Any) -> str:
        is_outcomes = isinstance(value, list) and value and "operations" in value[0]
        return "[\n" + ",\n".join(map(outcome_text, value)) + "]" if is_outcomes else json.dumps(value)

    return "{\n" + ",\n".join(f'"{key}": {value_text(value)}' for key, value in document.items()) + "\n}\n"


def settings(plan: BenchPlan) -> dict[str, str]:
    """Returns the settings of a plan in words, under the names of the command's options."""
    workload = plan.workload
    return {
        "mode": plan.mode,
        "dtype": workload.dtype,
        "routing": workload.routing,
        "tokens": str(workload.num_tokens),
        "hidden": str(workload.hidden),
        "topk": str(workload.num_topk),
        "experts": str(workload.num_experts),
        "no-sync": "yes" if plan.no_sync else "no",
        **(
            {"skew": f"{workload.exponent * SKEWS_PER_EXPONENT:g}"}
            if plan.mode == BALANCE and workload.routing == "skewed"
            else {}
        ),
    }


def varying(results: list[BenchResult]) -> list[str]:
    """Names of the settings in which the plans differ."""
    all_settings = [settings(result.plan) for result in results]
    return [name for name in all_settings[0] if len({one[name] for one in all_settings}) > 1]


def summarize(plan: BenchPlan, wire: list[RankWire] | None, measurements: list[list[RankMeasurement]]) -> BenchResult:
    """Puts together what each rank measured of the wire (None = not asked for) and of each candidate."""
    limits: list[Outcome] = []
    for num_sms in wire[0].times if wire else ():
        ranks = [(one.times[num_sms], one.rows) for one in wire or ()]
        operations = [_operation(call, plan, ranks, None) for call in CALLS]
        limits.append(Outcome(Candidate(WIRE, num_sms), "push", [], operations))
    outcomes = []
    for candidate, found in zip(plan.candidates, measurements, strict=True):
        problems = [problem for rank in found for problem in rank.problems]
        same_sms = [limit for limit in limits if limit.candidate.num_sms == compared_sms(candidate, plan)]
        wire_us = {op.name: op.median_us for limit in same_sms for op in limit.operations}
        ranks = [(rank.times, rank.rows) for rank in found]
        operations = [_operation(name, plan, ranks, wire_us.get(call_of(name) or "")) for name in found[0].times]
        first = found[0]
        outcomes.append(
            Outcome(candidate, first.engine, problems, operations, first.fullest, first.num_ranks_per_domain)
        )
    return BenchResult(plan, outcomes, limits, wire[0].obstacle if wire else None)


def _operation(
    name: str, plan: BenchPlan, ranks: list[tuple[dict[str, Times], dict[str, RowCounts]]], wire_us: float | None
) -> Operation:
    by_rank = [times[name].microseconds for times, _ in ranks]
    slowest = [max(run) for run in zip(*by_rank, strict=True)]
    median_us = statistics.median(slowest)
    in_a_row = [times[name].in_a_row_microseconds for times, _ in ranks]
    default_device = [times[name].default_device_microseconds for times, _ in ranks]
    call = call_of(name)
    row_bytes = plan.row_bytes(call or "")
    p50_us = [percentile(times, 50) for times in by_rank]
    rows = [counts[call] if call else RowCounts(0, 0) for _, counts in ranks]
    rows_bytes = row_bytes * statistics.fmean(counts.total for counts in rows)
    remote_rows_bytes = row_bytes * statistics.fmean(counts.remote for counts in rows)
    return Operation(
        name=name,
        min_us=min(slowest),
        median_us=median_us,
        max_us=max(slowest),
        p50_us=p50_us,
        p99_us=[percentile(times, 99) for times in by_rank],
        host_us=max(statistics.median(times[name].host_microseconds) for times, _ in ranks),
        host_in_a_row_us=max(map(statistics.median, in_a_row)) if all(in_a_row) else None,
        host_default_device_us=max(map(statistics.median, default_device)) if all(default_device) else None,
        rows_bytes=rows_bytes,
        remote_rows_bytes=remote_rows_bytes,
        most_rows_bytes=row_bytes * max(counts.total for counts in rows),
        gbps=rows_bytes / median_us / 1e3,
        remote_gbps=remote_rows_bytes / median_us / 1e3,
        wire_us=wire_us,
        of_wire=None if wire_us is None else wire_us / median_us,
        fabric_gbps=_fabric_gbps([row_bytes * counts.crossing for counts in rows], p50_us),
    )


def _fabric_gbps(crossing_bytes: list[int], p50_us: list[float]) -> list[float]:
    """Bandwidth between domains of each rank; empty where nothing crosses."""
    if not any(crossing_bytes):
        return []
    return [num_bytes / us / 1e3 for num_bytes, us in zip(crossing_bytes, p50_us, strict=True)]


def percentile(values: list[float], percent: int) -> float:
    """The smallest value that is at least as large as `percent` of all (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def rail_metrics(name: str, gbytes_per_s: Sequence[float], num_ranks_per_domain: int) -> list[dict[str, Any]]:
    """Metrics as `hybrid_ep.cluster.validation` reads them.

    Args:
        name: of the figure; a rail adds ``railN`` to it.
        gbytes_per_s: by rank.
        num_ranks_per_domain: as many rails.
    """
    rails = [min(gbytes_per_s[rail::num_ranks_per_domain]) for rail in range(num_ranks_per_domain)]
    named = {name: min(rails)} | {f"{name} rail{rail}": value for rail, value in enumerate(rails)}
    return [{"name": key, "value": value, "unit": "GB/s"} for key, value in named.items()]
