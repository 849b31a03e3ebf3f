"""Runs inside the Soft-RoCE machine: the `verbs` transport between its NICs, whole and with a port taken down, and
`libfabric` over the same NICs.

One process holds all ends, because starting Python is what takes long in an emulated machine. Prints a JSON object.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from hybrid_ep import _C

CHUNK_BYTES = 16 * 14464  # 16 records of a BF16 row of 7168, top-8 and what goes with it
RINGS = [(CHUNK_BYTES, 8, 2), (256, 4, 1)]
ETH_P_ALL, ROCE_PORT = 3, 4791
SPEED_RUNS, SPEED_CHUNKS = 5, 300
SPEED_RINGS = [(CHUNK_BYTES, 32, 8), (256, 4, 1)]  # as many slots as the kernels' link of two domains
PORT_TIMEOUT_S = 20.0
PORT_DOWN_AFTER_S = 0.5
SMALL_RINGS = [(4096, 4, 2), (256, 4, 1)]  # Soft-RoCE loses packets, and connections, where many ends send much


def on_nic(layout: _C.LinkLayout, i: int, **options: Any) -> _C.Proxy:
    """End i over its own NIC."""
    return _C.verbs_proxy(layout=layout, devices=[f"rxe{i}"], num_fifos=2, **options)


def on_two_nics(layout: _C.LinkLayout, i: int, **options: Any) -> _C.Proxy:
    """End i over two NICs: 0 and 2, or 1 and 3."""
    return _C.verbs_proxy(layout=layout, devices=[f"rxe{i}", f"rxe{i + 2}"], num_fifos=2, **options)


def on_fabric(layout: _C.LinkLayout, i: int, *, num_queue_pairs: int = 0, **options: Any) -> _C.Proxy:
    """End i over its own NIC, by libfabric's provider for verbs, which connects in its own way."""
    os.environ["FI_UNIVERSE_SIZE"] = "4"  # peers; for more, the provider asks for more completions than Soft-RoCE has
    return _C.fabric_proxy(layout=layout, provider="verbs;ofi_rxm", devices=[f"rxe{i}"], num_fifos=2, **options)


def on_loopback(layout: _C.LinkLayout, _: int, **options: Any) -> _C.Proxy:
    """An end over sockets of this host."""
    return _C.tcp_proxy(layout=layout, host="127.0.0.1", num_fifos=2, **options)


class Ends:
    """Ranks of as many domains; `make` opens the end of each."""

    def __init__(
        self,
        num: int,
        rings: list[tuple[int, int, int]] = RINGS,
        make: Callable[..., _C.Proxy] = on_nic,
        **options: Any,
    ) -> None:
        self.rings = rings
        self.proxies: list[_C.Proxy] = []
        for i in range(num):
            layout = _C.LinkLayout(num_domains=num, domain_idx=i, rings=rings)
            self.proxies.append(make(layout, i, **options))
        addresses = [proxy.address() for proxy in self.proxies]
        together(lambda i: self.proxies[i].connect(addresses, 10.0), num)
        self.writers = [_C.HostWriter(proxy, 0) for proxy in self.proxies]
        self.epoch = 0

    def run(
        self, num_chunks: int, *, ring: int = 0, verifies: bool = True, one_way: bool = False, limit_s: float = 60
    ) -> list[Any]:
        """Chunks between all of them, or from the first end alone; returns seconds, chunks sent, received and wrong."""
        self.epoch += 1

        def run(i: int) -> Any:
            self.proxies[i].begin_call()
            figures = self.writers[i].run_chunks(
                self.proxies[i],
                ring=ring,
                num_out=num_chunks if not one_way or i == 0 else 0,
                num_in=num_chunks if not one_way or i > 0 else 0,
                num_bytes=self.rings[ring][0],
                epoch=self.epoch,
                verifies=verifies,
                timeout_s=limit_s,
            )
            self.writers[i].end_call()
            return figures

        return together(run, len(self.proxies))

    def failures(self) -> list[Any]:
        return [proxy.failure for proxy in self.proxies]

    def close(self) -> list[bool]:
        return together(lambda i: self.proxies[i].close(5.0), len(self.proxies))


def together(function: Callable[[int], Any], num: int) -> list[Any]:
    """Runs it in as many threads and returns the results."""
    results: list[Any] = [None] * num

    def run(i: int) -> None:
        results[i] = function(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def whole(num: int, **options: Any) -> dict[str, Any]:
    """Every chunk arrives, and the ends close in order."""
    # An emulated machine answers late; Soft-RoCE loses a connection that repeats what had only been slow.
    ends = Ends(num, timeout_s=600.0, **options)
    figures = [ends.run(12), ends.run(9, ring=1)]
    described = ends.proxies[0].describe
    return {"figures": figures, "describe": described, "failures": ends.failures(), "closed": ends.close()}


def classed() -> dict[str, Any]:
    """The same with a traffic class and a service level; and the types of service of RoCE packets that were seen."""
    seen: set[int] = set()
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL)) as packets:
        packets.bind(("port0", 0))
        packets.settimeout(0.2)
        ends = threading.Event()
        watcher = threading.Thread(target=watch, args=(packets, seen, ends))
        watcher.start()
        found = whole(2, gid_index=1, traffic_class=104, service_level=3)
        ends.set()
        watcher.join()
    return found | {"types_of_service": sorted(seen)}


