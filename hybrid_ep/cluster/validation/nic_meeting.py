"""NIC to NIC bandwidth between two nodes: the nodes meet, and agree on which memory is written and by what.

Perftest measures if it supports CUDA on both nodes, or if there is no GPU. Otherwise the verbs transport carries chunks
between the nodes' GPUs. If a NIC takes no GPU memory, the result is `unknown`: host memory is never used instead.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from hybrid_ep.agree.rendezvous import exchange, refuse
from hybrid_ep.cluster.doctor import Unreadable
from hybrid_ep.cluster.doctor.active.gpu_direct import End, open_gpu_end
from hybrid_ep.cluster.validation.perftest import (
    AT_ONCE,
    BOTH_WAYS,
    LATENCY,
    ONE_WAY,
    Memory,
    Step,
    choose_memory,
    listen,
    listen_once,
    metrics_of,
    nearest_gpus,
    nics_of_gpus,
    perftest_obstacle,
    write_once,
    write_to,
)
from hybrid_ep.errors import HybridEPError, TopologyError, TransportError
from hybrid_ep.topology import Topology

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_RANKS = (0, 1)
_SECONDS = 2.0
_WHERE = "NIC to NIC"
_Open = Callable[[int, int, str, int | None], End]


@dataclass(frozen=True)
class _Node:
    """What one node sends to the other.

    Attributes:
        num_nics: that are measured.
        has_gpus: whether it has any.
        obstacle: why its perftest cannot use GPU memory; empty where it can.
        has_latency: whether it has ib_write_lat.
    """

    num_nics: int
    has_gpus: bool
    obstacle: str
    has_latency: bool


def measure_between(
    rank: int,
    store: Store,
    address: str,
    topology: Topology,
    gid_index: int | None,
    limit_s: float,
    open_end: _Open = open_gpu_end,
) -> dict[str, Any]:
    """Measures; both ranks call it, and rank 1 writes.

    Args:
        rank: 0 or 1.
        store: where they meet.
        address: of rank 0's node.
        topology: of this node.
        gid_index: of Ethernet ports.
        limit_s: for each NIC and measurement.
        open_end: makes this node's end from its number, GPU, NIC and GID index.

    Returns:
        The job's result, as `hybrid_ep.cluster.validation.perftest.write_to` has it; at rank 0 it may know less.

    Raises:
        TimeoutError: the other rank has not come.
    """
    gpus = bool(topology.gpus)
    obstacle = perftest_obstacle() if gpus else ""
    mine = _Node(len(nics_of_gpus(topology)), gpus, obstacle, shutil.which("ib_write_lat") is not None)
    told = exchange(store, "nodes", rank, _RANKS, json.dumps(asdict(mine)).encode(), limit_s, where=_WHERE)
    nodes = [_Node(**json.loads(told[idx])) for idx in _RANKS]
    lacking = next((node.obstacle for node in nodes if node.obstacle), "")
    if all(node.has_gpus for node in nodes) and lacking and all(node.num_nics for node in nodes):
        return _Between(rank, store, address, topology, gid_index, limit_s, open_end, nodes, lacking).measure()
    memory = choose_memory(topology) if all(node.has_gpus for node in nodes) else Memory({}, (), "host memory")
    if rank == 1:
        return write_to(address, topology, gid_index, limit_s, memory)
    listen(topology, gid_index, limit_s, memory)
    return {"ok": True, "status": "pass", "reason": "", "metrics": []}


@dataclass
class _Between:
    """The measurement by the verbs transport; what both ranks do, step by step."""

    rank: int
    store: Store
    address: str
    topology: Topology
    gid_index: int | None
    limit_s: float
    open_end: _Open
    nodes: list[_Node]
    lacking: str

    def measure(self) -> dict[str, Any]:
        """The job's result."""
        names = nics_of_gpus(self.topology)[: min(node.num_nics for node in self.nodes)]
        seen: dict[str, dict[str, float]] = {}
        faults: dict[str, str] = {}
        try:
            for step in (ONE_WAY, BOTH_WAYS):
                for number, name in enumerate(names):
                    if name not in faults:
                        self._take(step, number, name, seen, faults)
            with ThreadPoolExecutor(len(names)) as pool:
                running = [
                    pool.submit(self._take, AT_ONCE, number, name, seen, faults)
                    for number, name in enumerate(names)
                    if name not in faults
                ]
            for each in running:
                each.result()
        except Unreadable as error:
            return {"ok": False, "status": "unknown", "reason": f"{self.lacking}; {error}", "metrics": []}
        if all(node.has_latency for node in self.nodes):
            self._take_latency(names, seen, faults)
        said = f"GPU memory, by the verbs transport: {self.lacking}"
        reason = "; ".join([*(f"{name}: {fault}" for name, fault in faults.items()), said])
        return {
            "ok": not faults,
            "status": "fail" if faults else "pass",
            "reason": reason,
            "metrics": metrics_of(seen),
        }

    def _take(
        self, step: Step, number: int, name: str, seen: dict[str, dict[str, float]], faults: dict[str, str]
    ) -> None:
        """Measures one NIC; both ranks note the same kind of fault, so that both leave it out of what follows.

        Raises:
            Unreadable: GPU memory cannot be registered, here or there.
        """
        meet = partial(self._meet, f"{step.metric}/{number}")
        try:
            end = self._open(step, number, name)
            try:
                addresses = meet("address", end.address())
                end.connect([addresses[idx] for idx in _RANKS])
                meet("ready", b"")
                both = step is BOTH_WAYS
                written = end.measure(
                    _SECONDS,
                    sends=both or self.rank == 1,
                    receives=both or self.rank == 0,
                    meet=partial(meet, "end", b""),
                )
                wrong = sum(int(value) for value in meet("wrong", str(written.num_wrong).encode()).values())
            except HybridEPError as error:
                for word in ("ready", "end", "wrong"):  # wherever the other one waits
                    refuse(self.store, f"{step.metric}/{number}/{word}", self.rank, str(error))
                raise
        except TransportError as error:
            faults[name] = f"{step.metric}: {error.detail}" if step is not ONE_WAY else error.detail
            return
        seen.setdefault(step.metric, {})[name] = 8 * written.gbytes_per_s
        if wrong:
            faults[name] = f"{step.metric}: {wrong} chunks with other bytes"

    def _open(self, step: Step, number: int, name: str) -> End:
        """This node's end; what one node cannot open, neither measures."""
        prefix = f"{step.metric}/{number}/open"
        try:
            end = self.open_end(self.rank, nearest_gpus(self.topology)[name], name, self.gid_index)
        except (TopologyError, Unreadable) as error:
            refuse(self.store, prefix, self.rank, str(error))
            raise Unreadable(str(error)) from None
        try:
            exchange(self.store, prefix, self.rank, _RANKS, b"", self.limit_s, where=_WHERE)
        except TransportError as error:
            raise Unreadable(f"the other node: {error.detail}") from None
        return end

    def _meet(self, prefix: str, word: str, value: bytes) -> Mapping[int, bytes]:
        return exchange(self.store, f"{prefix}/{word}", self.rank, _RANKS, value, self.limit_s, where=_WHERE)

    def _take_latency(self, names: list[str], seen: dict[str, dict[str, float]], faults: dict[str, str]) -> None:
        """By perftest, of host memory, as with any memory."""
        for number, name in enumerate(names):
            if name in faults:
                continue
            if self.rank == 0:
                listen_once(self.topology, self.gid_index, LATENCY, name, number, self.limit_s)
                continue
            try:
                value = write_once(self.topology, self.gid_index, LATENCY, name, number, self.limit_s, self.address)
            except HybridEPError as error:
                faults[name] = f"{LATENCY.metric}: {error}"
            else:
                seen.setdefault(LATENCY.metric, {})[name] = value
