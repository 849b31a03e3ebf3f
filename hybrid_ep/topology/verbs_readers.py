"""What libibverbs knows beyond /sys: the active MTU of InfiniBand ports, and whether a NIC registers dma-buf memory.

Two readers use the same library and give the same facts: pyverbs, which rdma-core ships and a site's image may have,
and the extension module `_verbs`. The first that answers is taken. If neither does, only /sys is used.
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
    """One RDMA device; `dmabuf` is None where the driver's answer is unclear, `ports` empty where it was closed."""

    name: str
    dmabuf: bool | None
    ports: list[VerbsPort]


def read_verbs() -> tuple[str, list[VerbsDevice]]:
    """Asks the readers in the order of `READERS`.

    Returns:
        The name of the first that answered, and the devices.

    Raises:
        RuntimeError: none answered; the message says why.
    """
    reasons = []
    for name, read in READERS.items():
        try:
            return name, read()
        except (ImportError, RuntimeError) as error:
            reasons.append(f"{name}: {error}")
    raise RuntimeError("; ".join(reasons))


def _read_pyverbs() -> list[VerbsDevice]:
    device = importlib.import_module("pyverbs.device")
    errors = importlib.import_module("pyverbs.pyverbs_error")
    try:
        return [_read_device(item.name.decode()) for item in device.get_device_list()]
    except errors.PyverbsError as error:
        # A kernel without RDMA ends here, too, and pyverbs does not say which; the next reader can.
        raise RuntimeError(str(error)) from None
    except (AttributeError, TypeError) as error:
        raise RuntimeError(f"this version has another interface: {error}") from None


def _read_device(name: str) -> VerbsDevice:
    device = importlib.import_module("pyverbs.device")
    errors = importlib.import_module("pyverbs.pyverbs_error")
    found = VerbsDevice(name=name, dmabuf=None, ports=[])
    try:
        with device.Context(name=name) as context:
            for port in range(1, context.query_device().phys_port_cnt + 1):
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
    regions = importlib.import_module("pyverbs.mr")
    no_descriptor, length, local_write = -1, 4096, 1  # IBV_ACCESS_LOCAL_WRITE
    with importlib.import_module("pyverbs.pd").PD(context) as domain:
        try:
            regions.DmaBufMR(domain, length, local_write, dmabuf=no_descriptor).close()
        except errors.PyverbsRDMAError as error:
            answers = {errno.EBADF: True, errno.EOPNOTSUPP: False, errno.EPROTONOSUPPORT: False, errno.ENOSYS: False}
            return answers.get(error.error_code)
    return True


def _read_extension() -> list[VerbsDevice]:
    try:
        module = importlib.import_module("hybrid_ep._verbs")
    except ModuleNotFoundError:
        raise ImportError("was not built (see `hybrid-ep info`)") from None
    return [
        VerbsDevice(
            name=device["name"],
            dmabuf=device["dmabuf"],
            ports=[VerbsPort(port=port["port"], active_mtu_bytes=port["active_mtu_bytes"]) for port in device["ports"]],
        )
        for device in module.probe()
    ]


# In the order of preference.
READERS: dict[str, Callable[[], list[VerbsDevice]]] = {"pyverbs": _read_pyverbs, "_verbs": _read_extension}
