"""The RDMA NICs that the profile counts: present, up, fast, addressable, and not losing packets.

They are the GPUs' NICs. A server has more, for storage and management; those are named and not judged.
"""

from __future__ import annotations

from fnmatch import fnmatch

from hybrid_ep.doctor.checks.gpu import gpus_are_missing
from hybrid_ep.doctor.model import Counters, Finding, Status
from hybrid_ep.doctor.node import Node
from hybrid_ep.doctor.profile import Profile
from hybrid_ep.doctor.registry import check, counters
from hybrid_ep.doctor.survey import survey
from hybrid_ep.doctor.unreadable import Unreadable
from hybrid_ep.topology import Distance, Nic, NicPort

_CLASS = "/sys/class/infiniband"
# The kernel takes these headers off the network interface's MTU and rounds down to a power of two (iboe_get_mtu).
_ROCE_HEADERS_BYTES = 96
# Counters that only rise when something is lost; drivers have different ones, and Soft-RoCE has only hardware counters.
_LOSSES = ("link_downed", "symbol_error", "link_error_recovery", "port_rcv_errors")
_HW_LOSSES = (
    "link_downed",
    "local_ack_timeout_err",
    "packet_seq_err",
    "out_of_sequence",
    "rnr_nak_retry_err",
    "roce_adp_retrans_to",
    "retry_exceeded_err",
    "rcvd_seq_err",
)

Port = tuple[Nic, NicPort]


def _named_nics(node: Node, profile: Profile) -> list[Nic]:
    """The NICs that the profile's patterns name."""
    return [nic for nic in node.topology.nics if any(fnmatch(nic.name, pattern) for pattern in profile["nic.devices"])]


def compute_nics(node: Node, profile: Profile) -> list[Nic]:
    """The NICs that the profile counts: of those that it names, the ones near a GPU, by its own measure of near.

    All of them where that tells nothing apart: no NIC is near a GPU, as in a virtual machine that hides the PCIe tree.
    """
    named = _named_nics(node, profile)
    most = profile["affinity.max_distance"]
    columns = zip(node.topology.nics, *node.topology.nic_distances, strict=True)
    nearest = {nic.name: min(distances, default=Distance.SYS) for nic, *distances in columns}
    near = [nic for nic in named if most and nearest[nic.name] <= Distance[most]]
    return near or named


def required_nics(node: Node, profile: Profile) -> list[Nic]:
    """The same; Unreadable where there are none: a check that looked at nothing has confirmed nothing."""
    found = compute_nics(node, profile)
    if not found:
        raise Unreadable("no NIC to examine, see nic.count")
    return found


def _ports(node: Node, profile: Profile) -> list[Port]:
    return [(nic, port) for nic in required_nics(node, profile) for port in nic.ports]


def _active_ports(node: Node, profile: Profile) -> list[Port]:
    """Ports that are up; those that are down are named by nic.state alone."""
    found = [(nic, port) for nic, port in _ports(node, profile) if port.state == "ACTIVE"]
    if not found:
        raise Unreadable("no port is up, see nic.state")
    return found


def _nic_name(nic: Nic) -> str:
    return nic.name


def _port_name(port: Port) -> str:
    return f"{port[0].name}/{port[1].port}"


def _port_folder(port: Port) -> str:
    return f"{_CLASS}/{port[0].name}/ports/{port[1].port}"


@check(
    "nic.count",
    title="number of RDMA NICs",
    source=_CLASS,
    expectation="{nic.count} near a GPU ({affinity.max_distance}), named {nic.devices}",
    remedy="Compare with lspci: a NIC on the bus without a device needs its driver (mlx5_ib, bnxt_re, irdma, efa); one "
    "that is not on the bus needs service. Other counts or names belong into a profile of the site.",
    wants="nic.count",
    zero_is_wish=True,
)
def nic_count(node: Node, profile: Profile) -> Finding:
    found, want = compute_nics(node, profile), profile["nic.count"]
    others = [nic.name for nic in _named_nics(node, profile) if nic not in found]
    seen = f"{len(found)}: {', '.join(nic.name for nic in found) or 'none'}"
    seen += f"; near no GPU, so not judged: {', '.join(others)}" if others else ""
    if len(found) < want <= len(found) + len(others) and gpus_are_missing(node, profile):
        return Finding(Status.UNKNOWN, f"{seen}; some may belong to the missing GPUs, see gpu.count")
    return Finding(Status.PASS if len(found) == want else Status.FAIL, seen)


@check(
    "nic.state",
    title="port state",
    source=f"{_CLASS}/*/ports/*/state, phys_state, sm_lid",
    expectation="ACTIVE, LinkUp; on InfiniBand a subnet manager",
    remedy="Polling or Disabled: cable, transceiver or switch port. INIT on InfiniBand: no subnet manager answers.",
    wants="nic.count",
)
def nic_state(node: Node, profile: Profile) -> Finding:
    def fault(port: Port) -> str | None:
        it = port[1]
        if not it.state:
            raise Unreadable(f"{_port_folder(port)}/state")
        if it.state != "ACTIVE" or it.phys_state != "LinkUp":
            return f"{it.state}, {it.phys_state or 'no physical state'}"
        return "no subnet manager (sm_lid 0)" if it.link_layer == "InfiniBand" and it.sm_lid == 0 else None

    ports = _ports(node, profile)
    return survey(ports, _port_name, fault, f"{len(ports)} ports ACTIVE, LinkUp")


