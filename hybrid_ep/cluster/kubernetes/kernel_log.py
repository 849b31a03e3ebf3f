"""The kernel's log for a doctor that may not read it.

Only root may read /dev/kmsg, and in a container only if it is privileged. So a container that runs nothing but this
command reads it, and keeps the lines that the doctor judges in a file that the doctor's Pod shares.
"""

from __future__ import annotations

import os
from pathlib import Path

from hybrid_ep.cluster.doctor.capture import kernel_records
from hybrid_ep.cluster.doctor.node import Node


def keep_kernel_log(node: Node, place: Path) -> None:
    """Writes the lines that `kernel_records` keeps to `place`, whole or not at all.

    Raises:
        Unreadable: the log cannot be read; `place` is then left alone.
        OSError: `place` cannot be written.
    """
    beside = place.with_name(f".{place.name}.{os.getpid()}")
    beside.write_text(kernel_records(node))
    beside.chmod(0o644)
    beside.replace(place)
