"""The experts of the demo: two-layer GELU networks in float64.

They compute in float64, so all error against the reference comes from rounding rows to the dtype in which they are
sent, and none from the experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Experts", "make_experts"]


@dataclass(frozen=True)
class Experts:
    """All experts of the layer; every rank can make all of them and runs its own.

    Attributes:
        up: ``[E, F, H]`` float64.
        down: ``[E, H, F]`` float64.
    """

    up: Tensor
    down: Tensor

    def __call__(self, expert: int, x: Tensor) -> Tensor:
        """``[n, H]`` float64 → ``[n, H]`` float64."""
        return F.gelu(x @ self.up[expert].t()) @ self.down[expert].t()


@lru_cache(maxsize=1)
def make_experts(num_experts: int, hidden: int, ffn_hidden: int, seed: int) -> Experts:
    """Draws weights that keep rows at about their size."""
    generator = torch.Generator().manual_seed(seed)
    up = torch.randn(num_experts, ffn_hidden, hidden, generator=generator, device="cpu") / hidden**0.5
    down = torch.randn(num_experts, hidden, ffn_hidden, generator=generator, device="cpu") / ffn_hidden**0.5
    return Experts(up.double(), down.double())
