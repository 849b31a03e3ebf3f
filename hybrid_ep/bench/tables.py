"""The result as a table: for the terminal and as Markdown, from the same cells."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hybrid_ep.bench.results import BenchResult
from hybrid_ep.report.units import format_bytes, unit_of_microseconds

__all__ = ["print_result", "render_markdown"]

_TEXT_COLUMNS = ("implementation", "engine", "SMs", "operation")
_NUMBER_COLUMNS = (
    "median",
    "min … max",
    "p50 / p99, slowest rank",
    "host",
    "bytes",
    "GB/s",
    "bytes remote",
    "GB/s remote",
)
_LEGEND = (
    "Times are of the slowest rank in each run; host: until the call returned to the host. bytes: all rows that a rank "
    "receives, its own included, mean over ranks; remote: only those from other ranks. GB/s: bytes over the median."
)


def print_result(console: Console, result: BenchResult) -> None:
    """Prints the table, and what is wrong."""
    table = Table(
        title=escape(result.describe()),
        caption=_LEGEND,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for name in _TEXT_COLUMNS:
        table.add_column(name)
    for name in _NUMBER_COLUMNS:
        table.add_column(name.replace(", ", ",\n").replace(" remote", "\nremote"), justify="right", no_wrap=True)
    for row in _rows(result):
        table.add_row(*map(escape, row))
    if table.row_count:
        console.print(table)
    for outcome in result.outcomes:
        for problem in outcome.problems:
            console.print(f"[bold red]wrong[/]  {escape(outcome.candidate.title)}: {escape(problem)}")
    if result.ok:
        console.print("[bold green]every row arrived and came back right[/]")


def render_markdown(result: BenchResult) -> str:
    """The same table as Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    columns = (*_TEXT_COLUMNS, *_NUMBER_COLUMNS)
    rules = ["---"] * len(_TEXT_COLUMNS) + ["---:"] * len(_NUMBER_COLUMNS)
    lines = [result.describe() + f". {result.plan.num_runs} runs, {versions}.", ""]
    lines += [f"| {' | '.join(cells)} |" for cells in (columns, rules, *_rows(result))]
    problems = [f"- {o.candidate.title}: {problem}" for o in result.outcomes for problem in o.problems]
    return (
        "\n".join([*lines, "", _LEGEND, *(["", "Wrong, and so not timed:", "", *problems] if problems else [])]) + "\n"
    )


def _rows(result: BenchResult) -> list[list[str]]:
    rows = []
    for outcome in result.outcomes:
        num_sms = "–" if outcome.candidate.num_sms is None else str(outcome.candidate.num_sms)
        for op in outcome.operations:
            slowest = op.p50_us.index(max(op.p50_us))
            factor, unit = unit_of_microseconds(op.median_us)
            median, least, most, p50, p99, host = (
                f"{us / factor:.{0 if op.median_us >= 100 * factor else 2}f}"
                for us in (op.median_us, op.min_us, op.max_us, op.p50_us[slowest], op.p99_us[slowest], op.host_us)
            )
            rows.append(
                [
                    outcome.candidate.implementation,
                    outcome.engine,
                    num_sms,
                    op.name,
                    f"{median} {unit}",
                    f"{least} … {most}",
                    f"{p50} / {p99}",
                    f"{host}",
                    format_bytes(op.rows_bytes),
                    f"{op.gbps:.3g}",
                    format_bytes(op.remote_rows_bytes),
                    f"{op.remote_gbps:.3g}",
                ]
            )
    return rows
