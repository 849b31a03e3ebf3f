"""Checks of low-latency calls in which a rank is late, masked or lost. Each runs on every rank of a group."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep import Buffer, env
from tests.battery.cases import Case
from tests.battery.low_latency import (
    FORMATS,
    arguments_of,
    as_logfmt,
    check_packed,
    expected_combine,
    expert_copies,
    expert_output,
    quantised,
)
from tests.battery.normal import equal, make_buffer, on


def check_late_rank(device: str = "cpu") -> None:
    """The last rank comes late, to dispatch and then to combine; the others' statistics say so, and no other's."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    late_s = 1.0 if device == "cuda" else 3.0  # more than a busy CPU delays any other rank
    case = Case("late", num_ranks, 40, num_experts=8 * num_ranks)  # enough tokens for weights to be waited for, too
    inputs = on(device, case.inputs(rank))
    x = expert_output(case, rank, case.max_tokens * case.num_ranks).to(device)
    with make_buffer(case, low_latency_mode=True) as buffer:

        def is_waited_for(calls: Callable[[Tensor], object]) -> list[bool]:
            waited = torch.zeros(num_ranks, dtype=torch.int64, device=device)
            if device == "cuda":
                torch.cuda.synchronize()
            dist.barrier()
            if rank == num_ranks - 1:
                time.sleep(late_s)
            calls(waited)
            return [us > 0.5e6 * late_s for us in waited.tolist()]

        def dispatch(waited: Tensor) -> tuple:
            return buffer.low_latency_dispatch(
                inputs.x, inputs.topk_idx, case.max_tokens, case.num_experts, None, waited, use_fp8=False
            )

        want = [r != rank and r == num_ranks - 1 for r in range(num_ranks)]
        *_, handle, _, _ = dispatch(torch.zeros(num_ranks, dtype=torch.int64, device=device))
        assert is_waited_for(dispatch) == want
        back = (x, inputs.topk_idx, inputs.topk_weights, handle)
        assert (
            is_waited_for(lambda waited: buffer.low_latency_combine(*back, combine_wait_recv_cost_stats=waited)) == want
        )


