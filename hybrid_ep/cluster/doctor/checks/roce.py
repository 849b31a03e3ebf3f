"""RoCE: the GID that addresses a port, and the quality of service that keeps packets from being lost."""

from __future__ import annotations

from collections.abc import Iterable

from hybrid_ep.cluster.doctor.model import Finding
from hybrid_ep.cluster.doctor.node import Node
from hybrid_ep.cluster.doctor.ports import INFINIBAND, members_of, netdev_of, port_folder, port_name
from hybrid_ep.cluster.doctor.profile import Profile
from hybrid_ep.cluster.doctor.registry import check
from hybrid_ep.cluster.doctor.roles import Port, judged_ports
from hybrid_ep.cluster.doctor.survey import survey

_GIDS_SHOWN = 16  # of up to 256 entries of a port's table


@check(
    "nic.gid",
    title="RoCE v2 GID at the configured index",
    source=f"{INFINIBAND}/*/ports/*/gids, gid_attrs/types",
    expectation="index {nic.roce_gid_index} is a RoCE v2 GID (Ethernet ports only)",
    remedy="Give the network interface an address, or set NCCL_IB_GID_INDEX and the profile to the index that "
    "`show_gids` lists as v2.",
    wants="nic.count nic.roce_gid_index",
)
def nic_gid(node: Node, profile: Profile) -> Finding:
    index = profile["nic.roce_gid_index"]

    def fault(port: Port) -> str | None:
        folder = port_folder(port)
        if (kind := _gid_kind(node, folder, index)) == "RoCE v2":
            return None
        others = [i for i in range(_GIDS_SHOWN) if node.is_seen(f"{folder}/gids/{i}")]
        usable = [str(i) for i in others if _gid_kind(node, folder, i) == "RoCE v2"]
        return f"GID {index} is {kind or 'empty'}; RoCE v2 at {', '.join(usable) or 'no index'}"

    ports = [port for port in judged_ports(node, profile) if port[1].link_layer == "Ethernet"]
    return survey(ports, port_name, fault, f"RoCE v2 at index {index}", if_none="no Ethernet port")


def _gid_kind(node: Node, folder: str, index: int) -> str:
    """The type of an entry of a port's table; empty for an unused entry, whose type the kernel refuses."""
    if node.read(f"{folder}/gids/{index}").strip("0:") == "":
        return ""
    return node.read(f"{folder}/gid_attrs/types/{index}")


@check(
    "nic.qos",
    title="RoCE quality of service",
    source="DCB netlink (IEEE PFC and application table); /sys/class/net/*/ecn; counters np_cnp_sent, rp_cnp_handled",
    expectation="Ethernet: packets are sorted by DSCP, PFC and ECN are on for priority {nic.roce_priority}",
    remedy="DSCP and PFC: mlnx_qos -i IFACE --trust dscp --pfc with a 1 at the priority, or dcb app and dcb pfc. ECN: "
    "/sys/class/net/IFACE/ecn/roce_{np,rp}/enable/PRIORITY. Set the same on the switches.",
    wants="nic.count nic.roce_priority",
)
def nic_qos(node: Node, profile: Profile) -> Finding:
    priority = profile["nic.roce_priority"]

    def fault(port: Port) -> str | None:
        netdev = netdev_of(node, port)
        faults = []
        for member in members_of(node, netdev):
            of = "" if member == netdev else f" ({member})"
            dcb = node.dcb(member)
            faults += [] if dcb.sorts_by_dscp else [f"trusts no DSCP{of}"]
            faults += [] if dcb.pfc_priorities & 1 << priority else [f"no PFC for priority {priority}{of}"]
            for side in ("roce_np", "roce_rp"):
                # Only NVIDIA's own driver package shows this file; without it, the firmware's default (on) holds.
                folder = f"/sys/class/net/{member}/ecn/{side}/enable"
                if node.is_seen(folder) and node.read(f"{folder}/{priority}") == "0":
                    faults.append(f"no ECN ({side}){of}")
        return ", ".join(faults) or None

    ports = [port for port in judged_ports(node, profile) if port[1].link_layer == "Ethernet"]
    sent, handled = (_sum(node, ports, name) for name in ("np_cnp_sent", "rp_cnp_handled"))
    good = f"DSCP, PFC and ECN for priority {priority}; CNPs sent {sent}, handled {handled}"
    return survey(ports, port_name, fault, good, if_none="no Ethernet port")


def _sum(node: Node, ports: Iterable[Port], counter: str) -> int:
    total = 0
    for port in ports:
        path = f"{port_folder(port)}/hw_counters/{counter}"
        total += node.read_int(path) if node.is_seen(path) else 0
    return total
