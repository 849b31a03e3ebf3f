"""Ranks that call dispatch and combine in a loop, until one of them is killed somewhere inside a call.

A team is some ranks of a cluster with a buffer over them. After a loss the others make a new team, as
docs/cuda_engine.md tells users to, unless the buffer can go on without the lost rank.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import hybrid_ep
from tests.multi_gpu.exact import (
    MAX_TOKENS,
    RoundTrip,
    check_round_trip,
    draw_exact,
    finish_round_trip,
    start_round_trip,
)
from tests.multi_gpu.random_routings import (
    Tokens,
    check_received,
    check_returned,
    current_device,
    dispatch,
    draw_tokens,
)

NUM_DRAWS = 3
CALLS_IN_A_ROW = 50
CALLS_AFTER_LOSS = 5


class _Team(NamedTuple):
    """The ranks that call together.

    Attributes:
        members: rank of the cluster, by rank of the buffer.
        buffer: over them.
        pool: what the calls send, in turn.
        lost: ranks of the buffer that it goes on without.
    """

    members: list[int]
    low_latency: bool
    buffer: hybrid_ep.Buffer
    pool: list[Tokens]
    lost: set[int]


_teams: list[_Team] = []


def join(members: list[int], low_latency: bool, shrink: bool, timeout_s: float) -> None:
    """Makes a team of these ranks of the cluster, whatever has become of the others, and its first calls."""
    group = dist.new_group(members, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    options = {"low_latency_mode": low_latency, "enable_shrink": shrink}
    buffer = hybrid_ep.Buffer(group, engine="cuda", timeout_s=timeout_s, **options)
    num_ranks = len(members)
    draws = [
        draw_exact(seed, num_ranks) if low_latency else draw_tokens(seed, [256] * num_ranks, 1024, 4, 8 * num_ranks)
        for seed in range(NUM_DRAWS)
    ]
    team = _Team(members, low_latency, buffer, draws, set())
    if low_latency:
        _low_latency_calls(team, 2)
    else:
        _round_trips(team, 0)
    torch.cuda.synchronize()
    dist.barrier(group)
    _teams.append(team)


def call_until_lost() -> int:
    """Calls until one raises TimeoutError; returns whom that names, as rank of the cluster."""
    team = _teams.pop()
    with team.buffer:
        try:
            _call(team)
        except hybrid_ep.TimeoutError as error:
            _check_gpu()
            return team.members[_peer(error)]


def lose_one_after(step: str, lost: int, is_ahead: bool = False, pause_s: float = 0.0) -> int:
    """A rank is killed inside a round trip; the others name it, meet, and go on without it.

    Args:
        step: what the rank has done: ``some`` (its dispatch has reached one rank only), ``dispatch``, ``receive`` or
            ``combine`` (all that it sends has arrived).
        lost: the rank.
        is_ahead: hosts learn of the loss when the round trip has ended, as where they run ahead of their GPUs.
        pause_s: how long the rank that `some` has reached pauses before its combine, in which it finds the loss.

    Returns:
        Whom the error names.
    """
    team = _teams[-1]
    buffer, sent, rank = team.buffer, team.pool[0], team.buffer.rank
    first = min({0, 1} - {lost})
    if rank == lost:
        if step == "some":
            for r in set(range(len(team.members))) - {first, lost}:
                buffer.low_latency_update_mask_buffer(r, True)
        x, topk_idx = sent.x[rank], sent.topk_idx[rank]
        packed, _, handle, _, hook = buffer.low_latency_dispatch(
            x, topk_idx, MAX_TOKENS, sent.num_experts, use_fp8=False, return_recv_hook=True
        )
        assert hook is not None
        if step in ("receive", "combine"):
            hook()
        if step == "combine":
            buffer.low_latency_combine(packed, topk_idx, sent.weights[rank], handle, return_recv_hook=True)
        torch.cuda.synchronize()
        if buffer.engine.grid.num_domains > 1:
            _kernels_of(buffer).drain()
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        knows_late = mock.patch.object(_kernels_of(buffer), "raise_fault") if is_ahead else contextlib.nullcontext()
        with knows_late:
            started = start_round_trip(buffer, sent)
            if rank == first:
                time.sleep(pause_s)
            finish_round_trip(buffer, sent, started)
        _low_latency_calls(team, 3)
    except hybrid_ep.TimeoutError as error:
        return _go_on_after(team, error)
    raise AssertionError("no rank was lost")


def join_and_lose_one_after(timeout_s: float, *given: Any) -> int:
    """Makes a team of all ranks of the cluster, for `lose_one_after`."""
    join(list(range(dist.get_world_size())), True, True, timeout_s)
    return lose_one_after(*given)


def go_on_after_loss() -> int:
    """Calls until a rank is lost. The others may have lost it in different calls: they meet, and go on without it.

    Returns:
        The lost rank, as rank of the cluster.
    """
    team = _teams[-1]
    try:
        _call(team)
    except hybrid_ep.TimeoutError as error:
        return _go_on_after(team, error)


def _go_on_after(team: _Team, error: hybrid_ep.TimeoutError) -> int:
    """Meets the survivors and goes on; returns whom the error names, as rank of the cluster."""
    lost = _peer(error)
    team.lost.add(lost)
    sent = team.pool[0]
    team.buffer.clean_low_latency_buffer(MAX_TOKENS, sent.x[0].shape[1], sent.num_experts)
    _low_latency_calls(team, CALLS_AFTER_LOSS)
    status = torch.zeros(len(team.members), dtype=torch.int32, device=current_device())
    team.buffer.low_latency_query_mask_buffer(status)
    assert {r for r, masked in enumerate(status.tolist()) if masked} == team.lost
    _check_gpu()
    return team.members[lost]


def go_on_together(late: int) -> tuple[list[str], list[int]]:
    """Calls while one rank stands still for too long; returns what each failed call said, and the masks at the end.

    The others may lose it in different calls: they meet, and make some more. The rank that stood still calls until an
    error has told it `CALLS_IN_A_ROW` times that they went on.
    """
    team, told = _teams[-1], []
    sent, num_right = team.pool[0], 0
    while num_right < CALLS_AFTER_LOSS and len(told) < CALLS_IN_A_ROW:
        try:
            _low_latency_calls(team, 1)
        except hybrid_ep.TransportError as error:
            told.append(str(error))
            if error.peer is not None and team.buffer.rank != late:
                team.lost.add(error.peer)
                team.buffer.clean_low_latency_buffer(MAX_TOKENS, sent.x[0].shape[1], sent.num_experts)
            num_right = 0
        else:
            num_right += bool(told)
    status = torch.zeros(len(team.members), dtype=torch.int32, device=current_device())
    team.buffer.low_latency_query_mask_buffer(status)
    return told, status.tolist()


def meet_again() -> None:
    """Takes all ranks back in, and calls."""
    team = _teams[-1]
    team.lost.clear()
    team.buffer.low_latency_clean_mask_buffer()
    sent = team.pool[0]
    team.buffer.clean_low_latency_buffer(8, sent.x[0].shape[1], sent.num_experts)
    _low_latency_calls(team, CALLS_AFTER_LOSS)


def lose_one_before_combine(lost: int) -> int | None:
    """A rank ends between its dispatch and its combine; returns whom the error of the others' combine names.

    The others then wait for two things at once: their senders for the lost rank, and their sums for rows that the other
    senders hold back.
    """
    team = _teams.pop()
    group, buffer, sent = team.buffer.group, team.buffer, team.pool[0]
    with buffer:
        recv_x, _, weights, _, handle, _ = dispatch(buffer, sent, buffer.rank)
        torch.cuda.synchronize()
        dist.barrier(group)
        if buffer.rank == lost:
            return None
        buffer.combine(recv_x, handle, weights)
        try:
            torch.cuda.synchronize()
            dispatch(buffer, sent, buffer.rank)
        except hybrid_ep.TimeoutError as error:
            _check_gpu()
            return error.peer
    raise AssertionError


def lose_one_that_reached_some(members: list[int]) -> str:
    """The last rank ends inside a dispatch, when the first has all that it sends and the others have nothing.

    The first then lacks rows of the others only, which will not come because they wait for the last.
    """
    team = _teams.pop()
    group, buffer, sent = team.buffer.group, team.buffer, team.pool[0]
    with buffer:
        rank, last = buffer.rank, len(members) - 1
        if rank == 0:
            _raise_flags_of(buffer, last)
        torch.cuda.synchronize()
        dist.barrier(group)
        if rank == last:
            return ""
        try:
            dispatch(buffer, sent, rank)
            torch.cuda.synchronize()
            dispatch(buffer, sent, rank)
        except hybrid_ep.TimeoutError as error:
            _check_gpu()
            return str(error)
    return "no error"


def lose_one_that_has_not_forwarded(lost: int) -> int | None:
    """A rank of two domains of two is killed when all that it sends in a low-latency dispatch has left.

    It has not forwarded then. So the other rank of its domain lacks rows, and cannot begin the combine. The peers of
    both wait in vain there, and the peer of the stalled rank gives up first. Returns whom the error names.
    """
    team = _teams.pop()
    buffer, sent, rank = team.buffer, team.pool[0], team.buffer.rank
    with buffer:
        if rank == lost:
            x, topk_idx = sent.x[rank], sent.topk_idx[rank]
            buffer.low_latency_dispatch(x, topk_idx, MAX_TOKENS, sent.num_experts, use_fp8=False, return_recv_hook=True)
            torch.cuda.synchronize()
            _kernels_of(buffer).drain()
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            started = start_round_trip(buffer, sent)
            if rank == lost ^ 2:
                time.sleep(1)
            finish_round_trip(buffer, sent, started)
            torch.cuda.synchronize()
            _low_latency_calls(team, 1)
        except hybrid_ep.TransportError as error:
            _check_gpu()
            return error.peer
    raise AssertionError


def _kernels_of(buffer: hybrid_ep.Buffer) -> Any:
    """The low-latency calls of a buffer."""
    engine: Any = buffer.engine
    return engine._low_latency


def _raise_flags_of(buffer: hybrid_ep.Buffer, peer: int) -> None:
    """Writes what the peer's next dispatch would; the counts stand there."""
    from hybrid_ep import _cuda

    control: Tensor = buffer.engine._control.local  # type: ignore[attr-defined]
    row_bytes = _cuda.control_count_row_bytes
    counts = control[peer * row_bytes : (peer + 1) * row_bytes].view(torch.int64)
    counts += 1  # the epoch is the lower half of each word
    control[_cuda.control_offsets["rows_epoch"] :][: 4 * _cuda.max_ranks].view(torch.int32)[peer] += 1