def check_late_rank_comes_back(timeout_s: float, device: str = "cpu") -> None:
    """The recovery of vLLM, twice: the others mask a late rank, and it masks them, without an exception. Then each
    cleans by itself, and they meet in another group.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    late = num_ranks - 1
    case = Case("late", num_ranks, 6, hidden=128, num_experts=4 * num_ranks)
    inputs = on(device, case.inputs(rank))
    x = expert_output(case, rank, case.max_tokens * num_ranks).to(device)
    others = dist.new_group(backend="gloo")
    options = {"low_latency_mode": True, "enable_shrink": True, "lost_ranks": "mask", "num_rdma_bytes": 1 << 20}
    with make_buffer(case, timeout_s=timeout_s, **options) as buffer:

        def step() -> tuple[Tensor, Tensor]:
            _, count, handle, _, _ = buffer.low_latency_dispatch(
                inputs.x, inputs.topk_idx, case.max_tokens, case.num_experts, use_fp8=False
            )
            combined, _, _ = buffer.low_latency_combine(x, inputs.topk_idx, inputs.topk_weights, handle)
            return count, combined

        def masks() -> list[int]:
            status = torch.full((num_ranks,), -1, dtype=torch.int32, device=device)
            buffer.low_latency_query_mask_buffer(status)
            told: list[int] = status.tolist()
            return told

        def check_step() -> None:
            count, combined = step()
            want = torch.tensor([len(rows) for rows in expert_copies(case, rank)], dtype=torch.int32)
            equal(count, want, "packed_recv_count")
            equal(combined, expected_combine(case, rank, lambda _: False), "combined_x")
            assert masks() == [0] * num_ranks

        for num_calls in (1, 3):
            for _ in range(num_calls):
                check_step()
            if rank == late:
                time.sleep(1.7 * timeout_s)
            for _ in range(2 if rank != late else 1):
                count, _ = step()
            assert masks() == [int((r == late) != (rank == late)) for r in range(num_ranks)]
            if rank != late:  # which may have rows that the others sent before they gave it up
                left = expert_copies(case, rank, [late])
                equal(count, torch.tensor([len(rows) for rows in left], dtype=torch.int32), "counts without the late")
            before = torch.cuda.memory_allocated() if device == "cuda" else 0
            buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True).zero_()
            assert before == (torch.cuda.memory_allocated() if device == "cuda" else 0)
            buffer.low_latency_clean_mask_buffer()
            dist.barrier(others)
            assert masks() == [0] * num_ranks
        check_step()


def check_masked(case: Case, format_name: str, lost: Collection[int], device: str = "cpu") -> None:
    """Ranks are left out by hand and make no calls; then all come back, by way of a cleaning."""
    rank, fmt, num_ranks = dist.get_rank(), FORMATS[format_name], case.num_ranks
    inputs = on(device, case.inputs(rank))
    sent = [quantised(case.inputs(r).x, fmt) for r in range(num_ranks)]
    waited = torch.zeros(num_ranks, dtype=torch.int64, device=device)
    status = torch.full((num_ranks,), -1, dtype=torch.int32, device=device)

    def check_step(without: Collection[int], hooked: bool, use_logfmt: bool) -> None:
        received, count, handle, _, hook = buffer.low_latency_dispatch(
            inputs.x,
            inputs.topk_idx,
            case.max_tokens,
            case.num_experts,
            dispatch_wait_recv_cost_stats=waited,
            **arguments_of(fmt, device),  # type: ignore[arg-type]
            return_recv_hook=hooked,
        )
        if hook is not None:
            hook()
        copies = expert_copies(case, rank, without)
        equal(count, torch.tensor([len(rows) for rows in copies], dtype=torch.int32), "packed_recv_count")
        check_packed(case, copies, sent, received, handle)
        combined, _, hook = buffer.low_latency_combine(
            expert_output(case, rank, case.max_tokens * num_ranks, without).to(device),
            inputs.topk_idx,
            inputs.topk_weights,
            handle,
            use_logfmt=use_logfmt,
            return_recv_hook=hooked,
            combine_wait_recv_cost_stats=waited,
        )
        if hook is not None:
            hook()
        cross = as_logfmt if use_logfmt else Tensor.float
        equal(combined, expected_combine(case, rank, lambda _: hooked, cross, without), "combined_x")

    with make_buffer(case, low_latency_mode=True, enable_shrink=True) as buffer:
        check_step((), False, False)
        if device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        before = waited.tolist()
        if rank not in lost:
            for r in lost:
                buffer.low_latency_update_mask_buffer(r, True)
            for use_logfmt in (False, True)[: 1 + (case.hidden % 128 == 0)]:
                for hooked in (False, True):
                    check_step(lost, hooked, use_logfmt)
            buffer.low_latency_query_mask_buffer(status)
            assert status.tolist() == [int(r in lost) for r in range(num_ranks)]
            after = waited.tolist()
            # Such a wait would last until the timeout. A thread may lose its core between two readings of the clock.
            waited_s = [(after[r] - before[r]) / 1e6 for r in lost]
            assert max(waited_s) < env.TIMEOUT_S.get() / 10, "a masked rank was waited for"
        buffer.low_latency_clean_mask_buffer()
        buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.num_experts)
        buffer.low_latency_query_mask_buffer(status)
        assert not status.any()
        for hooked in (False, True, False):
            check_step((), hooked, False)


def check_masks_that_differ(timeout_s: float, device: str = "cpu") -> None:
    """The first rank has masked a rank that the others lose in the same dispatch; then all go on without it."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    lost = num_ranks - 1
    case = Case("masks", num_ranks, 6, hidden=128, num_experts=4 * num_ranks)
    inputs = on(device, case.inputs(rank))
    options = {"low_latency_mode": True, "enable_shrink": True, "lost_ranks": "mask"}
    status = torch.zeros(num_ranks, dtype=torch.int32, device=device)
    with make_buffer(case, timeout_s=timeout_s, **options) as buffer:

        def check_step(without: Collection[int], meets: bool = False) -> None:
            _, count, handle, _, _ = buffer.low_latency_dispatch(
                inputs.x, inputs.topk_idx, case.max_tokens, case.num_experts, use_fp8=False
            )
            copies = expert_copies(case, rank, without)
            equal(count, torch.tensor([len(rows) for rows in copies], dtype=torch.int32), "packed_recv_count")
            if meets:
                dist.barrier()
            x = expert_output(case, rank, case.max_tokens * num_ranks, without).to(device)
            combined, _, _ = buffer.low_latency_combine(x, inputs.topk_idx, inputs.topk_weights, handle)
            equal(combined, expected_combine(case, rank, lambda _: False, lost=without), "combined_x")

        check_step(())
        if device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        if rank == lost:
            dist.barrier()
        else:
            if rank == 0:
                buffer.low_latency_update_mask_buffer(lost, True)
            for call in range(5):
                check_step([lost], meets=call == 0)
            buffer.low_latency_query_mask_buffer(status)
            assert status.tolist() == [int(r == lost) for r in range(num_ranks)]
        if device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()


def check_left_out(buffer: Buffer, case: Case, victim: int) -> None:
    """A dispatch and combine in which `victim` is masked: its rows do not come, its experts count as zero."""
    rank = dist.get_rank()
    inputs = case.inputs(rank)
    num_local = case.num_experts // case.num_ranks
    _, count, handle, _, _ = buffer.low_latency_dispatch(
        inputs.x, inputs.topk_idx, case.max_tokens, case.num_experts, use_fp8=False
    )
    copies = [[c for c in rows if c.src_rank != victim] for rows in expert_copies(case, rank)]
    assert count.tolist() == [len(rows) for rows in copies]
    y = torch.zeros(num_local, case.max_tokens * case.num_ranks, case.hidden, dtype=torch.bfloat16)
    for e, rows in enumerate(copies):
        y[e, : len(rows)] = 1.0
    out, _, _ = buffer.low_latency_combine(y, inputs.topk_idx, inputs.topk_weights, handle)
    alive = inputs.topk_idx.div(num_local, rounding_mode="floor") != victim
    expected = torch.zeros(inputs.topk_idx.shape[0])
    for k in range(case.topk):
        expected += torch.where(alive[:, k], inputs.topk_weights[:, k], 0.0)
    equal(out, expected.to(torch.bfloat16).unsqueeze(1).expand_as(out), "combined_x without the masked rank")
