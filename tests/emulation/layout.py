"""The kernels of core/layout.py, which tensors of the CPU do not reach through the public API."""

from __future__ import annotations

import contextlib
import random

import torch

from hybrid_ep.core.layout import columns_of_experts, compute_layout, experts_of_columns, weights_to_probs
from tests.battery.normal import equal
from tests.emulation.engine import local_kernels

__all__ = ["check_layout", "check_probs"]


def check_layout(count: int) -> None:
    """Random routings with holes and duplicates, counted by the kernel and on the host."""
    from hybrid_ep import _cuda

    for seed in range(count):
        draw = random.Random(seed)
        num_domains, per_domain, num_local = draw.randint(1, 3), draw.randint(1, 30), draw.randint(1, 9)
        num_ranks = num_domains * per_domain
        num_experts, num_tokens = num_ranks * num_local, draw.choice([0, 1, 33, 300])
        if seed == 0:
            num_tokens = 8200  # more than the CTAs of a launch take 16 each
        num_topk = draw.randint(1, min(32, num_experts))
        generator = torch.Generator().manual_seed(seed)
        topk_idx = torch.randint(-1, num_experts, (num_tokens, num_topk), generator=generator)
        want = compute_layout(topk_idx, num_experts, num_ranks, per_domain)

        totals = torch.full((num_ranks + num_domains + num_experts,), -1, dtype=torch.int32)
        in_rank = torch.empty(num_tokens, num_ranks, dtype=torch.bool)
        _cuda.layout(
            topk_idx=topk_idx.data_ptr(),
            totals=totals.data_ptr(),
            is_token_in_rank=in_rank.data_ptr(),
            num_tokens=num_tokens,
            num_topk=num_topk,
            num_experts=num_experts,
            num_ranks=num_ranks,
            num_ranks_per_domain=per_domain,
            device=0,
            stream=0,
        )
        per_rank, per_domain_counts, per_expert = totals.split((num_ranks, num_domains, num_experts))
        equal(per_rank, want.num_tokens_per_rank, f"seed {seed}: tokens per rank")
        equal(per_domain_counts, want.num_tokens_per_domain, f"seed {seed}: tokens per domain")
        equal(per_expert, want.num_tokens_per_expert, f"seed {seed}: tokens per expert")
        equal(in_rank, want.is_token_in_rank, f"seed {seed}: is_token_in_rank")


def check_probs(count: int, device: str = "cpu") -> None:
    """Weights to probabilities and back, by kernels and by torch, of random routings with holes and duplicates."""
    for seed in range(count):
        draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        num_experts, num_tokens, num_topk = draw.randint(1, 130), draw.choice([0, 1, 33, 300]), 1 + seed % 32
        if seed == 31:
            num_tokens = 8200  # more than the CTAs of a launch take at once
        topk_idx = torch.randint(-1, num_experts, (num_tokens, num_topk), generator=generator)
        weights = torch.rand(num_tokens, num_topk, generator=generator) - 0.5
        probs = weights_to_probs(topk_idx, weights, num_experts)
        columns = columns_of_experts(topk_idx, probs)
        # The dispatch reports an index outside. Here it names no expert.
        outside = draw.choice([-1, -2, num_experts, num_experts + (1 << 32)])
        given, weights = torch.where(topk_idx < 0, outside, topk_idx).to(device), weights.to(device)
        with contextlib.nullcontext() if device == "cuda" else local_kernels():
            sums = weights_to_probs(given, weights, num_experts)
            same = experts_of_columns(given, columns.to(device), num_experts)
            back = columns_of_experts(given, probs.to(device))
        equal(sums.cpu(), probs, f"seed {seed}: sums of columns")
        equal(same.cpu(), probs, f"seed {seed}: equal columns")
        equal(back.cpu(), columns, f"seed {seed}: columns")
