"""What calls cost the host: operators of torch, and functions of this package that are entered.

They are counted and not timed, so a slow machine changes nothing. On the host of a GPU an operator takes 2 to 6 µs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import hybrid_ep
from tests.battery.normal import unread_values
from tests.emulation.engine import local_kernels

_PACKAGE = str(Path(hybrid_ep.__file__).parent)
_ALLOCATIONS = ("aten.empty.memory_format", "aten.empty_strided.default")
_NUM_TOKENS, _HIDDEN, _NUM_TOPK, _NUM_LOCAL = 8, 512, 2, 8


class _Work(NamedTuple):
    """Of one call: operators that allocate, names of the others, and functions of the package.

    What torch's C interface allocates on a CPU is no operator.
    """

    num_allocations: int
    others: list[str]
    num_functions: int


# What each call takes; of functions, the most.
_WORK = {
    "layout": _Work(0, [], 13),
    "low-latency dispatch": _Work(0, [], 30),
    "low-latency combine": _Work(1, [], 29),
    "low-latency dispatch with a hook": _Work(0, [], 38),
    "low-latency combine with a hook": _Work(1, [], 37),
    "dispatch with a bound": _Work(0, ["aten.equal.default"], 25),  # of the layout, on a CPU only
    "dispatch": _Work(0, ["aten.equal.default"], 27),
    "cached dispatch": _Work(0, [], 21),
    "combine": _Work(0, [], 14),
    "hybrid dispatch with a bound": _Work(1, ["aten.clone.default"], 42),  # of the experts that arrived
    "hybrid combine": _Work(2, [], 24),
}


class _Operators(TorchDispatchMode):
    """Inside, notes the operators of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def _num_functions(call: Callable[[], object]) -> int:
    """How many functions of the package a call enters."""
    num_entered = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal num_entered
        num_entered += event == "call" and frame.f_code.co_filename.startswith(_PACKAGE)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return num_entered


def _work_of(call: Callable[[], object]) -> _Work:
    """Of the third call and the fourth: the first ones may grow memory and the pool of slots."""
    call()
    call()
    with _Operators() as operators:
        call()
    others = [name for name in operators.names if name not in _ALLOCATIONS]
    return _Work(len(operators.names) - len(others), others, _num_functions(call))


def _receive(sent: tuple[Any, ...]) -> tuple[Any, ...]:
    """Calls the hook, the last entry of what a low-latency call returns; returns that."""
    sent[-1]()
    return sent


def check_host_work() -> None:
    """Calls enter few functions, and allocate nothing but their results."""
    num_ranks = dist.get_world_size()
    num_experts, most_rows = _NUM_LOCAL * num_ranks, _NUM_TOKENS * num_ranks
    x = torch.randn(_NUM_TOKENS, _HIDDEN).bfloat16()
    y = torch.zeros(_NUM_LOCAL, most_rows, _HIDDEN, dtype=torch.bfloat16)
    topk_idx = torch.rand(_NUM_TOKENS, num_experts).topk(_NUM_TOPK).indices
    weights = torch.rand(_NUM_TOKENS, _NUM_TOPK)
    routing = {"topk_idx": topk_idx, "topk_weights": weights}
    last: dict[str, Any] = {}  # results of the latest call

    with (
        hybrid_ep.Buffer(low_latency_mode=True) as buffer,
        hybrid_ep.HybridEPBuffer(dist.group.WORLD, _HIDDEN, _NUM_TOKENS, _NUM_LOCAL) as hybrid,
        unread_values(),
        local_kernels(),
    ):
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
        layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
        calls: dict[str, Callable[[], Any]] = {
            "layout": lambda: buffer.get_dispatch_layout(topk_idx, num_experts),
            "low-latency dispatch": lambda: buffer.low_latency_dispatch(x, topk_idx, _NUM_TOKENS, num_experts),
            "low-latency combine": lambda: buffer.low_latency_combine(
                y, topk_idx, weights, last["low-latency dispatch"][2]
            ),
            "low-latency dispatch with a hook": lambda: _receive(
                buffer.low_latency_dispatch(x, topk_idx, _NUM_TOKENS, num_experts, return_recv_hook=True)
            ),
            "low-latency combine with a hook": lambda: _receive(
                buffer.low_latency_combine(y, topk_idx, weights, last["low-latency dispatch"][2], return_recv_hook=True)
            ),
            "dispatch with a bound": lambda: buffer.dispatch(x, **layout, **routing, num_worst_tokens=most_rows),
            "dispatch": lambda: buffer.dispatch(x, **layout, **routing),
            "cached dispatch": lambda: buffer.dispatch(x, last["dispatch with a bound"][4]),
            "combine": lambda: buffer.combine(last["cached dispatch"][0], last["dispatch with a bound"][4]),
            "hybrid dispatch with a bound": lambda: hybrid.dispatch(
                x, **routing, num_of_experts=num_experts, num_dispatched_tokens=most_rows
            ),
            "hybrid combine": lambda: hybrid.combine(
                *last["hybrid dispatch with a bound"][:2], last["hybrid dispatch with a bound"][3]
            ),
        }
        for name, call in calls.items():

            def repeat(name: str = name, call: Callable[[], Any] = call) -> None:
                last.pop(name, None)  # it holds a slot
                last[name] = call()

            most, found = _WORK[name], _work_of(repeat)
            about = f"{name}: {found}, expected {most}"
            assert found[:2] == most[:2], about
            assert found.num_functions <= most.num_functions, about
            if name.startswith("dispatch"):
                last[name] = (*[None] * 4, last[name][4])  # the handle alone, which holds no slot
        last.clear()
