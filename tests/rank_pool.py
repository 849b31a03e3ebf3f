"""Clusters of ranks that tests share: started on first use, kept, and replaced when a rank failed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from hybrid_ep import _C
from hybrid_ep.testing.cluster import RankError, VirtualCluster

_LIMIT_S = 240.0
# libfabric's rxm takes memory for so many peers, and touches it over 100,000 writes.
FEW_PEERS = {"FI_UNIVERSE_SIZE": "16"}
# With CI=true its tests run nevertheless, and fail: the build has missed libfabric-dev.
needs_fabric = pytest.mark.skipif(
    not _C.has_fabric and os.environ.get("CI") != "true", reason="built without the headers of libfabric"
)


def variables_over(transport: str) -> dict[str, str]:
    """The environment of ranks whose domains a transport joins on this host; ``libfabric/tcp`` names a provider."""
    name, _, provider = transport.partition("/")
    return {
        "HYBRID_EP_TRANSPORT": name,
        "HYBRID_EP_FABRIC_PROVIDER": provider,
        "HYBRID_EP_TCP_ADDRESS": "127.0.0.1",
        **FEW_PEERS,
    }


class RankPool:
    """Runs functions on ranks.

    Args:
        device: ``cpu`` or ``cuda``.
        variables: environment variables of every rank.
        one_at_a_time: end the clusters of other sizes before one is started.
        ranks_share_gpus: as in `VirtualCluster`.
    """

    def __init__(
        self,
        *,
        device: str = "cpu",
        variables: dict[str, str] | None = None,
        one_at_a_time: bool = False,
        ranks_share_gpus: bool = False,
    ) -> None:
        options = {"device": device, "variables": variables, "ranks_share_gpus": ranks_share_gpus}
        self._options: dict[str, Any] = options
        self._one_at_a_time = one_at_a_time
        self._started: dict[int, VirtualCluster] = {}

    def run(self, num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Runs `function(*args)` on so many ranks and gives the results by rank."""
        if num_ranks not in self._started:
            if self._one_at_a_time:
                self.close()
            self._started[num_ranks] = VirtualCluster(num_ranks, **self._options)
        try:
            return self._started[num_ranks].run(function, *args, limit_s=_LIMIT_S)
        except RankError:
            # Its ranks are no longer at the same call.
            self._started.pop(num_ranks).close()
            raise

    def close(self) -> None:
        """Ends all ranks."""
        while self._started:
            self._started.popitem()[1].close()
