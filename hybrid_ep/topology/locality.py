"""GPUs and NICs by the PCIe root port and the NUMA node that they share."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from hybrid_ep.topology.model import Gpu, Nic, Topology

__all__ = ["Locality", "localities", "numa_name"]


@dataclass(frozen=True)
class Locality:
    """GPUs and NICs under one PCIe root port.

    Attributes:
        numa_node: −1 where not known.
        root: PCI address of what they hang under; empty for devices without a PCI function.
        gpus, nics: what hangs there.
    """

    numa_node: int
    root: str
    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]


def localities(topology: Topology) -> list[Locality]:
    """Groups GPUs and NICs by the PCIe root port above them, ordered by NUMA node and address."""
    paths = {device.address: device.path for device in topology.pci}
    gpus: dict[tuple[int, str], list[Gpu]] = defaultdict(list)
    nics: dict[tuple[int, str], list[Nic]] = defaultdict(list)
    for gpu in topology.gpus:
        gpus[gpu.numa_node, _root(gpu.pci_address, paths)].append(gpu)
    for nic in topology.nics:
        nics[nic.numa_node, _root(nic.pci_address, paths)].append(nic)
    return [Locality(*key, tuple(gpus[key]), tuple(nics[key])) for key in sorted({*gpus, *nics})]


def _root(address: str, paths: dict[str, tuple[str, ...]]) -> str:
    path = paths.get(address, (address,))
    return path[1] if len(path) > 2 else path[0]


def numa_name(topology: Topology, numa_node: int) -> str:
    """How a NUMA node is called; the kernel gives devices no number where there is only one, as in most VMs."""
    if numa_node >= 0:
        return f"NUMA node {numa_node}"
    return "the only NUMA node" if topology.num_numa_nodes == 1 else "NUMA node not given by the firmware"
