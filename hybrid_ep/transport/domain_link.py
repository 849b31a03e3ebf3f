"""A rank's link to its peers in the other domains, as the engine holds it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hybrid_ep import env
from hybrid_ep.agree.rendezvous import exchange, refuse
from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.core.host import host_name
from hybrid_ep.errors import ClosedError, ConfigError, TransportError
from hybrid_ep.topology import near_cpus, probe
from hybrid_ep.transport import nvshmem
from hybrid_ep.transport.choice import (
    TransportChoice,
    TransportState,
    agree_on_transport,
    fabric_provider,
    survey,
)
from hybrid_ep.transport.settings import fabric_nics, gpu_idx_of, local_address, nic_names

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import Store

    from hybrid_ep._C import Faults, LinkView, Proxy

_WHERE = "a link between domains"


@dataclass(frozen=True)
class Ring:
    """The slots that chunks of one kind pass through, per peer and direction.

    Attributes:
        slot_bytes: of a chunk at most; a multiple of 128.
        num_slots: the most chunks in flight to a peer.
        slots_per_credit: chunks that the receiver reads before it returns a credit; divides `num_slots`.
    """

    slot_bytes: int
    num_slots: int
    slots_per_credit: int


class DomainLink:
    """Connections to the peers and the proxy thread that feeds them; made by `open_link`.

    Attributes:
        choice: which transport it is, and why.
        proxy: the native object; `proxy.view()` is for kernels.
        kernels: a capsule of kernels compiled for this link, which `_cuda` launches; None: `_cuda` launches its own.
    """

    def __init__(
        self,
        choice: TransportChoice,
        proxy: Proxy,
        grid: RankGrid,
        num_near: int,
        memory: Any = None,
        kernels: Any = None,
    ) -> None:
        self.choice = choice
        self.proxy = proxy
        self.kernels = kernels
        self._grid, self._num_near = grid, num_near
        self._memory = memory  # that the transport uses
        self._is_closed = False

    @property
    def description(self) -> str:
        """Describes the link for people: devices, connections, where the rings are."""
        return self.proxy.describe

    @property
    def num_peers(self) -> int:
        """Ranks at the other ends."""
        return self._grid.num_domains - self._num_near

    def view(self) -> LinkView:
        """Returns the view of the link that kernels get."""
        self._require_open()
        return self.proxy.view()

    def begin_call(self) -> None:
        """Opens a call: once before the launch of each kernel that gives commands."""
        self._require_open()
        self.proxy.begin_call()

    def check(self, where: str) -> None:
        """Raises the error that the transport has reported.

        Args:
            where: the call, for the error.

        Raises:
            TransportError: a peer or a NIC is lost; it names the rank, the device and what the device says.
        """
        if (failure := self.proxy.failure) is not None:
            domain_idx, device, detail = failure
            peer = None if domain_idx < 0 else self._grid.peers[domain_idx]
            raise TransportError(where, self._grid.rank, peer, f"{device}: {detail}")

    def drain(self, timeout_s: float) -> bool:
        """Returns whether all that the kernels of this rank have sent is complete in time. They must have ended."""
        is_complete = self.proxy.drain(timeout_s)
        if isinstance(self._memory, nvshmem.Window):
            is_complete = self._memory.drain(timeout_s) and is_complete
        return is_complete

    def close(self, timeout_s: float = 1.0) -> bool:
        """Completes what is in flight, for so long at most, and ends the connections. May be called again.

        Returns:
            Whether everything was completed.
        """
        is_complete = self.proxy.close(timeout_s)
        if isinstance(self._memory, nvshmem.Window) and not self._is_closed:
            is_complete = self._memory.give_back(timeout_s) and is_complete
        self._is_closed = True
        return is_complete

    def _require_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the link between domains is closed")


def open_link(
    group: dist.ProcessGroup,
    grid: RankGrid,
    rings: Sequence[Ring],
    *,
    device: torch.device,
    timeout_s: float,
    native: Any,
    asked: str | None = None,
    map_symmetric: Callable[[int], Sequence[int]] | None = None,
    num_near: int = 1,
    keeps_other_peers: bool = False,
    faults: Faults | None = None,
) -> DomainLink:
    """Connects this rank to its peers. Collective: every rank of the group calls it with the same rings.

    Args:
        group: the process group.
        grid: the domains; at least two.
        rings: up to 4 rings for each peer.
        device: GPU whose kernels use the link, or the CPU.
        timeout_s: how long to wait for ranks here. In calls, a silent peer counts as lost after half of it.
        native: the module whose kernels use the link: ``_cuda``, or ``_C`` without kernels.
        asked: ``auto`` or a transport; None = ``HYBRID_EP_TRANSPORT``.
        map_symmetric: allocates a number of bytes at every rank, and returns the addresses in this process of the
            memory of `grid.peers`. Loopback on GPUs needs it: kernels write the peers' windows themselves.
        num_near: consecutive domains of `grid` that the link does not join to each other, because NVLink does: the
            ranks of a domain, if each rank of `grid` is a domain. 1: the link joins all.
        keeps_other_peers: the link goes on when a peer is lost, and drops what is sent to that peer.
        faults: faults of the network, for tests; only where a proxy carries the chunks.

    Raises:
        ConfigError: the transport that was asked for cannot be used at some rank, or the grids of ranks differ.
        TimeoutError: a rank has not come in time.
        TransportError: a connection could not be made.
    """
    from hybrid_ep.agree.board import Board
    from hybrid_ep.agree.roll_call import MIN_TIMEOUT_S, gather_all

    asked = env.TRANSPORT.get() if asked is None else asked
    size = grid.num_ranks_per_domain
    mine = json.dumps({"host": host_name(), "states": [asdict(state) for state in survey()], "size": size})
    # The store and no collective: that would wait for a lost rank for the group's own timeout, and name no rank.
    texts, number = gather_all(group, "link", mine, timeout_s=max(timeout_s, MIN_TIMEOUT_S), where=_WHERE)
    votes = [json.loads(text) for text in texts]
    for rank, vote in enumerate(votes):
        if vote["size"] != votes[0]["size"]:
            sizes = f"{votes[0]['size']} at rank 0 and {vote['size']} at rank {rank}"
            allowed = "the same on every rank; enable_shrink makes it 1"
            raise ConfigError(f"ranks that a peer of the link stands for is {sizes}; allowed: {allowed}")
    by_rank = [[TransportState(**state) for state in vote["states"]] for vote in votes]
    choice = agree_on_transport(by_rank, [vote["host"] for vote in votes], asked)
    if choice.name == "nvshmem" and not hasattr(native, "BetweenCommunicator"):
        raise ConfigError(
            "transport is 'nvshmem' without the cuda engine; allowed then: verbs, libfabric, tcp or loopback"
        )
    board = Board.of(group).at(f"link {number}")
    store, prefix = board.store, board.name
    return connect_link(
        choice,
        store,
        prefix,
        grid,
        rings,
        device=device,
        timeout_s=timeout_s,
        native=native,
        map_symmetric=map_symmetric,
        num_near=num_near,
        keeps_other_peers=keeps_other_peers,
        faults=faults,
    )


def connect_link(
    choice: TransportChoice,
    store: Store,
    prefix: str,
    grid: RankGrid,
    rings: Sequence[Ring],
    *,
    device: torch.device,
    timeout_s: float,
    native: Any,
    map_symmetric: Callable[[int], Sequence[int]] | None = None,
    num_near: int = 1,
    keeps_other_peers: bool = False,
    faults: Faults | None = None,
) -> DomainLink:
    """Connects this rank to its peers by a transport that all ranks have chosen. Collective; does not import torch.

    Args:
        choice: the transport, equal at all ranks.
        store: a store that all ranks reach, for their addresses.
        prefix: name of this link in the store; used once.
        grid, rings, device, timeout_s, native, map_symmetric, num_near, keeps_other_peers, faults: as in `open_link`.

    Raises:
        TimeoutError, TransportError: as `open_link`.
    """
    layout = native.LinkLayout(
        num_domains=grid.num_domains,
        domain_idx=grid.domain_idx,
        num_near=num_near,
        rings=[(ring.slot_bytes, ring.num_slots, ring.slots_per_credit) for ring in rings],
    )
    where = f"transport {choice.name}"
    step, kernels = "address", None
    try:
        if choice.name == "nvshmem":
            proxy, memory, kernels = _nvshmem_proxy(native, layout, store, prefix, grid, device, timeout_s)
        else:
            proxy, memory = _make_proxy(choice.name, native, layout, device, timeout_s, map_symmetric, faults)
        if keeps_other_peers:
            proxy.keep_other_peers()
        addresses = exchange(store, f"{prefix}/{step}", grid.rank, grid.peers, proxy.address(), timeout_s, where=where)
        step = "ready"
        proxy.connect([addresses[peer] for peer in grid.peers], timeout_s)
        # No rank sends before all can receive.
        exchange(store, f"{prefix}/{step}", grid.rank, grid.peers, b"", timeout_s, where=where)
    except ConnectionError as error:
        domain_idx, what = error.args
        refuse(store, f"{prefix}/{step}", grid.rank, what)
        raise TransportError(where, grid.rank, None if domain_idx < 0 else grid.peers[domain_idx], what) from error
    return DomainLink(choice, proxy, grid, num_near, memory, kernels)


def _nvshmem_proxy(
    native: Any, layout: Any, store: Store, prefix: str, grid: RankGrid, device: torch.device, timeout_s: float
) -> tuple[Proxy, nvshmem.Window, Any]:
    """Returns the proxy, which carries nothing, the window that holds its rings, and the kernels for NVSHMEM.

    The kernels are None if every peer's window is mapped: the kernels of `_cuda` write them, as with loopback.
    """
    topology, device_idx = probe(), device.index or 0
    num_bytes = layout.window_bytes + 8 * layout.num_words
    window = nvshmem.take_window(
        store, prefix, grid.rank, grid.num_ranks, num_bytes, device=device_idx, timeout_s=timeout_s
    )
    windows = window.map_at(grid.peers)
    proxy = native.nvshmem_proxy(
        layout=layout,
        windows=windows,
        pes=list(grid.peers),
        device=device_idx,
        cpus=near_cpus(topology, gpu_idx_of(topology, device)),
    )
    uses_mapped = all(windows) and len(windows) <= native.max_mapped_domains
    return proxy, window, None if uses_mapped else nvshmem.kernels()


def _make_proxy(
    name: str,
    native: Any,
    layout: Any,
    device: torch.device,
    timeout_s: float,
    map_symmetric: Callable[[int], Sequence[int]] | None,
    faults: Faults | None,
) -> tuple[Proxy, Any]:
    """Returns the proxy, and the tensor that holds its rings."""
    on_gpu = device.type == "cuda"
    topology = probe()
    gpu_idx = gpu_idx_of(topology, device)
    options: dict[str, Any] = {
        "layout": layout,
        "device": (device.index or 0) if on_gpu else 0,
        "cpus": near_cpus(topology, gpu_idx),
    }
    if faults is not None:
        options["faults"] = faults
    num_bytes = layout.window_bytes + 8 * layout.num_words
    if name == "loopback":
        assert map_symmetric is not None or not on_gpu, "loopback on GPUs needs symmetric memory"
        if map_symmetric is not None and faults is None:
            options["windows"] = list(map_symmetric(num_bytes))
        options["gbytes_per_s"] = env.LOOPBACK_RATE.get()
        return native.loopback_proxy(**options), None
    if name == "tcp":
        options |= {"host": local_address(), "num_connections": env.TCP_CONNECTIONS.get(), "timeout_s": timeout_s}
        return native.tcp_proxy(**options), None
    memory = None
    if on_gpu:
        import torch

        memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)
    options |= {"timeout_s": timeout_s, "memory": 0 if memory is None else memory.data_ptr()}
    if name == "libfabric":
        provider = fabric_provider()
        proxy = native.fabric_proxy(
            provider=provider,
            devices=fabric_nics(topology, gpu_idx, provider),
            host=local_address() if provider == "tcp" else "",
            has_remote_data=provider != "cxi",
            **options,
        )
        return proxy, memory
    proxy = native.verbs_proxy(
        devices=nic_names(topology, gpu_idx),
        gid_index=env.GID_INDEX.get(),
        pkey_index=env.PKEY_INDEX.get(),
        service_level=env.SERVICE_LEVEL.get(),
        traffic_class=env.TRAFFIC_CLASS.get(),
        mtu_bytes=env.RDMA_MTU.get(),
        num_queue_pairs=env.QUEUE_PAIRS.get(),
        relaxed_ordering=env.RELAXED_ORDERING.get() == "1",
        **options,
    )
    return proxy, memory
