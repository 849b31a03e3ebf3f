"""Checks of buffers that say nothing of domains, in several of them."""

from __future__ import annotations

import importlib
import os
from typing import Any
from unittest import mock

import torch.distributed as dist

from hybrid_ep.engine.select import make_engine

__all__ = ["check_auto", "check_in_domains"]


def check_in_domains(num_ranks_per_domain: int, check: str, *args: Any) -> None:
    """Runs a check of tests/, as ``battery.other_calls.check_other_calls``."""
    module, name = check.rsplit(".", 1)
    with mock.patch.dict(os.environ, {"HYBRID_EP_NUM_RANKS_PER_DOMAIN": str(num_ranks_per_domain)}):
        getattr(importlib.import_module(f"tests.{module}"), name)(*args)


def check_auto() -> None:
    """`auto` takes the kernels between domains, and says what joins them."""
    from hybrid_ep.engine.cuda_between import CudaBetween

    engine = make_engine(dist.group.WORLD, num_ranks_per_domain=1, asked="auto")
    assert isinstance(engine, CudaBetween)
    engine.close()
