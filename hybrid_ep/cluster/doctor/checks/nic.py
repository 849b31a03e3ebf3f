"""The GPUs' RDMA NICs (`hybrid_ep.cluster.doctor.roles`): present, up, fast, addressable, and not losing packets."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable

from hybrid_ep.cluster.doctor.checks.gpu import gpus_are_missing, sees_few
from hybrid_ep.cluster.doctor.model import Counters, Finding, Severity, Status
from hybrid_ep.cluster.doctor.node import Node
from hybrid_ep.cluster.doctor.pcie import bandwidth_gbps, link_faults, links_above
from hybrid_ep.cluster.doctor.profile import Profile
from hybrid_ep.cluster.doctor.registry import check, counters, survey
from hybrid_ep.cluster.doctor.roles import (
    INFINIBAND,
    Port,
    active_ports,
    assign_roles,
    blind_devices,
    is_guid,
    judged_ports,
    members_of,
    netdev_of,
    port_folder,
    port_name,
    required_nics,
    wanted_nics,
)
from hybrid_ep.topology import Nic
from hybrid_ep.watched import Unreadable

# The kernel takes these headers off the network interface's MTU and rounds down to a power of two (iboe_get_mtu).
_ROCE_HEADERS_BYTES = 96
# Counters that only rise when something is lost; drivers have different ones, and Soft-RoCE has only hardware counters.
_LOSSES = (
    "link_downed",
    "symbol_error",
    "link_error_recovery",
    "port_rcv_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "port_xmit_discards",
)
_HW_LOSSES = (
    "link_downed",
    "local_ack_timeout_err",
    "packet_seq_err",
    "out_of_sequence",
    "rnr_nak_retry_err",
    "roce_adp_retrans_to",
    "retry_exceeded_err",
    "rcvd_seq_err",
    "rx_icrc_encapsulated",
    "roce_slow_restart",
    "req_transport_retries_exceeded",
    # Broadcom's, beside those that newer drivers name as mlx5 does (drivers/infiniband/hw/bnxt_re/hw_counters.c).
    "to_retransmits",
    "seq_err_naks_rcvd",
    "max_retry_exceeded",
    "rnr_naks_rcvd",
    "missing_resp",
    "unrecoverable_err",
    "rx_roce_error_pkts",
    "rx_roce_errors",
    "tx_roce_errors",
    "rx_roce_discards",
    "tx_roce_discards",
    # eRDMA's (drivers/infiniband/hw/erdma/erdma_verbs.c); drops by the limits of an instance's size are no fault.
    "hw_disable_drop_cnt",
    "hw_rx_disable_drop_cnt",
    # EFA's (drivers/infiniband/hw/efa/efa_verbs.c).
    "rx_drops",
    "rdma_read_wr_err",
    "rdma_write_wr_err",
    "retrans_timeout_events",
    "unresponsive_remote_events",
    "impaired_remote_conn_events",
)
# Of the whole device: commands of EFA that its firmware refused, or never answered.
_DEVICE_LOSSES = ("cmds_err", "no_completion_cmds")


def _name(nic: Nic) -> str:
    return nic.name


@check(
    "nic.count",
    title="number of RDMA NICs",
    source=INFINIBAND,
    expectation="{nic.count} for the GPUs: within {affinity.max_distance} of one, of the profile's rate and link "
    "layer, named {nic.devices}",
    remedy="Compare with lspci: a NIC on the bus without a device needs its driver (mlx5_ib, bnxt_re, irdma, efa); one "
    "that is not on the bus needs service. Other counts or names belong into a profile of the site.",
    wants="nic.count",
    zero_is_wish=True,
)
def nic_count(node: Node, profile: Profile) -> Finding:
    roles, want = assign_roles(node, profile), wanted_nics(node, profile)
    assert want is not None
    seen = f"{len(roles.compute)}: {', '.join(nic.name for nic in roles.compute) or 'none'}"
    for reason in sorted(set(roles.others.values())):
        seen += f"; {reason}, so not judged: {', '.join(name for name, why in roles.others.items() if why == reason)}"
    if len(roles.compute) == want:
        return Finding(Status.PASS, seen)
    may_be_theirs = len(roles.compute) < want <= len(roles.compute) + len(roles.others)
    if may_be_theirs and gpus_are_missing(node, profile):
        return Finding(Status.UNKNOWN, f"{seen}; some may belong to the missing GPUs, see gpu.count")
    if may_be_theirs and (blind := blind_devices(node)):
        return Finding(Status.UNKNOWN, f"{seen}; class or NUMA node of {', '.join(blind)} cannot be read")
    if len(roles.compute) < want and sees_few(node, profile):
        return Finding(Status.UNKNOWN, f"{seen} of {want}; a container that has a few cannot see the others")
    return Finding(Status.FAIL, f"{seen}; wanted {want}")


@check(
    "nic.state",
    title="port state",
    source=f"{INFINIBAND}/*/ports/*/state, phys_state, sm_lid; of a bond, /sys/class/net/*/lower_*/operstate; "
    "of EFA, /sys/class/net/*/operstate",
    expectation="ACTIVE, LinkUp; on InfiniBand a subnet manager; every interface of a bond, and that of EFA, is up",
    remedy="Polling, Disabled, or an interface of a bond that is down: cable, transceiver or switch port. INIT on "
    "InfiniBand: no subnet manager answers.",
    wants="nic.count",
)
def nic_state(node: Node, profile: Profile) -> Finding:
    def fault(port: Port) -> str | None:
        it = port[1]
        for name, value in (("state", it.state), ("phys_state", it.phys_state)):
            if not value:
                raise Unreadable(f"{port_folder(port)}/{name} cannot be read")
        if it.state != "ACTIVE" or it.phys_state != "LinkUp":
            return f"{it.state}, {it.phys_state}"
        if it.link_layer == "Ethernet":
            return _bond_fault(node, port)
        if it.link_layer not in ("Ethernet", "InfiniBand"):
            return _netdev_fault(node, port)
        return "no subnet manager (sm_lid 0)" if it.link_layer == "InfiniBand" and it.sm_lid == 0 else None

    ports = judged_ports(node, profile)
    return survey(ports, port_name, fault, f"{len(ports)} ports ACTIVE, LinkUp")


def _netdev_fault(node: Node, port: Port) -> str | None:
    """The driver of EFA calls every port active, whatever its network interface says."""
    for netdev in port[0].netdevs:
        with contextlib.suppress(Unreadable):
            if (state := node.read(f"/sys/class/net/{netdev}/operstate")) == "down":
                return f"{netdev} is {state}"
    return None


def _bond_fault(node: Node, port: Port) -> str | None:
    """Which interfaces of a bond are down: the bond's port stays active, and is slower."""
    try:
        netdev = netdev_of(node, port)
        members = [name for name in members_of(node, netdev) if name != netdev]
        states = {name: node.read(f"/sys/class/net/{netdev}/lower_{name}/operstate") for name in members}
    except Unreadable:  # of a Pod with a network of its own
        return None
    down = [f"{name} is {state}" for name, state in states.items() if state not in ("up", "unknown")]
    return f"{netdev}: {', '.join(down)}" if down else None


