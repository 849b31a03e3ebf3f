"""Ranks that come to a call just when others give them up, where ranks are masked and not reported."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep import Buffer, LowLatencyHandle
from tests.battery.cases import Case
from tests.battery.low_latency import expected_combine, expert_copies, expert_output
from tests.battery.normal import equal, make_buffer
from tests.emulation.devices import stalls

_NUM_ROUNDS, _MOST_ROUNDS = 4, 20  # a round counts if its ranks begin it together
_LATE = 0  # rows of the other ranks stand behind its rows


def check_rank_at_the_deadline(call: str, timeout_s: float) -> None:
    """A rank comes when most CTAs of the others have given it up, and some, which stall, have not. It takes part in the
    call of such a rank as a whole, or not at all. The others may be late, too, on a busy machine.
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

        num_done = 0
        for _ in range(_MOST_ROUNDS):
            begin = time.monotonic()
            rows, count, handle = dispatch()
            lost_ranks = _lost_ranks(case, rows, count, handle)
            assert not lost_ranks or time.monotonic() - begin >= timeout_s, "a rank was given up before its time"
            num_lost = torch.tensor(len(lost_ranks))
            dist.all_reduce(num_lost)
            if num_lost == 0:
                if rank == _LATE:
                    time.sleep(1.1 * timeout_s)
                longest_stall_s = 0 if rank == _LATE else 1.5 * timeout_s
                if call == "dispatch":
                    results = dispatch(longest_stall_s)
                    if rank != _LATE:
                        _lost_ranks(case, *results)
                else:
                    combined = combine(handle, longest_stall_s)
                    wanted = [expected_combine(case, rank, lambda _: True, lost=lost) for lost in _subsets_of_others()]
                    assert rank == _LATE or any(torch.equal(combined, want) for want in wanted), "rows of some tokens"
                num_done += 1
            buffer.low_latency_clean_mask_buffer()
            dist.barrier()
            if num_done == _NUM_ROUNDS:
                return
    raise AssertionError(f"in {_MOST_ROUNDS - num_done} of {_MOST_ROUNDS} rounds ranks were too slow to begin together")


def check_rows_of_a_rank_that_was_given_up(timeout_s: float) -> None:
    """A rank sends its rows of a combine when the others, which have given it up, use the buffer for a later one."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    cases = [Case("given_up", num_ranks, 40, hidden=512, num_experts=2 * num_ranks, seed=i) for i in range(3)]
    options = {"low_latency_mode": True, "enable_shrink": True, "lost_ranks": "mask", "timeout_s": timeout_s}
    with make_buffer(cases[0], **options) as buffer:

        def dispatch(case: Case) -> LowLatencyHandle:
            inputs = case.inputs(rank)
            _, _, handle, _, _ = buffer.low_latency_dispatch(
                inputs.x, inputs.topk_idx, case.max_tokens, case.num_experts, use_fp8=False
            )
            return handle

        def combine(case: Case, handle: LowLatencyHandle, lost: tuple[int, ...]) -> tuple[Tensor, Callable[[], None]]:
            inputs = case.inputs(rank)
            x = expert_output(case, rank, case.max_tokens * num_ranks, lost)
            combined, _, hook = buffer.low_latency_combine(
                x, inputs.topk_idx, inputs.topk_weights, handle, return_recv_hook=True
            )
            assert hook is not None
            return combined, hook

        handle = dispatch(cases[0])
        if rank == _LATE:
            dist.barrier()
            _, hook = combine(cases[0], handle, ())
            dist.barrier()
            hook()
            masks = torch.zeros(num_ranks, dtype=torch.int32)
            buffer.low_latency_query_mask_buffer(masks)
            assert masks.tolist() == [int(r != rank) for r in range(num_ranks)]
            return
        for case in cases[:2]:
            combine(case, handle, () if case is cases[0] else (_LATE,))[1]()
            handle = dispatch(cases[cases.index(case) + 1])
        combined, hook = combine(cases[2], handle, (_LATE,))
        dist.barrier()
        dist.barrier()
        hook()
        equal(combined, expected_combine(cases[2], rank, lambda _: True, lost=(_LATE,)), "sums without the late rank")


def check_peer_that_some_ctas_gave_up() -> None:
    """The last CTA of a send has given up a peer for which others have already counted records."""
    rank = dist.get_rank()
    case = Case("given_up", 2, 20, hidden=512, num_experts=4, num_ranks_per_domain=1)
    inputs = case.inputs(rank)
    options = {"low_latency_mode": True, "enable_shrink": True, "lost_ranks": "mask", "timeout_s": 8.0}
    with make_buffer(case, **options) as buffer:

        def check_dispatch(lost: tuple[int, ...] = ()) -> None:
            rows, count, _, _, _ = buffer.low_latency_dispatch(
                inputs.x, inputs.topk_idx, case.max_tokens, case.num_experts, use_fp8=False
            )
            assert isinstance(rows, Tensor)
            for e, copies in enumerate(expert_copies(case, rank, lost)):
                assert count[e] == len(copies)
                want = torch.stack([case.inputs(c.src_rank).x[c.token] for c in copies])
                equal(rows[e, : len(copies)], want, f"rows of expert {e}")

        for _ in range(2):
            check_dispatch()
        dist.barrier()
        buffer.low_latency_update_mask_buffer(1 - rank, True)
        for idx in range(2):
            _num_records(buffer, idx)[1 - rank] = 3  # by the CTAs that have not given it up
            check_dispatch(lost=(1 - rank,))
        buffer.low_latency_update_mask_buffer(1 - rank, False)
        dist.barrier()
        for _ in range(2):
            check_dispatch()


def _num_records(buffer: Buffer, buffer_idx: int) -> Tensor:
    """LowLatencyBetweenChannel::num_records of a dispatch, by domain."""
    from hybrid_ep import _cuda

    region = buffer.engine._low_latency._regions[-1]  # type: ignore[attr-defined]
    control = region.memory.local[region.capacity.region_bytes :]
    channel_bytes = _cuda.low_latency_session_offset // 2 // _cuda.low_latency_buffers
    channel = control[buffer_idx * channel_bytes : (buffer_idx + 1) * channel_bytes]
    return channel[8 * _cuda.max_ranks :].view(torch.int32)  # behind a 64-bit word for each rank


def _subsets_of_others() -> list[tuple[int, ...]]:
    """All sets of ranks without this one, small ones first."""
    others = [r for r in range(dist.get_world_size()) if r != dist.get_rank()]
    return [lost for size in range(len(others) + 1) for lost in itertools.combinations(others, size)]


def _lost_ranks(case: Case, received: Tensor, count: Tensor, handle: LowLatencyHandle) -> tuple[int, ...]:
    """Ranks that take no part in a dispatch. Checks the rows of the others."""
    subsets = _subsets_of_others()
    counts = [[len(rows) for rows in expert_copies(case, dist.get_rank(), lost)] for lost in subsets]
    assert count.tolist() in counts, "a rank takes part at some experts"
    lost = subsets[counts.index(count.tolist())]
    for e, rows in enumerate(expert_copies(case, dist.get_rank(), lost)):
        kept = [place for place, c in enumerate(rows) if c.src_rank != _LATE]
        if not kept:
            continue
        want = torch.stack([case.inputs(rows[place].src_rank).x[rows[place].token] for place in kept])
        equal(received[e, kept], want, f"rows of expert {e}")
        tokens = torch.tensor([rows[place].token for place in kept], dtype=torch.int32)
        equal(handle[0][e, kept], tokens, f"source tokens of expert {e}")
    return lost
