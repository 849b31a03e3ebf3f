"""NVLink domains of a process group: which ranks can map each other's memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid_ep import env
from hybrid_ep.errors import TopologyError
from hybrid_ep.topology.model import Topology

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class DomainMember:
    """What one rank sends to the others about its GPU.

    Attributes:
        rank: its rank.
        node_id: the same for ranks of one operating system, e.g. the kernel's boot id.
        gpu_uuid: its GPU.
        nvlink_peer_uuids: GPUs of the node that its GPU reaches over NVLink.
        fabric_id: (cluster UUID, clique) where the GPU is part of a multi-node domain, else None.
    """

    rank: int
    node_id: str
    gpu_uuid: str
    nvlink_peer_uuids: frozenset[str]
    fabric_id: tuple[str, int] | None

    def to_json(self) -> str:
        """All fields as text."""
        return json.dumps([*asdict(self).values()], default=sorted)

    @classmethod
    def from_json(cls, text: str) -> DomainMember:
        """Returns the member that `to_json` has made a text of."""
        rank, node_id, gpu_uuid, peers, fabric_id = json.loads(text)
        return cls(rank, node_id, gpu_uuid, frozenset(peers), None if fabric_id is None else tuple(fabric_id))


def find_domains(members: Sequence[DomainMember]) -> tuple[tuple[int, ...], ...]:
    """Groups ranks into domains.

    Two ranks share a domain if their GPUs belong to one clique of one multi-node fabric. They also do if the GPUs are
    in one node and are the same GPU or NVLink peers. The relation is transitive.

    Returns:
        Domains by their first rank, each with its ranks ascending.
    """
    domains: list[list[DomainMember]] = []
    for member in members:
        joined = [domain for domain in domains if any(_connected(member, other) for other in domain)]
        merged = [member] + [other for domain in joined for other in domain]
        domains = [domain for domain in domains if domain not in joined] + [merged]
    return tuple(sorted(tuple(sorted(member.rank for member in domain)) for domain in domains))


def _connected(a: DomainMember, b: DomainMember) -> bool:
    if a.fabric_id is not None and a.fabric_id == b.fabric_id:
        return True
    return a.node_id == b.node_id and (a.gpu_uuid == b.gpu_uuid or b.gpu_uuid in a.nvlink_peer_uuids)


def gather_domains(
    topology: Topology, gpu_idx: int, group: ProcessGroup | None = None, *, timeout_s: float | None = None
) -> tuple[tuple[int, ...], ...]:
    """Finds the domains of a process group; collective.

    Args:
        topology: of this rank's node.
        gpu_idx: this rank's GPU.
        group: None = the default group.
        timeout_s: how long to wait for ranks; None = ``HYBRID_EP_TIMEOUT_S``.

    Raises:
        TopologyError: the node has no such GPU.
        TimeoutError: a rank has not come in time.
        TransportError: the store of the process group cannot be reached.
    """
    import torch.distributed as dist

    from hybrid_ep.agree.roll_call import gather_all

    by_idx = {gpu.gpu_idx: gpu for gpu in topology.gpus}
    if gpu_idx not in by_idx:
        raise TopologyError(f"gpu_idx is {gpu_idx}; allowed: {sorted(by_idx) or 'none, this node has no GPU'}")
    gpu = by_idx[gpu_idx]
    fabric = gpu.fabric if gpu.fabric and gpu.fabric.is_multi_node else None
    mine = DomainMember(
        rank=dist.get_rank(group),
        node_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        gpu_uuid=gpu.uuid or gpu.pci_address,
        nvlink_peer_uuids=frozenset(by_idx[peer].uuid for peer in gpu.nvlink_peers if peer in by_idx),
        fabric_id=(fabric.cluster_uuid, fabric.clique) if fabric else None,
    )
    world = dist.group.WORLD if group is None else group
    assert world is not None
    texts, _ = gather_all(
        world,
        "search for domains",
        mine.to_json(),
        timeout_s=env.TIMEOUT_S.get() if timeout_s is None else timeout_s,
        where="domains",
        missed="it does not look for its own",
    )
    return find_domains([DomainMember.from_json(text) for text in texts])
