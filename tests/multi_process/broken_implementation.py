"""A module with the usual interfaces that gets one received row wrong on rank 1, and one combined row on rank 2."""

from __future__ import annotations

from typing import Any

import hybrid_ep
from hybrid_ep import Config

__all__ = ["Buffer", "Config", "HybridEPBuffer"]


class Buffer(hybrid_ep.Buffer):
    """Wrong in its normal and its low-latency calls."""

    def dispatch(self, x: Any, **options: Any) -> Any:
        """One row is not the one that was sent."""
        result = super().dispatch(x, **options)
        _spoil_dispatch(self.rank, result[0])
        return result

    def combine(self, x: Any, handle: Any, **options: Any) -> Any:
        """One row is too large."""
        result = super().combine(x, handle, **options)
        _spoil_combine(self.rank, result[0])
        return result

    def low_latency_dispatch(self, *arguments: Any, **options: Any) -> Any:
        """One row is not the one that was sent."""
        result = super().low_latency_dispatch(*arguments, **options)
        _spoil_dispatch(self.rank, result[0][0])
        return result

    def low_latency_combine(self, *arguments: Any, **options: Any) -> Any:
        """One row is too large."""
        result = super().low_latency_combine(*arguments, **options)
        _spoil_combine(self.rank, result[0])
        return result


class HybridEPBuffer(hybrid_ep.HybridEPBuffer):
    """Wrong in its permuted calls."""

    def dispatch_with_permute(self, **options: Any) -> Any:
        """One row is not the one that was sent."""
        result = super().dispatch_with_permute(**options)
        _spoil_dispatch(self.rank, result[0])
        return result

    def combine_with_unpermute(self, **options: Any) -> Any:
        """One row is too large."""
        result = super().combine_with_unpermute(**options)
        _spoil_combine(self.rank, result[0])
        return result


def _spoil_dispatch(rank: int, rows: Any) -> None:
    if rank == 1:
        rows[0] += 1


def _spoil_combine(rank: int, rows: Any) -> None:
    if rank == 2:
        rows[3] *= 1.5
