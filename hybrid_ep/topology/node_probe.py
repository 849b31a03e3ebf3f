"""Reads one node into a `Topology`: /sys through `_C`, NVML through `_nvml`, verbs through libibverbs.

A module may not be built, a library not installed, or a driver may not answer. In each case that part of the topology
stays empty, and `Topology.missing` has the reason.

libibverbs knows what /sys does not: the active MTU of InfiniBand ports, and whether a NIC registers dma-buf memory. Two
readers use it and give the same facts: pyverbs, which rdma-core ships and a site's image may have, and the extension
module `_verbs`. The first that answers is taken. If neither does, only /sys is used.
"""

from __future__ import annotations

import errno
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

from hybrid_ep.topology.model import Distance, Fabric, Gpu, Nic, NicPort, NvLink, PciDevice, PciLink, Platform, Topology
from hybrid_ep.topology.recording import read_facts


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


class VerbsPort(TypedDict):
    """One port: its number from 1, and the RDMA MTU in force in bytes."""

    port: int
    active_mtu_bytes: int


class VerbsDevice(TypedDict):
    """One RDMA device; `dmabuf` is None where the driver's answer is unclear, `ports` empty where it was closed."""

    name: str
    dmabuf: bool | None
    ports: list[VerbsPort]


def read_verbs() -> tuple[str, list[VerbsDevice]]:
    """Asks the readers in the order of `READERS`.

    Returns:
        The name of the first that answered, and the devices.

    Raises:
        RuntimeError: none answered; the message says why.
    """
    reasons = []
    for name, read in READERS.items():
        try:
            return name, read()
        except (ImportError, RuntimeError) as error:
            reasons.append(f"{name}: {error}")
    raise RuntimeError("; ".join(reasons))


def _read_pyverbs() -> list[VerbsDevice]:
    device = importlib.import_module("pyverbs.device")
    errors = importlib.import_module("pyverbs.pyverbs_error")
    try:
        return [_read_device(item.name.decode()) for item in device.get_device_list()]
    except errors.PyverbsError as error:
        # A kernel without RDMA ends here, too, and pyverbs does not say which; the next reader can.
        raise RuntimeError(str(error)) from None
    except (AttributeError, TypeError) as error:
        raise RuntimeError(f"this version has another interface: {error}") from None


def _read_device(name: str) -> VerbsDevice:
    device = importlib.import_module("pyverbs.device")
    errors = importlib.import_module("pyverbs.pyverbs_error")
    found = VerbsDevice(name=name, dmabuf=None, ports=[])
    try:
        with device.Context(name=name) as context:
            for port in range(1, context.query_device().phys_port_cnt + 1):
                mtu = int(context.query_port(port).active_mtu)
                # enum ibv_mtu: 1 = 256 bytes … 5 = 4096 bytes.
                found["ports"].append(VerbsPort(port=port, active_mtu_bytes=128 << mtu if 1 <= mtu <= 5 else 0))
            found["dmabuf"] = _registers_dmabuf(context)
    except errors.PyverbsError:
        return found  # closed to us: listed with what was read so far
    return found


def _registers_dmabuf(context: Any) -> bool | None:
    """Registers a dma-buf that does not exist: a driver that knows dma-buf says EBADF, another "not supported"."""
    errors = importlib.import_module("pyverbs.pyverbs_error")
    regions = importlib.import_module("pyverbs.mr")
    no_descriptor, length, local_write = -1, 4096, 1  # IBV_ACCESS_LOCAL_WRITE
    with importlib.import_module("pyverbs.pd").PD(context) as domain:
        try:
            regions.DmaBufMR(domain, length, local_write, dmabuf=no_descriptor).close()
        except errors.PyverbsRDMAError as error:
            answers = {errno.EBADF: True, errno.EOPNOTSUPP: False, errno.EPROTONOSUPPORT: False, errno.ENOSYS: False}
            return answers.get(error.error_code)
    return True


def _read_extension() -> list[VerbsDevice]:
    try:
        module = importlib.import_module("hybrid_ep._verbs")
    except ModuleNotFoundError:
        raise ImportError("was not built (see `hybrid-ep info`)") from None
    return [
        VerbsDevice(
            name=device["name"],
            dmabuf=device["dmabuf"],
            ports=[VerbsPort(port=port["port"], active_mtu_bytes=port["active_mtu_bytes"]) for port in device["ports"]],
        )
        for device in module.probe()
    ]


# In the order of preference.
READERS: dict[str, Callable[[], list[VerbsDevice]]] = {"pyverbs": _read_pyverbs, "_verbs": _read_extension}