@check(
    "nic.rate",
    title="port rate",
    source=f"{INFINIBAND}/*/ports/*/rate",
    expectation="≥ {nic.rate_gbps} Gb/s on every port that is up",
    remedy="Check cable, transceiver, lanes and the switch port's speed; auto-negotiation may have fallen back.",
    wants="nic.count nic.rate_gbps",
)
def nic_rate(node: Node, profile: Profile) -> Finding:
    want = profile["nic.rate_gbps"]

    def fault(port: Port) -> str | None:
        if not port[1].rate_gbps:
            raise Unreadable(f"{port_folder(port)}/rate cannot be read")
        rates.add(port[1].rate_gbps)
        return f"{port[1].rate_gbps:g} Gb/s" if port[1].rate_gbps < want else None

    rates: set[float] = set()
    found = survey(active_ports(node, profile), port_name, fault, "")
    seen = " and ".join(f"{rate:g}" for rate in sorted(rates))
    return Finding(Status.PASS, f"{seen} Gb/s") if found.status is Status.PASS else found


@check(
    "nic.link_layer",
    title="link layer",
    source=f"{INFINIBAND}/*/ports/*/link_layer",
    expectation="{nic.link_layer}, the same on every port",
    remedy="mlxconfig -d DEVICE set LINK_TYPE_P1=1 (InfiniBand) or 2 (Ethernet), then reset the NIC.",
    wants="nic.count nic.link_layer",
)
def nic_link_layer(node: Node, profile: Profile) -> Finding:
    ports = judged_ports(node, profile)
    layers = sorted({port.link_layer for _, port in ports if port.link_layer})
    faults = [f"{layer} is not allowed" for layer in layers if layer not in profile["nic.link_layer"]]
    faults += [f"mixed: {', '.join(layers)}"] if len(layers) > 1 else []
    silent = [port_name(port) for port in ports if not port[1].link_layer]
    if silent and not faults:
        return Finding(Status.UNKNOWN, f"cannot be read of {', '.join(silent)}")
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
        mtu = port[1].active_mtu_bytes or _mtu_ofnetdev_of(node, port)
        return None if mtu == profile["nic.mtu"] else f"{mtu} bytes"

    return survey(active_ports(node, profile), port_name, fault, f"{profile['nic.mtu']} bytes")


