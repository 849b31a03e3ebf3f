"""A module whose buffer is as DeepEP V1's: `destroy()` works only if it was made with `explicitly_destroy`."""

from __future__ import annotations

from typing import Any

import hybrid_ep
from hybrid_ep import Config

__all__ = ["Buffer", "Config"]


class Buffer:
    """`hybrid_ep.Buffer` without `close`."""

    get_dispatch_config = hybrid_ep.Buffer.get_dispatch_config
    get_combine_config = hybrid_ep.Buffer.get_combine_config
    get_low_latency_rdma_size_hint = hybrid_ep.Buffer.get_low_latency_rdma_size_hint

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        explicitly_destroy: bool = False,
    ) -> None:
        self.explicitly_destroy = explicitly_destroy
        self._inner = hybrid_ep.Buffer(group, num_nvl_bytes, num_rdma_bytes, low_latency_mode)

    def __getattr__(self, name: str) -> Any:
        if name == "close":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def destroy(self) -> None:
        """Gives back what it holds."""
        assert self.explicitly_destroy
        self._inner.destroy()
