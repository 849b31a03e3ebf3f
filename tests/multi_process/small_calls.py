"""Right arguments of small calls on a single rank. Tests change one of them and look at the error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybrid_ep import Buffer

T, H, K, E = 6, 256, 2, 8
BF16 = torch.bfloat16
X, TOPK, WEIGHTS = torch.ones(T, H, dtype=BF16), torch.arange(T * K).view(T, K) % E, torch.rand(T, K)
EXPERT_ROWS = torch.ones(E, 8, H, dtype=BF16)
SIGNALS = torch.zeros(E, dtype=torch.int32)  # one for each expert


def layout_of(buffer: Buffer, topk: Tensor = TOPK, num_experts: int = E) -> dict[str, Tensor]:
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk, num_experts)
    return {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}


def handle_of(buffer: Buffer) -> Any:
    return buffer.dispatch(X, **layout_of(buffer), topk_idx=TOPK, topk_weights=WEIGHTS)[4]


def low_latency_handle(buffer: Buffer) -> Any:
    return buffer.low_latency_dispatch(X, TOPK, 8, E, use_fp8=False)[2]
