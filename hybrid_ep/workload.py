"""The workload of one MoE layer: its sizes, its formats, and how popular its experts are. Needs no torch."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from hybrid_ep.checks import CHANNELS_PER_SCALE, MAX_TOPK, require, require_int

DTYPES = ("bf16", "fp8")
ROUTINGS = ("uniform", "skewed", "hot")
ZIPF_EXPONENT = 0.6
SKEWS_PER_EXPONENT = 5  # skew 5 is Zipf's law
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
        return 2 * self.hidden if self.dtype == "bf16" else self.hidden + self.scale_bytes

    @property
    def scale_bytes(self) -> int:
        """Bytes of a dispatched row's scales."""
        return 0 if self.dtype == "bf16" else _FP8_SCALE_BYTES * (self.hidden // CHANNELS_PER_SCALE)

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


def log_popularity(workload: Workload) -> list[float]:
    """Returns the logarithm of the popularity of each of the E experts in the skewed routing, at every rank."""
    popularity = [0.0] * workload.num_experts
    for place, expert in enumerate(_popular_first(workload.num_experts, workload.seed)):
        popularity[expert] = -workload.exponent * math.log(place + 1)
    return popularity


def _popular_first(num_experts: int, seed: int) -> list[int]:
    """Returns the experts in the order that ``torch.randperm`` has for the seed.

    It is the Mersenne Twister with Knuth's initialization, and a Fisher-Yates shuffle.
    """
    state = [seed]
    for idx in range(1, 624):
        state.append((1812433253 * (state[-1] ^ state[-1] >> 30) + idx) & 0xFFFFFFFF)
    generator = random.Random()
    generator.setstate((3, (*state, 624), None))
    experts = list(range(num_experts))
    for first in range(num_experts - 1):
        other = first + generator.getrandbits(32) % (num_experts - first)
        experts[first], experts[other] = experts[other], experts[first]
    return experts


def default_workload_sizes(device: str, mode: str) -> dict[str, int]:
    """Sizes for what the caller leaves open: those of large models on GPUs, small ones on a CPU."""
    decode = mode == "low-latency"
    if device == "cuda":
        return {"tokens": 128 if decode else 4096, "hidden": 7168, "topk": 8, "experts": 256}
    return {"tokens": 32 if decode else 256, "hidden": 1024, "topk": 4, "experts": 32}
