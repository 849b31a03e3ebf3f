"""Symmetric memory of a single rank, which no other rank maps."""

from __future__ import annotations

import pytest
import torch

from hybrid_ep.agree.roll_call import RollCall
from hybrid_ep.engine.cuda.symmetric import SymmetricMemory
from hybrid_ep.errors import ConfigError


def test_a_single_rank_without_memory_raises_what_several_do() -> None:
    """A pool of slots that finds no memory to grow stays as it is, and knows that by this error."""
    with pytest.raises(ConfigError, match="which rank 0 does not have"):
        SymmetricMemory.allocate(1 << 60, RollCall(None, 0, 1.0, 0), torch.device("cpu"))
