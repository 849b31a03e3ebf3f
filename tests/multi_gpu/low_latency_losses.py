"""Low-latency calls of the cuda engine beyond the battery, when ranks are masked or lost."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hybrid_ep
from tests.multi_gpu.low_latency import MAX_TOKENS, check_received, draw, expected_sum, make_buffer, pair, round_trip
from tests.multi_gpu.random_routings import current_device

_NOT_THERE = "low_latency_dispatch: (routes|records of another domain)"


def _masks(buffer: hybrid_ep.Buffer) -> list[int]:
    status = torch.full((dist.get_world_size(),), -1, dtype=torch.int32, device=current_device())
    buffer.low_latency_query_mask_buffer(status)
    masks: list[int] = status.tolist()
    return masks


def _masks_of(lost: int) -> list[int]:
    return [int(r == lost) for r in range(dist.get_world_size())]


def _begin(buffer: hybrid_ep.Buffer) -> None:
    """A first round trip, which has ended at all ranks."""
    round_trip(buffer, draw(0))
    torch.cuda.synchronize()
    dist.barrier()


def check_masks_of_old_graphs() -> None:
    """A graph goes on with the memory that it was captured with; masks and cleanings reach it there."""
    rank, lost, sent = dist.get_rank(), dist.get_world_size() - 1, draw(0)
    with make_buffer(enable_shrink=True) as buffer:
        round_trip(buffer, sent)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            *result, combined = pair(buffer, sent)

        def replay(lost: int | None) -> None:
            graph.replay()
            check_received(*result, sent, lost)  # type: ignore[arg-type]
            assert torch.equal(combined, expected_sum(sent, rank, lost)), "combined_x is wrong"

        replay(None)
        round_trip(buffer, draw(0, hidden=2048))  # the memory grows
        replay(None)
        torch.cuda.synchronize()
        dist.barrier()
        if rank != lost:
            buffer.low_latency_update_mask_buffer(lost, True)
            begin = time.monotonic()
            for _ in range(3):
                replay(lost)
            assert time.monotonic() - begin < 5, "a masked rank was waited for"
        buffer.low_latency_clean_mask_buffer()
        buffer.clean_low_latency_buffer(MAX_TOKENS, 2048, sent.num_experts)
        for _ in range(3):
            replay(None)
            round_trip(buffer, draw(0, hidden=2048))


def check_given_up_on_the_device(timeout_s: float) -> None:
    """Kernels mask a lost rank in a replay, which raises nothing. The next query returns the mask."""
    rank, lost = dist.get_rank(), dist.get_world_size() - 1
    with make_buffer(enable_shrink=True, timeout_s=timeout_s) as buffer:
        _begin(buffer)
        if rank != lost:
            with _untold(buffer):
                pair(buffer, draw(0))
            assert _masks(buffer) == _masks_of(lost)
            for seed in range(3):
                round_trip(buffer, draw(seed), lost=lost)
        torch.cuda.synchronize()
        dist.barrier()


def check_pending_loss(timeout_s: float) -> None:
    """`raise_pending` raises the loss of a rank, and the buffer goes on without that rank."""
    rank, lost = dist.get_rank(), dist.get_world_size() - 1
    with make_buffer(enable_shrink=True, timeout_s=timeout_s) as buffer:
        _begin(buffer)
        if rank != lost:
            with _untold(buffer):
                pair(buffer, draw(0))
            torch.cuda.synchronize()
            with pytest.raises(hybrid_ep.TimeoutError):
                buffer.raise_pending()
            assert _masks(buffer) == _masks_of(lost)
        dist.barrier()


def check_told_at_close(timeout_s: float) -> None:
    """`close` raises the loss of a rank that no call has raised, and names the rank."""
    rank, lost = dist.get_rank(), dist.get_world_size() - 1
    buffer = make_buffer(timeout_s=timeout_s)
    _begin(buffer)
    if rank != lost:
        with _untold(buffer):
            pair(buffer, draw(0))
        with pytest.raises(hybrid_ep.TimeoutError) as told:
            buffer.close()
        assert told.value.peer == lost
    dist.barrier()
    buffer.close()


def check_named_at_close(timeout_s: float) -> None:
    """Calls that are queued behind the one that lost a rank lose it, too. `close` does not raise that again."""
    rank, lost = dist.get_rank(), dist.get_world_size() - 1
    buffer = make_buffer(timeout_s=timeout_s)
    _begin(buffer)
    if rank != lost:
        with pytest.raises(hybrid_ep.TimeoutError) as told:  # noqa: PT012
            pair(buffer, draw(0))
            torch.cuda.synchronize()
            pair(buffer, draw(0))
        assert told.value.peer == lost
        with _untold(buffer), contextlib.suppress(hybrid_ep.TimeoutError):
            pair(buffer, draw(0))
        buffer.close()
    dist.barrier()  # a rank that closes ends its connections, which others would see instead of its silence
    buffer.close()


def check_told_once(timeout_s: float) -> None:
    """A late rank that was given up takes part again. Older reports of its loss are not raised then."""
    rank, late = dist.get_rank(), dist.get_world_size() - 1
    with make_buffer(enable_shrink=True, timeout_s=timeout_s) as buffer:
        _begin(buffer)
        if rank != late:
            with pytest.raises(hybrid_ep.TimeoutError):  # noqa: PT012
                pair(buffer, draw(0))
                torch.cuda.synchronize()
                pair(buffer, draw(0))
            buffer.low_latency_update_mask_buffer(late, False)
            with _untold(buffer):
                pair(buffer, draw(0))
        buffer.low_latency_clean_mask_buffer()
        dist.barrier()  # whoever has waited in vain comes later
        buffer.clean_low_latency_buffer(MAX_TOKENS, 1024, 8 * dist.get_world_size())
        assert _masks(buffer) == [0] * dist.get_world_size()
        for seed in range(3):
            round_trip(buffer, draw(seed))


def _untold(buffer: hybrid_ep.Buffer) -> contextlib.AbstractContextManager[object]:
    """Calls in it do not look at what kernels find wrong, as replays of a graph do not."""
    return mock.patch.object(_kernels_of(buffer), "take_fault", return_value=None)


def _kernels_of(buffer: hybrid_ep.Buffer) -> Any:
    """What makes the low-latency calls of a buffer, of one domain or of several."""
    engine: Any = buffer.engine
    return engine._low_latency


def check_masks_by_hand(fp8: bool, hooked: bool) -> None:
    """All agree to leave a rank out, which makes no calls; then they take it back in."""
    rank, lost = dist.get_rank(), dist.get_world_size() - 1
    with make_buffer(enable_shrink=True) as buffer:
        round_trip(buffer, draw(0), fp8=fp8, hooked=hooked)
        torch.cuda.synchronize()
        dist.barrier()
        if rank != lost:
            buffer.low_latency_update_mask_buffer(lost, True)
            for seed in range(3):
                round_trip(buffer, draw(seed), lost=lost, fp8=fp8, hooked=hooked)
        buffer.low_latency_clean_mask_buffer()
        buffer.clean_low_latency_buffer(MAX_TOKENS, 1024, 8 * dist.get_world_size())
        assert _masks(buffer) == [0] * dist.get_world_size()
        for seed in range(3):
            round_trip(buffer, draw(seed), fp8=fp8, hooked=hooked)


def check_an_answer_that_comes_late() -> None:
    """The device has told of a mask. That arrives when the rank has been taken back in."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    other = (rank + 1) % num_ranks
    with make_buffer(enable_shrink=True) as buffer:
        round_trip(buffer, draw(0))
        buffer.low_latency_update_mask_buffer(other, True)
        assert _masks(buffer) == _masks_of(other)
        kernels = _kernels_of(buffer)
        torch.cuda.synchronize()
        late = kernels._told.clone()
        buffer.low_latency_update_mask_buffer(other, False)
        kernels._told.copy_(late)
        assert kernels.note_told() == set()
        assert _masks(buffer) == [0] * num_ranks
        round_trip(buffer, draw(1))


