"""Bounds that drop rows, and memory that grows where ranks make different calls. Each check runs on every rank."""

from __future__ import annotations

import contextlib
import importlib.util
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hybrid_ep
from hybrid_ep.quantize import cast_to_fp8

_HIDDEN = 8192  # wide rows, so that few of them fill a slot
_NUM_TOKENS = 100


def _smallest_slots() -> AbstractContextManager[object]:
    """Inside, arenas begin with slots of 2 MiB: 127 rows of bf16. The torch engine has none."""
    if importlib.util.find_spec("hybrid_ep._cuda") is None:
        return contextlib.nullcontext()
    from hybrid_ep.engine.cuda import arena

    return mock.patch.object(arena, "_INITIAL_SLOT_BYTES", 1)


def _tokens(device: str, num_tokens: int = _NUM_TOKENS, first: int = 1) -> Tensor:
    """``[T, H]`` bf16, positive integers that name the rank and the token."""
    values = 16 * dist.get_rank() + first + torch.arange(num_tokens) % 16
    return values.to(torch.bfloat16).unsqueeze(1).repeat(1, _HIDDEN).to(device)


def _permuted_buffer(max_tokens: int = _NUM_TOKENS) -> hybrid_ep.HybridEPBuffer:
    return hybrid_ep.HybridEPBuffer(dist.group.WORLD, _HIDDEN, max_tokens, 2)


def check_dropped_copies(device: str = "cpu") -> None:
    """More rows arrive at rank 0 than its slot could hold. The kept ones are right, and the others count as zero."""
    num_ranks = dist.get_world_size()
    topk_idx = torch.tensor([[0, 1], [1, -1]]).repeat(_NUM_TOKENS // 2, 1).to(device)
    weights = (1.0 + torch.arange(2 * _NUM_TOKENS) % 64).view(-1, 2).to(device)
    x, bound = _tokens(device), 70
    given = {"hidden": x, "topk_idx": topk_idx, "topk_weights": weights, "num_of_experts": 2 * num_ranks}
    with _smallest_slots(), _permuted_buffer() as buffer:
        dropping: dict[str, Any] = {"num_permuted_tokens": bound, "non_blocking": True}
        rows, probs, _, counts, handle = buffer.dispatch_with_permute(**given, **dropping)
        all_rows, all_probs, _, all_counts, all_handle = buffer.dispatch_with_permute(**given)
        assert handle[-1].item() == 1, "a rank whose rows were dropped elsewhere knows nothing of it"
        assert torch.equal(counts.cpu(), all_counts)
        num_kept = min(bound, len(all_rows))
        assert probs is not None
        assert all_probs is not None
        assert torch.equal(rows[:num_kept], all_rows[:num_kept])
        assert torch.equal(probs[:num_kept], all_probs[:num_kept])

        # A combine of all rows leaves large values in the slots.
        buffer.combine_with_unpermute(hidden=all_rows * 8, probs=all_probs * 8, handle=all_handle)
        sums, sum_probs = buffer.combine_with_unpermute(hidden=rows, probs=probs, handle=handle)
        all_rows, all_probs = all_rows.clone(), all_probs.clone()
        all_rows[bound:] = all_probs[bound:] = 0
        want, want_probs = buffer.combine_with_unpermute(hidden=all_rows, probs=all_probs, handle=all_handle)
        assert torch.equal(sums, want)
        assert torch.equal(sum_probs, want_probs)

        # Along the handle, with and without weights: no call reports the rows again.
        again = buffer.dispatch_with_permute(hidden=2 * x, handle=handle)[0]
        assert torch.equal(again[:num_kept], 2 * rows[:num_kept])
        again, again_probs, *_ = buffer.dispatch_with_permute(
            hidden=2 * x, topk_idx=topk_idx, topk_weights=2 * weights, handle=handle
        )
        assert torch.equal(again[:num_kept], 2 * rows[:num_kept])
        assert torch.equal(again_probs[:num_kept], 2 * probs[:num_kept])  # type: ignore[index]
        buffer.engine.raise_pending()


def check_dropped_rows(num_ranks_per_domain: int, device: str = "cpu") -> None:
    """Rows by source beyond a bound: an OverflowError at every rank, and zeros in the combine beside it."""
    num_ranks = dist.get_world_size()
    topk_idx = torch.zeros(_NUM_TOKENS, 1, dtype=torch.int64).to(device)
    bound = _NUM_TOKENS * num_ranks - 30
    options: dict[str, Any] = {"num_ranks_per_domain": num_ranks_per_domain}
    with _smallest_slots(), hybrid_ep.Buffer(dist.group.WORLD, **options) as buffer:

        def dispatch(**bounds: int) -> tuple[Any, ...]:
            per_rank, per_domain, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_ranks)
            return buffer.dispatch(
                _tokens(device),
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_domain,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=topk_idx,
                topk_weights=torch.ones(_NUM_TOKENS, 1).to(device),
                **bounds,
            )

        rows, _, weights, _, handle, _ = dispatch()
        buffer.combine(rows * 8, handle, topk_weights=weights * 8)
        if buffer.engine.name == "torch":
            with pytest.raises(hybrid_ep.OverflowError):
                dispatch(num_worst_tokens=bound)
            return
        rows, _, weights, _, handle, _ = dispatch(num_worst_tokens=bound)
        if rows.is_cuda:
            torch.cuda.synchronize()
        with pytest.raises(hybrid_ep.OverflowError):
            buffer.raise_pending()
        sums, sum_weights, _ = buffer.combine(rows, handle, topk_weights=weights)
        want, want_weights = _tokens(device), torch.ones(_NUM_TOKENS, 1).to(device)
        if dist.get_rank() == num_ranks - 1:  # the last rows that arrive are of the last rank
            want[-30:], want_weights[-30:] = 0, 0
        assert torch.equal(sums, want)
        assert torch.equal(sum_weights, want_weights)


