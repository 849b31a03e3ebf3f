"""Which NIC a GPU uses: a nearest one that is up, shared out evenly, unless the site says otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_ep import env
from hybrid_ep.errors import TopologyError
from hybrid_ep.topology.model import Nic, Topology

__all__ = ["choose_nic"]


def choose_nic(topology: Topology, gpu_idx: int, names: Sequence[str] | None = None) -> Nic | None:
    """Chooses the NIC that serves a GPU.

    GPUs that have the same nearest NICs take them in turn, so that eight GPUs over four equally near NICs put two on
    each. Every rank computes the same answer from the same node.

    Args:
        topology: of this node.
        gpu_idx: the GPU.
        names: the NIC of each GPU in the order of `gpu_idx`, starting over at the end; None takes ``HYBRID_EP_NICS``.

    Returns:
        None where no NIC is up.

    Raises:
        TopologyError: there is no such GPU, or a NIC that was named is not there.
    """
    rows = {gpu.gpu_idx: row for gpu, row in zip(topology.gpus, topology.nic_distances, strict=True)}
    if gpu_idx not in rows:
        raise TopologyError(f"gpu_idx is {gpu_idx}; allowed: {sorted(rows) or 'none, this node has no GPU'}")
    names = env.NICS.get() if names is None else names
    if names:
        name = names[sorted(rows).index(gpu_idx) % len(names)]
        by_name = {nic.name: nic for nic in topology.nics}
        if name not in by_name:
            raise TopologyError(f"NIC {name!r} was asked for GPU {gpu_idx}; this node has {sorted(by_name) or 'none'}")
        return by_name[name]
    nearest = {idx: _nearest(topology, idx) for idx in rows}
    choices = nearest[gpu_idx]
    if not choices:
        return None
    sharers = sorted(idx for idx in rows if nearest[idx] == choices)
    return topology.nics[choices[sharers.index(gpu_idx) % len(choices)]]


def _nearest(topology: Topology, gpu_idx: int) -> list[int]:
    """Positions in `topology.nics` of the nearest NICs that are up."""
    row = next(row for gpu, row in zip(topology.gpus, topology.nic_distances, strict=True) if gpu.gpu_idx == gpu_idx)
    active = [position for position, nic in enumerate(topology.nics) if nic.is_active]
    least = min((row[position] for position in active), default=None)
    return [position for position in active if row[position] == least]
