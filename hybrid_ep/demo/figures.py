"""The four pictures of the demo, each drawn from a `DemoResult` alone."""

from __future__ import annotations

from typing import Any

from matplotlib.ticker import FuncFormatter, MaxNLocator

from hybrid_ep.demo.results import DemoResult, WireResult
from hybrid_ep.report.charts import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    SKY,
    VERMILION,
    Picture,
    label_bars,
    new_figure,
    theme,
    to_png,
)
from hybrid_ep.report.units import unit_of_bytes

_PHASE_COLOURS = {"dispatch": BLUE, "experts": GREY, "combine": ORANGE}
_WAYS = {
    "all_gather": ("all-gather", GREY),
    "all_to_all": ("all-to-all of top-k copies", SKY),
    "measured": ("hybrid_ep", BLUE),
}
_MOST_RANK_LABELS = 12


def draw_all(result: DemoResult) -> dict[str, Picture]:
    """Draws every picture; name → picture."""
    with theme():
        pictures = [_wire(result), _load(result), _time(result), _loss(result)]
        if result.skew:
            pictures.append(_skew(result))
    return {picture.name: picture for picture in pictures}


def _wire(result: DemoResult) -> Picture:
    steps = [item for item in result.wire if item.routing == "skewed"]
    hops = [("between_domains", "between domains (network)"), ("within_domain", "within domains (NVLink)")]
    if result.settings.num_domains == 1:
        hops = hops[1:]
    figure, axes = new_figure(
        1, len(hops), size=(10, 4.6), title="Bytes on the wire, skewed routing, all ranks together", grid="y"
    )
    for axis, (hop, name) in zip(axes[0], hops, strict=True):
        _wire_panel(axis, steps, hop)
        axis.set_title(name)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return Picture("wire", to_png(figure), "Bytes sent per hop by hybrid_ep, a plain all-to-all and an all-gather")


def _wire_panel(axis: Any, steps: list[WireResult], hop: str) -> None:
    width = 0.3
    most = max(getattr(getattr(item, way), hop) for item in steps for way in _WAYS)
    factor, unit = unit_of_bytes(most)
    for place, (way, (label, colour)) in enumerate(_WAYS.items()):
        sent = [getattr(getattr(item, way), hop) for item in steps]
        at = [x + (place - 1) * width for x in range(len(steps))]
        bars = axis.bar(at, sent, width * 0.92, label=label, color=colour)
        label_bars(axis, bars, [f"{value / factor:#.3g}" for value in sent])
    axis.set_xticks(range(len(steps)), [item.step for item in steps])
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / factor:g}"))
    axis.set_ylabel(unit)
    axis.yaxis.set_major_locator(MaxNLocator(5))
    axis.margins(y=0.12)


def _load(result: DemoResult) -> Picture:
    figure, axes = new_figure(2, 1, size=(10, 5.6), title="Tokens of each expert", sharex=True, sharey=True)
    num_local = result.settings.num_local_experts
    for axis, (routing, tokens) in zip(axes[:, 0], result.load.items(), strict=True):
        mean = sum(tokens) / len(tokens)
        colours = [BLUE if expert // num_local % 2 == 0 else SKY for expert in range(len(tokens))]
        axis.bar(range(len(tokens)), tokens, 0.82, color=colours)
        axis.axhline(mean, color=VERMILION, linewidth=1.5, linestyle="--")
        axis.set_title(f"{routing} routing: the busiest expert has {max(tokens) / mean:.1f} × the mean")
        axis.set_ylabel("tokens")
        axis.text(1.005, mean, f"mean\n{mean:.0f}", transform=axis.get_yaxis_transform(), va="center", color=VERMILION)
    every = -(-result.settings.num_ranks // _MOST_RANK_LABELS)
    ranks = range(0, result.settings.num_ranks, every)
    names = [f"rank {r}\n{_span(r * num_local, (r + 1) * num_local - 1)}" for r in ranks]
    axes[-1, 0].set_xticks([(rank + 0.5) * num_local - 0.5 for rank in ranks], names)
    axes[-1, 0].set_xlabel("experts by the rank that owns them")
    axes[-1, 0].set_xlim(-0.6, result.settings.num_experts - 0.4)
    return Picture("load", to_png(figure), "Tokens of each expert under skewed and uniform routing")


def _span(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first}–{last}"


def _time(result: DemoResult) -> Picture:
    paths = [item for item in result.paths if item.routing == "skewed"][::-1]
    figure, axes = new_figure(1, 1, size=(10, 4.8), title="Where the time goes, skewed routing", grid="x")
    axis = axes[0, 0]
    names = [f"{item.path.title}\n{item.path.dtype} tokens" for item in paths]
    left = [0.0] * len(paths)
    for phase, colour in _PHASE_COLOURS.items():
        spent = [item.milliseconds[phase] for item in paths]
        bars = axis.barh(names, spent, 0.62, left=left, label=phase, color=colour)
        widest = max(sum(item.milliseconds.values()) for item in paths)
        shown = [f"{value:.0f}" if value > 0.035 * widest else "" for value in spent]
        axis.bar_label(bars, labels=shown, label_type="center", fontsize=10, color="white" if colour == BLUE else INK)
        left = [a + b for a, b in zip(left, spent, strict=True)]
    axis.set_xlabel(f"ms, median over {result.settings.num_ranks} processes that share this machine's CPU cores")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return Picture("time", to_png(figure), "Milliseconds of dispatch, experts and combine on each path")


def _loss(result: DemoResult) -> Picture:
    figure, axes = new_figure(1, 1, size=(10, 4), title="A small MoE layer learns through dispatch and combine")
    axis = axes[0, 0]
    steps = range(1, len(result.losses) + 1)
    axis.plot(steps, result.losses, color=GREEN, linewidth=2.5)
    axis.axhline(1, color=GREY, linewidth=1.5, linestyle="--")
    axis.text(len(result.losses), 1, "answering 0 ", ha="right", va="bottom", color=INK, fontsize=11)
    for step, loss, side in ((1, result.losses[0], "left"), (len(result.losses), result.losses[-1], "right")):
        axis.plot([step], [loss], "o", color=GREEN, markersize=7)
        axis.annotate(f"{loss:.3g}", (step, loss), (0, 10), textcoords="offset points", ha=side, fontweight="bold")
    axis.set_ylim(0, 1.15 * max(1.0, *result.losses))
    axis.set_xlabel("training step")
    axis.set_ylabel("mean squared error\n/ mean square of the targets")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    return Picture("loss", to_png(figure), "The training loss over the steps")


def _skew(result: DemoResult) -> Picture:
    num_policies = len(result.skew)
    figure, axes = new_figure(
        1, num_policies, size=(10, 3.8), title="Copies that each rank computes, skewed router", sharey=True
    )
    for axis, item in zip(axes[0], result.skew, strict=True):
        mean = sum(item.copies) / len(item.copies)
        axis.bar(
            range(len(item.copies)), item.copies, 0.8, color=[ORANGE if c > mean + 1 else BLUE for c in item.copies]
        )
        axis.axhline(mean, color=VERMILION, linewidth=1.5, linestyle="--")
        axis.set_title(f"{item.policy}: {item.fullest:.2f} × the mean")
        axis.set_xlabel("rank")
    axes[0, 0].set_ylabel("copies")
    return Picture(
        "skew", to_png(figure), "Copies that each rank computes without balance, with a placement, and online"
    )
