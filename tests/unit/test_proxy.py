"""The proxy thread and its FIFOs, with links inside this process and a thread of the host as the kernel."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hybrid_ep import _C
from tests.rank_pool import FEW_PEERS, needs_fabric

RINGS = [(256, 8, 4), (1024, 4, 2)]
os.environ.update(FEW_PEERS)  # which libfabric reads when it is used for the first time
LIMIT_S = 10.0


def wait_until(condition: Callable[[], bool]) -> None:
    """Fails the test where the condition does not come true."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "nothing happened"


def make_pair(num_fifos: int = 1) -> tuple[list[_C.Proxy], list[_C.HostWriter]]:
    """Two ranks of two domains, with an open call each."""
    layouts = [_C.LinkLayout(num_domains=2, domain_idx=i, rings=RINGS) for i in range(2)]
    proxies = [_C.loopback_proxy(layout=layout, num_fifos=num_fifos) for layout in layouts]
    addresses = [proxy.address() for proxy in proxies]
    for proxy in proxies:
        proxy.connect(addresses, LIMIT_S)
        proxy.begin_call()
    return proxies, [_C.HostWriter(proxy, 0) for proxy in proxies]


def _connect(proxies: list[_C.Proxy]) -> None:
    """All at once: each waits for the others."""
    addresses = [proxy.address() for proxy in proxies]
    threads = [threading.Thread(target=proxy.connect, args=(addresses, LIMIT_S)) for proxy in proxies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_chunk_flag_and_credit_arrive() -> None:
    """A chunk lands in the slot of its ring, peer and number; its flag and the credit bring their words."""
    proxies, (sender, receiver) = make_pair()
    sender.send_slot(1, 1, 3)[:16] = b"sixteen bytes..."
    assert sender.put(1, 1, 3, 16, 2**63 + 5)
    wait_until(lambda: receiver.poll(1, 0, 3) == 2**63 + 5)
    assert bytes(receiver.recv_slot(1, 0, 3)[:20]) == b"sixteen bytes..." + bytes(4)
    assert [receiver.poll(1, 0, slot) for slot in range(3)] == [0, 0, 0]
    assert receiver.credit(1, 0, 1, 9)
    wait_until(lambda: sender.poll_credit(1, 1, 1) == 9)
    assert sender.poll_credit(1, 1, 0) == 0
    assert all(proxy.close(LIMIT_S) for proxy in proxies)


def test_fifo_wraps() -> None:
    """Commands of many laps arrive in order, each once, and the writer waits for free slots."""
    proxies, (sender, receiver) = make_pair()
    num, refused = 5000, 0
    for i in range(num):
        while not sender.put(0, 1, i % 8, 0, i + 1):
            refused += 1
    sender.end_call()
    wait_until(lambda: proxies[0].counts["calls"] == 1)
    assert proxies[0].counts["puts"] == num
    assert [receiver.poll(0, 0, slot) for slot in range(8)] == [num - 7 + slot for slot in range(8)]
    assert all(proxy.close(LIMIT_S) for proxy in proxies)


def test_a_million_commands() -> None:
    """A thousand laps of a FIFO."""
    proxies, (sender, _) = make_pair()
    sender.median_post_ns(1, 1_000_000)
    assert proxies[0].counts["puts"] == sender.num_pushed == 1_000_000
    assert all(proxy.close(LIMIT_S) for proxy in proxies)


def test_commands_in_flight_are_completed_at_close() -> None:
    """What stands in the FIFO when the proxy closes is still sent."""
    proxies, (sender, receiver) = make_pair()
    for i in range(1000):
        assert sender.put(0, 1, i % 8, 256, i + 1)
    assert proxies[0].close(LIMIT_S)
    assert proxies[0].counts["puts"] == 1000
    assert receiver.poll(0, 0, 7) == 1000
    assert proxies[1].close(LIMIT_S)


def test_drain_waits_for_what_is_on_its_way() -> None:
    """Chunks that a network delays have arrived when drain returns; a call that has not ended is not drained."""
    layouts = [_C.LinkLayout(num_domains=2, domain_idx=i, rings=RINGS) for i in range(2)]
    slow = _C.Faults(seed=1, max_delay_us=300_000)
    proxies = [_C.loopback_proxy(layout=layout, faults=slow) for layout in layouts]
    addresses = [proxy.address() for proxy in proxies]
    for proxy in proxies:
        proxy.connect(addresses, LIMIT_S)
        proxy.begin_call()
    sender, receiver = (_C.HostWriter(proxy, 0) for proxy in proxies)
    for slot in range(8):
        assert sender.put(0, 1, slot, 256, slot + 1)
    assert not proxies[0].drain(0.05)
    sender.end_call()
    assert proxies[0].drain(LIMIT_S)
    assert [receiver.poll(0, 0, slot) for slot in range(8)] == list(range(1, 9))
    assert proxies[0].close(LIMIT_S)
    proxies[1].close(0)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_lost_peer_and_the_others(keeps: bool) -> None:
    """One of three ranks closes its end: that ends the link, or only what goes to this rank."""
    layouts = [_C.LinkLayout(num_domains=3, domain_idx=i, rings=RINGS) for i in range(3)]
    proxies = [_C.tcp_proxy(layout=layout, host="127.0.0.1", num_fifos=1) for layout in layouts]
    _connect(proxies)
    if keeps:
        proxies[0].keep_other_peers()
    for proxy in proxies[:2]:
        proxy.begin_call()
    sender, receiver = (_C.HostWriter(proxy, 0) for proxy in proxies[:2])
    assert proxies[2].close(LIMIT_S)
    for number in range(1, 100):  # until the lost connection is noticed
        assert sender.put(0, 2, 0, 16, number)
        time.sleep(0.001)
    assert sender.put(0, 1, 0, 0, 7)
    sender.end_call()
    assert proxies[0].drain(LIMIT_S) == keeps
    if keeps:
        assert proxies[0].failure is None
        wait_until(lambda: receiver.poll(0, 0, 0) == 7)
    else:
        failure = proxies[0].failure
        assert failure is not None
        assert failure[0] == 2
    receiver.end_call()
    proxies[0].close(LIMIT_S)
    proxies[1].close(LIMIT_S)


def make_fabric_pair(provider: str, has_remote_data: bool) -> list[_C.Proxy]:
    """Two ranks of two domains, joined by libfabric."""
    proxies = []
    for i in range(2):
        layout = _C.LinkLayout(num_domains=2, domain_idx=i, rings=RINGS)
        host = "127.0.0.1" if provider == "tcp" else ""
        proxies.append(_C.fabric_proxy(layout=layout, provider=provider, host=host, has_remote_data=has_remote_data))
    _connect(proxies)
    return proxies


def _resources() -> tuple[int, int]:
    """Memory of this process in bytes, and open files."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE"), len(os.listdir("/proc/self/fd"))


@needs_fabric
@pytest.mark.parametrize(
    ("provider", "has_remote_data"), [("tcp", True), ("tcp", False), ("shm", True), ("shm", False)]
)
def test_many_calls_over_libfabric(provider: str, has_remote_data: bool) -> None:
    """With words that are told to the CPU of the receiver, and with words that are written after their chunk.

    In 10,000 calls of all together nothing grows, and without a call the threads take less than 1 % of a core each.
    """
    proxies = make_fabric_pair(provider, has_remote_data)
    writers = [_C.HostWriter(proxy, 0) for proxy in proxies]

    def run(end: int, epochs: range) -> int:
        num_right = 0
        for epoch in epochs:
            proxies[end].begin_call()
            _, _, num_come, num_wrong = writers[end].run_chunks(
                proxies[end],
                ring=0,
                num_out=1,
                num_in=1,
                num_bytes=RINGS[0][0],
                epoch=epoch,
                verifies=True,
                timeout_s=LIMIT_S,
            )
            writers[end].end_call()
            num_right += num_come - num_wrong
        return num_right

    with ThreadPoolExecutor(2) as threads:
        for epochs in (range(1, 501), range(501, 2501)):
            before = _resources()
            assert list(threads.map(run, range(2), [epochs] * 2)) == [len(epochs)] * 2
    num_bytes, num_files = _resources()
    assert num_bytes < before[0] + (1 << 20)
    assert num_files == before[1]
    wait_until(lambda: all(proxy.counts["sleeps"] > 0 and proxy.counts["calls"] == 2500 for proxy in proxies))
    time.sleep(1)  # where a descriptor is of no use, the threads find that out first
    begin = time.process_time()
    time.sleep(1)
    assert time.process_time() - begin < 0.02
    assert [proxy.failure for proxy in proxies] == [None] * 2
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda proxy: proxy.close(LIMIT_S), proxies)) == [True] * 2


@needs_fabric
def test_what_libfabric_cannot_open_is_named() -> None:
    layout = _C.LinkLayout(num_domains=2, domain_idx=0, rings=RINGS)
    for options, told in (
        ({"provider": "pigeon"}, "libfabric finds no network for provider pigeon here"),
        ({"provider": "tcp", "devices": ["eth99"]}, "libfabric has no device 'eth99' of this provider; it has: "),
        ({"provider": "tcp", "host": "192.0.2.1"}, "libfabric: fi_endpoint on tcp: Cannot assign requested address"),
    ):
        with pytest.raises(ConnectionError, match=re.escape(told)):
            _C.fabric_proxy(layout=layout, **options)
    proxies = []
    for i, provider in enumerate(("tcp", "shm")):
        layout = _C.LinkLayout(num_domains=2, domain_idx=i, rings=RINGS)
        proxies.append(_C.fabric_proxy(layout=layout, provider=provider))
    with pytest.raises(
        ConnectionError, match="it has provider shm with 1 NICs; this rank tcp with 1; allowed: the same"
    ):
        proxies[0].connect([proxy.address() for proxy in proxies], LIMIT_S)
    silent = _C.fabric_proxy(layout=layout, provider="tcp")
    with pytest.raises(ConnectionError, match="libfabric provider tcp: it does not answer in time"):
        proxies[0].connect([b"", silent.address()], 0.2)


def test_sleeps_without_a_call() -> None:
    """With no call open the threads take less than 1 % of a core, and the next call wakes them."""
    proxies, (sender, receiver) = make_pair()
    for writer in (sender, receiver):
        writer.end_call()
    wait_until(lambda: all(proxy.counts["sleeps"] > 0 and proxy.counts["calls"] == 1 for proxy in proxies))
    begin = time.process_time()
    time.sleep(1)
    assert time.process_time() - begin < 0.01
    proxies[0].begin_call()
    sender.put(0, 1, 0, 0, 5)
    wait_until(lambda: receiver.poll(0, 0, 0) == 5)
    assert all(proxy.close(LIMIT_S) for proxy in proxies)


def test_is_refused_in_a_forked_child() -> None:
    """A child has no proxy thread: it is told so, and its exit leaves the parent's alone."""
    proxies, (sender, receiver) = make_pair()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            proxies[0].begin_call()
        except RuntimeError as error:
            os.write(write, str(error).encode())
        del proxies, sender
        os._exit(0)
    os.waitpid(child, 0)
    assert b"forked" in os.read(read, 1000)
    sender.put(0, 1, 0, 0, 7)
    wait_until(lambda: receiver.poll(0, 0, 0) == 7)
    assert all(proxy.close(LIMIT_S) for proxy in proxies)


@pytest.mark.parametrize(
    ("ring", "peer", "slot", "num_bytes"), [(2, 1, 0, 16), (0, 0, 0, 16), (0, 1, 8, 16), (0, 1, 0, 272), (0, 1, 0, 8)]
)
def test_command_that_does_not_fit(ring: int, peer: int, slot: int, num_bytes: int) -> None:
    """It fails the link in words, writes nothing, and later commands are dropped."""
    proxies, (sender, receiver) = make_pair()
    sender.put(ring, peer, slot, num_bytes, 1)
    wait_until(lambda: proxies[0].failure is not None)
    failure = proxies[0].failure
    assert failure is not None
    assert f"ring {ring}, peer {peer}, slot {slot}, {num_bytes} bytes" in failure[2]
    sender.put(0, 1, 0, 16, 1)
    wait_until(lambda: sender.num_done == 2)
    assert receiver.poll(0, 0, 0) == 0
    assert not proxies[0].close(LIMIT_S)
    assert proxies[1].close(LIMIT_S)


@pytest.mark.parametrize(("num", "sends"), [(1, b""), (3, b"\0"), (3, b"GET / HTTP/1.0\r\n\r\n"), (300, b"")])
def test_strangers_do_not_keep_peers_from_connecting(num: int, sends: bytes) -> None:
    """Other programs connect to a rank's port before its peer, send nothing or something else, and stay."""
    layouts = [_C.LinkLayout(num_domains=2, domain_idx=i, rings=RINGS) for i in range(2)]
    proxies = [_C.tcp_proxy(layout=layout, host="127.0.0.1", num_fifos=1) for layout in layouts]
    host, port, *_ = proxies[0].address().split()
    with contextlib.ExitStack() as strangers:
        for _ in range(num):
            strangers.enter_context(socket.create_connection((host, int(port)))).sendall(sends)
        _connect(proxies)
        for proxy in proxies:
            proxy.begin_call()
        sender, receiver = (_C.HostWriter(proxy, 0) for proxy in proxies)
        assert sender.put(0, 1, 0, 16, 7)
        wait_until(lambda: receiver.poll(0, 0, 0) == 7)
        sender.end_call()
        receiver.end_call()
    closing = [threading.Thread(target=proxy.close, args=(LIMIT_S,)) for proxy in proxies]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()


def test_a_slow_peer_keeps_its_place_among_strangers() -> None:
    """A peer says half of who it is, 300 strangers connect, and the peer says the rest."""
    layout = _C.LinkLayout(num_domains=2, domain_idx=0, rings=RINGS)
    proxy = _C.tcp_proxy(layout=layout, host="127.0.0.1", num_fifos=1)
    host, port, secret, num_connections = proxy.address().split()
    with contextlib.ExitStack() as sockets, ThreadPoolExecutor(1) as pool:
        hellos = {
            sockets.enter_context(socket.create_connection((host, int(port)))): struct.pack("=QII", int(secret), 1, i)
            for i in range(int(num_connections))
        }
        for peer, hello in hellos.items():
            peer.sendall(hello[:7])
        connecting = pool.submit(proxy.connect, [b"", b""], LIMIT_S / 2)
        for _ in range(300):
            sockets.enter_context(socket.create_connection((host, int(port))))
        time.sleep(0.2)
        for peer, hello in hellos.items():
            peer.sendall(hello[7:])
        connecting.result(LIMIT_S)
    proxy.close(0)


def test_no_descriptor_is_left_for_a_peer() -> None:
    """The process has as many open files as it may have: connecting ends with that reason."""
    script = (
        "import os, resource, socket\n"
        "from hybrid_ep import _C\n"
        f"layout = _C.LinkLayout(num_domains=2, domain_idx=0, rings={RINGS})\n"
        "proxy = _C.tcp_proxy(layout=layout, host='127.0.0.1')\n"
        "host, port, *_ = proxy.address().split()\n"
        "stranger = socket.create_connection((host, int(port)))\n"
        "most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir('/proc/self/fd'))), most))\n"
        "while True:\n"
        "    try:\n"
        "        os.dup(0)\n"
        "    except OSError:\n"
        "        break\n"
        "proxy.connect([b'', b''], 1.0)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert "tcp: accept on 127.0.0.1: Too many open files" in ended.stderr


def test_a_call_ends_although_its_fifo_is_full() -> None:
    """A peer that takes nothing fills the FIFO; then it is lost, and the thread sleeps."""
    layout = _C.LinkLayout(num_domains=2, domain_idx=0, rings=[(1 << 18, 8, 4)])
    proxy = _C.tcp_proxy(layout=layout, host="127.0.0.1", num_connections=1, num_fifos=1)
    host, port, secret, _ = proxy.address().split()
    with socket.create_connection((host, int(port))) as peer:
        peer.sendall(struct.pack("=QII", int(secret), 1, 0))
        proxy.connect([b"", b""], LIMIT_S)
        proxy.begin_call()
        sender = _C.HostWriter(proxy, 0)
        last_taken = time.monotonic()
        while time.monotonic() < last_taken + 0.5:
            if sender.put(0, 1, 0, 1 << 18, 1):
                last_taken = time.monotonic()
        assert proxy.failure is None
        num_sleeps = proxy.counts["sleeps"]  # it does not sleep while a call is open
        assert sender.end_call(), "the end of the call is lost"
    wait_until(lambda: proxy.failure is not None)
    wait_until(lambda: proxy.counts["calls"] == 1)
    wait_until(lambda: proxy.counts["sleeps"] > num_sleeps)
    assert not proxy.close(LIMIT_S)


@pytest.mark.parametrize("transport", ["loopback", "tcp"])
@pytest.mark.parametrize("num_near", [2, 3])
def test_ranks_near_each_other_have_no_slots_for_each_other(transport: str, num_near: int) -> None:
    """Of six ranks, so many in a row are not joined. Every chunk and credit has a place of its own."""
    layouts = [_C.LinkLayout(num_domains=6, domain_idx=i, rings=RINGS, num_near=num_near) for i in range(6)]
    num_peers = 6 - num_near
    assert {layout.window_bytes for layout in layouts} == {
        2 * num_peers * sum(num_bytes * num_slots for num_bytes, num_slots, _ in RINGS)
    }
    assert {layout.num_words for layout in layouts} == {
        num_peers * sum(num_slots + num_slots // per_credit for _, num_slots, per_credit in RINGS)
    }
    make = {
        "loopback": lambda layout: _C.loopback_proxy(layout=layout),
        "tcp": lambda layout: _C.tcp_proxy(layout=layout, host="127.0.0.1"),
    }[transport]
    proxies = [make(layout) for layout in layouts]
    _connect(proxies)
    for proxy in proxies:
        proxy.begin_call()
    writers = [_C.HostWriter(proxy, 0) for proxy in proxies]
    pairs = [(a, b) for a in range(6) for b in range(6) if a // num_near != b // num_near]
    for a, b in pairs:
        for slot in range(8):
            number = 64 * (6 * a + b) + slot + 1
            writers[a].send_slot(0, b, slot)[:16] = number.to_bytes(16, "little")
            assert writers[a].put(0, b, slot, 16, number)
        assert writers[a].credit(0, b, 1, 6 * a + b + 1)
    for a, b in pairs:
        for slot in range(8):
            number = 64 * (6 * a + b) + slot + 1
            wait_until(functools.partial(_has_come, writers[b], a, slot, number))
            assert bytes(writers[b].recv_slot(0, a, slot)[:16]) == number.to_bytes(16, "little")
        wait_until(functools.partial(_has_credit, writers[b], a, 6 * a + b + 1))
    with pytest.raises(ValueError, match="peer is 1; allowed: another domain that the link joins"):
        writers[0].send_slot(0, 1, 0)
    closing = [threading.Thread(target=proxy.close, args=(LIMIT_S,)) for proxy in proxies]
    for writer in writers:
        writer.end_call()
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()
    assert [proxy.failure for proxy in proxies] == [None] * 6


def _has_come(writer: _C.HostWriter, peer: int, slot: int, number: int) -> bool:
    return writer.poll(0, peer, slot) == number


def _has_credit(writer: _C.HostWriter, peer: int, word: int) -> bool:
    return writer.poll_credit(0, peer, 1) == word


def test_layout_names_the_value() -> None:
    """Shapes that are not allowed are told with what is."""
    for options, text in (
        ({"num_domains": 65}, "num_domains is 65; allowed: 2 to 64"),
        ({"domain_idx": 2}, "domain_idx is 2"),
        ({"rings": [(100, 8, 4)]}, "slot_bytes is 100; allowed: positive multiples of 128"),
        ({"rings": [(128, 8, 3)]}, "slots_per_credit is 3; allowed: divisors of num_slots"),
        ({"rings": []}, "num_rings is 0"),
        ({"num_near": 0}, "num_near is 0; allowed: divisors of num_domains, and less"),
        ({"num_near": 2}, "num_near is 2; allowed: divisors of num_domains, and less"),
    ):
        arguments = {"num_domains": 2, "domain_idx": 0, "rings": RINGS} | options
        with pytest.raises(ValueError, match=text):
            _C.LinkLayout(**arguments)  # type: ignore[arg-type]


def test_writers_of_several_fifos() -> None:
    """Writers on FIFOs of their own do not disturb each other."""
    proxies, (_, receiver) = make_pair(num_fifos=4)
    num = 2000

    def write(fifo: int) -> None:
        writer = _C.HostWriter(proxies[0], fifo)
        for i in range(num):
            while not writer.put(0, 1, fifo, 0, i + 1):
                pass

    threads = [threading.Thread(target=write, args=(fifo,)) for fifo in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: [receiver.poll(0, 0, slot) for slot in range(1, 4)] == [num] * 3)
    assert proxies[0].counts["puts"] == 3 * num
    assert all(proxy.close(LIMIT_S) for proxy in proxies)


def _cpus_of_proxies() -> list[str]:
    """Where the proxy threads of this process may run, as the kernel says it."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            if (task / "comm").read_text().strip() == "hybrid_ep_proxy":
                status = (task / "status").read_text()
                cpus = next(line.split()[1] for line in status.splitlines() if line.startswith("Cpus_allowed_list"))
                found.append(cpus)
    return found


def test_thread_runs_on_the_cpus_it_is_given() -> None:
    cpu = max(os.sched_getaffinity(0))
    layouts = [_C.LinkLayout(num_domains=2, domain_idx=i, rings=RINGS) for i in range(2)]
    proxies = [_C.loopback_proxy(layout=layout, cpus=[cpu]) for layout in layouts]
    addresses = [proxy.address() for proxy in proxies]
    for proxy in proxies:
        proxy.connect(addresses, LIMIT_S)
    wait_until(lambda: _cpus_of_proxies() == [str(cpu)] * 2)
    assert all(proxy.close(LIMIT_S) for proxy in proxies)
    with pytest.raises(ValueError, match="cpus is 1024; allowed: 0 to 1023"):
        _C.loopback_proxy(layout=layouts[0], cpus=[1024])


def test_a_paced_link_has_the_rate_of_a_nic() -> None:
    """Chunks take the time that their bytes need at this rate, in order. A credit does not wait for them."""
    gbytes_per_s, num_bytes = 2e-6, 1024  # 0.5 s a chunk
    layouts = [_C.LinkLayout(num_domains=2, domain_idx=i, rings=RINGS) for i in range(2)]
    proxies = [_C.loopback_proxy(layout=layout, gbytes_per_s=gbytes_per_s, num_fifos=1) for layout in layouts]
    _connect(proxies)
    for proxy in proxies:
        proxy.begin_call()
    sender, receiver = (_C.HostWriter(proxy, 0) for proxy in proxies)
    assert proxies[0].describe == "loopback by memcpy, at 2e-06 GB/s"
    begin, seconds = time.monotonic(), num_bytes / gbytes_per_s / 1e9
    for slot in range(3):
        assert sender.put(1, 1, slot, num_bytes, slot + 1)
    assert sender.credit(1, 1, 0, 9)
    wait_until(lambda: receiver.poll_credit(1, 0, 0) == 9)
    assert receiver.poll(1, 0, 2) != 3, "a credit has waited for chunks"
    for slot in range(3):
        wait_until(lambda slot=slot: receiver.poll(1, 0, slot) == slot + 1)  # type: ignore[misc]
        assert (slot + 1) * seconds <= time.monotonic() - begin
        assert receiver.poll(1, 0, (slot + 1) % 4) == 0
    assert not proxies[0].drain(0)  # the call has not ended
    sender.end_call()
    assert proxies[0].drain(LIMIT_S)
    with pytest.raises(ValueError, match="gbytes_per_s is -1"):
        _C.loopback_proxy(layout=layouts[0], gbytes_per_s=-1)
