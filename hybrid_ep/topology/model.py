"""The topology of one node as frozen dataclasses, its JSON form, and its GPUs and NICs by root port."""

from __future__ import annotations

import dataclasses
import enum
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

UNREADABLE = -2  # a number that a file should hold and does not, where −1 has a meaning of its own


class Distance(enum.IntEnum):
    """How far apart two PCI devices are; the names are those of ``nvidia-smi topo``, smaller is nearer."""

    SELF = 0
    PIX = 1  # at most one PCIe switch between them
    PXB = 2  # several switches, no host bridge
    PHB = 3  # one host bridge
    NODE = 4  # host bridges of one NUMA node
    SYS = 5  # across NUMA nodes


_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6, 128.0: 7}


def _name_link(width: int, gts: float) -> str:
    speed = f"Gen{_GENERATIONS[gts]}" if gts in _GENERATIONS else f"{gts:g} GT/s"
    return f"{speed} x{width}" if width and gts else ""


@dataclass(frozen=True)
class PciLink:
    """The PCIe link of a function: its speed and width in use, and the best of this end; 0 if not known.

    Attributes:
        width, max_width: lanes.
        gts, max_gts: GT/s of a lane: 16 is generation 4, 32 generation 5, 64 generation 6.
    """

    width: int = 0
    max_width: int = 0
    gts: float = 0.0
    max_gts: float = 0.0

    def __str__(self) -> str:
        """``Gen5 x16`` as it trained; empty where that is not known."""
        return _name_link(self.width, self.gts)

    @property
    def possible(self) -> str:
        """``Gen5 x16`` with the speed that it could reach: an idle GPU's link is slow on purpose."""
        return _name_link(self.width, self.max_gts)


@dataclass(frozen=True)
class PciDevice:
    """A GPU, a NIC's function or a bridge, as /sys shows it.

    Attributes:
        address: ``0000:18:00.0``.
        vendor: PCI vendor, 0x10de for NVIDIA; −1 where unreadable.
        class_code: base class and subclass, e.g. 0x0302; −1 where unreadable.
        numa_node: −1 where the firmware does not say, −2 where unreadable.
        path: host bridge first, the device last; only the device where /sys hides the tree.
        link: towards the device above it.
        device_id: PCI device; −1 where unreadable.
    """

    address: str
    vendor: int
    class_code: int
    numa_node: int
    path: tuple[str, ...]
    link: PciLink = PciLink()
    device_id: int = -1

    @property
    def is_gpu(self) -> bool:
        return self.vendor == 0x10DE and self.class_code in (0x0300, 0x0302)

    @property
    def may_be_gpu(self) -> bool:
        """Whether it is NVIDIA's and its class cannot be read."""
        return self.vendor == 0x10DE and self.class_code < 0

    @property
    def is_bridge(self) -> bool:
        return self.class_code == 0x0604


@dataclass(frozen=True)
class NvLink:
    """One NVLink of a GPU.

    Attributes:
        link: its number on the GPU.
        active: whether it is up.
        remote_type: ``gpu``, ``switch``, ``npu``, ``unknown``, or empty where NVML does not say.
        remote_pci: PCI address of the other end, or empty.
    """

    link: int
    active: bool
    remote_type: str
    remote_pci: str


@dataclass(frozen=True)
class Fabric:
    """What NVML knows of the NVLink fabric that a GPU belongs to.

    Attributes:
        cluster_uuid: 32 hexadecimal digits; all zero outside a multi-node domain.
        clique: GPUs of one cluster and one clique can map each other's memory.
        state: 1 = not started, 2 = in progress, 3 = completed.
        status: an ``nvmlReturn_t``; 0 = success. Meaningful when completed.
    """

    cluster_uuid: str
    clique: int
    state: int
    status: int

    @property
    def is_multi_node(self) -> bool:
        return self.state == 3 and self.status == 0 and self.cluster_uuid.strip("0") != ""


