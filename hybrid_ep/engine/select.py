"""Which engine serves a group, and why."""

from __future__ import annotations

import importlib.util
import logging
from typing import NamedTuple

import torch
import torch.distributed as dist

from hybrid_ep import env
from hybrid_ep.engine.base import Engine
from hybrid_ep.engine.torch_engine import TorchEngine
from hybrid_ep.errors import ConfigError
from hybrid_ep.geometry import RankGrid

__all__ = ["Choice", "choose_engine", "make_engine"]

_LOG = logging.getLogger("hybrid_ep")
_said: set[str] = set()


class Choice(NamedTuple):
    """An engine's name, and why it is chosen."""

    name: str
    reason: str


def choose_engine(asked: str | None = None) -> Choice:
    """Returns which engine this process could serve with.

    Args:
        asked: ``auto``, ``torch`` or ``cuda``; None = ``HYBRID_EP_ENGINE``.

    Raises:
        ConfigError: cuda was asked for by name and cannot run here.
    """
    asked = env.ENGINE.get() if asked is None else asked
    if asked not in ("auto", "torch", "cuda"):
        raise ConfigError(f"engine is {asked!r}; allowed: auto, torch or cuda")
    if asked == "torch":
        return Choice("torch", "asked for by name")
    obstacle = _cuda_obstacle()
    if obstacle is None:
        return Choice("cuda", "the extension is built and the GPU is capable")
    if asked == "cuda":
        raise ConfigError(f"engine is 'cuda', but {obstacle}; allowed here: auto or torch")
    return Choice("torch", obstacle)


def _cuda_obstacle() -> str | None:
    """Returns why the cuda engine cannot run in this process, or None."""
    if importlib.util.find_spec("hybrid_ep._cuda") is None:
        return "the _cuda extension is not built"
    if not torch.cuda.is_available():
        return "no GPU is visible"
    if torch.cuda.get_device_capability() < (9, 0):
        return f"GPU compute capability is {torch.cuda.get_device_capability()}, below (9, 0)"
    return None


def make_engine(
    group: dist.ProcessGroup | None, grid: RankGrid, *, asked: str | None = None, timeout_s: float | None = None
) -> Engine:
    """Makes the engine for a group. Collective: all ranks agree on one.

    Args:
        group: the process group; None for a single rank.
        grid: its geometry.
        asked: as in `choose_engine`.
        timeout_s: how long to wait for a peer; None = ``HYBRID_EP_TIMEOUT_S``.
    """
    timeout_s = env.TIMEOUT_S.get() if timeout_s is None else timeout_s
    if not 0 < timeout_s < float("inf"):
        raise ConfigError(f"timeout_s is {timeout_s}; allowed: a number of seconds > 0")
    choice = choose_engine(asked)
    if choice.name not in _said:
        _said.add(choice.name)
        _LOG.info("engine %s: %s", choice.name, choice.reason)
    return TorchEngine(group, grid, timeout_s)
