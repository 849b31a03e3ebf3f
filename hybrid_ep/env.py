"""Every environment variable that hybrid_ep reads, as one table.

Nothing else in the package looks into ``os.environ``: the table drives parsing, `hybrid-ep env` and the documentation.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hybrid_ep.errors import ConfigError

__all__ = [
    "ARCH_LIST",
    "BUILD_CUDA",
    "ENGINE",
    "LOG_LEVEL",
    "NUM_RANKS_PER_DOMAIN",
    "TIMEOUT_S",
    "VARIABLES",
    "Variable",
]

T = TypeVar("T")


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable.

    Attributes:
        name: its name; ``HYBRID_EP_*`` unless the field already has one for it.
        default: the value when it is unset or empty.
        parse: turns the text into the value; raises ValueError for text that it does not take.
        allowed: what it takes, for people.
        effect: what it does, for people.
        phase: ``"run"`` for variables read by the package, ``"build"`` for those read by setup.py.
    """

    name: str
    default: T
    parse: Callable[[str], T]
    allowed: str
    effect: str
    phase: str = "run"

    def get(self) -> T:
        """Returns the value in force.

        Raises:
            ConfigError: the variable holds text that is not allowed.
        """
        text = os.environ.get(self.name, "")
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError:
            raise ConfigError(f"{self.name}={text!r} is not allowed; it takes {self.allowed}") from None


def _choice(*values: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in values:
            raise ValueError(text)
        return text

    return parse


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


def _positive_int(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise ValueError(text)
    return value


ENGINE = Variable(
    "HYBRID_EP_ENGINE",
    "auto",
    _choice("auto", "torch", "cuda"),
    "auto, torch or cuda",
    "The engine that moves tokens. `auto` takes cuda where it is built and every rank has a capable GPU, else torch.",
)
TIMEOUT_S = Variable(
    "HYBRID_EP_TIMEOUT_S",
    100.0,
    _positive_float,
    "a number of seconds > 0",
    "How long a rank waits for another before it raises TimeoutError; a buffer's `timeout_s` overrides it.",
)
NUM_RANKS_PER_DOMAIN: Variable[int | None] = Variable(
    "HYBRID_EP_NUM_RANKS_PER_DOMAIN",
    None,
    _positive_int,
    "an integer ≥ 1 that divides the number of ranks",
    "Forces the size of a domain, so that one host can stand for several; unset, the whole group is one domain.",
)
LOG_LEVEL = Variable(
    "HYBRID_EP_LOG_LEVEL",
    "WARNING",
    _choice("DEBUG", "INFO", "WARNING", "ERROR"),
    "DEBUG, INFO, WARNING or ERROR",
    "How much the `hybrid-ep` command logs to stderr.",
)

BUILD_CUDA = Variable(
    "HYBRID_EP_BUILD_CUDA",
    "auto",
    _choice("auto", "on", "off"),
    "auto, on or off",
    "The `_cuda` module: `auto` builds it where nvcc is found, `on` makes a missing nvcc an error.",
    "build",
)
ARCH_LIST = Variable(
    "TORCH_CUDA_ARCH_LIST",
    "9.0 10.0",
    str,
    "compute capabilities, separated by spaces or semicolons",
    "The GPU architectures that the `_cuda` module is compiled for.",
    "build",
)

VARIABLES: tuple[Variable[Any], ...] = (
    ENGINE,
    TIMEOUT_S,
    NUM_RANKS_PER_DOMAIN,
    LOG_LEVEL,
    BUILD_CUDA,
    ARCH_LIST,
)
