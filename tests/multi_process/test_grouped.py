"""Dispatch along an online plan: static shapes, separate groups, and the same mixture as without a plan."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hybrid_ep import Buffer, ConfigError, HybridEPBuffer
from hybrid_ep.balance.grouped import GroupedRows, dispatch_online
from hybrid_ep.balance.online import map_online, plan_online
from hybrid_ep.buffers.expert_moves import CountExchange, copy_weights
from hybrid_ep.testing.reference import dense_moe
from tests.conftest import RunRanks

NUM_RANKS, NUM_LOCAL, TOPK, TOKENS, HIDDEN = 4, 2, 2, 32, 16
NUM_EXPERTS = NUM_RANKS * NUM_LOCAL


def apply(got: GroupedRows, home: torch.Tensor, spare: torch.Tensor) -> torch.Tensor:
    """Each group times the factors of its slot, home and replicas from their own tensors."""
    y, begin = torch.zeros_like(got.rows), 0
    for ends, weights in ((got.home_ends, home), (got.spare_ends, spare)):
        for end, weight in zip(ends.tolist(), weights, strict=True):
            y[begin:end] = (got.rows[begin:end].float() * weight).bfloat16()
            begin = end
    assert not got.rows[begin:].any()
    assert got.probs is not None
    return (y.float() * got.probs.unsqueeze(1)).bfloat16()


def _mix(num_spare: int, pad_multiple: int) -> tuple[int, int, int]:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    odds = torch.arange(1, NUM_EXPERTS + 1).double() ** -1.5
    topk_idx = odds.repeat(TOKENS, 1).multinomial(TOPK, generator=generator)
    weights = torch.full((TOKENS, TOPK), 0.5)
    x = torch.randint(-8, 9, (TOKENS, HIDDEN), generator=generator).bfloat16()
    factors = torch.arange(1.0, NUM_EXPERTS + 1).view(NUM_EXPERTS, 1)
    home = factors[rank * NUM_LOCAL : (rank + 1) * NUM_LOCAL].expand(-1, HIDDEN).contiguous()
    spare = torch.zeros(num_spare, HIDDEN)
    num_rows = TOKENS * TOPK + (NUM_LOCAL + num_spare) * (pad_multiple - 1)
    with (
        Buffer(num_ranks_per_domain=NUM_RANKS) as mover,
        HybridEPBuffer(
            None, HIDDEN, TOKENS, NUM_LOCAL + num_spare, num_of_hybrid_ep_ranks_per_nvlink_domain=NUM_RANKS
        ) as buffer,
    ):
        counts = CountExchange(mover, NUM_EXPERTS).gather(topk_idx)
        plan = plan_online(counts, num_ranks_per_domain=NUM_RANKS, num_spare=num_spare)
        slots = map_online(plan, counts, topk_idx, rank)
        copy_weights(mover, plan.spare, [spare], [home])
        got = dispatch_online(buffer, x, slots, weights, plan, num_rows=num_rows, pad_multiple=pad_multiple)
        assert got.rows.shape == (num_rows, HIDDEN)
        assert got.probs is not None
        assert got.probs.shape == (num_rows,)
        assert got.home_ends.shape == (NUM_LOCAL,)
        assert got.spare_ends.shape == (num_spare,)
        assert got.home_ends.dtype == got.spare_ends.dtype == torch.int32
        overflow = int(got.handle[-1])
        if int(plan.loads.max()) <= TOKENS * TOPK:  # the same on every rank
            assert not overflow
            out, _ = buffer.combine_with_unpermute(
                hidden=apply(got, home, spare), handle=got.handle, pad_multiple=pad_multiple
            )
            want = dense_moe(x, topk_idx, weights, lambda expert, rows: rows * float(factors[expert]))
            assert torch.equal(out.double(), want)
        one = plan_online(counts[:1], num_ranks_per_domain=1, num_spare=num_spare)
        with pytest.raises(ConfigError, match=f"ranks of plan is 1 at rank {rank}; allowed: {NUM_RANKS}"):
            dispatch_online(buffer, x, slots, weights, one, num_rows=num_rows)
    return int(plan.loads.max()), int((plan.spare >= 0).sum()), overflow


@pytest.mark.parametrize("pad_multiple", [1, 4])
def test_one_size_serves_a_skewed_routing(run_ranks: RunRanks, pad_multiple: int) -> None:
    for fullest, num_replicas, overflow in run_ranks(NUM_RANKS, _mix, NUM_LOCAL, pad_multiple):
        assert (fullest, overflow) == (TOKENS * TOPK, 0)
        assert num_replicas > 0


def test_rows_beyond_the_size_are_told(run_ranks: RunRanks) -> None:
    found = run_ranks(NUM_RANKS, _mix, 0, 1)
    assert all(fullest > TOKENS * TOPK for fullest, _, _ in found)
    assert sum(overflow for _, _, overflow in found) > 0