def _mtu_ofnetdev_of(node: Node, port: Port) -> int:
    if port[1].link_layer != "Ethernet":
        raise Unreadable("active MTU of InfiniBand needs libibverbs")
    payload_bytes = node.read_int(f"/sys/class/net/{netdev_of(node, port)}/mtu") - _ROCE_HEADERS_BYTES
    return max((size for size in (256, 512, 1024, 2048, 4096) if size <= payload_bytes), default=0)


@check(
    "nic.firmware",
    title="firmware",
    source=f"{INFINIBAND}/*/fw_ver",
    expectation="one version on all NICs of a model; of those that are allowed: {nic.firmware}",
    remedy="Update the firmware (mlxfwmanager or the vendor's tool) and reset the NIC.",
    wants="nic.count",
)
def nic_firmware(node: Node, profile: Profile) -> Finding:
    nics, allowed = required_nics(node, profile), profile["nic.firmware"]
    versions: dict[int, set[str]] = {}
    for nic in nics:
        if nic.firmware:
            versions.setdefault(node.topology.pci_device(nic.pci_address).device_id, set()).add(nic.firmware)
    mixed = [", ".join(sorted(found)) for found in versions.values() if len(found) > 1]

    def fault(nic: Nic) -> str | None:
        if not nic.firmware and nic.pci_address:  # a device that is software has none, and some drivers say nothing
            node.read(f"{INFINIBAND}/{nic.name}/fw_ver")
        return None if not allowed or not nic.firmware or nic.firmware in allowed else nic.firmware

    found = survey(nics, _name, fault, ", ".join(sorted({nic.firmware for nic in nics})))
    return Finding(Status.FAIL, f"mixed: {'; '.join(mixed)}") if mixed and found.status is not Status.FAIL else found