def check_growth_of_other_ranks(device: str = "cpu") -> None:
    """Slots must grow in a call of which rank 0 has made the like before, and the others send more tokens."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()

    def topk_of(num_tokens: int) -> Tensor:
        return torch.zeros(num_tokens, 1, dtype=torch.int64).to(device)

    def by_source(buffer: Any, x: Tensor) -> Tensor:
        topk_idx = topk_of(len(x))
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_ranks)
        rows: Tensor = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=topk_idx,
            topk_weights=torch.ones(len(x), 1).to(device),
        )[0]
        return rows

    def by_expert(buffer: Any, x: Tensor) -> Tensor:
        rows: Tensor = buffer.dispatch_with_permute(hidden=x, topk_idx=topk_of(len(x)), num_of_experts=num_ranks)[0]
        return rows

    makers: list[tuple[Callable[[], Any], Callable[[Any, Tensor], Tensor]]] = [
        (lambda: hybrid_ep.Buffer(dist.group.WORLD), by_source),
        (lambda: hybrid_ep.HybridEPBuffer(dist.group.WORLD, _HIDDEN, 400, 1), by_expert),
    ]
    for make, dispatch in makers:
        with _smallest_slots(), make() as buffer:
            for _ in range(2):
                dispatch(buffer, _tokens(device, 20))
            num_tokens = 20 if rank == 0 else 200
            rows = dispatch(buffer, _tokens(device, num_tokens))
            assert len(rows) == (20 + 200 * (num_ranks - 1) if rank == 0 else 0)
            assert rank > 0 or torch.equal(rows[:20], _tokens(device, 20))


def check_bounds_that_differ(device: str = "cpu") -> None:
    """A dispatch of FP8 with other bounds at each rank; the bf16 rows of its combine need larger slots at all."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    data, scales = cast_to_fp8(_tokens(device))
    topk_idx = torch.full((_NUM_TOKENS, 1), 2 * ((rank + 1) % num_ranks), dtype=torch.int64).to(device)
    with _smallest_slots(), _permuted_buffer() as buffer:
        for bound in (200 if rank == 0 else 110, 110 if rank == 0 else 200):
            rows, *_, handle = buffer.dispatch_with_permute(
                hidden=data,
                scaling_factor=scales,
                topk_idx=topk_idx,
                num_of_experts=2 * num_ranks,
                num_permuted_tokens=bound,
                non_blocking=True,
            )
            sums, _ = buffer.combine_with_unpermute(hidden=torch.ones_like(rows, dtype=torch.bfloat16), handle=handle)
            assert torch.equal(sums, torch.ones_like(sums))


