"""Data Center Bridging of a network interface, asked from the kernel by netlink: PFC, and how packets are sorted.

There is no file for it, and the programs that show it (mlnx_qos, dcb) are seldom installed on a GPU node.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from hybrid_ep.watched import Unreadable

# From linux/rtnetlink.h and linux/dcbnl.h.
_RTM_GETDCB, _NLM_F_REQUEST, _NLMSG_ERROR = 78, 1, 2
_CMD_IEEE_GET = 21
_ATTR_IFNAME, _ATTR_IEEE = 1, 13
_IEEE_PFC, _IEEE_APP_TABLE = 2, 3
_SELECTOR_DSCP = 5
_TYPE_MASK = 0x3FFF  # without the flags for nesting and byte order
_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class DcbState:
    """Settings of one interface.

    Attributes:
        pfc_priorities: bit p is set where priority flow control is on for priority p.
        sorts_by_dscp: packets get their priority by the DSCP field (trust dscp), not by the VLAN tag.
    """

    pfc_priorities: int
    sorts_by_dscp: bool


def read_dcb(netdev: str) -> DcbState:
    """Asks the kernel; needs no privilege.

    Raises:
        Unreadable: the interface is not there, or its driver has no DCB.
    """
    name = netdev.encode() + b"\0"
    body = struct.pack("=BBH", socket.AF_UNSPEC, _CMD_IEEE_GET, 0) + _attribute(_ATTR_IFNAME, name)
    message = struct.pack("=IHHII", 16 + len(body), _RTM_GETDCB, _NLM_F_REQUEST, 1, 0) + body
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as link:
            link.settimeout(_TIMEOUT_S)
            link.send(message)
            answer = link.recv(1 << 16)
    except OSError as error:
        raise Unreadable(f"DCB of {netdev}: {error.strerror or error}") from None
    if len(answer) < 20:
        raise Unreadable(f"DCB of {netdev}: an answer of {len(answer)} bytes")
    if struct.unpack_from("=H", answer, 4)[0] == _NLMSG_ERROR:
        number = -struct.unpack_from("=i", answer, 16)[0]
        raise Unreadable(f"DCB of {netdev}: {os.strerror(number)}")
    return parse_ieee(answer[20:])


def parse_ieee(attributes: bytes) -> DcbState:
    """Reads the attributes behind the header of an answer to DCB_CMD_IEEE_GET."""
    pfc, by_dscp = 0, False
    for kind, content in _attributes(attributes):
        if kind == _ATTR_IEEE:
            for inner, value in _attributes(content):
                if inner == _IEEE_PFC and len(value) >= 2:
                    pfc = value[1]  # struct ieee_pfc: capability, priorities that are on, …
                if inner == _IEEE_APP_TABLE:  # of struct dcb_app: selector, priority, protocol
                    by_dscp = any(app[:1] == bytes([_SELECTOR_DSCP]) for _, app in _attributes(value))
    return DcbState(pfc, by_dscp)


def _attribute(kind: int, content: bytes) -> bytes:
    padding = -len(content) % 4
    return struct.pack("=HH", 4 + len(content), kind) + content + b"\0" * padding


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while offset + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, offset)
        if length < 4:
            return
        yield kind & _TYPE_MASK, data[offset + 4 : offset + length]
        offset += length + -length % 4
