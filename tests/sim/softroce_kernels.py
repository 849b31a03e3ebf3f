"""Runs inside the Soft-RoCE machine: the emulated kernels between domains over its NICs, and over a network that loses
and delays packets. MODULE is what tests/emulation/build.py has made. Prints a JSON object.

Rank i uses device rxe<i>. Packets are lost and delayed by netem on the loopback interface, which tcp uses here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.emulation.bare_low_latency import Fp8End, LowLatencyEnd, MaskingEnd, low_latency_shape
from tests.emulation.bare_ranks import End, Rank, Shape, load_module, run_ranks
from tests.sim.softroce_links import over_tcp

TIMEOUT_S = 200.0  # an emulated machine answers late
LOST_TIMEOUT_S = 20.0
DELAY = "delay 10ms 4ms"
LINK_LOSS = "loss 2%"
KERNEL_LOSS = "loss 20%"  # small calls have few packets, and some of them must be lost
PORT_DOWN = "ip link set nic1 down", "ip link set nic1 up"
SILENT = "tc qdisc add dev lo root netem loss 100%", "tc qdisc del dev lo root"
KILLED_RANK = 1
ROUNDS_WITH_A_LOSS = 8
FOLDER = Path("/tmp/ranks")


def num_rounds(end: type[End]) -> int:
    """Low-latency calls use each of two buffers twice."""
    return 2 if end is Rank else 4


def run(command: str) -> None:
    subprocess.run(command.split(), check=True)


def verbs(native: Any, shape: Shape, queue_pairs: int = 2, end: type[End] = Rank) -> list[dict[str, Any]]:
    """Rounds over the NICs."""
    return run_ranks(
        native,
        shape,
        FOLDER / f"verbs-{end.__name__}-{shape.num_domains}-{shape.ranks_per_domain}-{queue_pairs}",
        transport="verbs",
        timeout_s=TIMEOUT_S,
        num_rounds=num_rounds(end),
        variables_of=lambda rank: {"HYBRID_EP_NICS": f"rxe{rank}", "HYBRID_EP_QUEUE_PAIRS": str(queue_pairs)},
        end=end,
    )


def libfabric(native: Any, shape: Shape, end: type[End] = Rank) -> list[dict[str, Any]]:
    """Rounds over the NICs by libfabric's provider for verbs."""
    return run_ranks(
        native,
        shape,
        FOLDER / f"libfabric-{end.__name__}",
        transport="libfabric",
        timeout_s=TIMEOUT_S,
        num_rounds=num_rounds(end),
        variables_of=lambda rank: {
            "HYBRID_EP_NICS": f"rxe{rank}",
            "HYBRID_EP_FABRIC_PROVIDER": "verbs;ofi_rxm",
            "FI_UNIVERSE_SIZE": "4",  # for more, the provider asks for more completions than Soft-RoCE has
        },
        end=end,
    )


def tcp(native: Any, shape: Shape, end: type[End] = Rank) -> dict[str, Any]:
    """Rounds over a network that loses and delays packets, and how many it has lost."""
    run(f"tc qdisc add dev lo root netem {DELAY} {KERNEL_LOSS}")
    said = run_ranks(
        native,
        shape,
        FOLDER / f"tcp-{end.__name__}",
        transport="tcp",
        timeout_s=TIMEOUT_S,
        num_rounds=num_rounds(end),
        variables_of=lambda _: {"HYBRID_EP_TCP_ADDRESS": "127.0.0.1"},
        end=end,
    )
    return {"ranks": said, "lost": end_netem()}


def lossy_links() -> dict[str, Any]:
    """Chunks of the size of those of large calls, each compared, over such a network."""
    run(f"tc qdisc add dev lo root netem {DELAY} {LINK_LOSS}")
    return {"links": over_tcp(), "lost": end_netem()}


