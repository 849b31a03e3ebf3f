"""Tokens and routings of `hybrid-ep demo` and `hybrid-ep bench`, the same on every machine for one seed.

Any rank can make any other rank's batch, so that checks need no communication of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_ep.core.checks import MAX_TOPK, require, require_int
from hybrid_ep.quantize import CHANNELS_PER_SCALE

__all__ = [
    "DTYPES",
    "HOT_SHARE",
    "ROUTINGS",
    "ZIPF_EXPONENT",
    "Batch",
    "Workload",
    "log_popularity",
    "make_batch",
    "make_routing",
]

DTYPES = ("bf16", "fp8")
ROUTINGS = ("uniform", "skewed", "hot")
ZIPF_EXPONENT = 0.6
HOT_SHARE = 0.3
_FP8_SCALE_BYTES = 4


@dataclass(frozen=True)
class Workload:
    """One rank's share of one MoE layer.

    Attributes:
        num_tokens: T, tokens of each rank.
        hidden: H; a multiple of 128 for fp8.
        num_topk: K.
        num_experts: E.
        dtype: ``bf16``, or ``fp8`` (e4m3 with a float32 scale for each 128 channels).
        routing: ``uniform``: every expert is as likely as any other. ``skewed``: as a trained router looks: experts
            have a Zipf-like popularity (the r-th most popular is chosen ∝ r^−0.6, which ones these are depends on the
            seed), and every token has its own noise on top. ``hot``: 30 % of the tokens want expert 0 first, the others
            not at all; otherwise uniform.
        seed: of tokens and routing; ≥ 0.
        exponent: of the popularity in the skewed routing; 0 is uniform.

    Raises:
        ConfigError: a value is not allowed.
    """

    num_tokens: int
    hidden: int
    num_topk: int
    num_experts: int
    dtype: str = "bf16"
    routing: str = "uniform"
    seed: int = 0
    exponent: float = ZIPF_EXPONENT

    def __post_init__(self) -> None:
        require_int("tokens", self.num_tokens, minimum=0)
        require(self.dtype in DTYPES, "dtype", self.dtype, " or ".join(DTYPES))
        require(self.routing in ROUTINGS, "routing", self.routing, ", ".join(ROUTINGS))
        require_int("hidden", self.hidden, minimum=1, multiple_of=CHANNELS_PER_SCALE if self.dtype == "fp8" else 1)
        require_int("experts", self.num_experts, minimum=1)
        require_int("seed", self.seed, minimum=0)
        require(0 <= self.exponent < float("inf"), "exponent", self.exponent, "a finite number ≥ 0")
        limit = min(MAX_TOPK, self.num_experts)
        require(1 <= self.num_topk <= limit, "topk", self.num_topk, f"1 … {limit}")

    @property
    def row_bytes(self) -> int:
        """Bytes of a token row as it is dispatched, scales included and metadata not."""
        if self.dtype == "bf16":
            return 2 * self.hidden
        return self.hidden + _FP8_SCALE_BYTES * (self.hidden // CHANNELS_PER_SCALE)

    @property
    def combine_row_bytes(self) -> int:
        """Bytes of a row on its way back, which is always bf16."""
        return 2 * self.hidden

    def describe(self) -> str:
        """One line for people."""
        return (
            f"{self.num_tokens} tokens per rank, hidden {self.hidden}, top-{self.num_topk} of {self.num_experts} "
            f"experts, {self.dtype}, {self.routing} routing"
        )


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


def log_popularity(workload: Workload) -> Tensor:
    """Returns ``[E]`` float64: the logarithm of the popularity of each expert in the skewed routing, at every rank."""
    popular_first = torch.randperm(
        workload.num_experts, generator=torch.Generator().manual_seed(workload.seed), device="cpu"
    )
    return -workload.exponent * (popular_first.argsort() + 1).double().log()


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
        logits += log_popularity(workload)
    elif workload.routing == "hot":
        wants = torch.rand(num_tokens, generator=generator, device="cpu") < HOT_SHARE
        logits[:, 0] = torch.where(wants, logits.amax(1) + 1.0, -torch.inf if num_experts > workload.num_topk else 0.0)
    chosen, topk_idx = logits.topk(workload.num_topk, dim=1)
    return topk_idx, torch.softmax(chosen, dim=1).float()
