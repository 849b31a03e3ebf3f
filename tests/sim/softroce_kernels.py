"""Runs inside the Soft-RoCE machine: the emulated kernels between domains over its NICs, and over a network that loses
and delays packets. MODULE is what tests/emulation/build.py has made. Prints a JSON object.

Rank i uses device rxe<i>. Packets are lost and delayed by netem on the loopback interface, which tcp uses here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.emulation.bare_ranks import Shape, load_module, run_ranks
from tests.sim.softroce_links import over_tcp

TIMEOUT_S = 200.0  # an emulated machine answers late
LOST_TIMEOUT_S = 20.0
NUM_ROUNDS = 2
DELAY = "delay 10ms 4ms"
LINK_LOSS = "loss 2%"
KERNEL_LOSS = "loss 20%"  # small calls have few packets, and some of them must be lost
FOLDER = Path("/tmp/ranks")


def run(command: str) -> None:
    subprocess.run(command.split(), check=True)


def verbs(native: Any, num_domains: int, ranks_per_domain: int, queue_pairs: int) -> list[dict[str, Any]]:
    """Rounds over the NICs."""
    return run_ranks(
        native,
        Shape(num_domains, ranks_per_domain),
        FOLDER / f"verbs-{num_domains}-{ranks_per_domain}-{queue_pairs}",
        transport="verbs",
        timeout_s=TIMEOUT_S,
        num_rounds=NUM_ROUNDS,
        variables_of=lambda rank: {"HYBRID_EP_NICS": f"rxe{rank}", "HYBRID_EP_QUEUE_PAIRS": str(queue_pairs)},
    )


def tcp(native: Any, num_domains: int, ranks_per_domain: int) -> dict[str, Any]:
    """Rounds over a network that loses and delays packets, and how many it has lost."""
    run(f"tc qdisc add dev lo root netem {DELAY} {KERNEL_LOSS}")
    said = run_ranks(
        native,
        Shape(num_domains, ranks_per_domain),
        FOLDER / f"tcp-{num_domains}-{ranks_per_domain}",
        transport="tcp",
        timeout_s=TIMEOUT_S,
        num_rounds=NUM_ROUNDS,
        variables_of=lambda _: {"HYBRID_EP_TCP_ADDRESS": "127.0.0.1"},
    )
    return {"ranks": said, "lost": end_netem()}


def lossy_links() -> dict[str, Any]:
    """Chunks of the size of those of large calls, each compared, over such a network."""
    run(f"tc qdisc add dev lo root netem {DELAY} {LINK_LOSS}")
    return {"links": over_tcp(), "lost": end_netem()}


def lost(native: Any, transport: str, harm: str, mend: str) -> dict[str, Any]:
    """What the ranks say where the network goes away in the middle, and after how long."""
    harmed: list[float] = []

    def begin(_: Path) -> None:
        time.sleep(1)
        run(harm)
        harmed.append(time.monotonic())

    said = run_ranks(
        native,
        Shape(2, 1),
        FOLDER / f"lost-{transport}",
        transport=transport,
        timeout_s=LOST_TIMEOUT_S,
        num_rounds=100_000,
        variables_of=lambda rank: {"HYBRID_EP_NICS": f"rxe{rank}", "HYBRID_EP_TCP_ADDRESS": "127.0.0.1"},
        meanwhile=begin,
    )
    run(mend)
    return {"ranks": said, "seconds": [rank["at"] - harmed[0] for rank in said]}


def end_netem() -> int:
    """Returns how many packets were lost."""
    shown = subprocess.run(["tc", "-s", "-j", "qdisc", "show", "dev", "lo"], capture_output=True, text=True, check=True)
    num_lost: int = next(one["drops"] for one in json.loads(shown.stdout) if one["kind"] == "netem")
    run("tc qdisc del dev lo root")
    return num_lost


def main(module: str) -> None:
    native = load_module(module)
    steps: dict[str, Callable[[], Any]] = {
        "two": lambda: verbs(native, 2, 1, 2),
        "two-pairs": lambda: verbs(native, 2, 1, 4),
        "four": lambda: verbs(native, 4, 1, 1),
        "two-by-two": lambda: verbs(native, 2, 2, 2),
        "port-down": lambda: lost(native, "verbs", "ip link set nic1 down", "ip link set nic1 up"),
        "lossy-links": lossy_links,
        "lossy": lambda: tcp(native, 2, 1),
        "silent": lambda: lost(native, "tcp", "tc qdisc add dev lo root netem loss 100%", "tc qdisc del dev lo root"),
    }
    results = {}
    for name, step in steps.items():
        begun = time.monotonic()
        results[name] = step()
        print(f"{name}: {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
