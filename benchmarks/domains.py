"""A picture of the docs: what a dispatch sends between domains, and how long the network takes for it.

    python benchmarks/domains.py [--out docs/images/domains.png]

Computed, not measured: rows alone, uniform routing, every rank with a network port of its own.
"""

from __future__ import annotations

from pathlib import Path

import click
from matplotlib.ticker import FixedLocator, ScalarFormatter

from hybrid_ep.cluster.model.spread import touched
from hybrid_ep.report.charts import BLUE, GREY, ORANGE, new_figure, theme, to_png
from hybrid_ep.workload import Workload

DOMAINS = (2, 4, 8, 16, 32)
TOKENS, HIDDEN, TOPK, EXPERTS = 4096, 7168, 8, 256
ROW_BYTES = 2 * HIDDEN
PORT_GBPS = 50.0
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "domains.png"


def remote_domains(num_domains: int, num_experts: int = EXPERTS, topk: int = TOPK) -> float:
    """Expected number of other domains that own one of a token's experts; its experts are a uniform draw."""
    experts = -(-num_experts // num_domains) * num_domains
    return (num_domains - 1) * float(touched(Workload(TOKENS, HIDDEN, topk, experts), num_domains)[0])


def rows_between_domains(num_domains: int) -> dict[str, float]:
    """Rows that cross between domains for each token, by way."""
    return {
        "all-gather: a row per domain": num_domains - 1.0,
        "all-to-all: a row per expert": TOPK * (num_domains - 1) / num_domains,
        "hybrid_ep: a row per domain in use": remote_domains(num_domains),
    }


@click.command(help=__doc__.splitlines()[0])
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=PICTURE, show_default=True)
def main(out: Path) -> None:
    ways = list(rows_between_domains(DOMAINS[0]))
    colours = dict(zip(ways, (GREY, ORANGE, BLUE), strict=True))
    megabytes = TOKENS * ROW_BYTES / 1e6
    with theme():
        # Small, so that its text can be read where the page is a phone's.
        figure, axes = new_figure(size=(6.4, 3.9), title="Bytes and time between domains")
        axis = axes[0, 0]
        for way in ways:
            sent = [megabytes * rows_between_domains(n)[way] for n in DOMAINS]
            axis.plot(DOMAINS, sent, marker="o", linewidth=2.5, color=colours[way], label=way)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_locator(FixedLocator(DOMAINS))
        axis.xaxis.set_major_formatter(ScalarFormatter())
        axis.set_xlabel("domains")
        axis.set_ylabel("MB sent by each rank")
        axis.set_ylim(0, megabytes * rows_between_domains(DOMAINS[-1])[ways[1]] * 1.15)
        time = axis.secondary_yaxis("right", functions=(lambda mb: mb / PORT_GBPS, lambda ms: ms * PORT_GBPS))
        time.set_ylabel(f"ms at {PORT_GBPS:.0f} GB/s a rank")
        axis.legend(loc="lower right")
        axis.set_title(f"{TOKENS} tokens × {HIDDEN} bf16, top-{TOPK} of {EXPERTS}")
        out.write_bytes(to_png(figure))


if __name__ == "__main__":
    main()
