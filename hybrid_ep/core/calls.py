"""The decorator of public calls on tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")
_is_mode_enabled: Callable[[], bool] = torch._C._is_torch_function_mode_enabled


def plain_tensors(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """Makes a call read tensors without torch's function modes.

    `torch.set_default_device` is such a mode. It intercepts every attribute of every tensor, and the checks of a call
    read dozens. Inside the call, tensors that are made without a device are on the CPU, whatever the mode says.
    """

    @functools.wraps(call)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not _is_mode_enabled():
            return call(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return call(*args, **kwargs)

    return wrapped
