"""What libibverbs knows beyond /sys: the active MTU of InfiniBand ports, and whether a NIC registers dma-buf memory.

Two readers ask the same library and give the same facts: pyverbs, which rdma-core ships and a site's image may have,
and our extension module. The first that can be imported is asked; where neither can, /sys alone has to do.
"""

from __future__ import annotations

import errno
import importlib
from collections.abc import Callable
from typing import Any, TypedDict

__all__ = ["READERS", "VerbsDevice", "VerbsPort", "read_verbs"]


class VerbsPort(TypedDict):
    """One port: its number from 1, and the RDMA MTU in force in bytes."""

    port: int
    active_mtu_bytes: int


class VerbsDevice(TypedDict):
    """One RDMA device; `dmabuf` is None where the driver's answer tells nothing, `ports` empty where it was closed."""

    name: str
    firmware: str
    dmabuf: bool | None
    ports: list[VerbsPort]


def read_verbs() -> tuple[str, list[VerbsDevice]]:
    """Asks the first reader that can be imported.

    Returns:
        The reader's name, and the devices.

    Raises:
        ImportError: neither reader is there; the message says why.
        RuntimeError: libibverbs cannot list devices.
    """
    reasons = []
    for name, read in READERS.items():
        try:
            return name, read()
        except ImportError as error:
            reasons.append(str(error))
    raise ImportError("; ".join(reasons))


def _read_pyverbs() -> list[VerbsDevice]:
    device = importlib.import_module("pyverbs.device")
    errors = importlib.import_module("pyverbs.pyverbs_error")
    try:
        names = [item.name.decode() for item in device.get_device_list()]
    except errors.PyverbsError:
        return []  # pyverbs does not say why; a kernel without RDMA ends here, too
    return [_read_device(name) for name in names]


def _read_device(name: str) -> VerbsDevice:
    device = importlib.import_module("pyverbs.device")
    errors = importlib.import_module("pyverbs.pyverbs_error")
    found = VerbsDevice(name=name, firmware="", dmabuf=None, ports=[])
    try:
        with device.Context(name=name) as context:
            attributes = context.query_device()
            found["firmware"] = attributes.fw_ver.decode()
            for port in range(1, attributes.phys_port_cnt + 1):
                mtu = int(context.query_port(port).active_mtu)
                # enum ibv_mtu: 1 = 256 bytes … 5 = 4096 bytes.
                found["ports"].append(VerbsPort(port=port, active_mtu_bytes=128 << mtu if 1 <= mtu <= 5 else 0))
            found["dmabuf"] = _registers_dmabuf(context)
    except errors.PyverbsError:
        return found  # closed to us: listed with what was read so far
    return found


def _registers_dmabuf(context: Any) -> bool | None:
    """Registers a dma-buf that does not exist: a driver that knows dma-buf says EBADF, another "not supported"."""
    errors = importlib.import_module("pyverbs.pyverbs_error")
    enums = importlib.import_module("pyverbs.enums")
    regions = importlib.import_module("pyverbs.mr")
    no_descriptor, length = -1, 4096
    with importlib.import_module("pyverbs.pd").PD(context) as domain:
        try:
            regions.DmaBufMR(domain, length, enums.IBV_ACCESS_LOCAL_WRITE, no_descriptor).close()
        except errors.PyverbsRDMAError as error:
            answers = {errno.EBADF: True, errno.EOPNOTSUPP: False, errno.EPROTONOSUPPORT: False, errno.ENOSYS: False}
            return answers.get(error.error_code)
    return True


def _read_extension() -> list[VerbsDevice]:
    try:
        module = importlib.import_module("hybrid_ep._verbs")
    except ModuleNotFoundError:
        raise ImportError("hybrid_ep._verbs was not built (see `hybrid-ep info`)") from None
    return [
        VerbsDevice(
            name=device["name"],
            firmware=device["firmware"],
            dmabuf=device["dmabuf"],
            ports=[VerbsPort(port=port["port"], active_mtu_bytes=port["active_mtu_bytes"]) for port in device["ports"]],
        )
        for device in module.probe()
    ]


# In the order of preference.
READERS: dict[str, Callable[[], list[VerbsDevice]]] = {"pyverbs": _read_pyverbs, "_verbs": _read_extension}
