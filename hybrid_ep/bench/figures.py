"""The report as a picture: lines over tokens or over SMs for a sweep, bars for a comparison.

Low latency is drawn as time, everything else as bandwidth. Plans that differ in anything else (dtype, routing) are
separate lines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from matplotlib.ticker import MaxNLocator, ScalarFormatter

from hybrid_ep.bench.plan import BALANCE, CALLS
from hybrid_ep.bench.results import WIRE, BenchReport, BenchResult, Operation, Outcome, settings, varying
from hybrid_ep.report.charts import GREY, PALETTE, Picture, label_bars, new_figure, theme, to_png
from hybrid_ep.workload import SKEWS_PER_EXPONENT

_FORMS = ("", ": graph", ": graph of 20", ": send", ": receive")
_STYLES = ("-", "--", ":", "-.")
_Point = tuple[float, float]


class _Line(NamedTuple):
    """Attributes:
    name: of the implementation.
    plan: what distinguishes its plan from the others.
    form: of the call; empty for the call itself.
    """

    name: str
    plan: str
    form: str


def draw(report: BenchReport) -> Picture:
    """Draws one panel for dispatch and one for combine; at least one candidate must have been timed.

    Of plans that differ in tokens all are drawn; otherwise only those that sweep SMs, if any does.
    """
    results = report.results
    if results[0].plan.mode == BALANCE:
        return _draw_balance(report)
    over_tokens = "tokens" in report.varying()
    sweeps = [] if over_tokens else [result for result in results if _sweeps_sms(result)]
    results = sweeps or results
    timed = [(result, outcome) for result in results for outcome in _shown(result) if outcome.operations]
    low_latency = results[0].plan.mode == "low-latency"
    value, unit = (_latency, "µs, median") if low_latency else (_bandwidth, "GB/s of all received rows")
    is_sweep = over_tokens or bool(sweeps)
    with theme():
        figure, axes = new_figure(
            1, 2, size=(12, 5.6), title=_title(report, results), grid="y" if is_sweep else "x", sharey=is_sweep
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
            highest = max(float(y) for axis in axes[0] for line in axis.get_lines() for y in line.get_ydata())
            axes[0, 0].set_ylim(0, 1.08 * highest)
            axes[0, 0].set_ylabel(unit)
            figure.legend(
                *axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, handlelength=3.5
            )
        png = to_png(figure)
    name = "latency" if low_latency else "bandwidth"
    return Picture(name, png, f"{name.capitalize()} of dispatch and combine for each implementation")


def _draw_balance(report: BenchReport) -> Picture:
    """Over the skew of the router, or its routing: the time of the layer, and how full the most loaded rank is."""
    panels: tuple[tuple[str, Callable[[Outcome], float]], ...] = (
        ("time of the layer, ms", lambda outcome: _operation(outcome, "layer").median_us / 1e3),
        ("copies of the most loaded rank over the mean", lambda outcome: outcome.fullest or 0.0),
    )
    with theme():
        figure, axes = new_figure(1, 2, size=(12, 5.6), title=_title(report, report.results), grid="y")
        for axis, (title, value) in zip(axes[0], panels, strict=True):
            axis.set_title(title)
            lines: dict[str, list[tuple[float | str, float]]] = {}
            skews = all(result.plan.workload.routing == "skewed" for result in report.results)
            for result in sorted(report.results, key=lambda result: result.plan.workload.exponent):
                workload = result.plan.workload
                x = workload.exponent * SKEWS_PER_EXPONENT if skews else workload.routing
                for outcome in result.outcomes:
                    if outcome.operations:
                        lines.setdefault(outcome.candidate.title, []).append((x, value(outcome)))
            for i, (name, points) in enumerate(lines.items()):
                axis.plot(*zip(*points, strict=True), marker="o", color=PALETTE[i], linewidth=2, label=name)
            axis.set_ylim(bottom=0)
            if skews:
                _set_scale(axis, "skew of the router", logarithmic=False)
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, handlelength=3.5)
        png = to_png(figure)
    return Picture("balance", png, "Time of a layer and its most loaded rank over the skew of the router")


def _shown(result: BenchResult) -> list[Outcome]:
    return [*result.outcomes, *result.wire]


def _sweeps_sms(result: BenchResult) -> bool:
    return len({outcome.candidate.num_sms for outcome in result.outcomes} - {None}) > 1


def _title(report: BenchReport, results: list[BenchResult]) -> str:
    """Returns the settings that the drawn plans have in common."""
    apart = varying(results)
    values = settings(results[0].plan)
    words = [values[name] for name in ("mode", "dtype", "routing") if name not in apart]
    tokens = "" if "tokens" in apart else f"{values['tokens']} tokens, "
    size = f"{tokens}hidden {values['hidden']}, top-{values['topk']} of {values['experts']}"
    return f"{report.num_ranks} × {report.device}: {', '.join([*words, size])}"


def _labels(results: list[BenchResult], result: BenchResult) -> list[str]:
    """Returns the settings in which this plan differs from the others, except tokens."""
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
) -> dict[_Line, list[_Point]]:
    """The points of each line. Over SMs, who chose for itself is drawn level, from the first number to the last."""
    sweep = [outcome.candidate.num_sms for _, outcome in timed if outcome.candidate.num_sms is not None]
    lines: dict[_Line, list[_Point]] = {}
    for result, outcome in timed:
        who = outcome.candidate
        plan = ", ".join(_labels(results, result))
        for form in forms:
            operation = next((one for one in outcome.operations if one.name == call + form), None)
            if operation is None:
                continue
            if over_tokens:
                name, places = who.title, [result.plan.workload.num_tokens]
            elif who.num_sms is None:
                name, places = f"{who.implementation} (own choice)", [min(sweep), max(sweep)]
            else:
                name, places = who.implementation, [who.num_sms]
            line = _Line(name, plan, form.removeprefix(": "))
            lines.setdefault(line, []).extend((x, value(operation)) for x in places)
    return lines


def _draw_lines(axis: Any, lines: dict[_Line, list[_Point]]) -> None:
    """Line style: the plan. Colour: who, and which form, or where there is one form which plan; the wire is grey."""
    plans = list(dict.fromkeys(line.plan for line in lines))
    by_form = len({line.form for line in lines}) > 1
    kinds = {line: (line.name, line.form if by_form else line.plan) for line in lines if not line.name.startswith(WIRE)}
    colours = {kind: PALETTE[i % len(PALETTE)] for i, kind in enumerate(dict.fromkeys(kinds.values()))}
    for line, points in lines.items():
        axis.plot(
            *zip(*sorted(points), strict=True),
            marker="o",
            linestyle=_STYLES[plans.index(line.plan) % len(_STYLES)],
            color=colours[kinds[line]] if line in kinds else GREY,
            linewidth=2,
            markersize=5,
            label=", ".join(filter(None, line)),
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
