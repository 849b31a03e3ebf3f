"""Clusters of ranks that tests share: started on first use, kept, and replaced when a rank failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybrid_ep.testing.cluster import RankError, VirtualCluster

_LIMIT_S = 240.0


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