@check(
    "nic.rate",
    title="port rate",
    source=f"{_CLASS}/*/ports/*/rate",
    expectation="{nic.rate_gbps} Gb/s on every port that is up",
    remedy="Check cable, transceiver, lanes and the switch port's speed; auto-negotiation may have fallen back.",
    wants="nic.count nic.rate_gbps",
)
def nic_rate(node: Node, profile: Profile) -> Finding:
    want = profile["nic.rate_gbps"]

    def fault(port: Port) -> str | None:
        return None if port[1].rate_gbps == want else f"{port[1].rate_gbps:g} Gb/s"

    return survey(_active_ports(node, profile), _port_name, fault, f"{want} Gb/s")


@check(
    "nic.link_layer",
    title="link layer",
    source=f"{_CLASS}/*/ports/*/link_layer",
    expectation="{nic.link_layer}, the same on every port",
    remedy="mlxconfig -d DEVICE set LINK_TYPE_P1=1 (InfiniBand) or 2 (Ethernet), then reset the NIC.",
    wants="nic.count nic.link_layer",
)
def nic_link_layer(node: Node, profile: Profile) -> Finding:
    layers = sorted({port.link_layer for _, port in _ports(node, profile)})
    wrong = [layer for layer in layers if layer not in profile["nic.link_layer"]]
    faults = [f"{layer or 'unreadable'} is not allowed" for layer in wrong]
    faults += [f"mixed: {', '.join(layers)}"] if len(layers) > 1 else []
    return Finding.judge(faults, ", ".join(layers))


@check(
    "nic.mtu",
    title="active RDMA MTU",
    source="libibverbs query_port; on Ethernet else the network interface's MTU less 96 bytes of headers",
    expectation="{nic.mtu} bytes on every port that is up",
    remedy="Ethernet: ip link set dev IFACE mtu 9000 (4200 at least for 4096), on the switches too. InfiniBand: set "
    "the MTU in the subnet manager's partition.",
    wants="nic.count nic.mtu",
)
def nic_mtu(node: Node, profile: Profile) -> Finding:
    def fault(port: Port) -> str | None:
        mtu = port[1].active_mtu_bytes or _mtu_of_netdev(node, port)
        return None if mtu == profile["nic.mtu"] else f"{mtu} bytes"

    return survey(_active_ports(node, profile), _port_name, fault, f"{profile['nic.mtu']} bytes")


def _mtu_of_netdev(node: Node, port: Port) -> int:
    if port[1].link_layer != "Ethernet":
        raise Unreadable("active MTU of InfiniBand needs libibverbs")
    room = node.read_int(f"/sys/class/net/{_netdev(node, port)}/mtu") - _ROCE_HEADERS_BYTES
    return max((size for size in (256, 512, 1024, 2048, 4096) if size <= room), default=0)


def _netdev(node: Node, port: Port) -> str:
    """The network interface of a port: that of its first GID, else the first of its PCI function."""
    try:
        return node.read(f"{_port_folder(port)}/gid_attrs/ndevs/0")
    except Unreadable:
        if port[0].netdevs:
            return port[0].netdevs[0]
        raise


@check(
    "nic.gid",
    title="RoCE v2 GID at the configured index",
    source=f"{_CLASS}/*/ports/*/gids, gid_attrs/types",
    expectation="index {nic.roce_gid_index} is a RoCE v2 GID (Ethernet ports only)",
    remedy="Give the network interface an address, or set NCCL_IB_GID_INDEX and the profile to the index that "
    "`show_gids` lists as v2.",
    wants="nic.count nic.roce_gid_index",
)
def nic_gid(node: Node, profile: Profile) -> Finding:
    index = profile["nic.roce_gid_index"]

    def fault(port: Port) -> str | None:
        folder = _port_folder(port)
        if node.read(f"{folder}/gids/{index}").strip("0:") == "":
            return f"GID {index} is empty"
        # An unused entry's type cannot be read: the kernel answers EINVAL, so the GID comes first.
        kind = node.read(f"{folder}/gid_attrs/types/{index}")
        return None if kind == "RoCE v2" else f"GID {index} is {kind}"

    ports = [port for port in _ports(node, profile) if port[1].link_layer == "Ethernet"]
    return survey(ports, _port_name, fault, f"RoCE v2 at index {index}", if_none="no Ethernet port")


