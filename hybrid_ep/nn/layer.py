"""`MoELayer`: a router, this rank's share of the experts, and the two calls between them. Small on purpose, and it
trains.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid_ep.balance.placement import ExpertPlacement
from hybrid_ep.buffers.normal import Buffer
from hybrid_ep.core.checks import MAX_INT, MAX_TOPK, require, require_int, require_tensor
from hybrid_ep.nn.modules import DispatchedTokens, MoECombine, MoEDispatch, require_buffer
from hybrid_ep.nn.replicas import make_balancer

__all__ = ["MoELayer"]


class MoELayer(nn.Module):
    """Top-k mixture of two-layer GELU experts, spread over the ranks of a buffer.

    The router is the same on every rank: give every rank the same seed for it (`seed`), and call
    `sync_router_gradients` after the backward pass. Experts belong to one rank each. Parameters are
    float32; tokens cross in bf16.

    Args:
        buffer: moves the tokens.
        hidden: H.
        ffn_hidden: width inside an expert.
        num_experts: E, a multiple of the ranks.
        topk: K.
        seed: of the initial weights; expert e is the same whatever the number of ranks.
        balance: None: each expert is on its home rank alone. A placement: replicas where it says; their weights are
            fetched in each forward pass. ``"online"``: replicas for each micro-batch, planned from its routing; the
            same on all ranks. Parameters are those of home experts with every policy.
        layer: of the placement.
        num_spare: B, spare slots of each rank for ``"online"``; as many as it has experts balance every routing.

    Attributes:
        balance_loss: of the last forward: E × Σ (share of tokens × mean probability), 1 when balanced (source: Switch
            Transformers, equation 4).

    Raises:
        ConfigError: an argument does not fit.
    """

    balance_loss: Tensor

    def __init__(
        self,
        buffer: Buffer,
        *,
        hidden: int,
        ffn_hidden: int,
        num_experts: int,
        topk: int,
        seed: int = 0,
        balance: ExpertPlacement | str | None = None,
        layer: int = 0,
        num_spare: int = 2,
    ) -> None:
        super().__init__()
        require_buffer(buffer)
        require_int("seed", seed, minimum=-MAX_INT)
        require_int("hidden", hidden, minimum=1)
        require_int("ffn_hidden", ffn_hidden, minimum=1)
        require_int("num_experts", num_experts, minimum=1, multiple_of=buffer.group_size)
        limit = min(MAX_TOPK, num_experts)
        require(require_int("topk", topk, minimum=1) <= limit, "topk", topk, f"1 … {limit}")
        self.buffer, self.hidden, self.num_experts, self.topk = buffer, hidden, num_experts, topk
        self._balancer = make_balancer(buffer, num_experts, balance, layer=layer, num_spare=num_spare)
        self.dispatch = MoEDispatch(buffer, self._balancer.num_slots * buffer.group_size)
        self.combine = MoECombine(buffer)
        self.router = nn.Parameter(_normal(seed, (num_experts, hidden), hidden))
        num_local = num_experts // buffer.group_size
        mine = range(buffer.rank * num_local, (buffer.rank + 1) * num_local)
        self.up = nn.Parameter(torch.stack([_normal(seed + 1 + e, (ffn_hidden, hidden), hidden) for e in mine]))
        self.down = nn.Parameter(torch.stack([_normal(-seed - 1 - e, (hidden, ffn_hidden), ffn_hidden) for e in mine]))

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[T, H]`` float32 or bf16 tokens of this rank to ``[T, H]`` of the same dtype. Collective.

        Raises:
            ConfigError: dtype or hidden does not fit.
            TimeoutError, TransportError: a rank was lost.
        """
        require_tensor("x", x, dtypes=(torch.float32, torch.bfloat16), shape=(None, self.hidden))
        topk_idx, topk_weights = self.route(x)
        routed = self._balancer.route(topk_idx, self.up, self.down)
        tokens = self.dispatch(x.to(torch.bfloat16).contiguous(), routed.slots, topk_weights)
        combined: Tensor = self.combine(self.experts(tokens, *routed.weights), tokens.handle)
        return combined.to(x.dtype)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns top-k experts ``[T, K]`` int64 and their weights ``[T, K]`` float32, which sum to 1."""
        probs = F.softmax(x.float() @ self.router.t(), dim=-1)
        weights, topk_idx = probs.topk(self.topk, dim=-1)
        share = torch.bincount(topk_idx.flatten(), minlength=self.num_experts) / max(1, topk_idx.numel())
        mean = probs.mean(0) if x.shape[0] else torch.zeros_like(share)
        self.balance_loss = self.num_experts * (share * mean).sum()
        return topk_idx, weights / weights.sum(-1, keepdim=True)

    @staticmethod
    def experts(tokens: DispatchedTokens, up: Tensor, down: Tensor) -> Tensor:
        """Applies experts to received rows; a row's experts are weighted and summed: ``[N, H]`` bf16.

        Args:
            tokens: received; `topk_idx` counts the slots of this rank.
            up: ``[slots, ffn_hidden, H]``.
            down: ``[slots, H, ffn_hidden]``.
        """
        total = torch.zeros(tokens.x.shape, dtype=torch.float32, device=tokens.x.device)
        for expert in range(up.shape[0]):
            row, column = torch.nonzero(tokens.topk_idx == expert, as_tuple=True)
            inner = F.gelu(tokens.x[row].float() @ up[expert].t())
            weighted = inner @ down[expert].t() * tokens.topk_weights[row, column].unsqueeze(1)
            total = torch.index_add(total, 0, row, weighted)
        return total.to(torch.bfloat16)

    def sync_router_gradients(self) -> None:
        """Averages the router's gradient over the ranks. Collective; call it between backward and the optimizer's
        step. A rank without a gradient counts as zero, and gets the average.

        Raises:
            TimeoutError, TransportError: a rank was lost, or did not come within the buffer's `timeout_s`.
        """
        if self.router.grad is None:
            self.router.grad = torch.zeros_like(self.router)
        total = self.buffer.engine.sum_over_ranks(self.router.grad)
        self.router.grad.copy_(total / self.buffer.group_size)


def _normal(seed: int, shape: tuple[int, int], fan_in: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed % (1 << 63))
    weights: Tensor = torch.randn(shape, generator=generator) / fan_in**0.5
    return weights