@check(
    "nic.guid",
    title="GUIDs of the NICs",
    source=f"{INFINIBAND}/*/node_guid",
    expectation="each NIC has its own; zero, as of a virtual function that was given none, counts as none",
    remedy="Virtual functions: give each its own (ip link set DEVICE vf N node_guid GUID); a cloned VM needs new ones. "
    "Cards: flint -d DEVICE query shows what the firmware has; burn each card's own GUIDs.",
    wants="nic.count",
)
def nic_guid(node: Node, profile: Profile) -> Finding:
    nics = required_nics(node, profile)
    owners: dict[str, list[str]] = {}
    for nic in nics:
        if is_guid(nic.node_guid):
            owners.setdefault(nic.node_guid, []).append(nic.name)

    def fault(nic: Nic) -> str | None:
        if not nic.node_guid:
            raise Unreadable(f"{INFINIBAND}/{nic.name}/node_guid cannot be read")
        others = [name for name in owners.get(nic.node_guid, []) if name != nic.name]
        return f"{nic.node_guid}, as {', '.join(others)}" if others else None

    return survey(nics, _name, fault, f"{len(owners)} GUIDs")


@check(
    "nic.pcie",
    title="PCIe link of the NICs and the path above them",
    source="/sys/bus/pci/devices/*/current_link_width, current_link_speed and max_link_* of the NIC and every bridge "
    "above; a virtual function has the link of its physfn",
    expectation="width and speed = the most that NIC and slot can; enough for the rate of its ports; links of switches "
    "as wide and fast as both ends can",
    remedy="Reseat the NIC or riser; check the slot's bifurcation in the BIOS. Where the physical function cannot be "
    'seen, only the host can judge it: severity {nic.pcie: "off"} in a profile of the site.',
    wants="nic.count",
)
def nic_pcie(node: Node, profile: Profile) -> Finding:
    devices = {device.address: device for device in node.topology.pci}
    of_gpus = {lower.address for gpu in node.topology.pci_gpus for _, lower in links_above(gpu, devices)}

    def fault(nic: Nic) -> str | None:
        device = devices.get(node.link(f"/sys/bus/pci/devices/{nic.pci_address}/physfn") or nic.pci_address)
        link = device.link if device else None
        if device is None or link is None or not link.width or not link.gts:
            if node.is_guest:
                return None
            raise Unreadable("a virtual function, whose physical function cannot be seen here, or an unreadable link")
        # The bridges of a virtual machine are made up by its hypervisor.
        slot = devices.get(device.path[-2]) if len(device.path) > 1 and not node.is_guest else None
        width, gts = link.max_width, link.max_gts
        if slot is not None:  # a slot of an older generation is no fault where it carries the port
            width, gts = min(width, slot.link.max_width or width), min(gts, slot.link.max_gts or gts)
        faults = [f"width {link.width} of {width}"] if link.width < width else []
        faults += [f"speed {link.gts:g} of {gts:g} GT/s"] if link.gts < gts else []
        rate = max((port.rate_gbps for port in nic.ports if port.state == "ACTIVE"), default=0)
        if not faults and bandwidth_gbps(device) < rate:
            faults = [f"{link} carries {bandwidth_gbps(device):.0f} Gb/s, the port {rate:g}"]
        # Links that a GPU uses as well are named by gpu.pcie alone.
        faults += [] if node.is_guest else link_faults(device, devices, without=of_gpus)
        return ", ".join(faults) or None

    nics = [nic for nic in required_nics(node, profile) if nic.pci_address]
    good = "full width and speed" + ", as far as a guest sees it" * node.is_guest
    return survey(nics, _name, fault, good, if_none="no NIC on PCIe")


