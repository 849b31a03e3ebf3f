"""The picture of the model: time of dispatch and combine over the number of domains, and what each hop would need."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

from hybrid_ep.cluster.model.limits import SweepPoint
from hybrid_ep.cluster.model.predict import Prediction
from hybrid_ep.cluster.model.report import ModelReport
from hybrid_ep.report.charts import GREY, INK, PALETTE, new_figure, theme, to_png, to_svg

__all__ = ["draw"]

_SHOWN = ("NVLink out", "network out", "SMs", "messages", "credits", "local memory")
_COLOURS = dict(zip(_SHOWN, PALETTE, strict=True))
_COLOURS["cast"] = _COLOURS["SMs"]  # no call has both


def draw(report: ModelReport, form: str) -> bytes:
    """Draws a panel for each call.

    Args:
        report: with a sweep.
        form: ``svg`` or ``png``.
    """
    with theme():
        figure = _figure(report)
        return to_svg(figure) if form == "svg" else to_png(figure)


def _figure(report: ModelReport) -> Figure:
    question = report.question
    title = f"{question.mode}: {question.num_ranks_per_domain} ranks a domain, {question.machine.nic_gbits:g} Gbit/s"
    figure, axes = new_figure(1, 2, size=(11, 5), title=title, sharey=True)
    for axis, call in zip(axes[0], ("dispatch", "combine"), strict=True):
        axis.set_title(call)
        _draw_call(axis, report.sweep, call)
        if any(point.num_domains == question.num_domains for point in report.sweep):
            axis.axvline(question.num_domains, color=GREY, linewidth=1.5, linestyle="--", zorder=0)
    axes[0, 0].set_ylabel("ms")
    lines = {line.get_label(): line for axis in axes[0] for line in axis.get_lines() if line.get_label()[0] != "_"}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=4)
    return figure


def _draw_call(axis: Any, sweep: list[SweepPoint], call: str) -> None:
    numbers = [point.num_domains for point in sweep]
    calls: list[Prediction] = [getattr(point, call) for point in sweep]
    axis.plot(numbers, [one.total_us / 1e3 for one in calls], color=INK, marker="o", linewidth=2.5, label="whole call")
    fixed = [sum(one.fixed.values()) / 1e3 for one in calls]
    axis.plot(numbers, fixed, color=GREY, linewidth=2, label="fixed time")
    for name, colour in _COLOURS.items():
        points = [(n, one.rows[name] / 1e3) for n, one in zip(numbers, calls, strict=True) if name in one.rows]
        if points:
            axis.plot(*zip(*points, strict=True), color=colour, linewidth=2, label=name)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(numbers))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.set_xlabel("domains")
    axis.set_ylim(bottom=0)
