"""Calls that some rank of the cuda engine gets wrong: all raise the same, no slot is lost, and the buffer stays usable.

Each check runs on every rank, on GPUs and on emulated warps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hybrid_ep
from hybrid_ep.engine.calls import CombineRequest, DispatchRequest, Routing, Rows
from hybrid_ep.quantize import Fp8Format, cast_to_fp8
from tests.multi_gpu.behaviour import draw, make_buffer, round_trip
from tests.multi_gpu.random_routings import current_device, dispatch, draw_tokens


def _engine(buffer: Any) -> Any:
    return buffer.engine


def _told(buffer: Any, call: Callable[[], object], error: type[Exception] = hybrid_ep.ConfigError) -> str:
    """Calls, and returns what this rank is told, by the call or by the buffer behind it."""

    def once() -> None:
        call()
        torch.cuda.synchronize()
        buffer.raise_pending()

    with pytest.raises(error) as told:
        once()
    torch.cuda.synchronize()
    dist.barrier()
    buffer.raise_pending()
    return str(told.value)


def _all_equal(text: str) -> bool:
    texts = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return len(set(texts)) == 1


def _send(buffer: hybrid_ep.Buffer, topk_idx: Tensor, bound: int | None, num_experts: int) -> object:
    """A dispatch past the checks of the buffer, which see the values of tensors on the CPU."""
    x = torch.ones(topk_idx.shape[0], 128, dtype=torch.bfloat16, device=topk_idx.device)
    return buffer.engine.dispatch(DispatchRequest(Rows(x), Routing(topk_idx, None, num_experts), bound))


def check_bad_expert() -> None:
    """An index outside −1 … E−1 at one rank, which only its kernel sees: nobody sends, all say which and where."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    bad, num_experts = num_ranks - 1, 4 * num_ranks
    right = torch.arange(24, device=current_device()).view(12, 2) % num_experts
    with make_buffer() as buffer:
        for bound in None, 64:
            for value in (num_experts + 7, -2, 1 << 40):
                topk_idx = right.clone()
                if rank == bad:
                    topk_idx[5, 1] = value
                free = _engine(buffer)._arena.num_free
                call = functools.partial(_send, buffer, topk_idx, bound, num_experts)
                told = _told(buffer, call)
                shown = min(value, 2**31 - 1)
                assert told == f"topk_idx of rank {bad} has {shown}; allowed: −1 … {num_experts - 1}"
                assert _engine(buffer)._arena.num_free == free
                _send(buffer, right, bound, num_experts)
        round_trip(buffer, draw(1), "after bad indices")


