"""Checks of several domains: of buffers that say nothing of them, and of two buffers."""

from __future__ import annotations

import importlib
import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hybrid_ep
from tests.battery.cases import Case
from tests.battery.normal import dispatch, make_buffer

__all__ = ["check_in_domains", "check_two_buffers"]


def check_in_domains(num_ranks_per_domain: int, check: str, *args: Any) -> None:
    """Runs a check of tests/, as ``battery.other_calls.check_other_calls``."""
    module, name = check.rsplit(".", 1)
    with mock.patch.dict(os.environ, {"HYBRID_EP_NUM_RANKS_PER_DOMAIN": str(num_ranks_per_domain)}):
        getattr(importlib.import_module(f"tests.{module}"), name)(*args)


def check_two_buffers(case: Case) -> None:
    """Calls on two buffers take turns, and none takes a handle of the other."""
    inputs = case.inputs(dist.get_rank())
    with make_buffer(case) as first, make_buffer(case) as second:
        rows, *_, handle, _ = dispatch(first, case, inputs)
        same_rows, *_, other_handle, _ = dispatch(second, case, inputs)
        assert torch.equal(rows, same_rows)
        combined = [buffer.combine(rows, of)[0] for buffer, of in ((first, handle), (second, other_handle))]
        assert torch.equal(*combined)
        with pytest.raises(hybrid_ep.ConfigError, match="of another buffer"):
            second.combine(rows, handle)
