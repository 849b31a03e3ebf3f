"""A buffer that is dropped without `destroy()` gives its memory back at once, without the cyclic garbage collector."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
import torch.distributed as dist

import hybrid_ep
from tests.battery.cases import Case
from tests.battery.normal import dispatch, make_buffer


def check_dropped_buffers() -> None:
    """After normal calls, expert-major ones and low-latency ones."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    case = Case("dropped", num_ranks, 4, hidden=128, topk=2, num_experts=2 * num_ranks)
    inputs = case.inputs(rank)

    def use_normal() -> Any:
        buffer = make_buffer(case, low_latency_mode=True)
        received, *_, handle, _ = dispatch(buffer, case, inputs)
        buffer.combine(received, handle)
        rows, _, low_latency, _, _ = buffer.low_latency_dispatch(
            inputs.x, inputs.topk_idx, 8, case.num_experts, use_fp8=False
        )
        buffer.low_latency_combine(rows, inputs.topk_idx, inputs.topk_weights, low_latency)
        return weakref.ref(buffer.engine), weakref.ref(buffer.engine._arena)  # type: ignore[attr-defined]

    def use_hybrid() -> Any:
        buffer = hybrid_ep.HybridEPBuffer(dist.group.WORLD, 128, 4, 2, engine="cuda")
        rows, _, _, _, handle = buffer.dispatch_with_permute(hidden=inputs.x, topk_idx=inputs.topk_idx)
        buffer.combine_with_unpermute(hidden=rows, handle=handle)
        return weakref.ref(buffer.engine), weakref.ref(buffer.engine._arena)  # type: ignore[attr-defined]

    gc.disable()
    try:
        for use in (use_normal, use_hybrid):
            left = [ref() for ref in use()]
            assert left == [None, None], f"{use.__name__}: {left}"
    finally:
        gc.enable()


def check_tables_of_a_dropped_buffer() -> None:
    """A view of a low-latency handle's table keeps the memory that it is in, and nothing else does."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    case = Case("tables", num_ranks, 4, hidden=128, topk=2, num_experts=2 * num_ranks)
    inputs = case.inputs(rank)

    def tables() -> tuple[Any, Any, Any]:
        buffer = make_buffer(case, low_latency_mode=True)
        _, counts, handle, _, _ = buffer.low_latency_dispatch(inputs.x, inputs.topk_idx, 8, case.num_experts)
        assert (counts.shape, counts.dtype) == ((2,), torch.int32)
        assert (handle.src_info.shape, handle.src_info.dtype) == ((2, 8 * num_ranks), torch.int32)
        assert (handle.layout_range.shape, handle.layout_range.dtype) == ((2, num_ranks), torch.int64)
        state: Any = handle.state
        return handle.layout_range[1:], int(handle.layout_range[1, 0]), weakref.ref(state.memory)

    view, value, memory = tables()
    assert memory() is not None
    assert int(view[0, 0]) == value
    del view
    assert memory() is None
