"""What a report says about its node beside the results: the values that `compare` sets side by side."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from hybrid_ep.doctor.checks.nic import compute_nics
from hybrid_ep.doctor.node import Node
from hybrid_ep.doctor.profile import Profile
from hybrid_ep.doctor.unreadable import Unreadable
from hybrid_ep.topology.svg import draw

__all__ = ["collect_facts"]


def collect_facts(node: Node, profile: Profile) -> dict[str, Any]:
    """Collects versions, GPUs, fabric, NIC firmware and clock; null where a value could not be read.

    Returns:
        ``driver``, ``cuda``, ``packages``, ``gpus`` (name, uuid, cluster_uuid, clique), ``nic_firmware``, ``clock``,
        ``boot_id``, ``unix_time_s``, the picture ``topology_svg`` and, from the profile, ``domain_gpus`` and
        ``clock_error_ms``.
    """
    return {
        "driver": _known(lambda: str(node.nvml.system("driver_version"))),
        "cuda": _known(lambda: int(node.nvml.system("cuda_driver_version"))),
        "packages": _known(node.packages),
        "gpus": _known(lambda: [_gpu(node, gpu_idx) for gpu_idx in node.nvml.gpus]) or [],
        "nic_firmware": sorted({nic.firmware for nic in compute_nics(node, profile) if nic.firmware}),
        "clock": _known(lambda: asdict(node.clock())),
        "boot_id": _known(lambda: node.read("/proc/sys/kernel/random/boot_id")),
        "unix_time_s": round(time.time(), 3),
        "topology_svg": draw(node.topology),
        "domain_gpus": profile["mnnvl.domain_gpus"],
        "clock_error_ms": profile["host.clock_error_ms"],
    }


def _gpu(node: Node, gpu_idx: int) -> dict[str, Any]:
    keys = {"name": "name", "uuid": "uuid", "cluster_uuid": "fabric.cluster_uuid", "clique": "fabric.clique"}
    return {name: _known(partial(node.nvml.gpu, gpu_idx, key)) for name, key in keys.items()}


def _known(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Unreadable:
        return None
