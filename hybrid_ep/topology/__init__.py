"""The devices of this node and the distances between them: GPUs, NICs, NUMA nodes, NVLink domains.

`probe` reads a node once into a `Topology`, a tree of frozen dataclasses that the doctor, the `hybrid-ep topology`
command and the transports share. Nothing here imports torch, and no library has to be there: what could not be read is
named in `Topology.missing`.
"""

from __future__ import annotations

from hybrid_ep.topology.choice import choose_nic, choose_nics, near_cpus
from hybrid_ep.topology.domains import DomainMember, find_domains, gather_domains
from hybrid_ep.topology.model import (
    UNREADABLE,
    Distance,
    Fabric,
    Gpu,
    Nic,
    NicPort,
    NvLink,
    PciDevice,
    PciLink,
    Platform,
    Topology,
)
from hybrid_ep.topology.node_probe import probe

__all__ = [
    "UNREADABLE",
    "Distance",
    "DomainMember",
    "Fabric",
    "Gpu",
    "Nic",
    "NicPort",
    "NvLink",
    "PciDevice",
    "PciLink",
    "Platform",
    "Topology",
    "choose_nic",
    "choose_nics",
    "find_domains",
    "gather_domains",
    "near_cpus",
    "probe",
]