def check_too_many_tokens() -> None:
    """More tokens than the engine takes at one rank."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    num_experts = 2 * num_ranks
    num_tokens = 65_537 if rank == 0 else 3
    topk_idx = torch.zeros(num_tokens, 1, dtype=torch.int64, device=current_device())
    with make_buffer() as buffer:
        for bound in (None, 8):
            told = _told(buffer, lambda rows=bound: _send(buffer, topk_idx, rows, num_experts), hybrid_ep.ConfigError)
            assert told == "tokens of rank 0 are 65537; allowed with the cuda engine: ≤ 65536"
        round_trip(buffer, draw(1), "after too many tokens")


def check_bound_beyond_common_bound() -> None:
    """A bound beyond what a slot holds, at one rank: all are told, and a result that is still held stays as it is."""
    rank, num_ranks, hidden, most = dist.get_rank(), dist.get_world_size(), 7168, 8
    device = current_device()
    x = torch.randn(most, hidden, device=device, generator=torch.Generator(device).manual_seed(rank)).bfloat16()
    topk_idx = torch.arange(2 * most, device=device).view(most, 2) % (2 * num_ranks)
    with hybrid_ep.HybridEPBuffer(dist.group.WORLD, hidden, most, 2, engine="cuda") as buffer:
        arena = _engine(buffer)._arena

        def call(bound: int | None) -> tuple[Any, ...]:
            return buffer.dispatch(x, topk_idx=topk_idx, num_dispatched_tokens=bound)

        held, _, _, handle = call(None)
        also_held = call(None)[0]
        want, free = held.clone(), arena.num_free
        assert free == 0, "or there is nothing beside the slot"
        del also_held
        for bound in (10_000, 2**31 - 1):
            mine = bound if rank == num_ranks - 1 else most * num_ranks
            told = _told(buffer, lambda rows=mine: call(rows))
            assert told == (
                f"num_dispatched_tokens of rank {num_ranks - 1} is {bound}; allowed: ≤ {most * num_ranks}, "
                "what all ranks can send"
            )
            assert torch.equal(held, want), "a held result was written over"
            assert arena.num_free == 1, "a slot was lost"
        again, _, _, _ = call(most * num_ranks)
        assert torch.equal(again[: held.shape[0]], want)
        buffer.combine(held, None, handle)


def check_common_bounds_that_differ() -> None:
    """All slots grow for the common bound of bounds that differ; ranks that know other bounds of all are told so."""
    rank, num_ranks, hidden = dist.get_rank(), dist.get_world_size(), 8192
    device = current_device()
    topk_idx = torch.zeros(40, 1, dtype=torch.int64, device=device)  # all rows go to rank 0
    x = torch.full((40, hidden), float(rank), dtype=torch.bfloat16, device=device)
    bound = 40 * num_ranks if rank == 0 else 0
    with hybrid_ep.HybridEPBuffer(dist.group.WORLD, hidden, 5000, 1, engine="cuda") as buffer:
        arena = _engine(buffer)._arena
        before = arena.slot_bytes
        rows, _, _, handle = buffer.dispatch(x, topk_idx=topk_idx, num_dispatched_tokens=bound)
        assert arena.slot_bytes > before, "the slots did not grow"
        assert rows.shape[0] == bound
        if rank == 0:
            assert torch.equal(rows.view(num_ranks, 40, hidden)[:, 0, 0].cpu(), torch.arange(num_ranks).bfloat16())
        home, _ = buffer.combine(rows, None, handle)
        assert torch.equal(home, x)
        config = buffer.configurer.buffer_config
        config.max_num_of_tokens_per_rank = 50_000 if rank == num_ranks - 1 else 5000
        told = _told(buffer, lambda: buffer.dispatch(x, topk_idx=topk_idx, num_dispatched_tokens=bound))
        assert "num_max_tokens_per_rank is " in told
        assert "5000 at rank" in told
        assert "50000 at rank" in told


def check_combine_beyond_bound() -> None:
    """A dispatch that keeps to its bound, of rows that all come back to one rank, which cannot hold them."""
    rank, num_ranks, hidden = dist.get_rank(), dist.get_world_size(), 8192
    num_tokens = 70 if rank == 0 else 0
    topk_idx = torch.arange(1, num_ranks, device=current_device()).repeat(num_tokens, 1)
    with make_buffer() as buffer:
        slot_rows = _engine(buffer)._arena.slot_bytes // (2 * hidden)
        assert 70 <= slot_rows < 70 * (num_ranks - 1), "the case needs small slots"
        x = torch.ones(num_tokens, hidden, dtype=torch.bfloat16, device=current_device())
        result = buffer.engine.dispatch(DispatchRequest(Rows(x), Routing(topk_idx, None, num_ranks), 70))
        told = _told(
            buffer,
            lambda: buffer.engine.combine(CombineRequest(result.rows.data), result.handle),
            hybrid_ep.OverflowError,
        )
        assert f"{70 * (num_ranks - 1)} at rank 0; allowed by the bound: " in told
        assert _all_equal(told)
        round_trip(buffer, draw(1), "after an overflow")


def check_same_bytes() -> None:
    """Ranks whose rows have as many bytes with all that goes with them: the field is named, with both values."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    is_last, num_experts = rank == num_ranks - 1, 16 * num_ranks
    other, device = (0 if is_last else num_ranks - 1), current_device()

    def tensors(hidden: int, topk: int, fp8: Fp8Format | None, weights: bool) -> tuple[Rows, Routing]:
        x = torch.ones(6, hidden, dtype=torch.bfloat16, device=device)
        topk_idx = torch.arange(6 * topk, device=device).view(6, topk) % num_experts
        given = torch.ones(6, topk, device=device) if weights else None
        rows = Rows(x) if fp8 is None else Rows(*cast_to_fp8(x, fp8))
        return rows, Routing(topk_idx, given, num_experts)

    packed = Fp8Format(round_scale=True, ue8m0=True)
    here, there = (int(is_last), int(not is_last))
    cases: list[tuple[tuple[Any, ...], tuple[Any, ...], str, tuple[object, object]]] = [
        ((128, 8, None, True), (152, 4, None, True), "top-k (columns of topk_idx)", (8, 4)),
        ((264, 2, None, True), (512, 2, Fp8Format(), True), "hidden", (264, 512)),
        ((128, 2, Fp8Format(), True), (128, 2, packed, True), "dtype of the scales", (torch.float32, torch.int32)),
        ((128, 2, None, True), (128, 3, None, False), "top-k (columns of topk_idx)", (2, 3)),
    ]
    with make_buffer() as buffer:
        for first, last, name, values in cases:
            rows, routing = tensors(*(last if is_last else first))
            for bound in (None, 64):
                told = _told(
                    buffer,
                    lambda rows=rows, routing=routing, bound=bound: buffer.engine.dispatch(
                        DispatchRequest(rows, routing, bound)
                    ),
                )
                want = f"{name} is {values[here]} at rank {rank} and {values[there]} at rank "
                assert told.startswith(want), told
                assert is_last or told.startswith(f"{want}{other}; allowed: the same on every rank")
        rows, routing = tensors(128, 2, None, True)
        bound = 65 if is_last else 64
        told = _told(
            buffer,
            lambda: buffer.engine.dispatch(DispatchRequest(rows, routing, bound)),
        )
        assert told.startswith(f"num_worst_tokens is {bound} at rank {rank} and {129 - bound} at rank ")
        round_trip(buffer, draw(1), "after other calls")


