"""Ranks that come to a call just when others give them up, where ranks are masked and not reported."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep import LowLatencyHandle
from tests.battery.cases import Case
from tests.battery.low_latency import expected_combine, expert_copies, expert_output
from tests.battery.normal import equal, make_buffer
from tests.emulation.devices import stalls

__all__ = ["check_rank_at_the_deadline"]

_LATE = 0  # rows of the other ranks stand behind its rows


def check_rank_at_the_deadline(call: str, timeout_s: float) -> None:
    """A rank comes when most CTAs of the others have given it up, and some, which stall, have not. It takes part in the
    call of such a rank as a whole, or not at all.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    case = Case("late", num_ranks, 40, hidden=512, num_experts=2 * num_ranks)
    inputs = case.inputs(rank)
    x = expert_output(case, rank, case.max_tokens * num_ranks)
    options = {"low_latency_mode": True, "enable_shrink": True, "lost_ranks": "mask", "timeout_s": timeout_s}
    with make_buffer(case, **options) as buffer:

        def dispatch(longest_stall_s: float = 0) -> tuple[Tensor, Tensor, LowLatencyHandle]:
            rows, count, handle, _, hook = buffer.low_latency_dispatch(
                inputs.x, inputs.topk_idx, case.max_tokens, case.num_experts, use_fp8=False, return_recv_hook=True
            )
            assert isinstance(rows, Tensor)
            assert hook is not None
            with stalls(longest_stall_s):
                hook()
            return rows, count, handle

        def combine(handle: LowLatencyHandle, longest_stall_s: float) -> Tensor:
            combined, _, hook = buffer.low_latency_combine(
                x, inputs.topk_idx, inputs.topk_weights, handle, return_recv_hook=True
            )
            assert hook is not None
            with stalls(longest_stall_s):
                hook()
            return combined

        for _ in range(4):
            rows, count, handle = dispatch()
            assert _takes_part(case, rows, count, handle)
            dist.barrier()
            if rank == _LATE:
                time.sleep(1.1 * timeout_s)
            longest_stall_s = 0 if rank == _LATE else 1.5 * timeout_s
            if call == "dispatch":
                results = dispatch(longest_stall_s)
                if rank != _LATE:
                    _takes_part(case, *results)
            else:
                combined = combine(handle, longest_stall_s)
                wanted = [expected_combine(case, rank, lambda _: True, lost=lost) for lost in ((), (_LATE,))]
                assert rank == _LATE or any(torch.equal(combined, want) for want in wanted), "rows of some tokens"
            buffer.low_latency_clean_mask_buffer()
            dist.barrier()


def _takes_part(case: Case, received: Tensor, count: Tensor, handle: LowLatencyHandle) -> bool:
    """Whether the late rank takes part in a dispatch. Checks the rows of the others."""
    copies = expert_copies(case, dist.get_rank())
    takes_part = count.tolist() == [len(rows) for rows in copies]
    if not takes_part:
        copies = expert_copies(case, dist.get_rank(), [_LATE])
    assert count.tolist() == [len(rows) for rows in copies], "the late rank takes part at some experts"
    for e, rows in enumerate(copies):
        kept = [place for place, c in enumerate(rows) if c.src_rank != _LATE]
        want = torch.stack([case.inputs(rows[place].src_rank).x[rows[place].token] for place in kept])
        equal(received[e, kept], want, f"rows of expert {e}")
        tokens = torch.tensor([rows[place].token for place in kept], dtype=torch.int32)
        equal(handle[0][e, kept], tokens, f"source tokens of expert {e}")
    return takes_part