def lose_a_rank(lost: int, timeout_s: float, fp8: bool, hooked: bool) -> int | None:
    """The rank dies between two calls; the others are told who it was, and go on without it."""
    rank, sent = dist.get_rank(), draw(0)
    with make_buffer(enable_shrink=True, timeout_s=timeout_s) as buffer:
        round_trip(buffer, sent, fp8=fp8, hooked=hooked)
        _die_alone(lost)

        def dispatch() -> None:
            *_, hook = buffer.low_latency_dispatch(
                sent.x[rank],
                sent.topk_idx[rank],
                MAX_TOKENS,
                sent.num_experts,
                use_fp8=fp8,
                return_recv_hook=hooked,
            )
            if hook is not None:
                hook()

        with pytest.raises(hybrid_ep.TimeoutError, match=_NOT_THERE) as told:  # noqa: PT012
            dispatch()  # gives the rank up on the device
            torch.cuda.synchronize()
            dispatch()  # and here the host is told
        assert _masks(buffer) == _masks_of(lost)
        for seed in range(5):
            round_trip(buffer, draw(seed), lost=lost, fp8=fp8, hooked=hooked)
    return told.value.peer


def lose_a_rank_between_replays(lost: int, timeout_s: float) -> list[int]:
    """Ranks only replay a graph, and one of them dies; the others find its mask, and replay on without it."""
    rank, sent = dist.get_rank(), draw(0)
    with make_buffer(enable_shrink=True, timeout_s=timeout_s) as buffer:
        round_trip(buffer, sent)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            *result, combined = pair(buffer, sent)
        for _ in range(3):
            graph.replay()
        assert _masks(buffer) == [0] * dist.get_world_size()
        _die_alone(lost)
        graph.replay()
        masks = _masks(buffer)
        for _ in range(3):
            graph.replay()
            check_received(*result, sent, lost)  # type: ignore[arg-type]
            assert torch.equal(combined, expected_sum(sent, rank, lost)), "combined_x is wrong"
        round_trip(buffer, sent, lost=lost)  # and nothing is told that is known
    return masks


