"""How calls of buffers are repeated: what the engine's call takes of the arguments, and how its result is arranged."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from hybrid_ep.core.event import EventOverlap
from hybrid_ep.core.repeatable import Repeat, Taken
from hybrid_ep.engine.calls import (
    RepeatedCombine,
    RepeatedDispatch,
    RepeatedDispatchAlong,
)

__all__ = [
    "parts_of_repeat",
    "repeat_along",
    "repeat_combine",
    "repeat_dispatch",
    "up_to",
]


def parts_of_repeat(x: object) -> tuple[tuple[Taken, Taken], Any] | None:
    """Rows and scales as a Repeat takes them, and as it gives them. None: rows of this form are left to Python."""
    if isinstance(x, Tensor):
        return ("x", None), 0
    is_pair = isinstance(x, tuple) and len(x) == 2 and x[1] is not None
    return ((("x", 0), ("x", 1)), (0, 1)) if is_pair else None


def repeat_dispatch(repeat: RepeatedDispatch | None, x: object, alignment: int, bound: int) -> Repeat | None:
    parts = parts_of_repeat(x)
    if repeat is None or parts is None:
        return None
    taken, tokens = parts
    call = repeat.call if alignment == 1 or bound else functools.partial(_aligned, repeat.call, alignment)
    gives = tokens, 2, 3, list if bound else 4, 5, EventOverlap
    return Repeat(call, (*taken, "topk_idx", "topk_weights"), gives)


def _aligned(call: Callable[..., Any], alignment: int, *arguments: Any) -> Any:
    """A repeated dispatch whose counts are multiples of `alignment`."""
    made = call(*arguments)
    return made and (*made[:4], up_to(made[4], alignment), made[5])


def up_to(counts: list[int], alignment: int) -> list[int]:
    return [-(-count // alignment) * alignment for count in counts]


def repeat_along(repeat: RepeatedDispatchAlong | None, x: object, bound: int) -> Repeat | None:
    parts = parts_of_repeat(x)
    if repeat is None or parts is None:
        return None
    taken, tokens = parts
    call = functools.partial(_along_rows, repeat.call, bound) if bound else repeat.call
    return Repeat(call, (*taken, "handle"), (tokens, None, None, None, None, EventOverlap))


def _along_rows(call: Callable[..., Any], bound: int, data: Tensor, scales: Tensor | None, handle: Any) -> Any:
    """A repeated dispatch along a handle that was made with this bound."""
    return call(data, scales, handle) if handle.num_recv == bound else None


def repeat_combine(repeat: RepeatedCombine | None, bias: object, handle: Taken = "handle") -> Repeat | None:
    if repeat is None:
        return None
    biases: tuple[Taken, ...] = (None if bias is None else "bias", None)
    if isinstance(bias, tuple):
        biases = (*[("bias", i) for i in range(len(bias))], None, None)[:2]
    return Repeat(repeat.call, ("x", "topk_weights", *biases, handle), (0, 1, EventOverlap))
