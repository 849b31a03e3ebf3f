"""Bandwidth as a picture: bars for a comparison, lines over SMs for a sweep."""

from __future__ import annotations

from typing import Any

from matplotlib.ticker import MaxNLocator

from hybrid_ep.bench.results import BenchResult, Outcome
from hybrid_ep.report.charts import PALETTE, Picture, label_bars, new_figure, theme, to_png

__all__ = ["draw"]

_OPERATIONS = ("dispatch", "combine")


def draw(result: BenchResult) -> Picture:
    """Draws one panel for each operation."""
    timed = [outcome for outcome in result.outcomes if outcome.operations]
    sweep = len({outcome.candidate.num_sms for outcome in timed} - {None}) > 1
    workload = result.plan.workload
    size = f"{workload.num_tokens} × {workload.hidden}, top-{workload.num_topk} of {workload.num_experts}"
    title = f"{result.plan.mode} mode, {size}, {workload.dtype}, {result.num_ranks} ranks on {result.device}"
    with theme():
        figure, axes = new_figure(1, 2, size=(10, 4.2), title=title, grid="y" if sweep else "x", sharey=True)
        for place, name in enumerate(_OPERATIONS):
            axis = axes[0, place]
            axis.set_title(name)
            (_lines if sweep else _bars)(axis, timed, place)
        if sweep:
            fastest = max(operation.gbps for outcome in timed for operation in outcome.operations)
            axes[0, 0].set_ylim(0, 1.1 * fastest)
            figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
            axes[0, 0].set_ylabel("GB/s of all received rows")
        png = to_png(figure)
    return Picture("bandwidth", png, "Bandwidth of dispatch and combine for each implementation")


def _bars(axis: Any, timed: list[Outcome], place: int) -> None:
    names = [outcome.candidate.title for outcome in timed][::-1]
    values = [outcome.operations[place].gbps for outcome in timed][::-1]
    colours = [PALETTE[i % len(PALETTE)] for i in range(len(timed))][::-1]
    label_bars(axis, axis.barh(names, values, 0.6, color=colours), [f"{value:.3g}" for value in values])
    axis.margins(x=0.15)
    axis.xaxis.set_major_locator(MaxNLocator(5))
    axis.set_xlabel("GB/s of all received rows")


def _lines(axis: Any, timed: list[Outcome], place: int) -> None:
    names = list(dict.fromkeys(outcome.candidate.implementation for outcome in timed))
    for name, colour in zip(names, PALETTE, strict=False):
        mine = [outcome for outcome in timed if outcome.candidate.implementation == name]
        swept = [(o.candidate.num_sms, o.operations[place].gbps) for o in mine if o.candidate.num_sms is not None]
        if swept:
            axis.plot(*zip(*swept, strict=True), "o-", color=colour, linewidth=2.5, markersize=7, label=name)
        for outcome in (o for o in mine if o.candidate.num_sms is None):
            gbps = outcome.operations[place].gbps
            axis.axhline(gbps, color=colour, linewidth=2, linestyle="--", label=f"{name} (own choice)")
    axis.set_xlabel("SMs")
    axis.set_xticks(sorted({o.candidate.num_sms for o in timed if o.candidate.num_sms is not None}))
