"""Which host a process runs on."""

from __future__ import annotations

import socket
from pathlib import Path

__all__ = ["host_name"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_name() -> str:
    """Returns what tells this host from every other: images and default names give several the same name.

    The kernel draws its boot id at every start. Two containers of one host that have other names count as two: they
    need not reach each other's memory.
    """
    try:
        boot_id = _BOOT_ID.read_text().strip()
    except OSError:  # not Linux, or not to be read here
        boot_id = ""
    return f"{socket.gethostname()} {boot_id}"
