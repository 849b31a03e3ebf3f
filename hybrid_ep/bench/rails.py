"""Figures of a link between domains as metrics of a test job: the slowest rank, and the slowest of each rail.

A rail is the ranks with the same index in their domains, which are peers, and their NICs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["rail_metrics"]


def rail_metrics(name: str, gbytes_per_s: Sequence[float], num_ranks_per_domain: int) -> list[dict[str, Any]]:
    """Metrics as `hybrid_ep.cluster.validation` reads them.

    Args:
        name: of the figure; a rail adds ``railN`` to it.
        gbytes_per_s: by rank.
        num_ranks_per_domain: as many rails.
    """
    rails = [min(gbytes_per_s[rail::num_ranks_per_domain]) for rail in range(num_ranks_per_domain)]
    named = {name: min(rails)} | {f"{name} rail{rail}": value for rail, value in enumerate(rails)}
    return [{"name": key, "value": value, "unit": "GB/s"} for key, value in named.items()]
