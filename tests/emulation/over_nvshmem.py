"""Checks of buffers whose domains NVSHMEM joins."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hybrid_ep
from hybrid_ep import _C
from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.errors import ConfigError, TransportError
from hybrid_ep.transport import Ring, nvshmem, open_link
from tests.battery.cases import Case
from tests.battery.normal import dispatch, make_buffer
from tests.emulation.domains import check_over

_TIMEOUT_S = 6.0


def check(name: str, *args: Any) -> None:
    """Runs a check of tests/ whose buffers must have used windows of NVSHMEM's heap."""
    check_over("nvshmem", name, *args)
    windows = nvshmem._heap.windows
    assert windows
    assert all(window.is_free for window in windows)


def check_mapped(name: str, *args: Any) -> None:
    """The same where all peers' windows are mapped, so that kernels write them. NVSHMEM would finish no put."""
    given = {"HYBRID_EP_EMULATION_NVSHMEM_MAPS": "all", "HYBRID_EP_EMULATION_NVSHMEM": "stopped"}
    with mock.patch.dict(os.environ, given), mock.patch.object(nvshmem, "kernels", side_effect=AssertionError):
        check(name, *args)


def check_some_mapped(name: str, *args: Any) -> None:
    """The same where the windows of even ranks are mapped, and NVSHMEM gets the puts to the others."""
    with mock.patch.dict(os.environ, {"HYBRID_EP_EMULATION_NVSHMEM_MAPS": "even"}):
        check(name, *args)


def check_closed_buffers_leave_their_window() -> None:
    """Buffers one after the other share a window; two at once have one each."""
    case = Case("windows", 2, 5, num_ranks_per_domain=1)
    with mock.patch.dict(os.environ, {"HYBRID_EP_TRANSPORT": "nvshmem"}):
        for _ in range(3):
            with make_buffer(case):
                pass
        assert len(nvshmem._heap.windows) == 1
        with make_buffer(case), make_buffer(case) as second:
            assert "nvshmem" in repr(second)
        assert len(nvshmem._heap.windows) == 2


def check_puts_without_signals() -> None:
    """The flags of rank 1's chunks are not written: all ranks are told of rank 1, and none takes rows."""
    case = Case("without_signals", 3, 5, num_experts=6, num_ranks_per_domain=1)
    told = _dispatch_with_a_fault(case, "without signals")
    assert told == (1 if dist.get_rank() != 1 else told)
    assert told != dist.get_rank()
    dist.barrier()


def check_puts_that_stop() -> None:
    """Puts of rank 1 are not complete when its buffer is closed: rows of a later buffer are right when they are.

    The close comes to its end, and nothing else uses the window.
    """
    case = Case("stopped", 3, 5, num_experts=6, num_ranks_per_domain=1)
    rank = dist.get_rank()
    told = _dispatch_with_a_fault(case, "stopped")
    assert told == (1 if rank != 1 else told)
    assert [window.is_free for window in nvshmem._heap.windows] == [rank != 1]
    dist.barrier()
    with mock.patch.dict(os.environ, {"HYBRID_EP_TRANSPORT": "nvshmem"}), make_buffer(case) as buffer:
        assert len(nvshmem._heap.windows) == 2
        for _ in range(3):
            dispatch(buffer, case, case.inputs(rank))
    check_over("nvshmem", "battery.normal.check_round_trip", case)


def check_low_latency_puts_that_stop() -> None:
    """Puts of rank 1 are not complete: it cannot clean its buffer, because they could be written over later rows."""
    rank, case = dist.get_rank(), Case("stopped", 2, 5, num_ranks_per_domain=1)
    variables = {"HYBRID_EP_TRANSPORT": "nvshmem", "HYBRID_EP_LOW_LATENCY_BETWEEN": "cuda"}
    x, topk_idx, _ = case.inputs(rank)
    sizes = case.max_tokens, case.num_experts
    with mock.patch.dict(os.environ, variables):  # the first call opens the link
        buffer = make_buffer(case, low_latency_mode=True, enable_shrink=True, timeout_s=_TIMEOUT_S)
        buffer.low_latency_dispatch(x, topk_idx, *sizes)
    dist.barrier()
    with mock.patch.dict(os.environ, {"HYBRID_EP_EMULATION_NVSHMEM": "stopped"} if rank == 1 else {}):
        if rank == 0:
            with pytest.raises(TransportError) as told:
                buffer.low_latency_dispatch(x, topk_idx, *sizes)
            assert told.value.peer == 1
        else:  # what it waits for comes
            buffer.low_latency_dispatch(x, topk_idx, *sizes)
            with pytest.raises(TransportError, match="rows of earlier calls have not arrived within 5 s"):
                buffer.low_latency_clean_mask_buffer()
        dist.barrier()
        buffer.destroy()


def _dispatch_with_a_fault(case: Case, fault: str) -> int | None:
    """A dispatch without the fault, and one with it at rank 1; returns whom the error names."""
    rank = dist.get_rank()
    with mock.patch.dict(os.environ, {"HYBRID_EP_TRANSPORT": "nvshmem"}):
        buffer = make_buffer(case, timeout_s=_TIMEOUT_S)
    dispatch(buffer, case, case.inputs(rank))
    dist.barrier()
    faults = {"HYBRID_EP_EMULATION_NVSHMEM": fault} if rank == 1 else {}
    with mock.patch.dict(os.environ, faults):
        with pytest.raises(TransportError) as told:
            dispatch(buffer, case, case.inputs(rank))
        buffer.destroy()
    return told.value.peer


def check_part_of_the_job() -> None:
    """Ranks 0 and 1 of more make a buffer of their own."""
    group = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return
    variables = {"HYBRID_EP_TRANSPORT": "nvshmem", "HYBRID_EP_NUM_RANKS_PER_DOMAIN": "1"}
    with mock.patch.dict(os.environ, variables), pytest.raises(ConfigError) as told:
        hybrid_ep.Buffer(group)
    assert f"it joins all {dist.get_world_size()} ranks of the job, and the group has 2" in str(told.value)


def check_no_kernels() -> None:
    """A link of the module without kernels."""
    group = dist.group.WORLD
    assert group is not None
    grid = RankGrid(dist.get_rank(), dist.get_world_size(), 1)
    with pytest.raises(ConfigError, match="'nvshmem' without the cuda engine; allowed then: verbs, libfabric, tcp"):
        open_link(group, grid, [Ring(128, 4, 1)], device=torch.device("cpu"), timeout_s=5.0, native=_C, asked="nvshmem")
