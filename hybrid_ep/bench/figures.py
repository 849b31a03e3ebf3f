"""The report as a picture: lines over tokens or over SMs for a sweep, bars for a comparison.

Low latency is drawn as time, everything else as bandwidth. Whatever else differs between the plans (dtype, routing)
makes lines of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from matplotlib.ticker import MaxNLocator, ScalarFormatter

from hybrid_ep.bench.plan import CALLS
from hybrid_ep.bench.results import WIRE, BenchReport, BenchResult, Operation, Outcome, settings, varying
from hybrid_ep.report.charts import GREY, PALETTE, Picture, label_bars, new_figure, theme, to_png

__all__ = ["draw"]

_FORMS = ("", ": graph", ": send", ": receive")
_STYLES = ("-", "--", ":", "-.")
_Point = tuple[float, float]


def draw(report: BenchReport, results: list[BenchResult] | None = None) -> Picture:
    """Draws one panel for dispatch and one for combine.

    Args:
        report: what was measured.
        results: the plans to draw; None = all of the report. At least one with a timed candidate.
    """
    results = report.results if results is None else results
    timed = [(result, outcome) for result in results for outcome in _shown(result) if outcome.operations]
    low_latency = results[0].plan.mode == "low-latency"
    over_tokens = "tokens" in varying(results)
    num_sms = {outcome.candidate.num_sms for _, outcome in timed if outcome.candidate.implementation != WIRE}
    over_sms = not over_tokens and len(num_sms - {None}) > 1
    value, unit = (_latency, "µs, median") if low_latency else (_bandwidth, "GB/s of all received rows")
    # Lines need more room than bars: up to eight of them have a legend below.
    size = (12, 6.4) if over_tokens else (10, 4.8)
    is_sweep = over_tokens or over_sms
    with theme():
        figure, axes = new_figure(
            1, 2, size=size, title=_title(report, results), grid="y" if is_sweep else "x", sharey=is_sweep
        )
        for axis, call in zip(axes[0], CALLS, strict=True):
            axis.set_title(call)
            if is_sweep:
                forms = _FORMS if low_latency else ("",)
                _draw_lines(axis, _lines(results, timed, call, forms, value, over_tokens))
                _set_scale(axis, "tokens of each rank" if over_tokens else "SMs", logarithmic=over_tokens)
            else:
                _draw_bars(axis, [(_title_of(results, *one), value(_operation(one[1], call))) for one in timed], unit)
        if is_sweep:
            axes[0, 0].set_ylim(bottom=0)
            axes[0, 0].set_ylabel(unit)
            figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
        png = to_png(figure)
    name = "latency" if low_latency else "bandwidth"
    return Picture(name, png, f"{name.capitalize()} of dispatch and combine for each implementation")


def _shown(result: BenchResult) -> list[Outcome]:
    return [*result.outcomes, *result.wire]


def _title(report: BenchReport, results: list[BenchResult]) -> str:
    """What the drawn plans have in common."""
    apart = varying(results)
    values = settings(results[0].plan)
    words = [f"{report.num_ranks} ranks on {report.device}", f"{values['mode']} mode"]
    words += [values[name] for name in ("dtype", "routing") if name not in apart]
    if "tokens" not in apart:
        words.append(f"{values['tokens']} tokens")
    return ", ".join([*words, f"hidden {values['hidden']}, top-{values['topk']} of {values['experts']}"])


def _labels(results: list[BenchResult], result: BenchResult) -> list[str]:
    """What tells this plan from the others, tokens apart."""
    return [value for name, value in settings(result.plan).items() if name in varying(results) and name != "tokens"]


def _title_of(results: list[BenchResult], result: BenchResult, outcome: Outcome) -> str:
    return ", ".join([outcome.candidate.title, *_labels(results, result)])


def _operation(outcome: Outcome, name: str) -> Operation:
    return next(operation for operation in outcome.operations if operation.name == name)


def _bandwidth(operation: Operation) -> float:
    return operation.gbps


def _latency(operation: Operation) -> float:
    return operation.median_us


def _lines(
    results: list[BenchResult],
    timed: list[tuple[BenchResult, Outcome]],
    call: str,
    forms: tuple[str, ...],
    value: Callable[[Operation], float],
    over_tokens: bool,
) -> dict[tuple[str, str, str], list[_Point]]:
    """(implementation, what tells its plans apart, form) → points."""
    lines: dict[tuple[str, str, str], list[_Point]] = {}
    for result, outcome in timed:
        who = outcome.candidate
        for operation in outcome.operations:
            if operation.name not in [call + form for form in forms]:
                continue
            name = who.title if over_tokens else who.implementation
            x = result.plan.workload.num_tokens if over_tokens else who.num_sms
            if x is not None:
                key = (name, ", ".join(_labels(results, result)), operation.name.removeprefix(call).removeprefix(": "))
                lines.setdefault(key, []).append((x, value(operation)))
    return lines


def _draw_lines(axis: Any, lines: dict[tuple[str, str, str], list[_Point]]) -> None:
    """Colour: who and which form; the wire is grey. Line style: the plan."""
    colours = dict.fromkeys((name, form) for name, _, form in lines if not name.startswith(WIRE))
    colour_of = {key: PALETTE[i % len(PALETTE)] for i, key in enumerate(colours)}
    plans = list(dict.fromkeys(plan for _, plan, _ in lines))
    for (name, plan, form), points in lines.items():
        axis.plot(
            *zip(*sorted(points), strict=True),
            marker="o",
            linestyle=_STYLES[plans.index(plan) % len(_STYLES)],
            color=colour_of.get((name, form), GREY),
            linewidth=2.2,
            markersize=6,
            label=", ".join(filter(None, (name, plan, form))),
        )


def _draw_bars(axis: Any, bars: list[tuple[str, float]], unit: str) -> None:
    names, values = zip(*bars[::-1], strict=True)
    colours = [GREY if name.startswith(WIRE) else PALETTE[i % len(PALETTE)] for i, name in enumerate(names[::-1])]
    label_bars(axis, axis.barh(names, values, 0.6, color=colours[::-1]), [f"{value:.3g}" for value in values])
    axis.margins(x=0.15)
    axis.xaxis.set_major_locator(MaxNLocator(5))
    axis.set_xlabel(unit)


def _set_scale(axis: Any, label: str, *, logarithmic: bool) -> None:
    """Ticks where points are."""
    axis.set_xlabel(label)
    if logarithmic:
        axis.set_xscale("log", base=2)
    axis.set_xticks(sorted({float(x) for line in axis.get_lines() for x in line.get_xdata()}))
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.minorticks_off()
