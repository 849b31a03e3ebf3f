"""The call sequences of Hybrid-EP's own test scripts: what they pass, and which entries of handles they read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hybrid_ep
from hybrid_ep.core.layout import indices_to_map
from tests.conftest import RunRanks

TOKENS, HIDDEN, TOPK, LOCAL_EXPERTS, PAD = 24, 256, 4, 4, 8


def _batch(rank: int, num_experts: int, fp8: bool) -> dict[str, Tensor]:
    """Rows with scales even where they are bf16, as the scripts hand them in."""
    generator = torch.Generator().manual_seed(rank)
    scaling_factor = torch.rand(TOKENS, HIDDEN // 128, generator=generator)
    topk_idx = torch.stack([torch.randperm(num_experts, generator=generator)[:TOPK] for _ in range(TOKENS)])
    if fp8:
        hidden = torch.randint(0, 256, (TOKENS, HIDDEN), generator=generator, dtype=torch.uint8)
    else:
        hidden = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    return {"hidden": hidden, "scaling_factor": scaling_factor, "topk_idx": topk_idx}


def _expected(num_experts: int, fp8: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, scales and the local routing map of what this rank receives, by source rank and token."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    rows, scales, maps = [], [], []
    for source in range(num_ranks):
        batch = _batch(source, num_experts, fp8)
        routing_map, _ = indices_to_map(batch["topk_idx"], None, TOKENS, num_experts)
        local = routing_map[:, rank * LOCAL_EXPERTS : (rank + 1) * LOCAL_EXPERTS]
        comes = local.any(1)
        rows.append(batch["hidden"][comes])
        scales.append(batch["scaling_factor"][comes])
        maps.append(local[comes])
    return torch.cat(rows), torch.cat(scales), torch.cat(maps)


def _check_plain(fp8: bool) -> None:
    rank, num_experts = dist.get_rank(), LOCAL_EXPERTS * dist.get_world_size()
    batch = _batch(rank, num_experts, fp8)
    weights = torch.ones(TOKENS, TOPK)
    rows, scales, local_map = _expected(num_experts, fp8)
    with hybrid_ep.HybridEPBuffer(dist.group.WORLD, HIDDEN, TOKENS, LOCAL_EXPERTS, use_fp8=fp8) as buffer:
        for with_weights in (True, False):
            given = {**batch, "topk_weights": weights if with_weights else None, "num_of_experts": num_experts}
            hidden, probs, scaling_factor, handle = buffer.dispatch(**given)
            assert torch.equal(hidden, rows)
            assert hidden.dtype == (torch.uint8 if fp8 else torch.bfloat16)
            assert (scaling_factor is None) if not fp8 else torch.equal(scaling_factor, scales)
            assert (probs is not None) == with_weights
            _, _, _, num_dispatched, routing_map, num_tokens, config = handle
            assert (int(num_dispatched.cpu().item()), num_tokens) == (len(rows), TOKENS)
            assert config.hidden_dim == HIDDEN
            assert torch.equal(routing_map[: num_dispatched.item()], local_map)
            # Experts are the identity: each of a row's local experts adds the row once.
            outputs = hidden.to(torch.bfloat16) * routing_map.sum(1).unsqueeze(1)
            combined, _ = buffer.combine(outputs, None, handle)
            torch.testing.assert_close(combined / TOPK, batch["hidden"].to(torch.bfloat16), atol=2e-5, rtol=2e-2)
            again, *_ = buffer.dispatch(**given, handle=handle)
            assert torch.equal(again, rows)


def _check_permuted(fp8: bool) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    num_experts = LOCAL_EXPERTS * num_ranks
    batch = _batch(rank, num_experts, fp8)
    routing_map, probs = indices_to_map(batch.pop("topk_idx"), torch.ones(TOKENS, TOPK), TOKENS, num_experts)
    _, _, local_map = _expected(num_experts, fp8)
    bound = PAD * (TOKENS * num_ranks * TOPK // PAD + LOCAL_EXPERTS)
    # Made for fewer tokens and a smaller hidden size than it gets, as a framework does with its first batch.
    with hybrid_ep.HybridEPBuffer(dist.group.WORLD, 128, 1, 1, use_fp8=fp8) as buffer:
        given: dict[str, Any] = {**batch, "routing_map": routing_map, "probs": probs, "pad_multiple": PAD}
        blocking = buffer.dispatch_with_permute(**given)
        hidden, _, _, counts, handle = blocking
        assert len(handle) == 11
        assert (counts.dtype, counts.device.type) == (torch.int64, "cpu")
        assert torch.equal(handle[4][: handle[3].item()], local_map)
        padded = -(-local_map.sum(0) // PAD) * PAD
        assert counts.tolist() == padded.tolist()
        assert hidden.shape[0] == int(counts.sum())
        for way in ({"non_blocking": True}, {"use_host_meta": False}):
            bounded = buffer.dispatch_with_permute(**given, num_permuted_tokens=bound, **way)
            assert bounded[0].shape[0] == bound
            assert torch.equal(bounded[0][: len(hidden)], hidden)
            assert bounded[3].dtype == torch.int64
            assert torch.equal(bounded[4][4][: bounded[4][3].item()], local_map)
            assert int(bounded[4][-1].item()) == 0
        cached = buffer.dispatch_with_permute(**given, handle=handle, num_permuted_tokens=counts.sum().item())
        assert torch.equal(cached[0], hidden)
        combined, home = buffer.combine_with_unpermute(
            hidden=hidden.to(torch.bfloat16), probs=blocking[1], handle=handle, pad_multiple=PAD
        )
        torch.testing.assert_close(combined / TOPK, batch["hidden"].to(torch.bfloat16), atol=2e-5, rtol=2e-2)
        assert torch.equal(home, probs)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("check", [_check_plain, _check_permuted])
def test_the_peers_scripts_run(run_ranks: RunRanks, check: Any, fp8: bool) -> None:
    run_ranks(4, check, fp8)


def _check_growth() -> None:
    """A longer batch at one rank, a wider one, and one of more experts than the buffer was made for."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    with hybrid_ep.HybridEPBuffer(dist.group.WORLD, 128, 4, 1) as buffer:
        for num_tokens, hidden, num_local in ((4, 128, 1), (4 + 40 * rank, 128, 1), (4, 512, 1), (4, 128, 3)):
            x = torch.ones(num_tokens, hidden, dtype=torch.bfloat16)
            topk_idx = torch.arange(num_tokens).view(-1, 1) % (num_local * num_ranks)
            rows, _, _, _, handle = buffer.dispatch_with_permute(
                hidden=x, topk_idx=topk_idx, num_of_experts=num_local * num_ranks
            )
            combined, _ = buffer.combine_with_unpermute(hidden=rows, handle=handle)
            assert torch.equal(combined, x)
        sizes = buffer.configurer.buffer_config
        assert (sizes.hidden_dim, sizes.num_of_experts_per_rank) == (512, 3)
        assert sizes.max_num_of_tokens_per_rank == (4 if rank == 0 else -(-(4 + 40 * rank) // 16) * 16)


def test_a_buffer_grows_with_its_calls(run_ranks: RunRanks) -> None:
    run_ranks(3, _check_growth)
