"""Which NICs a GPU uses: the nearest that are up, shared out evenly, unless the site says otherwise. And its CPUs."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hybrid_ep import env
from hybrid_ep.errors import TopologyError
from hybrid_ep.topology.model import Nic, Topology

_LOG = logging.getLogger("hybrid_ep")


def choose_nic(topology: Topology, gpu_idx: int, names: Sequence[str] | None = None) -> Nic | None:
    """Chooses the first of the NICs that serve a GPU; see `choose_nics`. None where no NIC is up."""
    nics = choose_nics(topology, gpu_idx, names)
    return nics[0] if nics else None


def choose_nics(topology: Topology, gpu_idx: int, names: Sequence[str] | None = None) -> tuple[Nic, ...]:
    """Chooses the NICs that serve a GPU.

    Of NICs that are equally near, a GPU uses those of the kind (model and link layer) that the node has most of. The
    others are DPUs for storage, or bridges by which the fabric manager reaches NVSwitches.

    GPUs with the same nearest NICs take them in turn. Eight GPUs over four equally near NICs put two on each; two GPUs
    over four NICs have two each. Every rank computes the same answer from the same node.

    Args:
        topology: of this node.
        gpu_idx: the GPU.
        names: the NICs of each GPU in the order of `gpu_idx`, starting over at the end; several of one GPU are joined
            by ``+``. None takes ``HYBRID_EP_NICS``.

    Returns:
        Nothing where no NIC is up.

    Raises:
        TopologyError: there is no such GPU, or a NIC that was named is not there.
    """
    rows = {gpu.gpu_idx: row for gpu, row in zip(topology.gpus, topology.nic_distances, strict=True)}
    if gpu_idx not in rows:
        raise TopologyError(f"gpu_idx is {gpu_idx}; allowed: {sorted(rows) or 'none, this node has no GPU'}")
    names = env.NICS.get() if names is None else names
    if names:
        by_name = {nic.name: nic for nic in topology.nics}
        wanted = names[sorted(rows).index(gpu_idx) % len(names)].split("+")
        for name in wanted:
            if name not in by_name:
                raise TopologyError(
                    f"NIC {name!r} was asked for GPU {gpu_idx}; this node has {sorted(by_name) or 'none'}"
                )
        return tuple(by_name[name] for name in wanted)
    nearest = {idx: _nearest(topology, idx) for idx in rows}
    choices = nearest[gpu_idx]
    sharers = sorted(idx for idx in rows if nearest[idx] == choices)
    place = sharers.index(gpu_idx)
    if len(choices) < len(sharers):
        return tuple(topology.nics[choice] for choice in choices[place % max(len(choices), 1) :][:1])
    # As many for each, so that ranks agree on how many there are.
    share = len(choices) // len(sharers)
    return tuple(topology.nics[choice] for choice in choices[place : share * len(sharers) : len(sharers)])


def _nearest(topology: Topology, gpu_idx: int) -> list[int]:
    """Positions in `topology.nics` of the nearest NICs that are up; of several kinds, of the most frequent one."""
    row = next(row for gpu, row in zip(topology.gpus, topology.nic_distances, strict=True) if gpu.gpu_idx == gpu_idx)
    active = [position for position, nic in enumerate(topology.nics) if nic.is_active]
    least = min((row[position] for position in active), default=None)
    near = [position for position in active if row[position] == least]
    kinds = [(topology.pci_device(nic.pci_address).device_id, _link_layers(nic)) for nic in topology.nics]
    frequency = Counter(kinds)  # also of NICs that are down, so that a node chooses as its neighbours do
    most = max((frequency[kinds[position]] for position in near), default=0)
    return [position for position in near if frequency[kinds[position]] == most]


def _link_layers(nic: Nic) -> frozenset[str]:
    return frozenset(port.link_layer for port in nic.ports)


def near_cpus(topology: Topology, gpu_idx: int | None) -> list[int]:
    """Returns the CPUs next to a GPU that this process may use; empty: anywhere."""
    gpu = next((gpu for gpu in topology.gpus if gpu.gpu_idx == gpu_idx), None)
    if gpu is None or gpu.numa_node < 0:
        return []
    file = Path(f"/sys/devices/system/node/node{gpu.numa_node}/cpulist")
    try:
        near = _parse_cpus(file.read_text())
    except (OSError, ValueError) as error:
        _LOG.debug("CPUs of NUMA node %d: %s", gpu.numa_node, error)
        return []
    return sorted(near & os.sched_getaffinity(0))


def _parse_cpus(text: str) -> set[int]:
    """``0-3,8`` → {0, 1, 2, 3, 8}."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus
