"""The topology for people: a tree of localities and a GPU × NIC matrix."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from hybrid_ep.topology.choice import choose_nic
from hybrid_ep.topology.model import Distance, Gpu, Nic, Topology

__all__ = ["Locality", "describe_gpu", "describe_nic", "localities", "numa_name", "render"]

_STYLES = {
    Distance.SELF: "dim",
    Distance.PIX: "bold green",
    Distance.PXB: "green",
    Distance.PHB: "yellow",
    Distance.NODE: "yellow",
    Distance.SYS: "red",
}
_LEGEND = (
    "PIX one PCIe switch · PXB several switches · PHB one host bridge · NODE one NUMA node · SYS across NUMA nodes · "
    "* the NIC this GPU uses"
)


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


def describe_gpu(gpu: Gpu) -> str:
    """One line: index, name, address and links that are up."""
    links = f", NVLink {gpu.num_active_links}/{len(gpu.links)} up" if gpu.links else ""
    module = f", module {gpu.platform.module_id}" if gpu.platform else ""
    return f"GPU {gpu.gpu_idx}  {gpu.name or 'NVIDIA GPU (no NVML)'}  {gpu.pci_address}{module}{links}"


def describe_nic(nic: Nic) -> str:
    """One line: name, address, and each port's layer, rate and state."""
    ports = ", ".join(f"{port.link_layer} {port.rate_gbps:g} Gb/s {port.state}" for port in nic.ports)
    return f"NIC {nic.name}  {nic.pci_address or 'no PCI function'}  {ports}"


def render(topology: Topology) -> RenderableType:
    """Tree, matrix, and what could not be asked."""
    parts: list[RenderableType] = [_tree(topology)]
    if topology.gpus and (topology.nics or len(topology.gpus) > 1):
        parts += [_matrix(topology), Text(_LEGEND, style="dim")]
    parts += [Text(f"not asked: {source}: {reason}", style="yellow") for source, reason in topology.missing.items()]
    return Group(*parts)


def _tree(topology: Topology) -> Tree:
    versions = f"driver {topology.driver_version}" if topology.driver_version else "no NVIDIA driver"
    counts = (
        _count(len(topology.gpus), "GPU"),
        _count(len(topology.nics), "NIC"),
        _count(topology.num_numa_nodes, "NUMA node"),
    )
    tree = Tree(Text.assemble(("node", "bold"), f"  {', '.join(counts)}, {versions}{_place_in_rack(topology)}"))
    branches: dict[int, Tree] = {}
    for locality in localities(topology):
        if locality.numa_node not in branches:
            branches[locality.numa_node] = tree.add(numa_name(topology, locality.numa_node))
        branch = branches[locality.numa_node].add(f"PCIe {locality.root}" if locality.root else "no PCI function")
        for gpu in locality.gpus:
            branch.add(Text(describe_gpu(gpu), style="green"))
        for nic in locality.nics:
            branch.add(Text(describe_nic(nic), style="cyan" if nic.is_active else "red"))
    return tree


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _place_in_rack(topology: Topology) -> str:
    """Rack, slot and tray, where the platform names a rack and all GPUs agree; an HGX board stands in none."""
    places = {
        f", rack {gpu.platform.chassis_serial} slot {gpu.platform.slot} compute tray {gpu.platform.tray}"
        for gpu in topology.gpus
        if gpu.platform and gpu.platform.chassis_serial
    }
    return places.pop() if len(places) == 1 else ""


def _matrix(topology: Topology) -> Table:
    table = Table("", title="distance of each GPU, over PCIe and NVLink")
    for gpu in topology.gpus:
        table.add_column(f"GPU{gpu.gpu_idx}", justify="center")
    for nic in topology.nics:
        table.add_column(nic.name, justify="center")
    for row, gpu in enumerate(topology.gpus):
        chosen = choose_nic(topology, gpu.gpu_idx)
        cells = [_gpu_cell(topology, row, column) for column in range(len(topology.gpus))]
        for nic, distance in zip(topology.nics, topology.nic_distances[row], strict=True):
            mark = "*" if nic is chosen else ""
            cells.append(Text(distance.name + mark, style=_STYLES[distance]))
        table.add_row(f"GPU{gpu.gpu_idx}", *cells)
    return table


def _gpu_cell(topology: Topology, row: int, column: int) -> Text:
    gpu, other = topology.gpus[row], topology.gpus[column]
    if row == column:
        return Text("·", style="dim")
    if other.gpu_idx in gpu.nvlink_peers:
        return Text(f"NV{gpu.num_active_links}", style="bold green")
    distance = topology.gpu_distances[row][column]
    return Text(distance.name, style=_STYLES[distance])
