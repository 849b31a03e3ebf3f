"""Finds the NICs of the GPUs, which are judged. A server has other NICs, for storage, management and other services.

NICs are chosen by place and kind. Of the NICs within the profile's distance of a GPU, as many as the profile counts are
taken. The first are those with the profile's rate and link layer, or of the same model as one that has both, so that a
broken NIC counts, too. Where one kind of them, of a model and a link layer, is complete, the others come later. Then
come the nearest. A second port or function without a cable is not counted as a NIC, and
neither is a bridge to NVSwitches. All other NICs are named with the reason. Below stands where the kernel shows a port
of a NIC: its folder, its network interface, the interfaces of a bond.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch

from hybrid_ep.cluster.doctor.checks.gpu import sees_few
from hybrid_ep.cluster.doctor.node import Node
from hybrid_ep.cluster.doctor.profile import Profile
from hybrid_ep.topology import UNREADABLE, Distance, Nic, NicPort
from hybrid_ep.watched import Unreadable

Port = tuple[Nic, NicPort]


@dataclass(frozen=True)
class Roles:
    """The NICs of a node.

    Attributes:
        compute: the GPUs', by name.
        others: name of every other one → why it is not judged.
    """

    compute: tuple[Nic, ...]
    others: Mapping[str, str]


def wanted_nics(node: Node, profile: Profile) -> int | None:
    """How many NICs the profile counts; for a container with some of the GPUs, their share."""
    want: int | None = profile["nic.count"]
    if want and sees_few(node, profile):
        return -(-want * len(node.topology.gpus) // int(profile["gpu.count"]))
    return want


def assign_roles(node: Node, profile: Profile) -> Roles:
    """Separates the GPUs' NICs from the others.

    Where no NIC is near a GPU, as in a virtual machine that hides the PCIe tree, all of them may be the GPUs'.
    """
    bridges = node.switch_bridges if profile["nvlink.switch"] else frozenset()
    nics = [nic for nic in node.topology.nics if nic.name not in bridges]
    named = [nic for nic in nics if any(fnmatch(nic.name, pattern) for pattern in profile["nic.devices"])]
    most = profile["affinity.max_distance"]
    columns = zip(node.topology.nics, *node.topology.nic_distances, strict=True)
    nearest = {nic.name: min(distances, default=Distance.SYS) for nic, *distances in columns}
    near = [nic for nic in named if most and nearest[nic.name] <= Distance[most]]
    candidates = near or named
    others = dict.fromkeys(sorted(bridges), "for the fabric manager")
    others |= {nic.name: "near no GPU" for nic in named if nic not in candidates}
    want = wanted_nics(node, profile)
    if want is None or len(candidates) <= want:
        return Roles(tuple(candidates), others)
    fitting = [nic for nic in candidates if any(_fits(port, profile) for port in nic.ports)]
    models = {_model(node, nic) for nic in fitting}
    cards = {_card(nic) for nic in fitting}
    # Two DPUs of the same rate beside four NICs are no GPU's; nor are bridges that only root can tell from NICs.
    kinds = Counter(_kind(node, nic) for nic in named)
    complete = {_kind(node, nic) for nic in fitting if kinds[_kind(node, nic)] >= profile["nic.count"]}

    def rank(nic: Nic) -> tuple[bool, bool, int]:
        spare = nic not in fitting and _card(nic) in cards  # the other function of a card that is in use
        foreign = _kind(node, nic) not in complete if complete else nic not in fitting
        return spare, foreign and (bool(complete) or _model(node, nic) not in models), int(nearest[nic.name])

    chosen = _one_for_each_gpu(node, candidates, rank, want)
    for nic in candidates:
        if nic not in chosen:
            spare, foreign, _ = rank(nic)
            reason = "another model, rate or link layer" if foreign else "further away"
            others[nic.name] = "unused port" if spare else reason
    return Roles(tuple(nic for nic in candidates if nic in chosen), others)


def _one_for_each_gpu(
    node: Node, candidates: list[Nic], rank: Callable[[Nic], tuple[bool, bool, int]], want: int
) -> list[Nic]:
    """Every GPU takes its best NIC that is left, in turns; then the best of all that are left."""
    position = {nic.name: column for column, nic in enumerate(node.topology.nics)}
    chosen: list[Nic] = []
    rows = list(node.topology.nic_distances)
    while len(chosen) < want:
        left = [nic for nic in candidates if nic not in chosen]
        for row in rows or [()]:
            if len(chosen) == want:
                break
            left = [nic for nic in left if nic not in chosen]
            if left:
                chosen.append(min(left, key=lambda nic: (*rank(nic)[:2], row[position[nic.name]] if row else 0)))
        if not left:
            break
    return chosen


def blind_devices(node: Node) -> list[str]:
    """GPUs and NICs whose class or NUMA node cannot be read, so that it is not known how near they are."""
    nics = {nic.pci_address for nic in node.topology.nics}
    ours = [device for device in node.topology.pci if device.is_gpu or device.may_be_gpu or device.address in nics]
    return [device.address for device in ours if device.may_be_gpu or device.numa_node == UNREADABLE]


def _fits(port: NicPort, profile: Profile) -> bool:
    rate, layers = profile["nic.rate_gbps"], profile["nic.link_layer"]
    right_rate = port.rate_gbps == rate if rate else True
    return port.state == "ACTIVE" and right_rate and (not layers or port.link_layer in layers)


def _model(node: Node, nic: Nic) -> int:
    return node.topology.pci_device(nic.pci_address).device_id


def _kind(node: Node, nic: Nic) -> tuple[int, tuple[str, ...]]:
    return _model(node, nic), tuple(sorted({port.link_layer for port in nic.ports}))


def _card(nic: Nic) -> str:
    """The slot of a NIC: its PCI address without the function; a NIC that is not on PCI is a card of its own."""
    return nic.pci_address.rpartition(".")[0] or nic.name


def required_nics(node: Node, profile: Profile) -> tuple[Nic, ...]:
    """The GPUs' NICs; Unreadable where there are none: a check that looked at nothing has confirmed nothing."""
    found = assign_roles(node, profile).compute
    if not found:
        raise Unreadable("no NIC to examine, see nic.count")
    return found


def judged_ports(node: Node, profile: Profile) -> list[Port]:
    """The ports of the GPUs' NICs; a port without a link is left out where another one of its NIC is in use."""
    found = []
    for nic in required_nics(node, profile):
        in_use = any(_fits(port, profile) for port in nic.ports)
        found += [(nic, port) for port in nic.ports if not in_use or port.state != "DOWN"]
    return found


def active_ports(node: Node, profile: Profile) -> list[Port]:
    """Ports that are up; those that are down are named by nic.state alone."""
    found = [(nic, port) for nic, port in judged_ports(node, profile) if port.state == "ACTIVE"]
    if not found:
        raise Unreadable("no port is up, see nic.state")
    return found


def is_guid(text: str) -> bool:
    """Whether it names one device: a virtual function or device that was given no GUID has zeros."""
    return text.strip("0:") != ""


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
