"""A part of `CudaBetween`: low-latency calls, each by the kernels or, where they do not take its size, by torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from hybrid_ep.engine.base import one_at_a_time
from hybrid_ep.engine.calls import (
    LowLatencyCombineRequest,
    LowLatencyDispatched,
    LowLatencyDispatchRequest,
    LowLatencyHandle,
)
from hybrid_ep.engine.cuda.low_latency_between import LowLatencyBetween
from hybrid_ep.engine.torch.engine import TorchEngine
from hybrid_ep.errors import ConfigError

__all__ = ["LowLatencyChoice"]


class LowLatencyChoice(TorchEngine):
    """The torch engine, whose low-latency calls may have kernels. Arguments are those of `TorchEngine`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._low_latency_kernels: LowLatencyBetween | None = None
        self._calls_kernels: bool | None = None  # whether they served the last low-latency call; None: none yet

    @one_at_a_time
    def low_latency_dispatch(self, request: LowLatencyDispatchRequest) -> LowLatencyDispatched:
        kernels = self._low_latency_kernels
        self._calls_kernels = kernels is not None and kernels.serves(request)
        if kernels is None or not self._calls_kernels:
            return super().low_latency_dispatch(request)
        return kernels.dispatch(request)

    @one_at_a_time
    def low_latency_combine(
        self, request: LowLatencyCombineRequest, handle: LowLatencyHandle
    ) -> Callable[[], None] | None:
        kernels = self._low_latency_kernels
        self._calls_kernels = kernels is not None and kernels.has_made(handle)
        if kernels is None or not self._calls_kernels:
            return super().low_latency_combine(request, handle)
        return kernels.combine(request, handle)

    def refuse(self, call: str, error: ConfigError) -> None:
        """As `Engine.refuse`, for low-latency calls."""
        kernels = self._low_latency_kernels
        # The arguments do not tell which engine the other ranks call: most likely that of the call before.
        if kernels is None or self._calls_kernels is False:
            super().refuse(call, error)
        else:
            kernels.refuse(call, error)

    def allow_masks(self, *, only_masks_lost: bool) -> None:
        super().allow_masks(only_masks_lost=only_masks_lost)
        if (kernels := self._low_latency_kernels) is not None:
            kernels.takes_masks, kernels.only_masks_lost = True, only_masks_lost

    @property
    def completes_lost_calls(self) -> bool:  # type: ignore[override]
        return not self._calls_kernels

    def set_masked(self, ranks: Iterable[int], masked: bool) -> None:
        ranks = set(ranks)
        super().set_masked(ranks, masked)
        if (kernels := self._low_latency_kernels) is not None:
            kernels.set_masked(ranks, masked)

    def leave_out(self, peer: int) -> None:
        kernels = self._low_latency_kernels
        if kernels is not None and self._calls_kernels:
            kernels.leave_out(peer, self.set_masked)
        else:
            super().leave_out(peer)

    def low_latency_memory(self) -> Tensor:
        kernels = self._low_latency_kernels
        return super().low_latency_memory() if kernels is None else kernels.rows_memory()