@dataclass(frozen=True)
class Platform:
    """The place of a GPU in its rack, on platforms that report it (NVL72).

    Attributes:
        chassis_serial: of the rack.
        slot: in the rack, switch trays included.
        tray: among the compute trays.
        host_id: node within the slot.
        module_id: GPU within the node.
    """

    chassis_serial: str
    slot: int
    tray: int
    host_id: int
    module_id: int


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        gpu_idx: NVML's index; the order of PCI addresses where NVML is missing.
        name, uuid, memory_bytes: as NVML says; empty or 0 where it is missing.
        pci_address: in the form of /sys.
        numa_node: −1 where not known.
        links: its NVLinks, up or down.
        fabric: None where driver or GPU has no fabric.
        nvlink_peers: `gpu_idx` of the GPUs of this node reached over NVLink.
        platform: its place in the rack; None where the platform does not say.
    """

    gpu_idx: int
    name: str
    uuid: str
    pci_address: str
    numa_node: int
    memory_bytes: int
    links: tuple[NvLink, ...]
    fabric: Fabric | None
    nvlink_peers: tuple[int, ...]
    platform: Platform | None = None

    @property
    def num_active_links(self) -> int:
        return sum(link.active for link in self.links)


@dataclass(frozen=True)
class NicPort:
    """One port of a NIC.

    Attributes:
        port: its number, from 1.
        state, phys_state: ``ACTIVE``, ``LinkUp`` …; empty where unreadable.
        link_layer: ``InfiniBand`` or ``Ethernet``.
        rate_gbps: signalling rate in Gb/s; 0 where not known.
        sm_lid: LID of the subnet manager; 0 on Ethernet, −1 where not known.
        active_mtu_bytes: RDMA MTU in force, from libibverbs; None without it.
    """

    port: int
    state: str
    phys_state: str
    link_layer: str
    rate_gbps: float
    sm_lid: int
    active_mtu_bytes: int | None


@dataclass(frozen=True)
class Nic:
    """One RDMA device.

    Attributes:
        name: e.g. ``mlx5_0``.
        pci_address: empty for a device without a PCI function (Soft-RoCE).
        numa_node: −1 where not known.
        node_guid, firmware: as the driver says.
        netdevs: network interfaces on the same function.
        ports: its ports.
        dmabuf: whether the driver registers dma-buf memory, from libibverbs; None if it could not be read.
    """

    name: str
    pci_address: str
    numa_node: int
    node_guid: str
    firmware: str
    netdevs: tuple[str, ...]
    ports: tuple[NicPort, ...]
    dmabuf: bool | None

    @property
    def is_active(self) -> bool:
        return any(port.state == "ACTIVE" for port in self.ports)


@dataclass(frozen=True)
class Topology:
    """One node.

    Attributes:
        gpus: by `gpu_idx`.
        nics: by name.
        pci: GPUs, network functions and bridges as /sys lists them, whether a driver has them or not.
        nic_distances: ``[gpu][nic]``, in the order of `gpus` and `nics`.
        gpu_distances: ``[gpu][gpu]`` over PCIe; NVLink is in `Gpu.nvlink_peers`.
        numa_cpus: NUMA node → its CPUs, ``0-55,112-167``; empty where /sys does not say.
        driver_version, nvml_version: empty without NVML.
        cuda_driver_version: 13000 for 13.0; 0 without NVML.
        verbs_reader: which reader gave the verbs attributes (`verbs_readers`); empty where none could.
        missing: what could not be asked, and why: ``{"nvml": "libnvidia-ml.so.1: cannot open …"}``.
    """

    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]
    pci: tuple[PciDevice, ...]
    nic_distances: tuple[tuple[Distance, ...], ...]
    gpu_distances: tuple[tuple[Distance, ...], ...]
    numa_cpus: dict[int, str]
    driver_version: str
    nvml_version: str
    cuda_driver_version: int
    missing: dict[str, str]
    verbs_reader: str = ""

    @property
    def num_numa_nodes(self) -> int:
        return max(1, len(self.numa_cpus))

    @property
    def pci_gpus(self) -> tuple[PciDevice, ...]:
        return tuple(device for device in self.pci if device.is_gpu)

    def pci_device(self, address: str) -> PciDevice:
        """The device at a PCI address; one of which nothing is known where /sys does not list it."""
        unknown = PciDevice(address, -1, -1, -2, (address,))
        return next((device for device in self.pci if device.address == address), unknown)

    def to_json(self) -> dict[str, Any]:
        """A tree of plain values; distances by name, bridges left out."""
        tree = dataclasses.asdict(self)
        tree["num_numa_nodes"] = self.num_numa_nodes
        tree["pci"] = [dataclasses.asdict(device) for device in self.pci if not device.is_bridge]
        for key in ("nic_distances", "gpu_distances"):
            tree[key] = [[distance.name for distance in row] for row in tree[key]]
        return tree


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
