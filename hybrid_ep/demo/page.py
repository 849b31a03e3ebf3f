"""The demo as one page: what was asked, whether it is right, what it sends, and the pictures."""

from __future__ import annotations

from hybrid_ep._version import __version__
from hybrid_ep.demo.results import DemoResult
from hybrid_ep.demo.tables import checks_table, describe_cluster, describe_loss, wire_table
from hybrid_ep.demo.verify import FP8_ALLOWED_RMS
from hybrid_ep.report.charts import Picture
from hybrid_ep.report.page import Page
from hybrid_ep.report.tables import Cell


def render_page(result: DemoResult, pictures: dict[str, Picture]) -> str:
    """Returns the HTML document."""
    page = Page(
        "hybrid_ep demo",
        "A Mixture-of-Experts layer sends each token to a few experts on other ranks (*dispatch*), brings the experts' "
        "outputs back and sums them (*combine*). This page shows both on a virtual cluster: "
        f"{describe_cluster(result)}.".replace("*", ""),
    )
    page.cards(_cards(result))
    page.section(
        "Correctness",
        "Every rank compares its output with a dense float64 computation without dispatch. The bound of the error "
        "is derived from the dtype: each rounding of a row to bf16 may cost 2⁻⁸ of the magnitudes that add up to a "
        "value. `of allowed` is the largest error as a share of its bound. For fp8 tokens the same bound holds after "
        "quantisation; quantisation itself may change the whole output by "
        f"{FP8_ALLOWED_RMS:.1%} (rms).",
    )
    for problem in result.problems:
        page.section("Failed", problem)
    page.table(checks_table(result))
    page.section(
        "Bytes sent",
        "A token with several experts in one remote domain crosses the network once and is spread inside that domain. "
        "Partial sums come back the same way. The bytes of hybrid_ep are counted as they are sent, with metadata. The "
        "other two are computed from the same routing, for rows only: one copy for each expert straight to its rank, "
        "and every token to every rank with as few crossings as possible.",
        "hybrid_ep sends fewer bytes between domains and more within them, where links are several times faster.",
    )
    _add(page, pictures, "wire")
    page.table(wire_table(result))
    page.section(
        "Load of the experts",
        "The skewed routing resembles that of a trained router: the popularity of experts falls off as in Zipf's law "
        "with exponent 0.6, and each token adds its own noise.",
    )
    _add(page, pictures, "load")
    page.section(
        "Time",
        "All ranks share the CPU cores of one machine. Experts compute in float64, so that every error above comes "
        "from sending. These times say nothing about a GPU.",
    )
    _add(page, pictures, "time")
    if result.skew:
        page.section(
            "A skewed router",
            "All tokens share a direction, so that most of them choose the same experts. The placement was "
            "made from the loads of this batch. Online, each rank has two spare slots, and replicas are planned "
            "from the counts of this batch before it is sent. The ranks are one domain here.",
        )
        _add(page, pictures, "skew")
    if result.loss is not None:
        page.section(
            "A lost rank",
            "One process was killed in the middle of its work. The others agreed on who is left, made a new group and "
            "a new placement, loaded the experts that no survivor held, and went on; every output is compared with "
            "float64.",
            describe_loss(result.loss).capitalize() + ".",
        )
    page.section(
        "Training",
        "A `MoELayer` with its experts spread over all ranks learns a synthetic task: the backward pass of dispatch is "
        "a combine, and that of combine a dispatch.",
    )
    _add(page, pictures, "loss")
    return page.render(
        f"hybrid_ep {__version__}, `hybrid-ep demo`, seed {result.settings.seed}, {result.seconds:.0f} s in all."
    )


def _cards(result: DemoResult) -> list[tuple[Cell, str]]:
    num_good = sum(not row.problems for row in result.paths)
    first, last = result.losses[0], result.losses[-1]
    cards = [
        (Cell(f"{num_good} of {len(result.paths)}", num_good == len(result.paths)), "paths match the reference"),
        (Cell(f"{result.largest_error('bf16').max_error:.2g}"), "max error against float64, bf16 tokens"),
        (Cell(f"{result.largest_error('fp8').max_error:.2g}"), "max error against float64, fp8 tokens"),
        (Cell(f"{first:.2f} → {last:.2f}", last < first), f"training loss in {len(result.losses)} steps"),
    ]
    if result.settings.num_domains > 1:
        item = result.wire[0]
        saved = 1 - item.measured.between_domains / max(1, item.all_to_all.between_domains)
        cards.insert(1, (Cell(f"{saved:.0%}", saved > 0), "fewer bytes between domains than an all-to-all of copies"))
    return cards


def _add(page: Page, pictures: dict[str, Picture], name: str) -> None:
    page.picture(pictures[name].png, pictures[name].description)
