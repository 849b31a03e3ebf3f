"""The transports that join domains of one host in tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch.distributed as dist

from hybrid_ep.transport import nvshmem

__all__ = ["TRANSPORTS", "check_by_puts", "needs_nvshmem"]

_OBSTACLE = nvshmem.obstacle()[1]
needs_nvshmem = pytest.mark.skipif(_OBSTACLE is not None, reason=str(_OBSTACLE))
TRANSPORTS = ["loopback", "tcp", pytest.param("nvshmem", marks=needs_nvshmem)]


def check_by_puts(check: Callable[..., object], *args: object) -> None:
    """Runs a check in which no peer's window counts as mapped, so that NVSHMEM gets every put."""

    def map_own(window: nvshmem.Window, pes: Sequence[int]) -> list[int]:
        return [window.address if pe == dist.get_rank() else 0 for pe in pes]

    with mock.patch.object(nvshmem.Window, "map_at", map_own):
        check(*args)
