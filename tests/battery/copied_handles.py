"""Deep copies of handles serve in their place."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist

from tests.battery import elastic, hybrid, low_latency, normal
from tests.battery.cases import Case
from tests.battery.normal import equal, on


def _copied(handle: Any) -> Any:
    """A copy, whose addresses are those of memory that it keeps."""
    made = copy.deepcopy(handle)
    for part in (made, getattr(made, "dispatch", None), getattr(made, "permute", None)):
        state = getattr(part, "state", None)
        if hasattr(state, "chunk"):
            memory = state.chunk.memory
            begin = memory.data_ptr()
            assert begin <= state.address < begin + memory.numel(), "the memory of another chunk"
    return made


def check_copied_handles(case: Case, device: str = "cpu") -> None:
    """Combines and dispatches along copies of handles, of every class of buffer."""
    rank = dist.get_rank()
    reference, inputs = case.reference(), on(device, case.inputs(rank))
    received, topk = reference.received(rank), {"topk_idx": inputs.topk_idx, "topk_weights": inputs.topk_weights}
    want, y = normal.expected_combine(case, rank), normal.returned(case, rank, received).to(device)
    with normal.make_buffer(case) as buffer:
        recv_x, _, _, _, handle, _ = normal.dispatch(buffer, case, inputs)
        copied = _copied(handle)
        del handle
        equal(buffer.dispatch(inputs.x, handle=copied)[0], recv_x.cpu(), "recv_x")
        equal(buffer.combine(y, copied)[0], want, "combined_x")
    copies = reference.permuted(rank, 1)
    by_expert = hybrid.expert_rows(case, copies).to(device)
    with hybrid.make_buffer(case) as buffer:
        rows, _, _, _, handle = buffer.dispatch_with_permute(hidden=inputs.x, **topk, num_of_experts=case.num_experts)
        copied = _copied(handle)
        del handle
        equal(buffer.dispatch_with_permute(hidden=inputs.x, handle=copied)[0], rows.cpu(), "permuted hidden")
        combined, _ = buffer.combine_with_unpermute(hidden=by_expert, handle=copied)
        equal(combined, hybrid.expected_unpermuted(case, rank), "combined hidden")
    with elastic.make_buffer(case) as buffer:
        for do_expand, x, wanted in (False, y, want), (True, by_expert, hybrid.expected_unpermuted(case, rank)):
            handle = buffer.dispatch(inputs.x, **topk, num_experts=case.num_experts, do_expand=do_expand)[3]
            copied = _copied(handle)
            assert copied.topk_idx.data_ptr() != handle.topk_idx.data_ptr()
            del handle
            assert copied.num_unaligned_recv_tokens_per_expert.tolist() == reference.tokens_per_expert(rank)
            equal(buffer.combine(x, copied)[0], wanted, "combined_x")
    with normal.make_buffer(case, low_latency_mode=True) as buffer:
        sizes = case.max_tokens, case.num_experts
        handle = buffer.low_latency_dispatch(inputs.x, inputs.topk_idx, *sizes, use_fp8=False)[2]
        x = low_latency.expert_output(case, rank, case.max_tokens * case.num_ranks).to(device)
        combined, *_ = buffer.low_latency_combine(x, *topk.values(), copy.deepcopy(handle))
        equal(combined, low_latency.expected_combine(case, rank, lambda _: False), "low-latency combined_x")
        assert torch.equal(copy.deepcopy(handle).src_info, handle.src_info)
