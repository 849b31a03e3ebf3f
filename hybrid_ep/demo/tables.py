"""The result in the terminal: tables of 80 columns and a verdict that need no prior knowledge."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hybrid_ep.demo.lose_rank import LossResult
from hybrid_ep.demo.results import DemoResult, PathResult
from hybrid_ep.demo.skew import ALLOWED_RMS
from hybrid_ep.demo.verify import FP8_ALLOWED_RMS
from hybrid_ep.report.units import format_bytes, format_ratio

__all__ = ["describe_cluster", "describe_loss", "print_result"]


def print_result(console: Console, result: DemoResult) -> None:
    """Prints tables and verdict."""
    console.print(
        Group(
            Text(describe_cluster(result), style="dim"),
            Text(),
            _checks(result),
            Text(),
            _wire(result),
            Text(),
            _times(result),
            Text(),
            _load_and_training(result),
            Text(),
            *((_skew(result), Text()) if result.skew else ()),
            _verdict(result),
        )
    )


def describe_cluster(result: DemoResult) -> str:
    """One line: what ran on what."""
    asked = result.settings
    domains = "1 domain" if asked.num_domains == 1 else f"{asked.num_domains} domains"
    return (
        f"{asked.num_ranks} ranks in {domains}, {asked.num_tokens} tokens per rank, hidden {asked.hidden}, "
        f"top-{asked.num_topk} of {asked.num_experts} experts, engine {result.engine} on CPU"
    )


def _skew(result: DemoResult) -> Table:
    table = _table(
        "How does balance help?  copies that ranks compute under a skewed router, all ranks in one domain",
        "fullest: copies of the most loaded rank over the mean · experts: CPU time of the slowest rank · rms: error of "
        f"the whole output against float64 (allowed: {ALLOWED_RMS:.1%})",
    )
    table.add_column("balance", overflow="fold")
    for name in ("most copies", "fewest", "fullest", "experts", "rms"):
        table.add_column(name, justify="right", overflow="fold")
    for item in result.skew:
        counts = [str(max(item.copies)), str(min(item.copies))]
        table.add_row(
            item.policy, *counts, f"{item.fullest:.2f}×", f"{item.milliseconds:.1f} ms", f"{item.rms_error:.2%}"
        )
    return table


def _table(title: str, caption: str) -> Table:
    """A table that fits into 80 columns. In fewer, cells take more lines, and lose nothing."""
    return Table(
        title=title, caption=caption, title_justify="left", caption_justify="left", box=SIMPLE_HEAD, pad_edge=False
    )


def _checks(result: DemoResult) -> Table:
    table = _table(
        "Are the results right?  output of every rank against a dense float64 reference",
        "max error: largest difference of a value · of allowed: largest difference as a share of its bound, which "
        f"follows from rounding to bf16 · rms: error of the whole output (allowed for fp8: {FP8_ALLOWED_RMS:.1%})",
    )
    for name in ("calls", "tokens", "routing"):
        table.add_column(name, overflow="fold")
    for name in ("max error", "of allowed", "rms"):
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("", justify="right", no_wrap=True, min_width=len("wrong"))
    for row in result.paths:
        error = (f"{row.max_error:.2g}", f"{row.worst_of_allowed:.0%}", f"{row.rms_error:.2%}")
        table.add_row(row.path.title, row.path.dtype, row.routing, *error, _mark(row))
    return table


def _mark(row: PathResult) -> Text:
    return Text("wrong", style="bold red") if row.problems else Text("ok", style="bold green")


def _wire(result: DemoResult) -> Table:
    table = _table(
        "How many bytes are sent?  all ranks together",
        "hybrid_ep: counted as sent, with metadata · the others: computed, rows only · all-to-all: a copy of a token "
        "for each of its experts · all-gather: every token once to each domain, then to every rank",
    )
    for name in ("", "domains"):
        table.add_column(name, overflow="fold")
    for name in ("hybrid_ep", "all-to-\nall", "all-\ngather", "vs all-\nto-all", "vs all-\ngather"):
        table.add_column(name, justify="right", overflow="fold")
    hops = {"between_domains": "between", "within_domain": "within"}
    if result.settings.num_domains == 1:
        del hops["between_domains"]
    for routing in dict.fromkeys(item.routing for item in result.wire):
        table.add_row(Text(routing, style="bold"))
        for item in (item for item in result.wire if item.routing == routing):
            for place, (hop, name) in enumerate(hops.items()):
                ours, plain, gather = (getattr(way, hop) for way in (item.measured, item.all_to_all, item.all_gather))
                shown = (format_bytes(ours), format_bytes(plain), format_bytes(gather))
                ratios = (format_ratio(ours, plain), format_ratio(ours, gather))
                table.add_row("" if place else item.step, name, *shown, *ratios)
        table.add_section()
    return table


def _times(result: DemoResult) -> Table:
    table = _table(
        f"How long does it take?  median of {result.settings.num_ranks} processes that share this machine's cores",
        "skewed routing · experts compute in float64 · these times say nothing about a GPU",
    )
    for name in ("calls", "tokens"):
        table.add_column(name, overflow="fold")
    phases = ("dispatch", "experts", "combine")
    for name in phases:
        table.add_column(name, justify="right", overflow="fold")
    for row in (row for row in result.paths if row.routing == "skewed"):
        times = (f"{row.milliseconds[phase]:.0f} ms" for phase in phases)
        table.add_row(row.path.title, row.path.dtype, *times)
    return table


def _load_and_training(result: DemoResult) -> RenderableType:
    lines = []
    for routing, tokens in result.load.items():
        mean = sum(tokens) / len(tokens)
        lines.append(
            f"load      {routing} routing: the busiest expert has {max(tokens)} tokens, "
            f"{max(tokens) / mean:.1f} × the mean"
        )
    first, last = result.losses[0], result.losses[-1]
    lines.append(f"training  a small MoE layer: loss {first:.3g} → {last:.3g} in {len(result.losses)} steps")
    if result.loss is not None:
        lines.append("lost rank " + describe_loss(result.loss))
    return Text("\n".join(lines))


def describe_loss(loss: LossResult) -> str:
    """One sentence on the job that lost a rank."""
    return (
        f"rank {loss.victim} was killed: the others raised within {loss.raised_s:.1f} s and went on "
        f"{loss.recovered_s:.1f} s later with {loss.num_ranks} ranks, {loss.num_loaded} experts loaded again; "
        f"rms {loss.rms_after:.2%}"
    )


def _verdict(result: DemoResult) -> RenderableType:
    if not result.ok:
        return Group(*(Text.from_markup(f"[bold red]failed[/]  {escape(problem)}") for problem in result.problems))
    worst = ", ".join(f"{dtype} {result.largest_error(dtype).max_error:.2g}" for dtype in ("bf16", "fp8"))
    return Text.from_markup(
        f"[bold green]all checks passed[/]  max error against float64: {worst}  ·  {result.seconds:.0f} s"
    )
