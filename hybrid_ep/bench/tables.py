"""The report as a table: for the terminal and as Markdown, from the same cells."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hybrid_ep.bench.results import BenchReport, Operation, Outcome, settings
from hybrid_ep.bench.subjects import OWN
from hybrid_ep.report.tables import NOTHING, DataTable
from hybrid_ep.report.units import format_bytes, unit_of_microseconds

_TEXT_COLUMNS = ("implementation", "engine", "SMs", "operation")
_NUMBER_COLUMNS = (
    "median",
    "min … max",
    "p50 / p99, slowest rank",
    "host",
    "host, in a row",
    "host, default device",
    "bytes",
    "GB/s",
    "bytes remote",
    "GB/s remote",
    "of the wire",
)
# Columns that a narrow terminal leaves out, in this order.
_SPARE_COLUMNS = (
    "p50 / p99, slowest rank",
    "bytes remote",
    "GB/s remote",
    "host",
    "min … max",
    "bytes",
    "host, default device",
    "host, in a row",
    "engine",
    "GB/s",
)
_ANY_WIDTH = 10_000
_LEGEND = (
    "Times are of the slowest rank in each run. Host: until the call returned to the host, once after a barrier of the "
    "ranks, and of calls in a row; the latter also under torch.set_default_device. Held: that many results of earlier "
    "calls are alive. Until done: by the clock, from the call until the device, idle before, has done it. Bytes: all "
    "rows that a rank receives, its own included, mean over ranks. Remote: only rows of other ranks. GB/s: bytes over "
    "the median. Of the wire: the time of the wire alone for the same rows with as many SMs, over the median."
)


def print_report(console: Console, report: BenchReport) -> None:
    """Prints the table, and what is wrong."""
    left_out: list[str] = []
    table = _table(report, left_out)
    wide = console.options.update(max_width=_ANY_WIDTH)
    for name in _SPARE_COLUMNS:
        if console.measure(table, options=wide).maximum <= console.width:
            break
        left_out.append(name)
        table = _table(report, left_out)
    if table.row_count:
        console.print(table)
        if left_out:
            console.print(f"The terminal is too narrow for: {'; '.join(left_out)}. --out and --json have them.")
    for note in _notes(report):
        console.print(escape(note))
    for problem in _problems(report):
        console.print(f"[bold red]wrong[/]  {escape(problem)}")
    if report.ok:
        console.print("[bold green]every row arrived and came back right[/]")


def _table(report: BenchReport, left_out: Sequence[str]) -> Table:
    names = (*report.varying(), *_TEXT_COLUMNS, *_NUMBER_COLUMNS)
    kept = [i for i, name in enumerate(names) if name not in left_out]
    return DataTable(
        [names[i].replace(", ", ",\n").replace(" remote", "\nremote").replace("of the ", "of the\n") for i in kept],
        [[row[i] for i in kept] for row in _rows(report)],
        num_text_columns=sum(names[i] not in _NUMBER_COLUMNS for i in kept),
        title=report.describe(),
        caption=_LEGEND,
    ).to_rich(no_wrap=True)


def render_markdown(report: BenchReport) -> str:
    """Returns the table as Markdown."""
    text_columns = (*report.varying(), *_TEXT_COLUMNS)
    table = DataTable((*text_columns, *_NUMBER_COLUMNS), _rows(report), num_text_columns=len(text_columns))
    about = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    lines = [report.describe() + ".", "", f"Measured {report.date}; {about}.", ""]
    lines += [*table.to_markdown(), "", _LEGEND]
    for note in _notes(report):
        lines += ["", note]
    if problems := _problems(report):
        lines += ["", "Wrong, and so not timed:", "", *(f"- {problem}" for problem in problems)]
    return "\n".join(lines) + "\n"


def _notes(report: BenchReport) -> list[str]:
    """Returns notes below the table: floors of the timer and of the host, and why the wire was not measured."""
    num_runs = sorted({result.plan.num_runs for result in report.results})
    runs = " or ".join(map(str, num_runs))
    notes = [
        f"Timer floor: {report.timer_floor_us:.2f} µs, one trivial kernel by the same timer; it is in every figure. "
        f"{runs} runs.",
        f"Host floor: {report.host_floor_us:.2f} µs, one trivial call of torch, in a row. Hosts differ in it; compare "
        "times of the host as multiples of it.",
    ]
    obstacles = dict.fromkeys(result.wire_obstacle for result in report.results if result.wire_obstacle)
    return (
        notes
        + _fullest(report)
        + [f"Wire limit not measured: {obstacle}." for obstacle in obstacles]
        + _where_others_are_faster(report)
    )


def _fullest(report: BenchReport) -> list[str]:
    """In mode balance, the load of the most loaded rank."""
    return [
        f"{', '.join((*_labels(report, i), outcome.candidate.title))}: the most loaded rank has "
        f"{outcome.fullest:.2f} × the mean copies."
        for i, result in enumerate(report.results)
        for outcome in result.outcomes
        if outcome.fullest is not None
    ]


def _where_others_are_faster(report: BenchReport) -> list[str]:
    """One line for each operation in which another implementation is faster than this library."""
    lines = []
    for i, result in enumerate(report.results):
        best: dict[str, dict[bool, tuple[float, str]]] = {}
        for outcome in result.outcomes:
            for op in outcome.operations:
                time_and_name = (op.median_us, outcome.candidate.title)
                of_op = best.setdefault(op.name, {})
                is_own = outcome.candidate.implementation == OWN
                of_op[is_own] = min(of_op.get(is_own, time_and_name), time_and_name)
        lines += [
            f"{', '.join((*_labels(report, i), name))}: {other[1]} is faster than {own[1]}, {other[0]:.0f} µs against "
            f"{own[0]:.0f} µs."
            for name, (own, other) in ((n, (b[True], b[False])) for n, b in best.items() if len(b) == 2)
            if other[0] < own[0]
        ]
    return lines


def _problems(report: BenchReport) -> list[str]:
    return [
        f"{', '.join((*_labels(report, i), outcome.candidate.title))}: {problem}"
        for i, result in enumerate(report.results)
        for outcome in result.outcomes
        for problem in outcome.problems
    ]


def _labels(report: BenchReport, result_idx: int) -> list[str]:
    """Returns the settings in which this plan differs from the others."""
    values = settings(report.results[result_idx].plan)
    return [f"skew {values[name]}" if name == "skew" else values[name] for name in report.varying()]


def _rows(report: BenchReport) -> list[list[str]]:
    return [
        [*_labels(report, i), *_cells(outcome, operation)]
        for i, result in enumerate(report.results)
        for outcome in (*result.outcomes, *result.wire)
        for operation in outcome.operations
    ]


def _cells(outcome: Outcome, op: Operation) -> list[str]:
    slowest = op.p50_us.index(max(op.p50_us))
    factor, unit = unit_of_microseconds(op.median_us)
    digits = 0 if op.median_us >= 100 * factor else 2
    times = (op.median_us, op.min_us, op.max_us, op.p50_us[slowest], op.p99_us[slowest], op.host_us)
    median, least, most, p50, p99, host = (f"{us / factor:.{digits}f}" for us in times)
    moves = op.rows_bytes > 0
    return [
        outcome.candidate.implementation,
        outcome.engine,
        NOTHING if outcome.candidate.num_sms is None else str(outcome.candidate.num_sms),
        op.name,
        f"{median} {unit}",
        f"{least} … {most}",
        f"{p50} / {p99}",
        host,
        *(
            NOTHING if us is None else f"{us / factor:.{digits}f}"
            for us in (op.host_in_a_row_us, op.host_default_device_us)
        ),
        format_bytes(op.rows_bytes) if moves else NOTHING,
        f"{op.gbps:.3g}" if moves else NOTHING,
        format_bytes(op.remote_rows_bytes) if moves else NOTHING,
        f"{op.remote_gbps:.3g}" if moves else NOTHING,
        NOTHING if op.of_wire is None else f"{op.of_wire:.0%}",
    ]