def check_calls_of_two_threads(device: str = "cpu") -> None:
    """A call beside another thread's is refused, or gets its own rows: never those of the other call. One rank."""
    refused: list[str] = []
    wrong: list[tuple[int, int]] = []
    barrier = threading.Barrier(2)

    def dispatch(buffer: hybrid_ep.HybridEPBuffer, num_tokens: int) -> None:
        topk_idx = torch.arange(num_tokens).unsqueeze(1).to(device) % 2
        for _ in range(20):
            barrier.wait(60)
            try:
                rows, *_ = buffer.dispatch_with_permute(
                    hidden=_tokens(device, num_tokens), topk_idx=topk_idx, num_of_experts=2
                )
                if len(rows) != num_tokens:
                    wrong.append((num_tokens, len(rows)))
            except hybrid_ep.ConfigError as error:
                refused.append(str(error))

    with hybrid_ep.HybridEPBuffer(dist.group.WORLD, _HIDDEN, 64, 2) as buffer:
        threads = [threading.Thread(target=dispatch, args=(buffer, num_tokens)) for num_tokens in (16, 64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert len(refused) < 40, "every call was refused"
    assert all("while another thread is in a call of the same buffer" in text for text in refused), refused


def check_results_freed_under_another_stream(device: str) -> None:
    """A result of stream A is freed while stream B is current: the next dispatch on B does not write what A reads.

    The dispatch runs on A, or asynchronously on the communication stream.
    """
    num_experts, x = dist.get_world_size(), _tokens(device, 1024)
    topk_idx = torch.full((1024, 1), dist.get_rank(), dtype=torch.int64, device=device)
    group = dist.group.WORLD
    with hybrid_ep.HybridEPBuffer(group, _HIDDEN, 1024, 1) as hybrid, hybrid_ep.Buffer(group) as buffer:

        def by_expert(rows: Tensor) -> Tensor:
            received: Tensor = hybrid.dispatch_with_permute(
                hidden=rows, topk_idx=topk_idx, num_of_experts=num_experts, num_permuted_tokens=1024, non_blocking=True
            )[0]
            return received

        def asynchronous(rows: Tensor) -> Tensor:
            per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
            layout: dict[str, Any] = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank}
            layout["num_tokens_per_expert"] = per_expert
            received: Tensor
            received, *_, event = buffer.dispatch(
                rows, topk_idx=topk_idx, num_worst_tokens=1024, async_finish=True, **layout
            )
            event.current_stream_wait()
            return received

        one, other = torch.cuda.Stream(), torch.cuda.Stream()
        torch.cuda.synchronize()
        for dispatch in (by_expert, asynchronous) * 4:
            with torch.cuda.stream(one):
                rows = dispatch(x)
                torch.cuda._sleep(50_000_000)
                copy = rows.clone()
            with torch.cuda.stream(other):
                del rows
                for _ in range(6):  # as many as take every slot
                    dispatch(-x)
            torch.cuda.synchronize()
            assert torch.equal(copy, x), f"{dispatch.__name__}: the slot was written while another stream read it"


def check_memory_freed_in_a_capture(device: str) -> None:
    """The last result of memory that has been replaced dies inside a capture, where torch could not free it."""
    num_ranks = dist.get_world_size()

    def dispatch(num_tokens: int) -> tuple[Any, ...]:
        return buffer.dispatch_with_permute(
            hidden=_tokens(device, num_tokens),
            topk_idx=torch.zeros(num_tokens, 1, dtype=torch.int64, device=device),
            num_of_experts=num_ranks,
            num_permuted_tokens=300 * num_ranks,
            non_blocking=True,
        )

    from hybrid_ep.engine.cuda import symmetric

    with _smallest_slots(), hybrid_ep.HybridEPBuffer(dist.group.WORLD, _HIDDEN, 300, 1) as buffer:
        topk_idx = torch.zeros(20, 1, dtype=torch.int64, device=device)
        early = buffer.dispatch_with_permute(hidden=_tokens(device, 20), topk_idx=topk_idx, num_of_experts=num_ranks)
        for _ in range(3):
            dispatch(300)  # in larger slots
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            held = torch.zeros(1, device=device) + 1
            del early
        assert symmetric.kept
        graph.replay()
        torch.cuda.synchronize()
        assert held.item() == 1
        dispatch(300)
        assert not symmetric.kept
