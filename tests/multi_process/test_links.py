"""Links between domains over loopback, tcp and libfabric: real ranks, with threads of the host instead of kernels."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybrid_ep import _C, TransportError
from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.errors import ClosedError, ConfigError, TimeoutError
from hybrid_ep.testing.cluster import VirtualCluster
from hybrid_ep.transport import DomainLink, Ring, open_link
from tests.conftest import RunRanks
from tests.rank_pool import needs_fabric, variables_over

RINGS = (Ring(slot_bytes=16 * 1024, num_slots=8, slots_per_credit=4), Ring(512, 3, 1))
LIMIT_S = 30.0
TIMEOUT_S = 6.0


@dataclass(frozen=True)
class Network:
    """A transport, as `variables_over` takes it, and what goes wrong on its way."""

    name: str
    max_delay_us: int = 0
    lost_fraction: float = 0.0

    def __str__(self) -> str:
        return f"{self.name}-{self.max_delay_us}us-{self.lost_fraction}"


def _open(network: Network, num_ranks_per_domain: int = 1, timeout_s: float = LIMIT_S) -> DomainLink:
    group = dist.group.WORLD
    assert group is not None
    rank = dist.get_rank()
    faults = _C.Faults(seed=rank, max_delay_us=network.max_delay_us, lost_fraction=network.lost_fraction)
    grid = RankGrid(rank, dist.get_world_size(), num_ranks_per_domain)
    cpu = torch.device("cpu")
    variables = variables_over(network.name)
    asked = variables.pop("HYBRID_EP_TRANSPORT")
    with mock.patch.dict(os.environ, variables):
        return open_link(group, grid, RINGS, device=cpu, timeout_s=timeout_s, native=_C, asked=asked, faults=faults)


def _run(link: DomainLink, ring: int, num: int, epoch: int, limit_s: float = LIMIT_S) -> tuple[int, int, int]:
    """Returns chunks sent, received and wrong. Where all chunks come, all credits come in time, too."""
    writer = _C.HostWriter(link.proxy, epoch % 8)
    link.begin_call()
    seconds, *figures = writer.run_chunks(
        link.proxy,
        ring=ring,
        num_out=num,
        num_in=num,
        num_bytes=RINGS[ring].slot_bytes,
        epoch=epoch,
        verifies=True,
        timeout_s=limit_s,
    )
    writer.end_call()
    assert figures[1] < num * link.num_peers or seconds < limit_s, "a credit has not come"
    return figures[0], figures[1], figures[2]


def _exchange(network: Network, num_ranks_per_domain: int) -> list[tuple[int, int, int]]:
    link = _open(network, num_ranks_per_domain)
    figures = [_run(link, 0, 50, 1), _run(link, 1, 100, 2)]
    link.check("test")
    link.close()
    with pytest.raises(ClosedError):
        link.begin_call()
    return figures


@pytest.mark.parametrize("shape", [(2, 1), (3, 1), (4, 2)], ids=lambda shape: f"{shape[0]}-ranks-by-{shape[1]}")
@pytest.mark.parametrize(
    "network",
    [
        Network("loopback"),
        Network("tcp"),
        Network("loopback", 2000),
        Network("tcp", 2000),
        pytest.param(Network("libfabric/tcp", 2000), marks=needs_fabric),
        pytest.param(Network("libfabric/shm", 2000), marks=needs_fabric),
    ],
    ids=str,
)
def test_every_chunk_arrives(run_ranks: RunRanks, network: Network, shape: tuple[int, int]) -> None:
    """Over slots that are used many times, also where chunks, flags and credits come late and in another order."""
    num_ranks, num_ranks_per_domain = shape
    num_peers = num_ranks // num_ranks_per_domain - 1
    for figures in run_ranks(num_ranks, _exchange, network, num_ranks_per_domain):
        assert figures == [(50 * num_peers, 50 * num_peers, 0), (100 * num_peers, 100 * num_peers, 0)]


def _lose_chunks() -> tuple[tuple[int, int, int], object]:
    link = _open(Network("loopback", lost_fraction=0.2))
    figures = _run(link, 0, 50, 1, limit_s=1.0)
    failure = link.proxy.failure
    link.close()
    return figures, failure


def test_lost_chunks_are_missing(run_ranks: RunRanks) -> None:
    """A network that loses chunks without a word: what has come is right, and the wait for the rest ends in time."""
    for (_, num_received, num_wrong), failure in run_ranks(2, _lose_chunks):
        assert num_received < 50
        assert num_wrong == 0
        assert failure is None


def _lose_peer(transport: str, victim: int) -> tuple[str, int | None, str]:
    # libfabric learns of a loss by silence, and a survivor on a busy machine must not be silent for half of this.
    timeout_s = TIMEOUT_S if transport == "tcp" else 5 * TIMEOUT_S
    link = _open(Network(transport), timeout_s=timeout_s)
    _run(link, 0, 10, 1)
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    _run(link, 0, 100_000, 2, limit_s=3 * timeout_s)
    try:
        link.check("test: rows")
    except TransportError as error:
        return type(error).__name__, error.peer, str(error)
    return "nothing", None, ""


@pytest.mark.parametrize(
    ("transport", "told"),
    [
        ("tcp", "tcp to 127.0.0.1 port"),
        pytest.param("libfabric/tcp", "libfabric tcp on lo: ", marks=needs_fabric),
        pytest.param("libfabric/shm", "libfabric shm on shm: ", marks=needs_fabric),
    ],
)
def test_survivors_name_the_killed_peer(transport: str, told: str) -> None:
    """They are told by which socket, or by which provider and device."""
    victim = 1
    with VirtualCluster(3) as cluster:
        cluster.start(_lose_peer, transport, victim)
        for name, peer, text in cluster.collect([0, 2], limit_s=2 * LIMIT_S):
            assert (name, peer) == ("TransportError", victim)
            assert told in text


def _shared_files() -> list[str]:
    """The files in /dev/shm, by which ranks have connected, as this process has mapped them."""
    link = _open(Network("libfabric/shm"))
    lines = Path("/proc/self/maps").read_text().splitlines()
    link.close()
    return sorted({line.split(maxsplit=5)[5].strip() for line in lines if "/dev/shm/hybrid_ep-" in line})


@needs_fabric
def test_a_killed_rank_leaves_no_file_in_shared_memory(run_ranks: RunRanks) -> None:
    """Its own file and its peer's have names that no other process takes, and lose them once both have mapped them."""
    for names in run_ranks(2, _shared_files):
        assert len(names) == 2
        assert all(name.endswith(" (deleted)") for name in names)


