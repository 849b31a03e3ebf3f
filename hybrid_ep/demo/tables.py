"""The result in the terminal: tables of 80 columns and a verdict that need no prior knowledge."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.text import Text

from hybrid_ep.demo.lose_rank import LossResult
from hybrid_ep.demo.results import DemoResult
from hybrid_ep.demo.skew import ALLOWED_RMS
from hybrid_ep.demo.verify import FP8_ALLOWED_RMS
from hybrid_ep.report.tables import Cell, DataTable
from hybrid_ep.report.units import format_bytes, format_ratio


def print_result(console: Console, result: DemoResult) -> None:
    """Prints tables and verdict."""
    parts: list[RenderableType] = [Text(describe_cluster(result), style="dim")]
    parts += [table.to_rich() for table in (checks_table(result), wire_table(result), _times(result))]
    parts += [_load_and_training(result), *([_skew(result).to_rich()] if result.skew else ()), _verdict(result)]
    console.print(Group(*(each for part in parts for each in (part, Text()))))


def describe_cluster(result: DemoResult) -> str:
    """One line: what ran on what."""
    asked = result.settings
    domains = "1 domain" if asked.num_domains == 1 else f"{asked.num_domains} domains"
    return (
        f"{asked.num_ranks} ranks in {domains}, {asked.num_tokens} tokens per rank, hidden {asked.hidden}, "
        f"top-{asked.num_topk} of {asked.num_experts} experts, engine {result.engine} on CPU"
    )


def _skew(result: DemoResult) -> DataTable:
    rows = []
    for item in result.skew:
        figures = [f"{item.fullest:.2f}×", f"{item.milliseconds:.1f} ms", f"{item.rms_error:.2%}"]
        rows.append([item.policy, str(max(item.copies)), str(min(item.copies)), *figures])
    return DataTable(
        ["balance", "most copies", "fewest", "fullest", "experts", "rms"],
        rows,
        title="How does balance help?  copies that ranks compute under a skewed router, all ranks in one domain",
        caption="fullest: copies of the most loaded rank over the mean · experts: CPU time of the slowest rank · rms: "
        f"error of the whole output against float64 (allowed: {ALLOWED_RMS:.1%})",
    )


def checks_table(result: DemoResult) -> DataTable:
    """Every path with its errors."""
    rows: list[list[str | Cell]] = [
        [
            *(row.path.title, row.path.dtype, row.routing, f"{row.max_error:.2g}", f"{row.worst_of_allowed:.0%}"),
            *(f"{row.rms_error:.2%}", Cell("wrong", False) if row.problems else Cell("ok", True)),
        ]
        for row in result.paths
    ]
    return DataTable(
        ["calls", "tokens", "routing", "max error", "of allowed", "rms", ""],
        rows,
        num_text_columns=3,
        title="Are the results right?  output of every rank against a dense float64 reference",
        caption="max error: largest difference of a value · of allowed: largest difference as a share of its bound, "
        "which follows from rounding to bf16 · rms: error of the whole output "
        f"(allowed for fp8: {FP8_ALLOWED_RMS:.1%})",
    )


def wire_table(result: DemoResult) -> DataTable:
    """Bytes of every step between and within domains, beside those of two other ways."""
    rows = []
    for item in result.wire:
        for hop, name in (("between_domains", "between"), ("within_domain", "within")):
            if hop == "within_domain" or result.settings.num_domains > 1:
                ours, plain, gather = (getattr(way, hop) for way in (item.measured, item.all_to_all, item.all_gather))
                shown = [format_bytes(ours), format_bytes(plain), format_bytes(gather)]
                ratios = [format_ratio(ours, plain), format_ratio(ours, gather)]
                rows.append([item.routing, item.step, name, *shown, *ratios])
    return DataTable(
        ["routing", "step", "domains", "hybrid_ep", "all-to-all", "all-gather", "vs all-to-all", "vs all-gather"],
        rows,
        num_text_columns=3,
        title="How many bytes are sent?  all ranks together",
        caption="hybrid_ep: counted as sent, with metadata · the others: computed, rows only · all-to-all: a copy of a "
        "token for each of its experts · all-gather: every token once to each domain, then to every rank",
    )


def _times(result: DemoResult) -> DataTable:
    phases = ("dispatch", "experts", "combine")
    return DataTable(
        ["calls", "tokens", *phases],
        [
            [row.path.title, row.path.dtype, *(f"{row.milliseconds[phase]:.0f} ms" for phase in phases)]
            for row in result.paths
            if row.routing == "skewed"
        ],
        num_text_columns=2,
        title=f"How long does it take?  median of {result.settings.num_ranks} processes on this machine's cores",
        caption="skewed routing · experts compute in float64 · these times say nothing about a GPU",
    )


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
