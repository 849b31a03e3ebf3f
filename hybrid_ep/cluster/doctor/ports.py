"""Where the kernel shows a port of an RDMA NIC: its folder, its network interface, the interfaces of a bond."""

from __future__ import annotations

from hybrid_ep.cluster.doctor.node import Node
from hybrid_ep.cluster.doctor.roles import Port
from hybrid_ep.watched import Unreadable

__all__ = ["INFINIBAND", "members_of", "netdev_of", "port_folder", "port_name"]

INFINIBAND = "/sys/class/infiniband"


def port_name(port: Port) -> str:
    return f"{port[0].name}/{port[1].port}"


def port_folder(port: Port) -> str:
    return f"{INFINIBAND}/{port[0].name}/ports/{port[1].port}"


def members_of(node: Node, netdev: str) -> list[str]:
    """The interfaces below a bond or a VLAN; the interface itself where none is."""
    there = node.names_or_none(f"/sys/class/net/{netdev}")
    return [name.removeprefix("lower_") for name in there if name.startswith("lower_")] or [netdev]


def netdev_of(node: Node, port: Port) -> str:
    """The network interface of a port: that of its first GID, else the first of its PCI function."""
    try:
        return node.read(f"{port_folder(port)}/gid_attrs/ndevs/0")
    except Unreadable:
        if port[0].netdevs:
            return port[0].netdevs[0]
        raise
