"""Checks of calls in which ranks disagree: every rank raises, and the buffer stays usable. Each runs on every rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hybrid_ep
from tests.battery.cases import Case
from tests.battery.normal import dispatch, equal, make_buffer, on
from tests.battery.refused_calls import TIMEOUT_S

_Buffer = hybrid_ep.Buffer | hybrid_ep.HybridEPBuffer


def _case() -> Case:
    """What all ranks call with."""
    return Case("other_calls", dist.get_world_size(), 12, hidden=128, topk=4, num_experts=8)


def _other(case: Case, **changes: Any) -> Case:
    """What the last rank calls with while the others keep to the case."""
    return replace(case, **changes) if dist.get_rank() == case.num_ranks - 1 else case


def _call(buffer: _Buffer, call: Callable[[], object], device: str) -> None:
    """Calls; of a call that does not wait for the device the buffer tells behind it."""
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    buffer.raise_pending()


def _is_refused(buffer: hybrid_ep.Buffer, call: Callable[[], object], device: str) -> str:
    with pytest.raises(hybrid_ep.ConfigError, match="allowed: the same on every rank") as refused:
        _call(buffer, call, device)
    return str(refused.value)


def _errors_of(buffer: _Buffer, calls: Iterable[Callable[[], object]], device: str) -> list[str]:
    """Makes the calls, one after the other at all ranks, and returns what the ConfigErrors say."""
    told = []
    for call in calls:
        try:
            _call(buffer, call, device)
        except hybrid_ep.ConfigError as error:
            told.append(str(error))
        dist.barrier()
    return told


def check_other_calls(device: str = "cpu") -> None:
    """Dispatch and combine of other sizes at one rank, with and without a wait for the counts."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    same = _case()
    inputs = on(device, same.inputs(rank))
    with make_buffer(same) as buffer:
        for bound in (0, 64):
            for change, name in [
                ({"hidden": 256}, "hidden"),
                ({"topk": 2}, "top-k"),
                ({"num_experts": 16}, "num_experts"),
            ]:
                case = _other(same, **change)
                other = on(device, case.inputs(rank))

                def call(case: Case = case, other: Any = other, bound: int = bound) -> object:
                    return dispatch(buffer, case, other, num_worst_tokens=bound)

                assert re.search(name, _is_refused(buffer, call, device))
        bound = 64 if rank == last else 0
        told = _is_refused(buffer, lambda: dispatch(buffer, same, inputs, num_worst_tokens=bound), device)
        assert re.search("num_worst_tokens", told)
        # A combine learns it when it sends; what it returns then has no meaning.
        received, *_, handle, _ = dispatch(buffer, same, inputs)
        rows = received.repeat(1, 2) if rank == last else received
        assert re.search("hidden", _is_refused(buffer, lambda: buffer.combine(rows, handle), device))
        combined, _, _ = buffer.combine(received, handle)
        _, _, _, in_rank, _ = buffer.get_dispatch_layout(inputs.topk_idx, same.num_experts)
        want = inputs.x.float() * in_rank.sum(1, keepdim=True)
        equal(combined, want.to(torch.bfloat16).cpu(), "after other calls")


def check_dispatch_beside_one_along_a_handle(device: str = "cpu") -> None:
    """One rank dispatches along a handle, the others make a route: all are told, and number later dispatches alike."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    case = _case()
    inputs = on(device, case.inputs(rank))
    with make_buffer(case) as buffer:
        received, *_, handle, _ = dispatch(buffer, case, inputs)
        want = buffer.combine(received, handle)[0].clone()
        for _ in range(2):  # the second is one call of C++

            def call() -> object:
                if rank == last:
                    return buffer.dispatch(inputs.x, handle)
                return dispatch(buffer, case, inputs, num_worst_tokens=64)

            _is_refused(buffer, call, device)
        received, *_, handle, _ = dispatch(buffer, case, inputs)
        equal(buffer.combine(received, handle)[0], want.cpu(), "after dispatches of two kinds")


def check_refused_combines_in_a_row(device: str = "cpu") -> None:
    """Every combine is refused at every rank, though one waits for no rows and soon begins the next one."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    case = Case("refused", num_ranks, 12, hidden=128, topk=1, num_experts=2 * num_ranks, routing="hot")
    inputs = on(device, case.inputs(rank))
    with make_buffer(case) as buffer:
        received, *_, handle, _ = dispatch(buffer, case, inputs)  # all rows are received by one rank
        rows = received.repeat(1, 2) if rank == num_ranks - 1 else received
        for _ in range(100):
            assert re.search("hidden", _is_refused(buffer, lambda: buffer.combine(rows, handle), device))
        combined, _, _ = buffer.combine(received, handle)
        equal(combined, inputs.x.cpu(), "after refused combines")


