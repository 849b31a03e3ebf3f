"""The pictures and the page of `hybrid-ep balance`, drawn from outcomes alone."""

from __future__ import annotations

from hybrid_ep._version import __version__
from hybrid_ep.balance.policies import COLUMNS, Outcome, table_rows
from hybrid_ep.report.charts import BLUE, GREY, PALETTE, VERMILION, Picture, new_figure, theme, to_png
from hybrid_ep.report.page import Page
from hybrid_ep.report.tables import Cell, DataTable


def draw_all(outcomes: list[Outcome]) -> list[Picture]:
    """Draws load per rank for each policy, and balancedness over the windows."""
    with theme():
        pictures = [_load(outcomes)]
        if outcomes[0].rank_loads.shape[0] > 1:
            pictures.append(_windows(outcomes))
    return pictures


def render_page(outcomes: list[Outcome], pictures: list[Picture]) -> str:
    """Returns the HTML document."""
    num_windows, num_layers, num_ranks = outcomes[0].rank_loads.shape
    page = Page(
        "Balance of experts",
        f"Load of {num_ranks} ranks over {num_windows} windows and {num_layers} layers, under each policy. "
        "Balancedness is the mean over the largest load of the ranks.",
    )
    page.cards([(Cell(f"{float(item.balancedness.mean()):.3f}"), f"balancedness: {item.policy}") for item in outcomes])
    page.table(DataTable(COLUMNS, table_rows(outcomes)))
    for picture in pictures:
        page.picture(picture.png, picture.description)
    page.section(
        "How it is judged",
        "A window is judged with the placement that the window before it called for. A trace of one window is judged "
        "with its own placement. A move is an expert weight that a rank must load.",
    )
    return page.render(f"hybrid_ep {__version__}, `hybrid-ep balance`.")


def _load(outcomes: list[Outcome]) -> Picture:
    worst = int(outcomes[0].balancedness[-1].argmin())
    figure, axes = new_figure(
        len(outcomes), 1, size=(10, 1.6 + 1.7 * len(outcomes)), title=f"Load of each rank, layer {worst}, last window",
        sharex=True, sharey=True,
    )  # fmt: skip
    for axis, item in zip(axes[:, 0], outcomes, strict=True):
        loads = item.rank_loads[-1, worst]
        shares = (loads / loads.mean().clamp_min(1e-300)).tolist()
        most = max(range(len(shares)), key=shares.__getitem__)
        axis.bar(range(len(shares)), shares, 0.82, color=[VERMILION if r == most else BLUE for r in range(len(shares))])
        axis.axhline(1, color=GREY, linewidth=1.5, linestyle="--")
        axis.set_title(f"{item.policy}: the most loaded rank has {shares[most]:.2f} × the mean")
        axis.set_ylabel("× mean")
    axes[-1, 0].set_xlabel("rank")
    return Picture("load", to_png(figure), "Load of each rank over the mean, under each policy")


def _windows(outcomes: list[Outcome]) -> Picture:
    figure, axes = new_figure(1, 1, size=(10, 4.2), title="Balancedness over time, mean of the layers")
    axis = axes[0, 0]
    for item, colour in zip(outcomes, (GREY, *PALETTE), strict=False):
        values = item.balancedness.mean(1).tolist()
        axis.plot(range(len(values)), values, color=colour, linewidth=2.5, label=item.policy)
    axis.set_ylim(0, 1.02)
    axis.set_xlabel("window")
    axis.set_ylabel("mean / largest load")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=len(outcomes))
    return Picture("windows", to_png(figure), "Balancedness of each policy in each window")
