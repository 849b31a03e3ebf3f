"""Links beside each other: verbs, ib_write_bw and libfabric between Soft-RoCE devices of an emulated machine, tcp and
libfabric over tcp on this host, and the proxy's time for a command.

    python benchmarks/verbs_link.py [--out FILE]

All move messages of a chunk (16 BF16 records of 7168), in turn, one way; verbs over one queue pair. A link adds a flag
to each chunk and waits for credits. Emulation and Soft-RoCE decide the MB/s, so only the ratio of two neighbouring runs
counts, on a machine that does nothing else. The time from a command in the FIFO to its posted work request is measured
on this host, where nothing is emulated, over loopback.
"""

from __future__ import annotations

import json
import platform
import shlex
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from hybrid_ep import _C

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # what runs in the machine is a part of the tests
POSTS = 100_000
GOAL_SHARE, GOAL_POST_NS = 0.94, 1000.0
GOAL_FABRIC_SHARES = {"verbs": 0.8, "tcp": 0.9}  # libfabric over Soft-RoCE and over tcp, to the link of that name
TCP_RUNS, TCP_CHUNKS = 15, 600


def post_ns() -> float:
    """Median time from a command in the FIFO until it is posted, and the writer knows."""
    layouts = [_C.LinkLayout(num_domains=2, domain_idx=i, rings=[(256, 8, 4)]) for i in range(2)]
    proxies = [_C.loopback_proxy(layout=layout, num_fifos=1) for layout in layouts]
    addresses = [proxy.address() for proxy in proxies]
    for proxy in proxies:
        proxy.connect(addresses, 10.0)
    proxies[0].begin_call()
    writer = _C.HostWriter(proxies[0], 0)
    found = writer.median_post_ns(1, POSTS)
    writer.end_call()
    for proxy in proxies:
        proxy.close(10.0)
    return found


def over_tcp() -> tuple[list[float], list[float]]:
    """Returns the rates of tcp and of libfabric over tcp on this host, in MB/s."""
    from tests.sim.softroce_links import CHUNK_BYTES, SPEED_RINGS, Ends, on_loopback

    def on_fabric(layout: _C.LinkLayout, _: int) -> _C.Proxy:
        return _C.fabric_proxy(layout=layout, provider="tcp", host="127.0.0.1", num_fifos=2)

    ends = [Ends(2, SPEED_RINGS, make=make) for make in (on_loopback, on_fabric)]
    rates: tuple[list[float], list[float]] = ([], [])
    for run in range(1 + TCP_RUNS):
        for link, found in zip(ends, rates, strict=True):
            seconds = max(figures[0] for figures in link.run(TCP_CHUNKS, verifies=False, one_way=True))
            if run > 0:  # memory and sockets of the first one are new
                found.append(TCP_CHUNKS * CHUNK_BYTES / seconds / 1e6)
    for link in ends:
        link.close()
    return rates


def share_of(rates: list[float], others: list[float]) -> float:
    """The median ratio of neighbouring runs."""
    return statistics.median(rate / other for rate, other in zip(rates, others, strict=True))


def measure() -> dict[str, Any]:
    """Runs the machine, the links of this host and the proxy."""
    from tests.sim.softroce_vm import run_in_vm

    proxy_ns = post_ns()
    tcp, fabric_tcp = over_tcp()
    with tempfile.TemporaryDirectory() as folder:
        command = f"{shlex.quote(sys.executable)} -m tests.sim.softroce_links speed"
        said = run_in_vm(command, Path(folder), num_nics=2, limit_s=540)
    found = json.loads(next(line for line in said.splitlines() if line.startswith("{")))["speed"]
    return {
        "machine": f"{platform.machine()}, Linux {platform.release()}, qemu (TCG) with Soft-RoCE for the link",
        "link_mb_s": found["link_mb_s"],
        "perftest_mb_s": found["perftest_mb_s"],
        "libfabric_mb_s": found["libfabric_mb_s"],
        "tcp_mb_s": tcp,
        "libfabric_tcp_mb_s": fabric_tcp,
        "share": share_of(found["link_mb_s"], found["perftest_mb_s"]),
        "libfabric_shares": {
            "verbs": share_of(found["libfabric_mb_s"], found["link_mb_s"]),
            "tcp": share_of(fabric_tcp, tcp),
        },
        "post_ns": proxy_ns,
    }


@click.command(help=__doc__.splitlines()[0])
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Writes the figures as JSON, too.")
def main(out: Path | None) -> None:
    figures = measure()
    link, perftest = (statistics.median(figures[name]) for name in ("link_mb_s", "perftest_mb_s"))
    click.echo(
        f"verbs link {link:.0f} MB/s, ib_write_bw {perftest:.0f} MB/s: {figures['share']:.1%} (goal {GOAL_SHARE:.0%})"
    )
    for name, share in figures["libfabric_shares"].items():
        click.echo(f"libfabric to the link {name}: {share:.1%} (goal {GOAL_FABRIC_SHARES[name]:.0%})")
    click.echo(f"command to posted work request {figures['post_ns']:.0f} ns (goal {GOAL_POST_NS:.0f})")
    if out is not None:
        out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
