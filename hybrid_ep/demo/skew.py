"""On every rank: a layer whose router is skewed, without balance, with a placement, and balanced online.

All tokens lean towards one direction, so that some experts are chosen by most of them. The ranks are one domain. Every
policy is compared with a dense float64 mixture.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid_ep.balance import ExpertPlacement
from hybrid_ep.buffers.v1 import Buffer
from hybrid_ep.demo.settings import Settings
from hybrid_ep.nn import MoELayer
from hybrid_ep.testing.reference import dense_moe

POLICIES = ("no balance", "placement", "online")
ALLOWED_RMS = 8 * 2.0**-8  # a few roundings to bf16
_LEAN = 2.0
_NUM_SPARE = 2
_NUM_RUNS = 3


@dataclass(frozen=True)
class SkewResult:
    """One policy.

    Attributes:
        policy: one of `POLICIES`.
        copies: that each rank computed.
        milliseconds: CPU time of the experts of the slowest rank.
        rms_error: of the whole output against float64.
    """

    policy: str
    copies: tuple[int, ...]
    milliseconds: float
    rms_error: float

    @property
    def fullest(self) -> float:
        """Copies of the most loaded rank over the mean."""
        return max(self.copies) * len(self.copies) / sum(self.copies)

    @property
    def problems(self) -> list[str]:
        """The faults in words; empty = good."""
        if self.rms_error <= ALLOWED_RMS:
            return []
        return [f"skewed router, {self.policy}: rms error {self.rms_error:.2%}; allowed {ALLOWED_RMS:.2%}"]


class _TimedLayer(MoELayer):
    """Measures its experts."""

    def __init__(self, buffer: Buffer, **sizes: Any) -> None:
        super().__init__(buffer, **sizes)
        self.seconds: list[float] = []
        self.experts.register_forward_pre_hook(self._begin)
        self.experts.register_forward_hook(self._end)

    def run(self, x: Tensor) -> tuple[Tensor, int, float]:
        """Returns the output, the copies that this rank computed, and the least CPU seconds that its experts took."""
        self.seconds.clear()
        for _ in range(_NUM_RUNS):
            y = self(x)
        return y, self.copies, min(self.seconds)

    def _begin(self, module: nn.Module, given: Any) -> None:
        self.copies = int((given[0].topk_idx >= 0).sum())
        self._began = time.process_time()

    def _end(self, module: nn.Module, given: Any, result: Tensor) -> None:
        self.seconds.append(time.process_time() - self._began)


def run_skewed(settings: Settings) -> list[SkewResult]:
    """Runs the layer under every policy. Collective; the same on every rank."""
    own = torch.Generator().manual_seed((settings.seed << 20) + dist.get_rank())
    shared = torch.Generator().manual_seed(settings.seed)
    x = torch.randn(settings.num_tokens, settings.hidden, generator=own, device="cpu")
    x = (x + _LEAN * torch.randn(settings.hidden, generator=shared, device="cpu")).to(torch.bfloat16)
    results = []
    with torch.no_grad(), Buffer(num_ranks_per_domain=settings.num_ranks) as buffer:
        plain = _layer(buffer, settings, None)
        topk_idx, weights = plain.route(x)
        up, down = (_gather(weight).double() for weight in plain.experts.weights())
        truth = dense_moe(x, topk_idx, weights, lambda e, rows: F.gelu(rows @ up[e].t()) @ down[e].t())
        load = torch.bincount(topk_idx.flatten(), minlength=settings.num_experts)
        dist.all_reduce(load)
        replicas = settings.num_experts + _NUM_SPARE * settings.num_ranks
        placement = ExpertPlacement.from_loads(load.unsqueeze(0), replicas, settings.num_ranks)
        for policy, balance in zip(POLICIES, (None, placement, "online"), strict=True):
            y, copies, seconds = _layer(buffer, settings, balance).run(x)
            found = _gather(
                torch.tensor(
                    [[copies, seconds, (y.double() - truth).square().sum(), truth.square().sum()]], device="cpu"
                )
            )
            error = float((found[:, 2].sum() / found[:, 3].sum()).sqrt())
            counts = tuple(int(count) for count in found[:, 0].tolist())
            results.append(SkewResult(policy, counts, 1e3 * float(found[:, 1].max()), error))
    return results


def _layer(buffer: Buffer, settings: Settings, balance: ExpertPlacement | str | None) -> _TimedLayer:
    return _TimedLayer(
        buffer,
        hidden=settings.hidden,
        ffn_hidden=settings.ffn_hidden,
        num_experts=settings.num_experts,
        topk=settings.num_topk,
        seed=settings.seed,
        balance=balance,
        num_spare=_NUM_SPARE,
    )


def _gather(mine: Tensor) -> Tensor:
    """``[n, …]`` of each rank → ``[R × n, …]``."""
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return torch.cat(parts)
