"""The transports that join domains of one host in tests."""

from __future__ import annotations

import pytest

from hybrid_ep.transport import nvshmem

__all__ = ["TRANSPORTS", "needs_nvshmem"]

_OBSTACLE = nvshmem.obstacle()[1]
needs_nvshmem = pytest.mark.skipif(_OBSTACLE is not None, reason=str(_OBSTACLE))
TRANSPORTS = ["loopback", "tcp", pytest.param("nvshmem", marks=needs_nvshmem)]