@check(
    "nic.firmware",
    title="firmware",
    source=f"{_CLASS}/*/fw_ver",
    expectation="{nic.firmware}",
    remedy="Update the firmware (mlxfwmanager or the vendor's tool) and reset the NIC.",
    wants="nic.count nic.firmware",
)
def nic_firmware(node: Node, profile: Profile) -> Finding:
    def fault(nic: Nic) -> str | None:
        if not nic.firmware:
            raise Unreadable(f"{_CLASS}/{nic.name}/fw_ver")
        return None if nic.firmware in profile["nic.firmware"] else nic.firmware

    nics = required_nics(node, profile)
    return survey(nics, _nic_name, fault, ", ".join(sorted({nic.firmware for nic in nics})))


@check(
    "nic.pcie",
    title="PCIe link of the NICs",
    source="/sys/bus/pci/devices/*/current_link_width, current_link_speed and max_link_*; a virtual function has the "
    "link of its physfn",
    expectation="width and speed = maximum",
    remedy="Reseat the NIC or riser; check the slot's bifurcation in the BIOS. Where the physical function cannot be "
    'seen, only the host can tell: severity {nic.pcie: "off"} in a profile of the site.',
    wants="nic.count",
)
def nic_pcie(node: Node, profile: Profile) -> Finding:
    def fault(nic: Nic) -> str | None:
        physical = node.link(f"/sys/bus/pci/devices/{nic.pci_address}/physfn")
        folder = f"/sys/bus/pci/devices/{physical or nic.pci_address}"
        faults = []
        for what in ("width", "speed"):
            now, most = (node.read(f"{folder}/{which}_link_{what}") for which in ("current", "max"))
            if now == "0" or now.startswith("Unknown"):
                raise Unreadable("a virtual function, whose physical function cannot be seen here")
            faults += [f"{what} {now} of {most}"] if now != most else []
        return ", ".join(faults) or None

    nics = [nic for nic in required_nics(node, profile) if nic.pci_address]
    return survey(nics, _nic_name, fault, "full width and speed", if_none="no NIC on PCIe")


@counters(
    "nic.errors",
    title="link and transport error counters, read twice",
    source=f"{_CLASS}/*/ports/*/counters, hw_counters",
    expectation="no counter rises, but for these and so much a second on one port: {nic.error_rise_per_s}",
    remedy="Clean or replace cable and transceiver; on Ethernet check PFC and ECN from host to switch.",
    wants="nic.count",
    rise_per_s="nic.error_rise_per_s",
)
def nic_errors(node: Node, profile: Profile) -> Counters:
    found: dict[tuple[str, str], int] = {}
    for port in _ports(node, profile):
        for folder, names in (("counters", _LOSSES), ("hw_counters", _HW_LOSSES)):
            place = f"{_port_folder(port)}/{folder}"
            there = node.names_or_none(place)
            found.update(
                {(_port_name(port), name): node.read_int(f"{place}/{name}") for name in names if name in there}
            )
    if not found:
        raise Unreadable(f"no error counters below {_CLASS}/*/ports/*")
    return found


@check(
    "nic.uverbs",
    title="uverbs devices",
    source="/sys/class/infiniband_verbs, /dev/infiniband",
    expectation="one /dev/infiniband/uverbs* for each NIC",
    remedy="modprobe ib_uverbs; in a container, add the devices (the RDMA device plugin, or --device /dev/infiniband).",
    wants="nic.count",
)
def nic_uverbs(node: Node, profile: Profile) -> Finding:
    verbs = "/sys/class/infiniband_verbs"
    of_nic = {
        node.read(f"{verbs}/{name}/ibdev"): name for name in node.names_or_none(verbs) if name.startswith("uverbs")
    }

    def fault(nic: Nic) -> str | None:
        name = of_nic.get(nic.name)
        if name is None:
            return "no uverbs device in /sys"
        there = node.exists("/dev/infiniband") and node.char_device(f"/dev/infiniband/{name}")
        return None if there else f"no /dev/infiniband/{name}"

    nics = required_nics(node, profile)
    return survey(nics, _nic_name, fault, f"{len(nics)} devices")


@check(
    "nic.umad",
    title="umad devices",
    source="/sys/class/infiniband_mad, /dev/infiniband",
    expectation="one /dev/infiniband/umad* for each InfiniBand port",
    remedy="modprobe ib_umad.",
    wants="nic.count nic.umad",
)
def nic_umad(node: Node, profile: Profile) -> Finding:
    mads = "/sys/class/infiniband_mad"
    of_port = {
        (node.read(f"{mads}/{name}/ibdev"), node.read_int(f"{mads}/{name}/port")): name
        for name in node.names_or_none(mads)
        if name.startswith("umad")
    }

    def fault(port: Port) -> str | None:
        name = of_port.get((port[0].name, port[1].port))
        if name is None:
            return "no umad device in /sys"
        there = node.exists("/dev/infiniband") and node.char_device(f"/dev/infiniband/{name}")
        return None if there else f"no /dev/infiniband/{name}"

    ports = [port for port in _ports(node, profile) if port[1].link_layer == "InfiniBand"]
    return survey(ports, _port_name, fault, f"{len(ports)} devices", if_none="no InfiniBand port")
