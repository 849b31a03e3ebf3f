"""The interface of an implementation that is measured.

A subject is driven as a model would drive it. `dispatch` and `combine` are what is timed and do nothing else;
`received` and `outputs` prepare what the check and the combine need, outside the timing.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.quantize import cast_from_fp8

__all__ = ["Received", "Subject", "as_float32"]


@dataclass(frozen=True)
class Received:
    """The rows that a dispatch brought, in a form that can be compared.

    Attributes:
        rows: ``[n, H]`` float32, dequantised, without padding; in any order.
        labels: ``[n, W]`` float64, what else is known of each row: its experts and weights, or where it comes from.
    """

    rows: Tensor
    labels: Tensor


class Subject(abc.ABC):
    """One implementation, ready to be driven with one batch."""

    engine: str
    grid: RankGrid | None = None  # its domains, where rows cross to a peer once for each domain
    waiting_calls: frozenset[str] = frozenset()  # in these the host waits for the device, so its time is the device's
    num_calls: Mapping[str, int] = MappingProxyType({})  # how many calls one run makes, of those that make several
    calls_with_results: tuple[str, ...] = ()  # dispatches whose results a caller may keep alive

    @abc.abstractmethod
    def dispatch(self) -> Any:
        """The timed call, layout and exchange of counts included. Collective."""

    @abc.abstractmethod
    def received(self, dispatched: Any) -> Received:
        """Returns the rows that `dispatch` brought. Local."""

    @abc.abstractmethod
    def outputs(self, dispatched: Any, factor: float) -> Tensor:
        """Replaces the experts: every received row times `factor`, in the form that combine takes. Local."""

    @abc.abstractmethod
    def combine(self, dispatched: Any, outputs: Tensor) -> Tensor:
        """The timed call; ``[T, H]`` bf16. Collective."""

    def further_calls(self, dispatched: Any, outputs: Tensor) -> dict[str, Callable[[], object]]:
        """Returns further calls to time in turn. Names begin with the call that they belong to. Collective."""
        return {}

    def close(self) -> None:  # noqa: B027 - most subjects hold nothing
        """Gives back what the implementation holds."""


def as_float32(rows: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """bf16 rows, or fp8 values (possibly as bytes) and their scales, as float32."""
    return cast_from_fp8(*rows, torch.float32) if isinstance(rows, tuple) else rows.float()