def _call(team: _Team) -> NoReturn:
    """Calls and compares until an error."""
    for call in itertools.count():
        if team.low_latency:
            _low_latency_calls(team, CALLS_IN_A_ROW)
        else:
            _round_trips(team, call)
    raise AssertionError


def _round_trips(team: _Team, call: int) -> None:
    """A dispatch that waits for its counts, one with a bound and a cached one, each with its combine.

    Only the next call that waits tells of a rank that is lost in those which do not: until then nothing is compared.
    """
    buffer, sent, rank = team.buffer, team.pool[call % NUM_DRAWS], team.buffer.rank
    bound = sum(x.shape[0] for x in sent.x)
    first = dispatch(buffer, sent, rank)
    first_back = buffer.combine(first[0], first[4], first[2])
    second = dispatch(buffer, sent, rank, num_worst_tokens=bound)
    second_back = buffer.combine(second[0], second[4], second[2])
    again, *_ = buffer.dispatch(sent.x[rank], handle=first[4])
    again_back = buffer.combine(again, first[4], first[2])
    dispatch(buffer, sent, rank)
    for result, back, num_rows in ((first, first_back, 0), (second, second_back, bound), (first, again_back, 0)):
        check_received(result, sent, rank, f"call {call}", num_rows)
        check_returned(back[0], back[1], sent, rank, f"call {call}")
    assert torch.equal(again, first[0])


def _low_latency_calls(team: _Team, count: int) -> None:
    """So many pairs of calls, each compared when the next dispatch has raised nothing; of the last only that counts."""
    buffer = team.buffer
    unchecked: tuple[RoundTrip, Tokens] | None = None
    for call in range(count):
        sent = team.pool[call % NUM_DRAWS]
        started = start_round_trip(buffer, sent)
        if unchecked is not None:
            check_round_trip(*unchecked, buffer.rank, team.lost)
        unchecked = finish_round_trip(buffer, sent, started), sent
        # Once in a step the host waits for its GPU, as sampling a token does: so all ranks learn of a loss in one call.
        torch.cuda.synchronize()


def _peer(error: hybrid_ep.TimeoutError) -> int:
    if error.peer is None:
        raise error
    return error.peer


def _check_gpu() -> None:
    torch.cuda.synchronize()
    ones = torch.ones(64, 64, device=current_device())
    assert torch.equal(ones @ ones, torch.full_like(ones, 64.0))
