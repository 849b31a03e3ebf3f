"""Tokens and routings of `hybrid-ep demo` and `hybrid-ep bench`, the same on every machine for one seed.

Any rank can make any other rank's batch, so that checks need no communication of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_ep.workload import HOT_SHARE, Workload, log_popularity


class Batch(NamedTuple):
    """One rank's input.

    Attributes:
        x: ``[T, H]`` bf16, standard normal.
        topk_idx: ``[T, K]`` int64, distinct experts, the preferred one first.
        topk_weights: ``[T, K]`` float32, positive, each row sums to 1.
    """

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor


def make_batch(workload: Workload, rank: int, device: str | torch.device = "cpu") -> Batch:
    """Makes the batch of `rank`. Local.

    The routing is made on the CPU, so it is the same on every device; `x` is made where it is needed.
    """
    device = torch.device(device)
    topk_idx, topk_weights = make_routing(workload, rank)
    generator = torch.Generator(device).manual_seed(_seed(workload, rank))
    x = torch.randn(workload.num_tokens, workload.hidden, generator=generator, device=device).to(torch.bfloat16)
    return Batch(x, topk_idx.to(device), topk_weights.to(device))


def _seed(workload: Workload, rank: int) -> int:
    return (workload.seed << 20) + rank


def make_routing(workload: Workload, rank: int) -> tuple[Tensor, Tensor]:
    """Makes the routing of `rank` alone: `Batch.topk_idx` and `Batch.topk_weights` on the CPU.

    Picks experts by adding Gumbel noise to their log-popularity and taking the top-k.

    That samples without replacement in proportion to popularity (source: Kool, van Hoof and Welling, "Stochastic Beams
    and Where to Find Them", 2019, section 2.3).
    """
    generator = torch.Generator().manual_seed(_seed(workload, rank))
    num_tokens, num_experts = workload.num_tokens, workload.num_experts
    noise = torch.rand(num_tokens, num_experts, generator=generator, dtype=torch.float64, device="cpu").clamp_min(
        1e-300
    )
    logits = -torch.log(-torch.log(noise))
    if workload.routing == "skewed":
        logits += torch.tensor(log_popularity(workload), dtype=torch.float64, device="cpu")
    elif workload.routing == "hot":
        wants = torch.rand(num_tokens, generator=generator, device="cpu") < HOT_SHARE
        logits[:, 0] = torch.where(wants, logits.amax(1) + 1.0, -torch.inf if num_experts > workload.num_topk else 0.0)
    chosen, topk_idx = logits.topk(workload.num_topk, dim=1)
    return topk_idx, torch.softmax(chosen, dim=1).float()