def _miss_a_peer(absent: int) -> tuple[str, int | None]:
    """One rank does not open the link at first; all open it together later."""
    told: tuple[str, int | None] = ("", None)
    if dist.get_rank() != absent:
        with pytest.raises(TimeoutError) as raised:
            _open(Network("loopback"), timeout_s=2.0)
        told = str(raised.value), raised.value.peer
    dist.barrier()
    link = _open(Network("loopback"))
    assert _run(link, 0, 10, 1)[1:] == (20, 0)
    link.close()
    return told


def test_a_rank_that_does_not_come_is_named_in_time(run_ranks: RunRanks) -> None:
    """Before there are addresses to exchange. The ranks meet again afterwards."""
    absent = 2
    for rank, (text, peer) in enumerate(run_ranks(3, _miss_a_peer, absent)):
        if rank != absent:
            assert peer == absent
            assert "a link between domains" in text
            assert "2 s" in text


def _ask_for(name: str) -> str:
    try:
        _open(Network(name))
    except ConfigError as error:
        return str(error)
    return "nothing"


def test_transport_that_is_not_there(run_ranks: RunRanks) -> None:
    """Every rank says the same."""
    said = run_ranks(2, _ask_for, "pigeon")
    assert said == ["transport is 'pigeon'; allowed: auto, verbs, libfabric, tcp, loopback, nvshmem"] * 2
    if not _has_nics():
        said = run_ranks(2, _ask_for, "verbs")
        assert said[0] == said[1]
        assert said[0].startswith("transport is 'verbs', but rank 0: ")


def _has_nics() -> bool:
    try:
        return bool(_C.active_verbs_devices())
    except ConnectionError:
        return False


def _come_alone() -> tuple[str, int | None, str]:
    from hybrid_ep.agree.rendezvous import exchange

    if dist.get_rank() != 0:
        return "", None, ""
    store: Any = dist.distributed_c10d._get_default_store()
    try:
        exchange(store, "test/alone", 0, range(3), b"here", 0.2, where="transport tcp")
    except TimeoutError as error:
        return type(error).__name__, error.peer, str(error)
    return "nothing", None, ""


def test_missing_ranks_are_named(run_ranks: RunRanks) -> None:
    """The rendezvous before the connections ends at its deadline."""
    name, peer, text = run_ranks(3, _come_alone)[0]
    assert (name, peer) == ("TimeoutError", 1)
    assert "waited 0.2 s for rank 1" in text
    assert "ranks [1, 2] are missing" in text


def _refuse() -> tuple[str, int | None, str]:
    from hybrid_ep.agree.rendezvous import exchange, refuse

    store: Any = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        refuse(store, "test/refused", 1, "rxe0 port 1 is not active")
        return "", None, ""
    try:
        exchange(store, "test/refused", 0, range(2), b"here", LIMIT_S, where="transport verbs")
    except TransportError as error:
        return type(error).__name__, error.peer, str(error)
    return "nothing", None, ""


def test_refusal_of_one_rank_reaches_the_others(run_ranks: RunRanks) -> None:
    """They need not wait for their deadline."""
    name, peer, text = run_ranks(2, _refuse)[0]
    assert (name, peer) == ("TransportError", 1)
    assert text.endswith("rxe0 port 1 is not active")
