"""A training step in the calls of Megatron's `hybridep` dispatcher: torchrun --nproc-per-node 2 examples/megatron.py

Rows arrive by expert. The backward pass of each call is the other one. Runs on GPUs, one rank each, and without any.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hybrid_ep


class Dispatch(torch.autograd.Function):
    """Tokens to the experts of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, routing_map: Tensor, probs: Tensor, buffer: hybrid_ep.HybridEPBuffer) -> Any:
        rows, row_probs, _, counts, ctx.handle = buffer.dispatch_with_permute(
            hidden=x, routing_map=routing_map, probs=probs
        )
        ctx.buffer = buffer
        return rows, row_probs, counts, ctx.handle

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_x, grad_probs = ctx.buffer.combine_with_unpermute(
            hidden=grads[0].contiguous(), probs=grads[1], handle=ctx.handle
        )
        return grad_x, None, grad_probs, None


class Combine(torch.autograd.Function):
    """Their outputs home, where each token's are summed."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, handle: Any, buffer: hybrid_ep.HybridEPBuffer) -> Any:
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine_with_unpermute(hidden=y, handle=handle)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.buffer.dispatch_with_permute(hidden=grads[0].contiguous(), handle=ctx.handle)[0], None, None


dist.init_process_group()
rank, num_ranks = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
num_tokens, hidden, num_local, topk = 64, 512, 4, 2
num_experts = num_local * num_ranks

torch.manual_seed(rank)
x = torch.randn(num_tokens, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
scores = torch.rand(num_tokens, num_experts, device=device)
topk_weights, topk_idx = scores.softmax(1).topk(topk)
routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter(1, topk_idx, True)
probs = torch.zeros_like(scores).scatter(1, topk_idx, topk_weights).requires_grad_()

with hybrid_ep.HybridEPBuffer(dist.group.WORLD, hidden, num_tokens, num_local, timeout_s=30) as buffer:
    rows, row_probs, counts, handle = Dispatch.apply(x, routing_map, probs, buffer)
    outputs = (2 * rows * row_probs.unsqueeze(1)).to(rows.dtype)  # counts[e] rows of local expert e, in this order
    combined = Combine.apply(outputs, handle, buffer)
    combined.float().sum().backward()

weight = probs.detach().sum(1, keepdim=True)
assert x.grad is not None
assert probs.grad is not None
assert torch.allclose(combined.float(), 2 * x.detach().float() * weight, rtol=2e-2, atol=2e-2)
assert torch.allclose(x.grad.float(), (2 * weight).expand_as(x), rtol=2e-2, atol=2e-2)
expected = 2 * x.detach().float().sum(1, keepdim=True) * routing_map
assert torch.allclose(probs.grad, expected, rtol=2e-2, atol=2e-1)
print(f"rank {rank}: its experts received {counts.tolist()} rows")
dist.destroy_process_group()
