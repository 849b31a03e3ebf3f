"""The picture of the README: times of calls beside DeepEP V1's, of one run.

python -m benchmarks.beside [--out docs/images/beside_deep_ep.png]
"""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.tables import BESIDE, ROOT, best_us, results
from hybrid_ep.report.charts import BLUE, GREY, label_bars, new_figure, theme, to_png

FILE = "beside_deep_ep/h200_2gpu"
PICTURE = ROOT / "docs" / "images" / "beside_deep_ep.png"
PANELS = {"4096 tokens": BESIDE[:3], "128 tokens": BESIDE[3:5]}
_SERIES = (("DeepEP V1", "deep_ep", GREY), ("hybrid_ep", "hybrid_ep", BLUE))
_HEIGHT = 0.36


@click.command(help=__doc__.splitlines()[0])
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=PICTURE, show_default=True)
def main(out: Path) -> None:
    about = results(FILE)
    with theme():
        # Small, so that its text can be read where the page is a phone's.
        size, heights = (6.4, 4.3), [len(calls) for calls in PANELS.values()]
        title = "Time of a call on the GPU, in µs: less is better"
        figure, axes = new_figure(2, 1, size=size, title=title, grid="x", height_ratios=heights)
        for axis, (panel, calls) in zip(axes[:, 0], PANELS.items(), strict=True):
            for place, (name, implementation, colour) in enumerate(_SERIES):
                us = [best_us(FILE, implementation, operation, **plan) for _, plan, operation in calls]
                rows = [row + (0.5 - place) * _HEIGHT for row in range(len(calls))]
                bars = axis.barh(rows, us, _HEIGHT, color=colour, label=name)
                label_bars(axis, bars, [f"{value:.0f}" if value > 99.5 else f"{value:.1f}" for value in us])
            axis.set_yticks(range(len(calls)), [label.removeprefix("low-latency ") for label, _, _ in calls])
            axis.invert_yaxis()
            axis.margins(x=0.12)
            axis.set_title(f"{panel} a rank{', low latency' if len(calls) == 2 else ''}")
        axes[0, 0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, reverse=True, borderpad=0)
        gpus = f"{about['num_ranks']} × {about['device'].removeprefix('NVIDIA ')}"
        axes[-1, 0].set_xlabel(f"{gpus}, {about['date'][:10]}, commit {about['versions']['commit']}")
        out.write_bytes(to_png(figure))


if __name__ == "__main__":
    main()
