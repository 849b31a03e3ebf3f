"""What a report says about its node beside the results: the values that `compare` compares between nodes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from hybrid_ep.cluster.doctor.node import Node
from hybrid_ep.cluster.doctor.profile import Profile
from hybrid_ep.cluster.doctor.roles import assign_roles, is_guid, judged_ports
from hybrid_ep.topology.svg import draw
from hybrid_ep.watched import Unreadable

__all__ = ["collect_facts"]


def collect_facts(node: Node, profile: Profile) -> dict[str, Any]:
    """Collects what can be read; null where a value could not be.

    Returns:
        ``driver``, ``cuda``, ``packages``, ``gpus`` (name, uuid, cluster_uuid, clique, memory_bytes, power_limit),
        ``nic_firmware``, ``nic_guids`` by name and ``ports`` of the GPUs' NICs (link_layer, rate_gbps, mtu, gid),
        ``kernel``, ``clock``, ``boot_id``, ``unix_time_s``, the PCIe tree by names that other nodes share (``tree``),
        the picture ``topology_svg`` and, from the profile, ``domain_gpus`` and ``clock_error_ms``.
    """
    return {
        "driver": _known(lambda: str(node.nvml.system("driver_version"))),
        "cuda": _known(lambda: int(node.nvml.system("cuda_driver_version"))),
        "packages": _known(node.packages),
        "gpus": _known(lambda: [_gpu(node, gpu_idx) for gpu_idx in node.nvml.gpus]) or [],
        "nic_firmware": _known(lambda: _firmware(node, profile)) or [],
        "nic_guids": _known(lambda: _guids(node, profile)),
        "ports": _known(lambda: _ports(node, profile)) or [],
        "kernel": _known(lambda: node.read("/proc/sys/kernel/osrelease")),
        "clock": _known(lambda: asdict(node.clock())),
        "boot_id": _known(lambda: node.read("/proc/sys/kernel/random/boot_id")),
        "unix_time_s": round(time.time(), 3),
        "tree": _known(lambda: _tree(node)),
        "topology_svg": _known(lambda: draw(node.topology)) or "",
        "domain_gpus": profile["mnnvl.domain_gpus"],
        "clock_error_ms": profile["host.clock_error_ms"],
    }


def _gpu(node: Node, gpu_idx: int) -> dict[str, Any]:
    keys = {
        "name": "name",
        "uuid": "uuid",
        "cluster_uuid": "fabric.cluster_uuid",
        "clique": "fabric.clique",
        "memory_bytes": "memory_bytes",
        "power_limit": "power_limit",
    }
    return {name: _known(partial(node.nvml.gpu, gpu_idx, key)) for name, key in keys.items()}


def _firmware(node: Node, profile: Profile) -> list[str]:
    return sorted({nic.firmware for nic in assign_roles(node, profile).compute if nic.firmware})


def _guids(node: Node, profile: Profile) -> dict[str, str]:
    """GUIDs by NIC."""
    return {nic.name: nic.node_guid for nic in assign_roles(node, profile).compute if is_guid(nic.node_guid)}


def _ports(node: Node, profile: Profile) -> list[dict[str, Any]]:
    """The ports of the GPUs' NICs, without what differs from node to node on purpose (addresses)."""
    index = profile["nic.roce_gid_index"]
    return [
        {
            "nic": nic.name,
            "port": port.port,
            "link_layer": port.link_layer,
            "rate_gbps": port.rate_gbps,
            "mtu": port.active_mtu_bytes,
            "gid": _known(partial(_gid_kind, node, nic.name, port.port, index)) if index is not None else None,
        }
        for nic, port in judged_ports(node, profile)
    ]


def _gid_kind(node: Node, nic: str, port: int, index: int) -> str:
    return node.read(f"/sys/class/infiniband/{nic}/ports/{port}/gid_attrs/types/{index}")


def _tree(node: Node) -> list[str]:
    """One line for each GPU and NIC: its address, NUMA node, and how far every GPU is from every NIC."""
    topology = node.topology
    lines = [f"GPU {gpu.gpu_idx} {gpu.pci_address} NUMA {gpu.numa_node}" for gpu in topology.gpus]
    lines += [f"{nic.name} {nic.pci_address} NUMA {nic.numa_node}" for nic in topology.nics]
    for gpu, row in zip(topology.gpus, topology.nic_distances, strict=True):
        near = [f"{nic.name} {distance.name}" for nic, distance in zip(topology.nics, row, strict=True)]
        lines.append(f"GPU {gpu.gpu_idx} → {', '.join(near) or 'no NIC'}")
    return [re.sub(r"\s+", " ", line) for line in lines]


def _known(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Unreadable:
        return None
