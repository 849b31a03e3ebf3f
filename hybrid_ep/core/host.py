"""The name of the host that a process runs on."""

from __future__ import annotations

import socket
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_name() -> str:
    """Returns an identifier of this host that no other host has. Host names are not enough: several may have the same.

    The kernel draws its boot id at every start. Two containers of one host that have other names count as two: they
    need not reach each other's memory.
    """
    try:
        boot_id = _BOOT_ID.read_text().strip()
    except OSError:  # not Linux, or not to be read here
        boot_id = ""
    return f"{socket.gethostname()} {boot_id}"
