"""`MoEDispatch` and `MoECombine`: the backward of dispatch is combine, and the backward of combine is dispatch.

tokens = dispatch(x, topk_idx, topk_weights)          # gradients flow to x and topk_weights
y = combine(experts(tokens), tokens.handle)           # gradients flow to the experts
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hybrid_ep.buffers.normal import Buffer
from hybrid_ep.core.checks import require, require_int, require_tensor
from hybrid_ep.engine.base import DispatchHandle

__all__ = ["DispatchedTokens", "MoECombine", "MoEDispatch"]


def require_buffer(buffer: Buffer) -> Buffer:
    """Returns `buffer` if it is one."""
    require(isinstance(buffer, Buffer), "buffer", type(buffer).__name__, "a hybrid_ep.Buffer")
    return buffer


class DispatchedTokens(NamedTuple):
    """What a rank receives.

    Attributes:
        x: ``[N, H]`` bf16, by source rank, then source token.
        topk_idx: ``[N, K]`` int64, local expert or −1.
        topk_weights: ``[N, K]`` float32, 0 where `topk_idx` is −1.
        num_tokens_per_expert: LE counts.
        handle: for `MoECombine`.
    """

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    num_tokens_per_expert: list[int]
    handle: DispatchHandle


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, buffer: Buffer, num_experts: int, x: Tensor, topk_idx: Tensor, topk_weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, list[int], DispatchHandle]:
        per_rank, per_domain, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
        recv_x, recv_idx, recv_weights, counts, handle, _ = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_domain,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
        )
        assert isinstance(recv_x, Tensor)
        assert recv_idx is not None
        assert recv_weights is not None
        assert counts is not None
        assert handle is not None
        ctx.buffer, ctx.handle = buffer, handle
        ctx.save_for_backward(recv_idx)
        ctx.mark_non_differentiable(recv_idx)
        return recv_x, recv_idx, recv_weights, counts, handle

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        grad_x, _, grad_weights = grads[:3]
        (recv_idx,) = ctx.saved_tensors
        # A weight that is reported as 0 because its expert lives elsewhere does not depend on its source.
        grad_weights = torch.where(recv_idx >= 0, grad_weights, 0.0)
        x, weights, _ = ctx.buffer.combine(grad_x, ctx.handle, topk_weights=grad_weights)
        return None, None, x, None, weights


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: Buffer, handle: DispatchHandle, x: Tensor) -> Tensor:
        ctx.buffer, ctx.handle = buffer, handle
        combined, _, _ = buffer.combine(x, handle)
        return combined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        received, *_ = ctx.buffer.dispatch(grads[0], handle=ctx.handle)
        return None, None, received


class MoEDispatch(nn.Module):
    """Dispatch with a backward pass. Collective, forwards and backwards: every rank of the buffer must take part.

    Args:
        buffer: moves the tokens.
        num_experts: E, a multiple of the ranks.

    Raises:
        ConfigError: an argument does not fit.
    """

    def __init__(self, buffer: Buffer, num_experts: int) -> None:
        super().__init__()
        self.buffer = require_buffer(buffer)
        self.num_experts = require_int("num_experts", num_experts, minimum=1, multiple_of=buffer.group_size)

    def forward(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> DispatchedTokens:
        """Sends tokens to the ranks of their experts.

        Args:
            x: ``[T, H]`` bf16.
            topk_idx: ``[T, K]`` int64, global expert index or −1.
            topk_weights: ``[T, K]`` float32.

        Raises:
            ConfigError, TimeoutError, TransportError: as `Buffer.dispatch`.
        """
        require_tensor("x", x, dtypes=(torch.bfloat16,), shape=(None, None))
        require_tensor("topk_weights", topk_weights, dtypes=(torch.float32,), shape=(None, None))
        parts = _Dispatch.apply(self.buffer, self.num_experts, x, topk_idx, topk_weights)  # type: ignore[no-untyped-call]
        return DispatchedTokens(*parts)


class MoECombine(nn.Module):
    """Combine with a backward pass. Collective, forwards and backwards.

    Args:
        buffer: moves the tokens.

    Raises:
        ConfigError: it is not a `Buffer`.
    """

    def __init__(self, buffer: Buffer) -> None:
        super().__init__()
        self.buffer = require_buffer(buffer)

    def forward(self, x: Tensor, handle: DispatchHandle) -> Tensor:
        """Brings the experts' rows ``[N, H]`` bf16 back and sums them: ``[T, H]`` bf16.

        Raises:
            ConfigError, TimeoutError, TransportError: as `Buffer.combine`.
        """
        combined: Tensor = _Combine.apply(self.buffer, handle, x)  # type: ignore[no-untyped-call]
        return combined
