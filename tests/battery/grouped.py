"""Checks of rows by expert under autograd: `MoEGroupedDispatch`. Each runs on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import hybrid_ep
from hybrid_ep.nn import MoECombine, MoEGroupedDispatch


def check_too_few_rows(device: str = "cpu") -> None:
    """More rows than one rank has room for: every rank is told by the end of the round trip, and goes on."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    x, weights = torch.ones(4, 16, dtype=torch.bfloat16, device=device), torch.ones(4, 1, device=device)
    with hybrid_ep.Buffer() as buffer:
        dispatch, combine = MoEGroupedDispatch(buffer, 2 * num_ranks, 4 * num_ranks - 1), MoECombine(buffer)

        def round_trip(expert: int) -> torch.Tensor:
            tokens = dispatch(x, torch.full((4, 1), expert, device=device), weights)
            combined: torch.Tensor = combine(tokens.x, tokens.handle)
            if device == "cuda":
                torch.cuda.synchronize()
            buffer.raise_pending()
            return combined

        for _ in range(2):
            with pytest.raises(
                hybrid_ep.OverflowError, match=rf"at rank {num_ranks - 1}; allowed by the bound: {4 * num_ranks - 1}$"
            ):
                round_trip(2 * num_ranks - 1)
            dist.barrier()
            assert torch.equal(round_trip(2 * rank), x)
