"""Checks of low-latency calls that one rank gets wrong: all raise the same error at once, and the buffer goes on.

Each runs on every rank.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.battery.cases import Case
from tests.battery.normal import equal, make_buffer, on
from tests.battery.refused_calls import TIMEOUT_S, errors_of, told_to_all


class _Calls:
    """A buffer, and calls of one size."""

    def __init__(self, device: str, name: str, num_tokens: int = 12, timeout_s: float = TIMEOUT_S) -> None:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        self.case = case = Case(name, num_ranks, num_tokens, hidden=128, topk=4, num_experts=4 * num_ranks)
        self.inputs = on(device, case.inputs(rank))
        self.buffer = make_buffer(case, low_latency_mode=True, timeout_s=timeout_s)

    def dispatch(self, hooked: bool = False, **changes: Any) -> tuple[Any, ...]:
        case = self.case
        arguments: dict[str, Any] = {
            "x": self.inputs.x,
            "topk_idx": self.inputs.topk_idx,
            "num_max_dispatch_tokens_per_rank": case.max_tokens,
            "num_experts": case.num_experts,
            "use_fp8": False,
            "return_recv_hook": hooked,
        }
        return self.buffer.low_latency_dispatch(**arguments | changes)

    def combine(self, x: Any, handle: Any, hooked: bool = False, **changes: Any) -> torch.Tensor:
        arguments: dict[str, Any] = {
            "x": x,
            "topk_idx": self.inputs.topk_idx,
            "topk_weights": self.inputs.topk_weights,
            "handle": handle,
            "return_recv_hook": hooked,
        }
        combined, _, hook = self.buffer.low_latency_combine(**arguments | changes)
        if hook is not None:
            hook()
        return combined


def _dispatch_and_receive(calls: _Calls, hooked: bool = False, **changes: Any) -> None:
    *_, hook = calls.dispatch(hooked, **changes)
    if hook is not None:
        hook()


def check_refused_combines(device: str = "cpu") -> None:
    """Tensors and handles that do not fit, at one rank, with and without a hook."""
    calls = _Calls(device, "refused_combines", 40)  # so many that ranks wait for weights
    with calls.buffer:
        rows, _, handle, _, _ = calls.dispatch()
        rows, topk_idx = rows.clone(), calls.inputs.topk_idx
        want = calls.combine(rows, handle).clone()
        wrongs: list[tuple[dict[str, Any], str]] = [
            ({"x": rows.float()}, "x.dtype is torch.float32"),
            ({"x": rows[:, :-1]}, "x.shape is "),
            ({"topk_idx": topk_idx[:-1], "topk_weights": calls.inputs.topk_weights[:-1]}, "topk_idx"),
            ({"topk_weights": calls.inputs.topk_weights.double()}, "topk_weights.dtype is torch.float64"),
            ({"out": want[:-1]}, "out.shape is "),
            ({"handle": None}, "handle is NoneType"),
            ({"zero_copy": True}, "zero_copy is True without a buffer"),
            ({"overlap": True}, "src_signals and comp_signal is neither"),
        ]
        for hooked in (False, True):
            right = partial(calls.combine, rows, handle, hooked)
            for wrong, name in wrongs:
                told = told_to_all(partial(calls.combine, **{"x": rows, "handle": handle} | wrong), right, device)
                assert told.startswith(name), told
        *_, unreceived, _, hook = calls.dispatch(True)
        told = told_to_all(partial(calls.combine, rows, unreceived), partial(calls.combine, rows, handle), device)
        assert told.startswith("handle is of a dispatch whose hook has not been called"), told
        hook()
        equal(calls.combine(rows, handle), want.cpu(), "after refused combines")


def check_refused_dispatches(device: str = "cpu") -> None:
    """Arguments that do not fit at one rank, with and without a hook."""
    calls = _Calls(device, "refused_dispatches")
    x, topk_idx, most = calls.inputs.x, calls.inputs.topk_idx, calls.case.max_tokens
    with calls.buffer:
        want, count, *_ = calls.dispatch()
        want, want_counts = want.clone(), count.tolist()
        waits = torch.zeros(1 + dist.get_world_size(), dtype=torch.int64, device=device)
        wrongs: list[tuple[dict[str, Any], str]] = [
            ({"x": x.float()}, "x.dtype is torch.float32"),
            ({"x": x[:, :100], "use_fp8": True}, "hidden of x is 100"),
            ({"topk_idx": topk_idx[:-1]}, "rows of topk_idx is "),
            ({"num_experts": calls.case.num_experts + 1}, "num_experts is "),
            ({"num_max_dispatch_tokens_per_rank": 0}, "num_max_dispatch_tokens_per_rank is 0"),
            ({"num_max_dispatch_tokens_per_rank": most - 1}, f"rows of x is {most}"),
            ({"dispatch_wait_recv_cost_stats": waits}, "dispatch_wait_recv_cost_stats.shape is "),
        ]
        for hooked in (False, True):
            right = partial(_dispatch_and_receive, calls, hooked)
            for wrong, name in wrongs:
                told = told_to_all(partial(_dispatch_and_receive, calls, **wrong), right, device)
                assert told.startswith(name), told
        grown = partial(_dispatch_and_receive, calls, num_max_dispatch_tokens_per_rank=8 * most)
        told = told_to_all(partial(_dispatch_and_receive, calls, x=x.float()), grown, device)
        assert told.startswith("x.dtype is torch.float32"), told
        rows, count, *_ = calls.dispatch()
        assert count.tolist() == want_counts
        for expert, num_rows in enumerate(want_counts):
            equal(rows[expert, :num_rows], want[expert, :num_rows].cpu(), f"expert {expert} after refused dispatches")


def check_refused_first_dispatch(device: str = "cpu") -> None:
    """The first low-latency call of a buffer is one that a rank refuses."""
    calls = _Calls(device, "refused_first")
    with calls.buffer:
        right = partial(_dispatch_and_receive, calls)
        told = told_to_all(partial(_dispatch_and_receive, calls, x=calls.inputs.x.float()), right, device)
        assert told.startswith("x.dtype is torch.float32"), told


def check_refused_at_every_rank(device: str = "cpu") -> None:
    """Calls that every rank gets wrong alike: each is told of its own, and all go on with the next call."""
    rank = dist.get_rank()
    calls = _Calls(device, "refused_at_all")
    with calls.buffer:
        rows, count, handle, _, _ = calls.dispatch()
        rows, want_counts = rows.clone(), count.tolist()
        want = calls.combine(rows, handle).clone()
        for _ in range(3):
            wrong = [partial(calls.combine, rows.float(), handle), partial(calls.dispatch, x=calls.inputs.x.float())]
            told = errors_of(wrong, device)
            assert told == [f"x.dtype is torch.float32 at rank {rank}; allowed: torch.bfloat16"] * 2, told
            told = errors_of([partial(calls.combine, rows, handle), calls.dispatch], device)
            assert told == []
        equal(calls.combine(rows, handle), want.cpu(), "after refused calls")
        assert calls.dispatch()[1].tolist() == want_counts


def check_handle_of_a_larger_buffer(device: str = "cpu") -> None:
    """One rank combines along the handle of another buffer, whose calls need more memory."""
    calls, larger = _Calls(device, "small", 12), _Calls(device, "large", 80)
    with calls.buffer, larger.buffer:
        rows, _, handle, _, _ = calls.dispatch()
        rows = rows.clone()
        want = calls.combine(rows, handle).clone()
        large_rows, _, large_handle, _, _ = larger.dispatch()
        large = larger.inputs
        wrong = partial(
            calls.combine,
            large_rows.clone(),
            large_handle,
            topk_idx=large.topk_idx,
            topk_weights=large.topk_weights,
        )
        for hooked in (False, True):
            told = told_to_all(wrong, partial(calls.combine, rows, handle, hooked), device)
            assert told.startswith("handle is of a dispatch that needs "), told
        equal(calls.combine(rows, handle), want.cpu(), "after the handle of a larger buffer")


def check_memory_of_a_graph(timeout_s: float) -> None:
    """One rank calls with the memory from before it grew, as a replayed graph does. Only for the cuda engine."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    calls = _Calls("cpu", "graph", timeout_s=timeout_s)
    case, engine = calls.case, calls.buffer.engine
    low_latency: Any = engine._low_latency  # type: ignore[attr-defined]
    with calls.buffer as buffer:
        rows, count, handle, _, _ = calls.dispatch()
        rows, want_counts = rows.clone(), count.tolist()
        want = calls.combine(rows, handle).clone()
        with mock.patch.object(low_latency, "_drop_region"):  # as after a capture
            calls.dispatch(num_max_dispatch_tokens_per_rank=4 * case.max_tokens)
        for call in (calls.dispatch, partial(calls.combine, rows, handle)):
            if rank == last:
                low_latency._calls.begin(low_latency._regions[0].native, 0)
            told = errors_of([call], "cpu")
            numbers = (1, 2) if rank == last else (2, 1)
            name = "number of the memory for rows (a CUDA graph keeps that of its capture)"
            assert len(told) == 1, told
            assert told[0].startswith(f"{name} is {numbers[0]} at rank {rank} and {numbers[1]} at rank "), told
            assert rank == last or f" at rank {last}; allowed: the same on every rank" in told[0]
            buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.num_experts)
        assert calls.dispatch()[1].tolist() == want_counts
        equal(calls.combine(rows, handle), want.cpu(), "after the memory of a graph")


# What one rank refuses, and every rank must be told.
CHECKS = (
    check_handle_of_a_larger_buffer,
    check_refused_at_every_rank,
    check_refused_combines,
    check_refused_dispatches,
    check_refused_first_dispatch,
)
