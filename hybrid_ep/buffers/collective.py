"""What all collective calls of the buffers have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

from hybrid_ep.buffers.base import BaseBuffer
from hybrid_ep.engine.base import Engine
from hybrid_ep.errors import ConfigError

__all__ = ["collective"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _refuse(engine: Engine, name: str, error: ConfigError) -> None:
    """Refuses a call, unless another thread is in one: ranks could not agree on the order of the two."""
    if engine.busy.acquire(blocking=False):
        try:
            engine.refuse(name, error)
        finally:
            engine.busy.release()


def collective(name: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Makes a call tell the other ranks what is wrong with the arguments of this one: they would wait for this rank.

    Until the engine takes part in a call, only this rank knows of an error. Then the engine refuses the call, and every
    rank raises the error. Tensors are read without torch's function modes, as by `plain_tensors`.

    Args:
        name: of the call, one of `engine.agreement.CALLS`. Its first argument is the buffer.
    """

    def decorate(call: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(call)
        def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            engine = cast("BaseBuffer", args[0])._engine
            num_calls = 0 if engine is None else engine.num_calls
            try:
                if not torch._C._is_torch_function_mode_enabled():
                    return call(*args, **kwargs)
                with torch._C.DisableTorchFunction():
                    return call(*args, **kwargs)
            except ConfigError as error:
                if engine is not None and engine.num_calls == num_calls:
                    _refuse(engine, name, error)
                raise

        return wrapped

    return decorate