def lost(native: Any, shape: Shape, transport: str, harm: str, mend: str, end: type[End] = Rank) -> dict[str, Any]:
    """What the ranks say where the network goes away in the middle, and after how long.

    Args:
        native, shape, transport, end: as of `run_ranks`.
        harm: a command; "" = a rank is killed.
        mend: a command; "" = there is none.
    """
    harmed: list[float] = []

    def begin(pids: list[int]) -> None:
        time.sleep(1)
        if harm:
            run(harm)
        else:
            os.kill(pids[KILLED_RANK], signal.SIGKILL)
        harmed.append(time.monotonic())

    said = run_ranks(
        native,
        shape,
        FOLDER / f"lost-{transport}-{end.__name__}-{shape.num_ranks}",
        transport=transport,
        timeout_s=LOST_TIMEOUT_S,
        num_rounds=100_000,
        variables_of=lambda rank: {"HYBRID_EP_NICS": f"rxe{rank}", "HYBRID_EP_TCP_ADDRESS": "127.0.0.1"},
        meanwhile=begin,
        end=end,
    )
    if mend:
        run(mend)
    return {"ranks": said, "seconds": [rank["at"] - harmed[0] for rank in said if "at" in rank]}


def go_on(native: Any) -> list[dict[str, Any]]:
    """What ranks say that go on without a lost one, whose slots for ranks of their own domain do not exist."""
    return run_ranks(
        native,
        low_latency_shape(MaskingEnd, 2, 2),
        FOLDER / "verbs-masks",
        transport="verbs",
        timeout_s=LOST_TIMEOUT_S,
        num_rounds=ROUNDS_WITH_A_LOSS,
        variables_of=lambda rank: {"HYBRID_EP_NICS": f"rxe{rank}"},
        end=MaskingEnd,
    )


def end_netem() -> int:
    """Returns how many packets were lost."""
    shown = subprocess.run(["tc", "-s", "-j", "qdisc", "show", "dev", "lo"], capture_output=True, text=True, check=True)
    num_lost: int = next(one["drops"] for one in json.loads(shown.stdout) if one["kind"] == "netem")
    run("tc qdisc del dev lo root")
    return num_lost


def main(module: str) -> None:
    native = load_module(module)
    two = Shape(2, 1)
    low_latency_two, low_latency_two_by_two = (low_latency_shape(LowLatencyEnd, 2, size) for size in (1, 2))
    steps: dict[str, Callable[[], Any]] = {
        "two": lambda: verbs(native, two),
        "two-pairs": lambda: verbs(native, two, queue_pairs=4),
        "four": lambda: verbs(native, Shape(4, 1), queue_pairs=1),
        "two-by-two": lambda: verbs(native, Shape(2, 2)),
        "low-latency-two": lambda: verbs(native, low_latency_two, end=LowLatencyEnd),
        "low-latency-two-by-two": lambda: verbs(native, low_latency_two_by_two, end=LowLatencyEnd),
        "low-latency-fp8": lambda: verbs(native, low_latency_shape(Fp8End, 2, 2), end=Fp8End),
        "libfabric": lambda: libfabric(native, two),
        "low-latency-libfabric": lambda: libfabric(native, low_latency_two, end=LowLatencyEnd),
        "port-down": lambda: lost(native, two, "verbs", *PORT_DOWN),
        "low-latency-port-down": lambda: lost(native, low_latency_two, "verbs", *PORT_DOWN, end=LowLatencyEnd),
        "killed": lambda: lost(native, Shape(3, 1, num_experts=6), "verbs", "", ""),
        "low-latency-killed": lambda: go_on(native),
        "lossy-links": lossy_links,
        "lossy": lambda: tcp(native, two),
        "low-latency-lossy": lambda: tcp(native, low_latency_two, end=LowLatencyEnd),
        "silent": lambda: lost(native, two, "tcp", *SILENT),
    }
    results = {}
    for name, step in steps.items():
        begun = time.monotonic()
        results[name] = step()
        print(f"{name}: {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
