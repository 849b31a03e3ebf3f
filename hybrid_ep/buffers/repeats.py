"""How calls of buffers are repeated: what the engine's call takes of the arguments, and how its result is arranged."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hybrid_ep.buffers.low_latency_arguments import nvfp4_as_returned
from hybrid_ep.core.event import EventOverlap
from hybrid_ep.core.repeatable import Repeat, Taken
from hybrid_ep.engine.calls import (
    LowLatencyCombinedFields,
    LowLatencyFields,
    RepeatedCombine,
    RepeatedDispatch,
    RepeatedDispatchAlong,
    RepeatedLowLatencyCombine,
    RepeatedLowLatencyDispatch,
)
from hybrid_ep.quantize import Nvfp4Format, RowFormat

if TYPE_CHECKING:
    from hybrid_ep.buffers.low_latency import LowLatencyCalls

__all__ = [
    "parts_of_repeat",
    "repeat_along",
    "repeat_combine",
    "repeat_dispatch",
    "repeat_low_latency_combine",
    "repeat_low_latency_dispatch",
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


def repeat_low_latency_dispatch(call: RepeatedLowLatencyDispatch | None, fmt: RowFormat | None) -> Repeat | None:
    if call is None:
        return None
    takes = (
        "self",
        "x",
        "topk_idx",
        "cumulative_local_expert_recv_stats",
        "dispatch_wait_recv_cost_stats",
        "x_global_scale",
    )
    if fmt is None:
        return Repeat(call, takes, (0, 2, 3, EventOverlap, 4))
    if isinstance(fmt, Nvfp4Format):
        call = functools.partial(_permuted, call)
    return Repeat(call, takes, ((0, 1), 2, 3, EventOverlap, 4))


def _permuted(call: RepeatedLowLatencyDispatch, *arguments: Any) -> LowLatencyFields | None:
    """A repeated dispatch of NVFP4 rows."""
    made = call(*arguments)
    if made is None:
        return None
    rows, scales, *others = made
    assert scales is not None
    return (*nvfp4_as_returned(rows, scales), *others)  # type: ignore[return-value]


def repeat_low_latency_combine(call: RepeatedLowLatencyCombine | None, zero_copy: bool) -> Repeat | None:
    if call is None:
        return None
    takes = "self", "x", "topk_idx", "topk_weights", "handle", "out", "combine_wait_recv_cost_stats"
    return Repeat(functools.partial(_zero_copy, call) if zero_copy else call, takes, (0, EventOverlap, 1))


def _zero_copy(
    call: RepeatedLowLatencyCombine, calls: LowLatencyCalls, _: Tensor, *arguments: Any
) -> LowLatencyCombinedFields | None:
    """A repeated combine of what was written for the handle."""
    written = calls._written_for(arguments[2])
    return None if written is None else call(calls, written, *arguments)
