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
from hybrid_ep.errors import ConfigError
from hybrid_ep.transport import Ring, nvshmem, open_link
from tests.battery.cases import Case
from tests.battery.normal import make_buffer
from tests.emulation.domains import check_over

__all__ = ["check", "check_closed_buffers_leave_their_window", "check_no_kernels", "check_part_of_the_job"]


def check(name: str, *args: Any) -> None:
    """Runs a check of tests/ whose buffers must have used windows of NVSHMEM's heap."""
    check_over("nvshmem", name, *args)
    windows = nvshmem._heap.windows
    assert windows
    assert all(window.is_free for window in windows)


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
    with pytest.raises(ConfigError, match="'nvshmem' without the cuda engine; allowed then: verbs, tcp"):
        open_link(group, grid, [Ring(128, 4, 1)], device=torch.device("cpu"), timeout_s=5.0, native=_C, asked="nvshmem")