@check(
    "nic.pcie_settings",
    title="PCIe read requests and relaxed ordering",
    source="configuration space of the NICs: MaxReadReq and relaxed ordering in Device Control; a virtual function has "
    "those of its physfn",
    expectation="MaxReadReq ≥ {nic.max_read_request} bytes; relaxed ordering enabled (not in a virtual machine)",
    remedy="BIOS, or at each boot: setpci -s NIC CAP_EXP+8.w sets MaxReadReq (bits 12–14), relaxed ordering (bit 4). "
    'Where the physical function cannot be seen: severity {nic.pcie_settings: "off"} in a profile of the site.',
    wants="nic.count nic.max_read_request",
    privilege="root, to read beyond the first 64 bytes of configuration space",
    severity=Severity.WARNING,
)
def nic_pcie_settings(node: Node, profile: Profile) -> Finding:
    def fault(nic: Nic) -> str | None:
        physical = node.link(f"/sys/bus/pci/devices/{nic.pci_address}/physfn")
        if node.is_guest:  # sees settings of the hypervisor's making
            return None
        if physical is None and not node.topology.pci_device(nic.pci_address).link.width:
            raise Unreadable("a virtual function, whose physical function cannot be seen here")
        config = node.read_bytes(f"/sys/bus/pci/devices/{physical or nic.pci_address}/config")
        control = _device_control(config)
        size = 128 << (control >> 12 & 0b111)
        faults = [f"MaxReadReq {size}"] if size < profile["nic.max_read_request"] else []
        faults += ["relaxed ordering is off"] if not control & 1 << 4 else []
        return ", ".join(faults) or None

    nics = [nic for nic in required_nics(node, profile) if nic.pci_address]
    good = "a virtual machine: the hypervisor decides" if node.is_guest else "large requests, relaxed ordering"
    return survey(nics, _name, fault, good, if_none="no NIC on PCIe")


def _device_control(config: bytes) -> int:
    """Device Control of the PCI Express capability; capabilities are a list that starts at 0x34."""
    if len(config) < 256:
        raise Unreadable(f"configuration space needs root (got {len(config)} of 256 bytes)")
    offset, steps = config[0x34] & ~3, 0
    while 0x40 <= offset <= 0xF4 and steps < 48:
        if config[offset] == 0x10:
            return int.from_bytes(config[offset + 8 : offset + 10], "little")
        offset, steps = config[offset + 1] & ~3, steps + 1
    raise Unreadable("configuration space has no PCI Express capability")


@counters(
    "nic.errors",
    title="link and transport error counters, read twice",
    source=f"{INFINIBAND}/*/ports/*/counters, hw_counters; {INFINIBAND}/*/hw_counters (EFA); "
    "/sys/class/net/*/carrier_changes",
    expectation="no counter rises, but for these and so much an hour on one port: {nic.error_rise_per_h}",
    remedy="Clean or replace cable and transceiver; on Ethernet check PFC and ECN from host to switch.",
    wants="nic.count",
    rise="nic",
)
def nic_errors(node: Node, profile: Profile) -> Counters:
    found: dict[tuple[str, str], int] = {}
    reason = f"no error counters below {INFINIBAND}/*/ports/*"
    for port in judged_ports(node, profile):
        places = [
            (port_name(port), f"{port_folder(port)}/counters", _LOSSES),
            (port_name(port), f"{port_folder(port)}/hw_counters", _HW_LOSSES),
            (port[0].name, f"{INFINIBAND}/{port[0].name}/hw_counters", _DEVICE_LOSSES),
            *((netdev, f"/sys/class/net/{netdev}", ("carrier_changes",)) for netdev in port[0].netdevs),
        ]
        for thing, place, names in places:
            there = node.names_or_none(place) if node.is_seen(place) else []
            for name in (name for name in names if name in there):
                try:
                    found[thing, name] = node.read_int(f"{place}/{name}")
                except Unreadable as error:  # a virtual function refuses some; the others count all the same
                    reason = str(error)
    if not found:
        raise Unreadable(reason)
    return found


# The InfiniBand standard allows a bit error in 10^12 bits after correction; mlxlink writes 15E-255 for none.
_MOST_BER = 1e-12
_NEEDS_FEC_GBPS = 100  # lanes of 25 Gb/s and more; without correction their raw errors reach the receiver