def check_combine_along_other_handles(device: str = "cpu") -> None:
    """A combine along another handle at one rank: that has fewer chunks, for which nobody waits until the timeout."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    cases = [Case(f"{n}_tokens", num_ranks, n, hidden=128, topk=2, num_experts=2 * num_ranks) for n in (40, 3)]
    with make_buffer(cases[0], timeout_s=TIMEOUT_S) as buffer:
        results = [dispatch(buffer, case, on(device, case.inputs(rank))) for case in cases]
        for is_other in (rank == num_ranks - 1, rank != num_ranks - 1):
            received, *_, handle, _ = results[int(is_other)]
            told = _is_refused(buffer, lambda rows=received, its=handle: buffer.combine(rows, its), device)
            assert told.startswith("number of the handle's dispatch is ")
            dist.barrier()
        received, *_, handle, _ = results[0]
        combined, _, _ = buffer.combine(received, handle)
        inputs = on(device, cases[0].inputs(rank))
        _, _, _, in_rank, _ = buffer.get_dispatch_layout(inputs.topk_idx, cases[0].num_experts)
        want = inputs.x.float() * in_rank.sum(1, keepdim=True)
        equal(combined, want.to(torch.bfloat16).cpu(), "after other handles")


def check_other_reports_of_dropped_rows(device: str = "cpu") -> None:
    """One rank wants a flag where rows do not fit its bound, the others want an error: every rank is told."""
    rank, num_ranks, hidden = dist.get_rank(), dist.get_world_size(), 128
    with hybrid_ep.HybridEPBuffer(dist.group.WORLD, hidden, 16, 4) as buffer:

        def call(non_blocking: bool) -> None:
            buffer.dispatch_with_permute(
                hidden=torch.ones(8, hidden, dtype=torch.bfloat16, device=device),
                topk_idx=torch.arange(16, device=device).view(8, 2) % (4 * num_ranks),
                num_of_experts=4 * num_ranks,
                num_permuted_tokens=256,
                non_blocking=non_blocking,
            )

        calls = [partial(call, rank == num_ranks - 1), partial(call, True), partial(call, True)]
        (told,) = _errors_of(buffer, calls, device)
        assert told.startswith("whether rows beyond that number are dropped is "), told
        assert f" at rank {num_ranks - 1}" in told, told


def check_refused_calls_leave_nothing_to_do(device: str = "cpu") -> None:
    """A refused dispatch, which the host does not know of yet, makes an empty route for the kernels behind it.

    Only for the cuda engine. Its memory is full of −1, as if it had been used before.
    """
    rank, num_ranks, hidden = dist.get_rank(), dist.get_world_size(), 128
    with hybrid_ep.HybridEPBuffer(dist.group.WORLD, hidden, 16, 4) as buffer:

        def call(pad_multiple: int) -> tuple[Any, ...]:
            tokens = torch.ones(8, hidden, dtype=torch.bfloat16, device=device)
            return buffer.dispatch_with_permute(
                hidden=tokens,
                topk_idx=torch.arange(16, device=device).view(8, 2) % (4 * num_ranks),
                num_of_experts=4 * num_ranks,
                num_permuted_tokens=256,
                pad_multiple=pad_multiple,
                non_blocking=True,
            )

        *_, handle = call(4)
        route = handle.permute.dispatch.state
        chunk, free = buffer.engine._routes.take(1, route.stream, alone=False)  # type: ignore[attr-defined]
        assert chunk is route.chunk
        chunk.memory[free - chunk.memory.data_ptr() :] = 255
        rows, _, _, counts, handle = call(8 if rank else 4)
        if device == "cuda":
            torch.cuda.synchronize()
        assert counts.tolist() == [0] * counts.numel()
        assert handle.permute.dispatch.rank_prefix_matrix.count_nonzero() == 0
        with pytest.raises(hybrid_ep.ConfigError, match="pad_multiple"):
            buffer.combine_with_unpermute(hidden=rows, handle=handle)


def check_other_low_latency_calls(device: str = "cpu") -> None:
    """Another number of experts, and another bound of tokens, at one rank."""
    rank, case = dist.get_rank(), _case()
    inputs = on(device, case.inputs(rank))
    with make_buffer(case, low_latency_mode=True) as buffer:

        def call(max_tokens: int, num_experts: int) -> list[int]:
            _, count, _, _, _ = buffer.low_latency_dispatch(
                inputs.x, inputs.topk_idx, max_tokens, num_experts, use_fp8=False
            )
            counts: list[int] = count.tolist()
            return counts

        want = call(32, case.num_experts)
        is_last = rank == dist.get_world_size() - 1
        for max_tokens, num_experts in [(16, 2 * case.num_experts), (24, case.num_experts)]:
            told = []
            # What a call finds is raised by itself or by the next: all make the same number of calls.
            for sizes in [(max_tokens, num_experts) if is_last else (32, case.num_experts)] + [(32, 8)] * 2:
                try:
                    call(*sizes)
                except hybrid_ep.ConfigError as error:
                    told.append(str(error))
                dist.barrier()
            assert len(told) == 1, told
            name = "num_experts" if num_experts > case.num_experts else "num_max_dispatch_tokens_per_rank"
            assert told[0].startswith(f"{name} is ")
            assert "allowed: the same on every rank" in told[0]
        assert call(32, case.num_experts) == want


def check_combines_that_grow_memory(device: str = "cpu") -> None:
    """A combine for which memory must grow, at one rank only; then at all ranks. For slots that begin small."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    case = Case("growing", last + 1, 100, hidden=4096, topk=2, num_experts=4 * (last + 1))
    inputs = on(device, case.inputs(rank))
    with make_buffer(case, timeout_s=TIMEOUT_S) as buffer:
        received, *_, handle, _ = dispatch(buffer, case, inputs)
        wide = received.repeat(1, 4)
        for is_other in (rank == last, rank != last):
            rows = wide if is_other else received
            assert re.search("^hidden is ", _is_refused(buffer, lambda rows=rows: buffer.combine(rows, handle), device))
            dist.barrier()
        _, _, _, in_rank, _ = buffer.get_dispatch_layout(inputs.topk_idx, case.num_experts)
        want = (inputs.x.float() * in_rank.sum(1, keepdim=True)).to(torch.bfloat16).cpu()
        combined, _, _ = buffer.combine(wide, handle)
        equal(combined, want.repeat(1, 4), "after growth")
        dispatch(buffer, case, inputs)
        combined, _, _ = buffer.combine(received, handle)
        equal(combined, want, "in memory that has grown")


