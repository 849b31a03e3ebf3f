"""The NICs and the address of a rank's link."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from hybrid_ep import _C, env
from hybrid_ep.topology import Topology, choose_nics

if TYPE_CHECKING:
    import torch

_DOCUMENTATION_HOST = "192.0.2.1"  # RFC 5737: reached by the default route, and by no host


def gpu_idx_of(topology: Topology, device: torch.device) -> int | None:
    """Returns which GPU of the node a torch device is; None for the CPU, and where the probe has not seen it."""
    if device.type != "cuda":
        return None
    import torch

    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return next((gpu.gpu_idx for gpu in topology.gpus if gpu.uuid.removeprefix("GPU-") == uuid), None)


def nic_names(topology: Topology, gpu_idx: int | None) -> list[str]:
    """Returns the NICs of a rank: those of its GPU, or all that are active where it has none."""
    nics = () if gpu_idx is None else choose_nics(topology, gpu_idx)
    if nics:
        return [nic.name for nic in nics]
    named = env.NICS.get()
    return [part for name in named for part in name.split("+")] if named else _C.active_verbs_devices()


def fabric_nics(topology: Topology, gpu_idx: int | None, provider: str) -> list[str]:
    """Returns the devices of a libfabric provider that a rank uses; none: the provider's first.

    The topology does not know Slingshot's NICs: GPUs take them in turn, or those of ``HYBRID_EP_NICS``.
    """
    named = env.NICS.get()
    if provider == "cxi":
        names = named or _C.fabric_devices(provider)
        return names[(gpu_idx or 0) % len(names)].split("+")
    has_nics = provider == "efa" or provider.startswith("verbs")
    return nic_names(topology, gpu_idx) if has_nics and (named or gpu_idx is not None) else []


def local_address() -> str:
    """Returns the numeric address at which the other hosts reach this one.

    ``HYBRID_EP_TCP_ADDRESS``, else the address of the route to rank 0's host. If that route uses the loopback
    interface although rank 0's host has a name, the address of the default route.
    """
    if named := env.TCP_ADDRESS.get():
        return named
    master = env.MASTER_ADDR.get()
    address = _source_address(master)
    if address is None or (_is_loopback(address) and not _is_loopback(master)):
        address = _source_address(_DOCUMENTATION_HOST)
    return address or "127.0.0.1"


def _source_address(host: str) -> str | None:
    """The address that packets to a host would have; sends none."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as datagrams:
            datagrams.connect(target)
            return str(datagrams.getsockname()[0])
    except OSError:
        return None


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
