"""Reads one node into a `Topology`: /sys through `_C`, NVML through `_nvml`, verbs through `verbs_readers`.

A module may not be built, a library not installed, or a driver may not answer. In each case that part of the topology
stays empty, and `Topology.missing` has the reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybrid_ep.topology.model import Distance, Fabric, Gpu, Nic, NicPort, NvLink, PciDevice, PciLink, Platform, Topology
from hybrid_ep.topology.recording import read_facts
from hybrid_ep.topology.verbs_readers import VerbsDevice, VerbsPort, read_verbs

__all__ = ["probe"]


def _live_nvml() -> dict[str, Any]:
    found: dict[str, Any] = importlib.import_module("hybrid_ep._nvml").probe()
    return found


def probe(
    sysroot: str | Path = "/",
    *,
    before: Callable[[str], None] = lambda source: None,
    ask_nvml: Callable[[], dict[str, Any]] = _live_nvml,
) -> Topology:
    """Reads a node.

    Args:
        ask_nvml: reads NVML; of a replayed node from its recording.
        before: is called with the next source; what it raises for NVML or libibverbs is the reason in `missing`.
        sysroot: /sys is read below this folder. NVML comes from whichever ``libnvidia-ml.so.1`` the loader finds; of
            any root but ``/`` the verbs part comes from the recording's facts.
    """
    from hybrid_ep import _C

    root = Path(sysroot)
    before("/sys")
    raw = _C.scan_sysfs(sysroot=str(root))
    missing: dict[str, str] = {}
    nvml = _ask_nvml(ask_nvml, missing, before)
    verbs_reader, verbs = _ask_verbs(root, missing, before)
    pci = tuple(
        PciDevice(**{**device, "path": tuple(device["path"]), "link": PciLink(**device["link"])})
        for device in raw["pci"]
    )
    numa_nodes = {device.address: device.numa_node for device in pci}
    known = nvml.get("gpus")
    gpus = tuple(_gpu(gpu, numa_nodes) for gpu in known) if known else _gpus_without_nvml(pci)
    nics = tuple(_nic(nic, verbs) for nic in raw["nics"])

    def distance(gpu: Gpu, address: str) -> Distance:
        return Distance[raw["distances"].get((gpu.pci_address, address), "SYS")]

    return Topology(
        gpus=gpus,
        nics=nics,
        pci=pci,
        nic_distances=tuple(tuple(distance(gpu, nic.pci_address) for nic in nics) for gpu in gpus),
        gpu_distances=tuple(tuple(distance(gpu, other.pci_address) for other in gpus) for gpu in gpus),
        numa_cpus=raw["numa_nodes"],
        driver_version=nvml.get("driver_version", ""),
        nvml_version=nvml.get("nvml_version", ""),
        cuda_driver_version=nvml.get("cuda_driver_version", 0),
        missing=missing,
        verbs_reader=verbs_reader,
    )


def _ask_nvml(
    ask: Callable[[], dict[str, Any]], missing: dict[str, str], before: Callable[[str], None]
) -> dict[str, Any]:
    """What NVML says, or nothing and the reason in `missing`."""
    try:
        before("NVML")
        found = ask()
    except ModuleNotFoundError:
        missing["nvml"] = "hybrid_ep._nvml was not built (see `hybrid-ep info`)"
    except Exception as error:  # `before` may refuse in its caller's words
        missing["nvml"] = str(error)
    else:
        return found
    return {}


def _ask_verbs(root: Path, missing: dict[str, str], before: Callable[[str], None]) -> tuple[str, list[VerbsDevice]]:
    """The reader and what it says; of a recorded node, what was recorded."""
    if root != Path("/"):
        try:
            return "recorded", [_recorded_verbs(device) for device in read_facts(root).get("verbs", [])]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            missing["verbs"] = f"the recorded facts are damaged: {error!r}"
            return "", []
    try:
        before("libibverbs")
        return read_verbs()
    except Exception as error:  # as where NVML is probed
        missing["verbs"] = str(error)
        return "", []


def _recorded_verbs(device: dict[str, Any]) -> VerbsDevice:
    # A recorded fact may hold anything; a list as a number would be no key.
    ports = [VerbsPort(port=int(port["port"]), active_mtu_bytes=port["active_mtu_bytes"]) for port in device["ports"]]
    return VerbsDevice(name=str(device["name"]), dmabuf=device["dmabuf"], ports=ports)


def _gpu(raw: dict[str, Any], numa_nodes: dict[str, int]) -> Gpu:
    fields = {
        **raw,
        "numa_node": numa_nodes.get(raw["pci_address"], -1),
        "links": tuple(NvLink(**link) for link in raw["links"]),
        "fabric": Fabric(**raw["fabric"]) if raw["fabric"] else None,
        "platform": Platform(**raw["platform"]) if raw["platform"] else None,
        "nvlink_peers": tuple(raw["nvlink_peers"]),
    }
    return Gpu(**fields)


def _gpus_without_nvml(pci: tuple[PciDevice, ...]) -> tuple[Gpu, ...]:
    devices = [device for device in pci if device.is_gpu]
    return tuple(
        Gpu(
            gpu_idx=gpu_idx,
            name="",
            uuid="",
            pci_address=device.address,
            numa_node=device.numa_node,
            memory_bytes=0,
            links=(),
            fabric=None,
            nvlink_peers=(),
        )
        for gpu_idx, device in enumerate(devices)
    )


def _nic(raw: dict[str, Any], verbs: list[VerbsDevice]) -> Nic:
    said = next((device for device in verbs if device["name"] == raw["name"]), None)
    mtu = {port["port"]: port["active_mtu_bytes"] for port in said["ports"]} if said else {}
    ports = tuple(NicPort(**port, active_mtu_bytes=mtu.get(port["port"])) for port in raw["ports"])
    fields = {**raw, "netdevs": tuple(raw["netdevs"]), "ports": ports, "dmabuf": said["dmabuf"] if said else None}
    return Nic(**fields)
