"""The differentiable calls of a training framework's dispatcher, as Megatron writes them, and an all-to-all."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["AllToAll", "Combine", "Dispatch", "PermutingCombine", "PermutingDispatch", "all_to_all"]


class AllToAll(torch.autograd.Function):
    """Rows to ranks and, of their gradients, back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, num_sent: list[int], num_received: list[int]) -> Tensor:
        ctx.splits = num_received, num_sent
        return all_to_all(rows, num_sent, num_received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return all_to_all(grad, *ctx.splits), None, None


def all_to_all(rows: Tensor, num_sent: list[int], num_received: list[int]) -> Tensor:
    received = rows.new_empty(sum(num_received), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), num_received, num_sent)
    return received


class Dispatch(torch.autograd.Function):
    """Megatron's `deepep`: layout and dispatch; the gradient is a combine."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, topk_idx: Tensor, weights: Tensor, num_experts: int, buffer: Any) -> Any:
        per_rank, per_domain, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
        received, recv_idx, recv_weights, _, handle, _ = buffer.dispatch(
            x,
            topk_idx=topk_idx,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_domain,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(recv_idx)
        return received, recv_idx, recv_weights, handle

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any, grad_weights: Tensor, __: Any) -> Any:  # type: ignore[override]
        grad_x, grad_topk, _ = ctx.buffer.combine(grad.contiguous(), ctx.handle, topk_weights=grad_weights.float())
        return grad_x, None, grad_topk, None, None


class Combine(torch.autograd.Function):
    """Megatron's `deepep`: the gradient is a dispatch along the handle."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, handle: Any, buffer: Any) -> Any:
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine(y, handle)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return ctx.buffer.dispatch(grad.contiguous(), handle=ctx.handle)[0], None, None


class PermutingDispatch(torch.autograd.Function):
    """Megatron's `hybridep`: rows by expert."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, routing_map: Tensor, probs: Tensor, is_fused: bool, buffer: Any) -> Any:
        ctx.buffer, ctx.is_fused = buffer, is_fused
        rows, row_probs, _, counts, ctx.handle = buffer.dispatch_with_permute(
            hidden=x, routing_map=routing_map, probs=probs, fuse_permute_dispatch=is_fused
        )
        return rows, row_probs, counts, ctx.handle

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_probs: Tensor, _: Any, __: Any) -> Any:  # type: ignore[override]
        grad_x, dense = ctx.buffer.combine_with_unpermute(
            hidden=grad.contiguous(), probs=grad_probs, handle=ctx.handle, fuse_unpermute_combine=ctx.is_fused
        )
        return grad_x, None, dense, None, None


class PermutingCombine(torch.autograd.Function):
    """Megatron's `hybridep`: rows of experts home."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, handle: Any, is_fused: bool, buffer: Any) -> Any:
        ctx.buffer, ctx.handle, ctx.is_fused = buffer, handle, is_fused
        return buffer.combine_with_unpermute(hidden=y, handle=handle, fuse_unpermute_combine=is_fused)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        rows = ctx.buffer.dispatch_with_permute(
            hidden=grad.contiguous(), handle=ctx.handle, fuse_permute_dispatch=ctx.is_fused
        )[0]
        return rows, None, None, None
