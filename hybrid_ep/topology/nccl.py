"""The node's PCIe tree as an NCCL topology file (``NCCL_TOPO_FILE``), and the variables that name its NICs.

NCCL usually reads the tree itself. It needs a file in a virtual machine that hides PCIe, or in a container without
/sys. Only the tree is written: CPUs, bridges and devices with their links. NCCL adds GPUs and NICs by address.
"""

from __future__ import annotations

from xml.etree import ElementTree

from hybrid_ep.topology.choice import choose_nics
from hybrid_ep.topology.model import PciDevice, Topology


def to_nccl_xml(topology: Topology) -> str:
    """Returns the XML text: one ``cpu`` for each NUMA node, below it the path of every GPU and RDMA NIC."""
    by_address = {device.address: device for device in topology.pci}
    wanted = [gpu.pci_address for gpu in topology.gpus] + [nic.pci_address for nic in topology.nics]
    system = ElementTree.Element("system", version="1")
    cpus: dict[int, ElementTree.Element] = {}
    placed: dict[str, ElementTree.Element] = {}
    for address in dict.fromkeys(wanted):
        device = by_address.get(address)
        if device is None:
            continue
        numa_node = max(device.numa_node, 0)
        if numa_node not in cpus:
            cpus[numa_node] = ElementTree.SubElement(system, "cpu", numaid=str(numa_node))
            if mask := _cpu_mask(topology.numa_cpus.get(numa_node, "")):
                cpus[numa_node].set("affinity", mask)
        parent = cpus[numa_node]
        for part in device.path:
            if part in by_address:
                if part not in placed:
                    placed[part] = ElementTree.SubElement(parent, "pci", _attributes(by_address[part]))
                parent = placed[part]
    ElementTree.indent(system)
    # NCCL takes the space before the end of an element for an attribute without a name.
    return ElementTree.tostring(system, encoding="unicode").replace(" />", "/>") + "\n"


def _attributes(device: PciDevice) -> dict[str, str]:
    found = {"busid": device.address, "class": f"0x{max(device.class_code, 0):04x}00"}
    speed, width = device.link.max_gts or device.link.gts, device.link.width or device.link.max_width
    # An idle GPU's link is slow on purpose, so the speed is that which it can reach.
    return found | ({"link_speed": f"{speed:.1f} GT/s PCIe", "link_width": str(width)} if speed and width else {})


def _cpu_mask(cpulist: str) -> str:
    """``0-3,8`` as the kernel's mask of 32-bit words, the highest first: ``0000010f``; empty for none."""
    mask = 0
    for part in filter(None, cpulist.split(",")):
        first, _, last = part.partition("-")
        if not first.isdigit() or not (last or first).isdigit() or int(last or first) > 1 << 16:
            return ""
        mask |= (1 << (int(last or first) + 1)) - (1 << int(first))
    words = []
    while mask > 0:
        words.append(f"{mask & 0xFFFFFFFF:08x}")
        mask >>= 32
    return ",".join(reversed(words))


def nic_variables(topology: Topology) -> dict[str, str]:
    """The variables that give each GPU its nearest NICs: for NCCL as a set, for this package in the order of the GPUs.

    Returns:
        ``NCCL_IB_HCA`` and ``HYBRID_EP_NICS``; {} where some GPU has no NIC that is up.
    """
    chosen = [[nic.name for nic in choose_nics(topology, gpu.gpu_idx, names=())] for gpu in topology.gpus]
    if not chosen or [] in chosen:
        return {}
    every = dict.fromkeys(name for names in chosen for name in names)
    # "=" asks NCCL for exact names: without it, mlx5_1 would mean mlx5_10 as well.
    return {"NCCL_IB_HCA": "=" + ",".join(every), "HYBRID_EP_NICS": ",".join("+".join(names) for names in chosen)}
