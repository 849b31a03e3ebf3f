"""The look of every picture: one theme, one palette, and figures as PNG bytes.

Colours are those of Okabe and Ito, which stay apart for every kind of colour vision (source: Okabe and Ito, "Color
Universal Design", 2008), and in print.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, SKY, VERMILION = "#0072B2", "#E69F00", "#009E73", "#56B4E9", "#D55E00"
GREY, INK = "#B4BCC8", "#1B2430"
PALETTE = (BLUE, ORANGE, GREEN, SKY, VERMILION, "#CC79A7")

_MUTED = "#5A6675"
_GRID = "#E3E8EE"
_DPI = 160
_STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["Inter", "Helvetica Neue", "Arial", "Liberation Sans", "DejaVu Sans"],
    "font.size": 12,
    "text.color": INK,
    "axes.edgecolor": "#C6CFDA",
    "axes.labelcolor": _MUTED,
    "axes.labelsize": 12,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "grid.color": _GRID,
    "grid.linewidth": 1.0,
    "legend.frameon": False,
    "legend.fontsize": 11,
    "figure.facecolor": "white",
    "figure.constrained_layout.h_pad": 0.12,
    "figure.constrained_layout.w_pad": 0.12,
}


@dataclass(frozen=True)
class Picture:
    """A drawn figure.

    Attributes:
        name: of its file, without the ending.
        png: the bytes of the file.
        description: one sentence for those who cannot see it.
    """

    name: str
    png: bytes
    description: str


def theme() -> AbstractContextManager[None]:
    """The house theme, in force inside a `with`."""
    return mpl.rc_context(_STYLE)


def new_figure(
    num_rows: int = 1, num_columns: int = 1, *, size: tuple[float, float], title: str, grid: str = "y", **options: Any
) -> tuple[Figure, Any]:
    """Makes a figure; call it, and draw on it, inside `theme`.

    Args:
        num_rows, num_columns: of axes.
        size: width and height in inches.
        title: one sentence that says what is seen; stands above all axes, at the left.
        grid: axis with grid lines, ``x`` or ``y``.
        **options: of `Figure.subplots`.

    Returns:
        The figure and its axes, an array of ``[num_rows, num_columns]``.
    """
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(num_rows, num_columns, squeeze=False, **options)
    figure.suptitle(title, x=0.012, ha="left", fontsize=16, fontweight="bold", color=INK)
    for axis in axes.flat:
        axis.grid(axis=grid)
    return figure, axes


def label_bars(axis: Any, bars: Any, labels: Sequence[str]) -> None:
    """Writes a label at the end of each bar."""
    axis.bar_label(bars, labels=labels, padding=3, fontsize=10, color=INK)


def to_png(figure: Figure) -> bytes:
    """Draws the figure."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=_DPI)
    return stream.getvalue()