def check_handles_of_others() -> None:
    """Handles of two dispatches or buffers in one call, other shapes along one handle, and one of the torch engine."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    is_last = rank == num_ranks - 1
    sent = draw(0, tokens=12, hidden=128)
    with make_buffer() as buffer, make_buffer() as second:
        elsewhere = dispatch(second, sent, rank)
        results = [dispatch(buffer, sent, rank) for _ in range(2)]
        mixed = results[int(is_last)]
        told = _told(buffer, lambda: buffer.combine(mixed[0], mixed[4]))
        assert told.startswith(f"number of the handle's dispatch is {1 + is_last} at rank {rank} and {2 - is_last} at")
        told = _told(buffer, lambda: buffer.dispatch(sent.x[rank], handle=mixed[4]))
        assert told.startswith(f"number of the handle's dispatch is {1 + is_last} at rank {rank} and {2 - is_last} at")
        mixed = elsewhere if is_last else results[0]
        told = _told(buffer, lambda: buffer.combine(mixed[0], mixed[4]))
        assert told.startswith("number of the buffer on its group is ")
        narrow = results[0][0][:, :64].contiguous() if is_last else results[0][0]
        told = _told(buffer, lambda: buffer.combine(narrow, results[0][4]))
        assert told.startswith(f"hidden is {narrow.shape[1]} at rank {rank} and {192 - narrow.shape[1]} at rank ")
        weights = None if is_last else results[0][2]
        told = _told(buffer, lambda: buffer.combine(results[0][0], results[0][4], weights), hybrid_ep.ConfigError)
        assert told.startswith("weights of a row is ")
        made = results[0][4]
        foreign = hybrid_ep.BufferHandle(buffer, made.dispatch._replace(state=object()), made[4], None)
        for call in (lambda: buffer.combine(results[0][0], foreign), lambda: buffer.dispatch(sent.x[rank], foreign)):
            with pytest.raises(hybrid_ep.ConfigError, match="handle is of another engine"):
                call()
        round_trip(buffer, sent, "after other handles")


def check_misaligned_scales() -> None:
    """FP8 rows and scales that begin anywhere in their storage; with 16 scales a row, four are loaded at once."""
    rank, hidden = dist.get_rank(), 2048
    sent = draw(0, tokens=20, hidden=hidden)
    data, scales = cast_to_fp8(sent.x[rank])
    assert scales.shape[1] % 4 == 0
    shifted = torch.empty(scales.numel() + 1, device=scales.device)[1:].view_as(scales).copy_(scales)
    bytes_of = torch.empty(data.numel() + 1, dtype=torch.uint8, device=data.device)[1:]
    moved = bytes_of.view_as(data.view(torch.uint8)).copy_(data.view(torch.uint8)).view(data.dtype)
    assert shifted.data_ptr() % 16
    assert moved.data_ptr() % 16
    with make_buffer() as buffer:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(sent.topk_idx[rank], sent.num_experts)
        layout = {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}
        given = layout | {"topk_idx": sent.topk_idx[rank]}
        want, got = (buffer.dispatch(x, **given) for x in ((data, scales), (moved, shifted)))
        for a, b in zip(want[0], got[0], strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        again = buffer.dispatch((moved, shifted), handle=want[4])[0]
        assert torch.equal(again[1], want[0][1])


@contextmanager
def _failing(target: Any, name: str) -> Iterator[None]:
    """Inside, what has this name fails when it is called, or if it is a number when it is set."""
    error = MemoryError("no memory")
    if name != "num_calls":
        with mock.patch.object(target, name, side_effect=error):
            yield
        return
    counted = property(lambda engine: vars(engine)[name], mock.Mock(side_effect=error))
    with mock.patch.object(target, name, counted, create=True):
        yield


def check_errors_keep_no_slot() -> None:
    """Whatever fails between taking a slot and handing it out, on all ranks: the slot is free again."""
    from hybrid_ep.engine.cuda import between

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    sent = draw_tokens(0, [12] * num_ranks, 128, 2, 2 * num_ranks)
    given = {"topk_idx": sent.topk_idx[rank], "topk_weights": sent.weights[rank], "num_of_experts": sent.num_experts}
    with hybrid_ep.HybridEPBuffer(dist.group.WORLD, 128, 12, 2, engine="cuda") as buffer:
        engine = _engine(buffer)
        handle = buffer.dispatch(sent.x[rank], **given)[-1]
        by_expert = buffer.dispatch_with_permute(hidden=sent.x[rank], **given)[-1]
        calls = [
            lambda: buffer.dispatch(sent.x[rank], **given),
            lambda: buffer.dispatch(sent.x[rank], **given, num_dispatched_tokens=12 * num_ranks),
            lambda: buffer.dispatch(sent.x[rank], handle=handle),
            lambda: buffer.dispatch_with_permute(hidden=sent.x[rank], **given),
            lambda: buffer.dispatch_with_permute(hidden=sent.x[rank], handle=by_expert),
        ]
        free = engine._arena.num_free
        assert free > 0
        # A launch is counted while the call holds its slot.
        points: list[tuple[Any, str]] = [(type(engine), "num_calls")]
        if engine.grid.num_domains > 1:
            points = [
                (engine, "_routes"),
                (engine, "_communicator"),
                (engine, "_between"),
                (between.BetweenRoute, "rank_prefix_matrix"),
                (between, "aligned_rows"),
            ]
        for target, name in points:
            for call in calls:
                error = None
                with _failing(target, name):
                    try:
                        call()
                    except Exception as raised:
                        error = raised  # holds the frames of the call
                assert engine._arena.num_free == free, f"{name}: a slot is lost by {error!r}"
                torch.cuda.synchronize()
                dist.barrier()
        rows, *_ = buffer.dispatch(sent.x[rank], **given)
        assert engine._arena.num_free == free - 1
        del rows