def check_dispatch_beside_combine(num_ranks_per_domain: int, device: str = "cpu") -> None:
    """One domain dispatches and the other ones combine: every rank is told which call each makes, and at once."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    case = Case(
        "beside", num_ranks, 12, hidden=128, num_experts=4 * num_ranks, num_ranks_per_domain=num_ranks_per_domain
    )
    inputs = on(device, case.inputs(rank))
    dispatches = rank < num_ranks_per_domain
    with make_buffer(case, timeout_s=TIMEOUT_S) as buffer:
        received, *_, handle, _ = dispatch(buffer, case, inputs)
        for bound in (0, 12 * num_ranks):

            def call(bound: int = bound) -> object:
                if dispatches:
                    return dispatch(buffer, case, inputs, num_worst_tokens=bound)
                return buffer.combine(received, handle)

            told = _is_refused(buffer, call, device)
            mine, theirs = ("dispatch", "combine") if dispatches else ("combine", "dispatch")
            assert told.startswith(f"call is '{mine}' at rank {rank} and '{theirs}' at rank "), told
            dist.barrier()
        again, *_, handle, _ = dispatch(buffer, case, inputs)
        equal(again, received.cpu(), "after other calls")
        combined, _, _ = buffer.combine(again, handle)
        _, _, _, in_rank, _ = buffer.get_dispatch_layout(inputs.topk_idx, case.num_experts)
        want = inputs.x.float() * in_rank.sum(1, keepdim=True)
        equal(combined, want.to(torch.bfloat16).cpu(), "after other calls")


def check_low_latency_calls_that_grow_memory(device: str = "cpu") -> None:
    """A low-latency dispatch for which memory must be made, or grow, at one rank only; then at all ranks."""
    rank, last, case = dist.get_rank(), dist.get_world_size() - 1, _case()
    inputs = on(device, case.inputs(rank))
    with make_buffer(case, low_latency_mode=True, timeout_s=TIMEOUT_S) as buffer:

        def call(max_tokens: int, hooked: bool = False) -> list[int]:
            _, count, _, _, hook = buffer.low_latency_dispatch(
                inputs.x, inputs.topk_idx, max_tokens, case.num_experts, use_fp8=False, return_recv_hook=hooked
            )
            if hook is not None:
                hook()
            counts: list[int] = count.tolist()
            return counts

        def refused(mine: int, other: int, hooked: bool = False) -> None:
            told = []
            # What a call finds is raised by itself or by the next: all make the same number of calls.
            for max_tokens in (other if rank == last else mine, 16, 16):
                try:
                    call(max_tokens, hooked)
                except hybrid_ep.ConfigError as error:
                    told.append(str(error))
                dist.barrier()
            assert len(told) == 1, told
            assert told[0].startswith("num_max_dispatch_tokens_per_rank is "), told
            assert "allowed: the same on every rank" in told[0]

        refused(16, 24)
        want = call(16)
        for hooked in (False, True):
            refused(16, 40, hooked)
            refused(48, 16, hooked)
        assert call(64) == want
        assert call(16, True) == want


def check_too_many_low_latency_tokens(device: str = "cpu") -> None:
    """One rank has more tokens than the call allows, with and without a hook: every rank is told soon, and goes on."""
    rank, case = dist.get_rank(), _case()
    last, most = case.num_ranks - 1, case.max_tokens
    inputs = on(device, case.inputs(rank))
    num_tokens = most + 3 if rank == last else most
    x = torch.ones(num_tokens, case.hidden, dtype=torch.bfloat16, device=device)
    topk_idx = torch.zeros(num_tokens, case.topk, dtype=torch.int64, device=device)
    wanted = f"rows of x is {most + 3} at rank {last}; allowed: ≤ num_max_dispatch_tokens_per_rank = {most}"
    with make_buffer(case, low_latency_mode=True, timeout_s=TIMEOUT_S) as buffer:

        def call(x: torch.Tensor, topk_idx: torch.Tensor, hooked: bool, told: list[str]) -> list[int]:
            try:
                _, count, _, _, hook = buffer.low_latency_dispatch(
                    x, topk_idx, most, case.num_experts, use_fp8=False, return_recv_hook=hooked
                )
                if hook is not None:
                    hook()
            except hybrid_ep.ConfigError as error:
                told.append(str(error))
                return []
            counts: list[int] = count.tolist()
            return counts

        want = call(inputs.x, inputs.topk_idx, False, [])
        for hooked in (False, True):
            told: list[str] = []
            call(x, topk_idx, hooked, told)
            dist.barrier()
            for _ in range(2):  # what a call finds is raised by itself or by the next
                call(inputs.x, inputs.topk_idx, hooked, told)
                dist.barrier()
            assert told == [wanted]
        assert call(inputs.x, inputs.topk_idx, False, told) == want


def check_other_global_scales(device: str = "cpu") -> None:
    """NVFP4 rows with other global scales, and with other formats of block scales, at one rank."""
    rank, case = dist.get_rank(), _case()
    inputs = on(device, case.inputs(rank))
    is_last = rank == dist.get_world_size() - 1
    with make_buffer(case, low_latency_mode=True) as buffer:

        def call(scale: float, ue8m0: bool = False) -> list[int]:
            _, count, *_ = buffer.low_latency_dispatch(
                inputs.x,
                inputs.topk_idx,
                case.max_tokens,
                case.num_experts,
                x_global_scale=torch.tensor([scale], device=device),
                use_nvfp4=True,
                use_ue8m0_for_sf=ue8m0,
            )
            counts: list[int] = count.tolist()
            return counts

        want = call(400.0)
        for other, name in (((300.0, False), "x_global_scale is about "), ((400.0, True), "format of the rows is ")):
            told = []
            for arguments in [other if is_last else (400.0, False)] + [(400.0, False)] * 2:
                try:
                    call(*arguments)
                except hybrid_ep.ConfigError as error:
                    told.append(str(error))
                dist.barrier()
            assert len(told) == 1, told
            assert told[0].startswith(name)
            assert "allowed: the same on every rank" in told[0]
        assert call(400.0) == want


def check_other_logfmt(device: str = "cpu") -> None:
    """Rows of a combine as LogFMT-10 at one rank only."""
    rank, case = dist.get_rank(), _case()
    inputs = on(device, case.inputs(rank))
    is_last = rank == dist.get_world_size() - 1
    num_local = case.num_experts // case.num_ranks
    x = torch.ones(num_local, case.max_tokens * case.num_ranks, case.hidden, dtype=torch.bfloat16, device=device)
    with make_buffer(case, low_latency_mode=True) as buffer:
        *_, handle, _, _ = buffer.low_latency_dispatch(
            inputs.x, inputs.topk_idx, case.max_tokens, case.num_experts, use_fp8=False
        )

        def combine(use_logfmt: bool) -> None:
            buffer.low_latency_combine(x, inputs.topk_idx, inputs.topk_weights, handle, use_logfmt=use_logfmt)

        for mine in (is_last, not is_last):
            told = _errors_of(buffer, [partial(combine, one) for one in (mine, False, False)], device)
            assert len(told) == 1, told
            assert told[0].startswith(f"use_logfmt is {mine} at rank {rank} and {not mine} at rank ")


def check_combine_along_other_low_latency_handles(device: str = "cpu") -> None:
    """A combine along the handle of another dispatch at one rank: of fewer tokens, of another region, of as many."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    is_last = rank == num_ranks - 1
    cases = [
        Case("other_handles", num_ranks, num_tokens, 128, 4, 2 * num_ranks, seed=seed)
        for seed, num_tokens in enumerate((3, 40, 40))
    ]
    with make_buffer(cases[0], low_latency_mode=True, timeout_s=TIMEOUT_S) as buffer:
        calls = []
        for case in cases:
            inputs = on(device, case.inputs(rank))
            rows, _, handle, _, _ = buffer.low_latency_dispatch(
                inputs.x, inputs.topk_idx, case.max_tokens, case.num_experts, use_fp8=False
            )
            calls.append((rows.clone(), inputs.topk_idx, inputs.topk_weights, handle))
        want = [buffer.low_latency_combine(*call)[0] for call in calls]

        def combine(i: int, hooked: bool) -> None:
            _, _, hook = buffer.low_latency_combine(*calls[i], return_recv_hook=hooked)
            if hook is not None:
                hook()

        for hooked in (False, True):
            for mine, theirs in [(0, 1), (1, 0), (1, 2)]:
                # What a call finds is raised by itself or by the next: all make the same number of calls.
                along = theirs if is_last else mine, 2, 2
                told = _errors_of(buffer, [partial(combine, i, hooked) for i in along], device)
                assert len(told) == 1, told
                assert told[0].startswith("number of the handle's dispatch is "), told
        for i, call in enumerate(calls):
            equal(buffer.low_latency_combine(*call)[0], want[i].cpu(), f"after other handles, dispatch {i}")


def check_calls_in_turn(device: str = "cpu") -> None:
    """Calls of other sizes in turn, the same at all ranks: one that is ahead is not taken for one that disagrees."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    case = Case("in_turn", num_ranks, (0, 3, *[0] * (num_ranks - 2)), hidden=64, num_experts=2 * num_ranks)
    inputs = on(device, case.inputs(rank))
    with make_buffer(case) as buffer:
        received, _, weights, _, handle, _ = dispatch(buffer, case, inputs)
        want, _, _ = buffer.combine(received, handle)
        for _ in range(30):
            buffer.combine(received, handle, weights)
            again, *_ = buffer.dispatch(inputs.x, handle=handle)
            combined, _, _ = buffer.combine(again, handle)
            equal(combined, want.cpu(), "in turn")
            dispatch(buffer, case, inputs)
