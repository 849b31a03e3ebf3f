"""Every error that hybrid_ep raises on purpose.

    HybridEPError
    ├── ConfigError (ValueError)       an argument, tensor, handle or variable is not what the call accepts
    ├── TopologyError                  the machine or the group has another layout than asked for
    ├── TransportError                 bytes could not be moved: a peer closed its connection
    │   └── TimeoutError               a peer did not arrive within the configured time
    ├── OverflowError                  more rows arrived than the caller's bound
    ├── ClosedError                    a buffer was used after it or its process group was closed
    └── CudaError (RuntimeError)       a call of the CUDA runtime failed in the cuda engine

A message has the value that was given and the values that are allowed. docs/troubleshooting.md has an entry for each
class: causes, and what to do.
"""

from __future__ import annotations

import builtins
from dataclasses import astuple, dataclass
from typing import Any

__all__ = [
    "ClosedError",
    "ConfigError",
    "CudaError",
    "HybridEPError",
    "OverflowError",
    "TimeoutError",
    "TopologyError",
    "TransportError",
]


class HybridEPError(Exception):
    """Base of every error raised by hybrid_ep."""


class ConfigError(HybridEPError, ValueError):
    """An argument, tensor, handle or environment variable is not what the call accepts."""


class TopologyError(HybridEPError):
    """The machine, the domain or the process group does not have the layout that the call needs."""


@dataclass(eq=False)
class TransportError(HybridEPError):
    """Bytes could not be moved between two ranks.

    Attributes:
        where: the step that failed, e.g. ``"dispatch: counts within domain"``.
        rank: the rank that noticed.
        peer: the rank that was lost, or None if no single rank is the cause.
        detail: the message of the layer underneath.
    """

    where: str
    rank: int
    peer: int | None
    detail: str

    def __post_init__(self) -> None:
        self.args = astuple(self)  # also where the fields were given by name

    def __str__(self) -> str:
        lost = "" if self.peer is None else f" lost rank {self.peer}"
        return f"{self.where}: rank {self.rank}{lost}: {self.detail}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), astuple(self)


@dataclass(eq=False)
class TimeoutError(TransportError, builtins.TimeoutError):
    """A peer did not arrive in time (``HYBRID_EP_TIMEOUT_S`` or the buffer's ``timeout_s``).

    Also a built-in ``TimeoutError``. It has the attributes of `TransportError`.

    Attributes:
        timeout_s: seconds that were waited.
    """

    timeout_s: float = 0.0

    def __str__(self) -> str:
        who = "" if self.peer is None else f" for rank {self.peer}"
        return f"{self.where}: rank {self.rank} waited {self.timeout_s:g} s{who}: {self.detail}"


class OverflowError(HybridEPError, builtins.OverflowError):
    """More rows arrived than the bound that the caller gave (``num_worst_tokens``, ``num_permuted_tokens`` …).

    Also a built-in ``OverflowError``. Rows beyond the bound are not delivered.
    """


class ClosedError(HybridEPError):
    """A buffer was used after ``close()`` or ``destroy()``, without its process group, or in a forked child."""


class CudaError(HybridEPError, RuntimeError):
    """A call of the CUDA runtime failed in the cuda engine; the message names the call."""