def _die_alone(lost: int) -> None:
    """The rank dies when no rank is in a call."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    if dist.get_rank() == lost:
        os.kill(os.getpid(), signal.SIGKILL)


def lose_a_rank_between_its_flags(timeout_s: float) -> str:
    """The last rank is lost in a combine, when its weights stand at the first rank only and its rows nowhere.

    The others wait for its weights, and the first waits for their rows; it must not give them up.
    """
    rank, lost, sent = dist.get_rank(), dist.get_world_size() - 1, draw(0)
    with make_buffer(enable_shrink=True, timeout_s=timeout_s) as buffer:
        round_trip(buffer, sent)
        round_trip(buffer, sent)
        send = (sent.x[rank], sent.topk_idx[rank], MAX_TOKENS, sent.num_experts)
        packed, _, handle, _, _ = buffer.low_latency_dispatch(*send, use_fp8=False)
        assert isinstance(packed, Tensor)
        torch.cuda.synchronize()
        if rank == 0:
            _raise_weights_flag_of(buffer, lost)
        torch.cuda.synchronize()
        dist.barrier()
        if rank == lost:
            return ""
        if rank > 0:
            time.sleep(0.1)  # the first rank's time is over first
        with pytest.raises(hybrid_ep.TimeoutError) as told:  # noqa: PT012
            buffer.low_latency_combine(packed, sent.topk_idx[rank], sent.weights[rank], handle)
            torch.cuda.synchronize()
            buffer.low_latency_dispatch(*send, use_fp8=False)
        assert told.value.peer == lost
        assert _masks(buffer) == _masks_of(lost)
        for seed in range(5):
            round_trip(buffer, draw(seed), lost=lost)
            torch.cuda.synchronize()
    return str(told.value)


def _raise_weights_flag_of(buffer: hybrid_ep.Buffer, peer: int) -> None:
    """Writes what the peer's third combine would."""
    from hybrid_ep import _cuda

    memory = _kernels_of(buffer)._regions[-1].memory.local
    channel = _cuda.low_latency_buffers * _cuda.low_latency_channel_bytes  # those of dispatch come first
    begin = channel + _cuda.low_latency_channel_offsets["weights_epoch"]
    flag = memory[begin:][: 4 * _cuda.max_ranks].view(torch.int32)[peer]
    assert int(flag) == 1
    flag += 1


_shared: dict[str, hybrid_ep.Buffer] = {}


def make_shared_buffer(timeout_s: float) -> None:
    """Makes a buffer that later calls of this process use."""
    _shared["buffer"] = make_buffer(timeout_s=timeout_s)
    round_trip(_shared["buffer"], draw(0))


def use_without_peer(timeout_s: float) -> int | None:
    """A rank has died since; returns whom the error names, which is told in its time."""
    rank, sent, begin = dist.get_rank(), draw(0), time.monotonic()
    with pytest.raises((hybrid_ep.TimeoutError, hybrid_ep.TransportError)) as told:  # noqa: PT012
        for _ in range(2):  # the second tells what the first has found
            _shared["buffer"].low_latency_dispatch(sent.x[rank], sent.topk_idx[rank], MAX_TOKENS, sent.num_experts)
            torch.cuda.synchronize()
    assert time.monotonic() - begin < 10 * timeout_s
    return told.value.peer
