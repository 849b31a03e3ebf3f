"""On every rank: the error of dispatch → experts → combine against the dense float64 reference, and its bound.

The bound is derived, not tuned. A result is a sum of weighted expert rows whose magnitudes add up to S. Rounding a row
to bf16 (8 significant bits) changes it by at most 2⁻⁸ of itself, and a float32 addition or product by at most 2⁻²⁴:

    |result − reference| ≤ ((1 + 2⁻⁸)ⁿ (1 + 2⁻²⁴)ᵐ − 1) · S    for each element

with n roundings on the way (`num_roundings` lists those of each path) and m = top-k + ranks + 2. The same bound holds
for fp8 tokens, against the reference of the tokens as they were quantised. Quantisation itself moves each channel by
at most 2⁻⁴ of itself, because e4m3 has 4 significant bits. Experts with normally distributed weights pass that on at
no more than the steepest slope of GELU. So the root-mean-square error against the tokens before quantisation may be
1.13 · 2⁻⁴ of the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep.demo.paths import make_experts, travel
from hybrid_ep.demo.settings import Path, Settings
from hybrid_ep.engine.calls import MIN_TOKENS_TO_SUM
from hybrid_ep.quantize import cast_from_fp8, cast_to_fp8
from hybrid_ep.testing.batch import make_batch, make_routing
from hybrid_ep.testing.reference import dense_moe
from hybrid_ep.workload import Workload

_BF16_UNIT = 2.0**-8
_FP32_UNIT = 2.0**-24
_GELU_SLOPE = 1.13
FP8_ALLOWED_RMS = _GELU_SLOPE * 2.0**-4


@dataclass(frozen=True)
class RankCheck:
    """The findings of one rank.

    Attributes:
        max_error: largest |result − reference|, reference of the tokens before quantisation.
        squared_error: Σ (result − reference)², same reference.
        squared_reference: Σ reference².
        worst_of_allowed: largest |result − reference| as a fraction of what the element is allowed, reference of the
            tokens as they were sent; good up to 1.
        num_tokens_per_expert: tokens that each local expert received.
        num_expected_per_expert: tokens that all ranks' routings send there.
        engine: what moved the tokens.
        seconds: phase → seconds.
        sent_bytes: phase → (bytes within the domain, bytes between domains).
    """

    max_error: float
    squared_error: float
    squared_reference: float
    worst_of_allowed: float
    num_tokens_per_expert: list[int]
    num_expected_per_expert: list[int]
    engine: str
    seconds: dict[str, float]
    sent_bytes: dict[str, tuple[int, int]]


def num_roundings(flavour: str, settings: Settings) -> int:
    """How often a row is rounded to bf16 between an expert and the result."""
    between_domains = 1 if settings.num_domains > 1 else 0
    sums_first = 1 if settings.num_tokens >= MIN_TOKENS_TO_SUM else 0
    return {
        "buffer": 2 + between_domains,  # a rank's sum of experts; the result
        "permuted": 3 + between_domains,  # each expert's row; a rank's sum of them; the result
        "low-latency": 2 + sums_first,  # each expert's row; a rank's sum of them; the result
    }[flavour]


def allowed_fraction(flavour: str, settings: Settings) -> float:
    """The allowed error of an element as a fraction of S (see above)."""
    num_float32 = settings.num_topk + settings.num_ranks + 2
    return float((1 + _BF16_UNIT) ** num_roundings(flavour, settings) * (1 + _FP32_UNIT) ** num_float32 - 1)


def check_path(path: Path, routing: str, settings: Settings) -> RankCheck:
    """Takes this rank's tokens along `path` and compares. Collective."""
    rank = dist.get_rank()
    workload = settings.workload(routing, path.dtype)
    experts = make_experts(settings.num_experts, settings.hidden, settings.ffn_hidden, settings.seed)
    passage = travel(path, settings, make_batch(workload, rank), experts)
    result = passage.output.double()

    reference, _ = _reference(settings, routing, "bf16", rank)
    sent_reference, magnitude = _reference(settings, routing, path.dtype, rank)
    allowed = allowed_fraction(path.flavour, settings) * magnitude + torch.finfo(torch.bfloat16).tiny
    error = (result - reference).abs()
    return RankCheck(
        max_error=error.max().item(),
        squared_error=error.square().sum().item(),
        squared_reference=reference.square().sum().item(),
        worst_of_allowed=((result - sent_reference).abs() / allowed).max().item(),
        num_tokens_per_expert=passage.num_tokens_per_expert,
        num_expected_per_expert=_expected_tokens_per_expert(workload, settings, rank),
        engine=passage.log.engine,
        seconds=passage.log.seconds,
        sent_bytes=passage.log.sent_bytes,
    )


@lru_cache(maxsize=2)
def _reference(settings: Settings, routing: str, dtype: str, rank: int) -> tuple[Tensor, Tensor]:
    """The dense result ``[T, H]`` float64 of this rank's tokens, and S, its magnitudes added up, ``[T, H]`` float64."""
    batch = make_batch(settings.workload(routing, dtype), rank)
    experts = make_experts(settings.num_experts, settings.hidden, settings.ffn_hidden, settings.seed)
    x = cast_from_fp8(*cast_to_fp8(batch.x), torch.float64) if dtype == "fp8" else batch.x

    def output_and_magnitude(expert: int, rows: Tensor) -> Tensor:
        output = experts(expert, rows)
        return torch.cat([output, output.abs()], dim=1)

    both = dense_moe(x, batch.topk_idx, batch.topk_weights, output_and_magnitude)
    reference, magnitude = both.split(settings.hidden, dim=1)
    return reference, magnitude


def _expected_tokens_per_expert(workload: Workload, settings: Settings, rank: int) -> list[int]:
    chosen = torch.cat([make_routing(workload, source)[0].flatten() for source in range(settings.num_ranks)])
    first = rank * settings.num_local_experts
    counts: list[int] = torch.bincount(chosen, minlength=settings.num_experts).tolist()
    return counts[first : first + settings.num_local_experts]