def watch(packets: socket.socket, seen: set[int], ends: threading.Event) -> None:
    """Notes the type of service of each RoCE v2 packet over IPv4."""
    while not ends.is_set():
        with contextlib.suppress(TimeoutError):
            frame = packets.recv(64)
            if (
                frame[12:14] == b"\x08\x00"
                and frame[23] == socket.IPPROTO_UDP
                and int.from_bytes(frame[36:38], "big") == ROCE_PORT
            ):
                seen.add(frame[15])


def over_tcp() -> dict[str, Any]:
    """The same of two ends over tcp."""
    return whole(2, make=on_loopback)


def port_down(timeout_s: float) -> dict[str, Any]:
    """A port goes down in the middle of a run: the figures of each end, and its failure."""
    ends = Ends(2, timeout_s=timeout_s)
    before = ends.run(4)
    cut = threading.Timer(PORT_DOWN_AFTER_S, lambda: subprocess.run(["ip", "link", "set", "nic1", "down"], check=True))
    cut.start()
    figures = ends.run(100_000, verifies=False, limit_s=1.5 * timeout_s)
    cut.join()
    failures = ends.failures()
    ends.close()
    subprocess.run(["ip", "link", "set", "nic1", "up"], check=True)
    return {"before": before, "figures": figures, "failures": failures}


def refusals() -> dict[str, str]:
    """What cannot be opened, and how that is told."""
    layout = _C.LinkLayout(num_domains=2, domain_idx=0, rings=RINGS)
    said = {}
    for name, options in {
        "device": {"devices": ["rxe9"]},
        "gid": {"devices": ["rxe0"], "gid_index": 200},
        "port": {"devices": ["rxe0"], "port": 3},
        "service level": {"devices": ["rxe0"], "service_level": 16},
        "traffic class": {"devices": ["rxe0"], "traffic_class": 256},
        "mtu": {"devices": ["rxe0"], "mtu_bytes": 1500},
        "queue pairs": {"devices": ["rxe0"], "num_queue_pairs": 5},
    }.items():
        try:
            _C.verbs_proxy(layout=layout, **options)  # type: ignore[arg-type]
        except ConnectionError as error:
            said[name] = error.args[1]
        except ValueError as error:
            said[name] = str(error)
    return said


def speed() -> dict[str, Any]:
    """Links and ib_write_bw with messages of a chunk in turn, in MB/s; and ns from a command to its work request."""
    link: list[float] = []
    fabric: list[float] = []
    perftest: list[float] = []
    ends, on_rxm = (Ends(2, SPEED_RINGS, make=make, num_queue_pairs=1, timeout_s=600.0) for make in (on_nic, on_fabric))
    for _ in range(SPEED_RUNS):
        for found, rates in ((ends, link), (on_rxm, fabric)):
            found.run(4, verifies=False)
            seconds = max(figures[0] for figures in found.run(SPEED_CHUNKS, verifies=False, one_way=True))
            rates.append(SPEED_CHUNKS * CHUNK_BYTES / seconds / 1e6)
        perftest.append(perftest_mb_s())
    on_rxm.close()
    ends.proxies[0].begin_call()
    post_ns = ends.writers[0].median_post_ns(1, 200)
    ends.writers[0].end_call()
    ends.close()
    return {"link_mb_s": link, "libfabric_mb_s": fabric, "perftest_mb_s": perftest, "post_ns": post_ns}


def perftest_mb_s() -> float:
    """What ib_write_bw moves between the same NICs, over one queue pair."""
    command = f"ib_write_bw -x 1 -s {CHUNK_BYTES} -n {SPEED_CHUNKS} -F -m 4096".split()
    server = subprocess.Popen([*command, "-d", "rxe1"], stdout=subprocess.DEVNULL)
    time.sleep(2)
    client = subprocess.run(
        [*command, "-d", "rxe0", "10.77.0.2"], capture_output=True, text=True, check=False, timeout=60
    )
    server.wait(10)
    line = next((line for line in client.stdout.splitlines() if line.split()[:1] == [str(CHUNK_BYTES)]), "")
    assert line, client.stdout[-300:] + client.stderr[-300:]
    return float(line.split()[3]) * 2**20 / 1e6


STEPS: dict[str, Callable[[], Any]] = {
    "devices": _C.active_verbs_devices,
    "two": lambda: whole(2),
    "two-pairs": lambda: whole(2, num_queue_pairs=4, relaxed_ordering=False, mtu_bytes=1024),
    "two-nics": lambda: whole(2, make=on_two_nics),
    "classed": classed,
    "four": lambda: whole(4, rings=SMALL_RINGS),
    "unordered": lambda: whole(2, unordered=True),
    "libfabric": lambda: whole(2, make=on_fabric),
    "refusals": refusals,
    "port-down": lambda: port_down(PORT_TIMEOUT_S),
    "speed": speed,
}

if __name__ == "__main__":
    results = {}
    for name in sys.argv[1:] or STEPS:
        begun = time.monotonic()
        results[name] = STEPS[name]()
        print(f"{name}: {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)
    print(json.dumps(results))