@check(
    "nic.cable",
    title="bit errors, error correction and temperature of the cables and transceivers",
    source="mlxlink -m -c --json (root); else ethtool -m",
    expectation="at most one bit error in 10^12 bits after correction; FEC on from 100 Gb/s; transceivers below their "
    "own high limit. Not measured where neither program is installed",
    remedy="Clean or replace cable and transceiver, and check the airflow past the ports; set FEC to auto at "
    "both ends.",
    wants="nic.count",
    severity=Severity.WARNING,
    quick=False,
)
def nic_cable(node: Node, profile: Profile) -> Finding:
    reasons: list[str] = []
    measured = 0

    def fault(port: Port) -> str | None:
        nonlocal measured
        for read in (_ask_mlxlink, _ask_ethtool):
            try:
                found = read(node, port)
            except Unreadable as error:
                reasons.append(str(error))
            else:
                measured += 1
                return ", ".join(found) or None
        return None

    ports = active_ports(node, profile)
    found = survey(ports, port_name, fault, f"{len(ports)} ports")
    return found if measured else Finding(Status.PASS, f"not measured: {reasons[0]}")


def _ask_mlxlink(node: Node, port: Port) -> list[str]:
    text = node.command("mlxlink", "-d", port[0].name, "-m", "-c", "--json")
    values = dict(re.findall(r'"([^"]+)"\s*:\s*"([^"]*)"', text))
    faults = []
    for name in ("Effective Physical BER", "Symbol BER"):
        with contextlib.suppress(ValueError):
            faults += [f"{name} {values[name]}"] if float(values.get(name, "0")) > _MOST_BER else []
    fec = values.get("FEC", "")
    if port[1].rate_gbps >= _NEEDS_FEC_GBPS and re.fullmatch(r"No[- ]FEC", fec, re.IGNORECASE):
        faults.append("no FEC")
    heat = re.match(r"(-?\d{1,3})\s*\[-?\d{1,3}\.\.(\d{1,3})\]", values.get("Temperature [C]", ""))
    if heat and int(heat[1]) >= int(heat[2]):
        faults.append(f"transceiver at {heat[1]} °C, its limit is {heat[2]}")
    return faults


def _ask_ethtool(node: Node, port: Port) -> list[str]:
    text = node.command("ethtool", "-m", netdev_of(node, port))
    alarms = re.findall(r"^\s*Module temperature high (alarm|warning)\s*: On", text, re.MULTILINE)
    return [f"transceiver too hot (high {alarm})" for alarm in alarms]


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
    return survey(nics, _name, fault, f"{len(nics)} devices")


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

    ports = [port for port in judged_ports(node, profile) if port[1].link_layer == "InfiniBand"]
    return survey(ports, port_name, fault, f"{len(ports)} devices", if_none="no InfiniBand port")


@check(
    "nic.pkey",
    title="partition key",
    source=f"{INFINIBAND}/*/ports/*/pkeys (InfiniBand only)",
    expectation="full membership (0x8000 is set) of a partition at index 0, which NCCL, NVSHMEM and this package take",
    remedy="Have the subnet manager put the port into the job's partition as full member, at index 0. With OpenSM that "
    "is the port's GUID with =full in partitions.conf. Limited members reach full members alone.",
    wants="nic.count",
)
def nic_pkey(node: Node, profile: Profile) -> Finding:
    def fault(port: Port) -> str | None:
        first = node.read_int(f"{port_folder(port)}/pkeys/0")
        seen.add(f"{first:#06x}")
        if first & 0x7FFF and first & 0x8000:
            return None
        indices = [name for name in node.names(f"{port_folder(port)}/pkeys") if name.isdigit()]
        others = {name: node.read_int(f"{port_folder(port)}/pkeys/{name}") for name in sorted(indices, key=int)[:128]}
        full = [f"{key:#06x} at index {name}" for name, key in others.items() if key & 0x8000 and key & 0x7FFF]
        kind = "empty" if not first & 0x7FFF else f"{first:#06x}, a limited member"
        return f"index 0 is {kind}; full membership: {', '.join(full) or 'none'}"

    seen: set[str] = set()
    ports = [port for port in judged_ports(node, profile) if port[1].link_layer == "InfiniBand"]
    found = survey(ports, port_name, fault, "", if_none="no InfiniBand port")
    return Finding(Status.PASS, " and ".join(sorted(seen))) if found.status is Status.PASS and seen else found


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
