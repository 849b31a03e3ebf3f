"""The decorator of all collective calls of the buffers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from hybrid_ep.engine.base import Engine
from hybrid_ep.errors import ConfigError

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _never(*_: object, **__: object) -> bool:
    return False


def _refuse(engine: Engine, name: str, error: ConfigError) -> None:
    """Refuses a call, unless another thread is in one: ranks could not agree on the order of the two."""
    if engine.busy.acquire(blocking=False):
        try:
            engine.refuse(name, error)
        finally:
            engine.busy.release()


def collective(name: str, *, is_local: Callable[..., bool] = _never) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Makes a call tell the other ranks if an argument of this rank does not fit: otherwise they would wait for it.

    Until the engine takes part in a call, only this rank knows of an error. Then the engine refuses the call, and every
    rank raises the error. Tensors are read without torch's function modes, as by `plain_tensors`.

    Args:
        name: of the call, one of `agree.fields.CALLS`. Its first argument is the buffer.
        is_local: takes the arguments of the call, of which any may be wrong; returns whether no rank sends anything.
    """

    def decorate(call: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(call)
        def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            buffer: Any = args[0]
            engine: Engine | None = buffer._engine
            num_calls = 0 if engine is None else engine.num_calls
            try:
                if not torch._C._is_torch_function_mode_enabled():
                    return call(*args, **kwargs)
                with torch._C.DisableTorchFunction():
                    return call(*args, **kwargs)
            except ConfigError as error:
                is_known = engine is None or engine.num_calls > num_calls
                if not is_known and not is_local(*args, **kwargs):
                    _refuse(buffer.engine, name, error)  # a closed one raises
                raise

        return wrapped

    return decorate
