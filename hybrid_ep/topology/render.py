"""The topology for people: a tree of localities, a GPU × GPU and a NIC × GPU matrix."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from hybrid_ep.topology.choice import choose_nics
from hybrid_ep.topology.model import Distance, Gpu, Nic, PciLink, Topology, localities, numa_name
from hybrid_ep.topology.nccl import nic_variables

_STYLES = {
    Distance.SELF: "dim",
    Distance.PIX: "bold green",
    Distance.PXB: "green",
    Distance.PHB: "yellow",
    Distance.NODE: "yellow",
    Distance.SYS: "red",
}
_LEGEND = (
    "NVn n NVLinks · PIX one PCIe switch · PXB several switches · PHB one host bridge · NODE one NUMA node · "
    "SYS across NUMA nodes · * the NIC this GPU uses"
)


def _cpus_of(topology: Topology, numa_node: int) -> str:
    """The CPUs of a NUMA node; of the only one where devices have no number."""
    if numa_node < 0 and len(topology.numa_cpus) == 1:
        return next(iter(topology.numa_cpus.values()))
    return topology.numa_cpus.get(numa_node, "")


def describe_gpu(gpu: Gpu, link: PciLink | None = None) -> str:
    """One line: index, name, address, PCIe link and NVLinks that are up."""
    links = f", NVLink {gpu.num_active_links}/{len(gpu.links)}" if gpu.links else ""
    module = f", module {gpu.platform.module_id}" if gpu.platform else ""
    pcie = f", {link.possible}" if link and link.possible else ""
    return f"GPU {gpu.gpu_idx}  {gpu.name or 'NVIDIA GPU (no NVML)'}  {gpu.pci_address}{module}{pcie}{links}"


def describe_nic(nic: Nic, link: PciLink | None = None) -> str:
    """One line: name, address, PCIe link, and each port's layer, rate and state."""
    ports = ", ".join(f"{port.link_layer} {port.rate_gbps:g} Gb/s {port.state}" for port in nic.ports)
    pcie = f", {link}" if link and str(link) else ""
    return f"NIC {nic.name}  {nic.pci_address or 'no PCI function'}  {ports}{pcie}"


def render(topology: Topology) -> RenderableType:
    """Tree, one matrix over GPUs and one over NICs, the variables that name the NICs, and what could not be asked."""
    parts: list[RenderableType] = [_tree(topology)]
    if len(topology.gpus) > 1:
        parts.append(_gpu_matrix(topology))
    if topology.gpus and topology.nics:
        parts.append(_nic_matrix(topology))
    if len(parts) > 1:
        parts.append(Text(_LEGEND, style="dim"))
    parts += [Text(f"{name}={value}") for name, value in nic_variables(topology).items()]
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
            cpus = _cpus_of(topology, locality.numa_node)
            name = numa_name(topology, locality.numa_node) + (f"  CPUs {cpus}" if cpus else "")
            branches[locality.numa_node] = tree.add(Text(name))
        root = topology.pci_device(locality.root).link
        speed = f"  {root}" if str(root) else ""
        branch = branches[locality.numa_node].add(
            Text(f"PCIe {locality.root}{speed}" if locality.root else "no PCI function")
        )
        for gpu in locality.gpus:
            branch.add(Text(describe_gpu(gpu, topology.pci_device(gpu.pci_address).link), style="green"))
        for nic in locality.nics:
            link = topology.pci_device(nic.pci_address).link
            branch.add(Text(describe_nic(nic, link), style="cyan" if nic.is_active else "red"))
    return tree


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _place_in_rack(topology: Topology) -> str:
    """Rack, slot and tray, where the platform names a rack and all GPUs agree; an HGX board is in none."""
    places = {
        f", rack {gpu.platform.chassis_serial} slot {gpu.platform.slot} compute tray {gpu.platform.tray}"
        for gpu in topology.gpus
        if gpu.platform and gpu.platform.chassis_serial
    }
    return places.pop() if len(places) == 1 else ""


def _table(title: str, columns: Iterable[str]) -> Table:
    """A matrix under its title, without lines between its cells: eight GPUs and ten NICs fit 80 columns."""
    table = Table(title, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column, justify="center", no_wrap=True)
    return table


def _gpu_matrix(topology: Topology) -> Table:
    table = _table("GPU–GPU", (f"GPU{gpu.gpu_idx}" for gpu in topology.gpus))
    for row, gpu in enumerate(topology.gpus):
        table.add_row(f"GPU{gpu.gpu_idx}", *(_gpu_cell(topology, row, column) for column in range(len(topology.gpus))))
    return table


def _nic_matrix(topology: Topology) -> Table:
    """GPUs in columns, which are few, and NICs in rows, whose names are long."""
    table = _table("NIC–GPU", (f"GPU{gpu.gpu_idx}" for gpu in topology.gpus))
    chosen = [choose_nics(topology, gpu.gpu_idx) for gpu in topology.gpus]
    for column, nic in enumerate(topology.nics):
        cells = []
        for row in range(len(topology.gpus)):
            distance = topology.nic_distances[row][column]
            cells.append(Text(distance.name + ("*" if nic in chosen[row] else ""), style=_STYLES[distance]))
        table.add_row(nic.name, *cells)
    return table


def _gpu_cell(topology: Topology, row: int, column: int) -> Text:
    gpu, other = topology.gpus[row], topology.gpus[column]
    if row == column:
        return Text("·", style="dim")
    if other.gpu_idx in gpu.nvlink_peers:
        return Text(f"NV{gpu.num_active_links}", style="bold green")
    distance = topology.gpu_distances[row][column]
    return Text(distance.name, style=_STYLES[distance])
