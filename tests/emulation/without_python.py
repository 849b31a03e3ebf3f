"""Calls of a `Buffer` that enter no function of Python."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hybrid_ep
from hybrid_ep import ConfigError, quantize
from tests.battery import normal
from tests.battery.cases import Case
from tests.battery.normal import equal, make_buffer, unread_values
from tests.emulation.engine import local_kernels

__all__ = ["check_no_python"]


@contextlib.contextmanager
def _entered() -> Iterator[list[str]]:
    """Which functions of Python in hybrid_ep/buffers are entered inside."""
    found: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and "/hybrid_ep/buffers/" in frame.f_code.co_filename:
            found.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


def _facts(result: tuple[Any, ...]) -> list[Any]:
    facts: list[Any] = []
    for entry in result:
        if isinstance(entry, torch.Tensor):
            facts.append((entry.shape, entry.dtype, entry.stride()))
        else:
            facts.append(list(entry) if isinstance(entry, list) else type(entry))
    return facts


def _again(call: Callable[[], tuple[Any, ...]], needs: Collection[str] = ()) -> tuple[Any, ...]:
    """Makes a call again. It enters no other functions of Python than `needs`, and returns the like."""
    facts = _facts(call())  # the result itself would hold a slot
    with _entered() as entered:
        result = call()
    assert set(entered) - {"<listcomp>"} == set(needs), entered
    assert _facts(result) == facts
    return result


def check_no_python() -> None:
    """Repeated calls of a `Buffer` enter no function of Python of its own, with any arguments that can be repeated."""
    case = Case("no Python", dist.get_world_size(), 12, hidden=256)
    inputs, rank, bound = case.inputs(dist.get_rank()), dist.get_rank(), 12 * case.num_ranks + 4
    rows, config = quantize.cast_to_fp8(inputs.x), hybrid_ep.Config(4)
    want = normal.expected_combine(case, rank)
    bias = torch.ones(12, case.hidden, dtype=torch.bfloat16)
    with unread_values(), make_buffer(case) as buffer:

        def layout() -> tuple[Any, ...]:
            return buffer.get_dispatch_layout(inputs.topk_idx, case.num_experts)

        with local_kernels():
            per_rank, _, per_expert, in_rank, _ = _again(layout)

        def dispatch(x: Any = inputs.x, **options: Any) -> tuple[Any, ...]:
            return buffer.dispatch(
                x,
                num_tokens_per_rank=per_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=inputs.topk_idx,
                topk_weights=inputs.topk_weights,
                **options,
            )

        counts = list(case.reference().tokens_per_expert(rank))
        assert _again(dispatch)[3] == counts
        assert _again(lambda: dispatch(rows, config=config))[3] == counts
        aligned = _again(lambda: dispatch(expert_alignment=8), ["_aligned", "up_to"])[3]
        assert aligned == [-(-count // 8) * 8 for count in counts]
        recv_x, _, weights, none, bounded, _ = _again(lambda: dispatch(num_worst_tokens=bound))
        assert none == []
        handle = dispatch()[4]
        nvfp4 = quantize.cast_to_nvfp4(inputs.x)
        for x, kinds in ((inputs.x, None), (torch.Tensor,)), (nvfp4, (torch.Tensor,) * 3):
            for _ in range(3):
                for received in dispatch(x)[0], buffer.dispatch(x, handle)[0]:
                    parts = received if isinstance(received, tuple) else (received,)
                    assert tuple(map(type, parts)) == kinds
        for made, num_worst_tokens, needs in (handle, 0, []), (bounded, 0, []), (bounded, bound, ["_along_rows"]):
            for x in inputs.x, rows:
                along = functools.partial(buffer.dispatch, x, made, num_worst_tokens=num_worst_tokens)
                assert _again(along, needs)[1:5] == (None,) * 4
        with pytest.raises(ConfigError, match="num_worst_tokens"):
            buffer.dispatch(inputs.x, handle, num_worst_tokens=bound)
        x = torch.zeros_like(recv_x)
        mine = normal.returned(case, rank, case.reference().received(rank))
        x[: len(mine)] = mine
        equal(_again(lambda: buffer.combine(x, bounded))[0], want, "combined_x")
        fewer = functools.partial(buffer.combine, x[: handle.num_recv], handle)
        with _entered() as entered:
            equal(fewer()[0], want, "combined_x of a handle with fewer rows")
        assert not entered, "the number of rows makes no difference"
        for biases in bias, (bias, bias):
            combine = functools.partial(buffer.combine, x, bounded, weights, bias=biases, config=config)
            steps = combine(previous_event=buffer.capture())
            for part, wanted in zip(_again(combine)[:2], steps, strict=False):
                equal(part, wanted, "with bias")
        with pytest.raises(ConfigError, match="bias"):  # as many rows as x, which another handle may have
            buffer.combine(x[: handle.num_recv], handle, bias=x[: handle.num_recv])
        # Events, another choice of SMs, and what is no argument of the call, are for Python.
        with _entered() as entered:
            buffer.combine(x, bounded, previous_event=buffer.capture())
            buffer.combine(x, bounded, async_finish=True)[2].wait()
        assert entered.count("combine") == 2
        with mock.patch.object(hybrid_ep.Buffer, "_num_sms_without_config", 3), _entered() as entered:
            buffer.combine(x, bounded)
        assert entered.count("combine") == 1
        with pytest.raises(TypeError, match="unexpected keyword"):
            buffer.combine(x, bounded, weight=None)  # type: ignore[call-overload]
