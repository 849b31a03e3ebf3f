"""A training step in TorchTitan's calls of V2 (`deepep`): torchrun --nproc-per-node 2 examples/torchtitan.py

Rows arrive by source. The backward pass of each call is the other one. Runs on GPUs, one rank each, and without any.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hybrid_ep

dist.init_process_group()
rank, num_ranks = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
num_tokens, hidden, num_experts, topk = 64, 512, 4 * num_ranks, 2


class Dispatch(torch.autograd.Function):
    """Tokens to the ranks of their experts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, topk_idx: Tensor, scores: Tensor, buffer: hybrid_ep.ElasticBuffer) -> Any:
        rows, recv_idx, recv_scores, ctx.handle, _ = buffer.dispatch(
            x,
            topk_idx=topk_idx,
            topk_weights=scores,
            num_experts=num_experts,
            num_max_tokens_per_rank=num_tokens,
            do_expand=False,
            do_cpu_sync=True,
        )
        ctx.buffer = buffer
        return rows, recv_idx, recv_scores, ctx.handle

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_x, grad_scores, _ = ctx.buffer.combine(
            grads[0].contiguous(), handle=ctx.handle, topk_weights=grads[2].float()
        )
        return grad_x, None, grad_scores, None


class Combine(torch.autograd.Function):
    """Their outputs home, where each token's are summed."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, handle: hybrid_ep.EPHandle, buffer: hybrid_ep.ElasticBuffer) -> Any:
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine(y, handle=handle)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_y, *_ = ctx.buffer.dispatch(grads[0].contiguous(), handle=ctx.handle, do_cpu_sync=False)
        return grad_y, None, None


torch.manual_seed(rank)
x = torch.randn(num_tokens, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
scores, topk_idx = torch.rand(num_tokens, num_experts, device=device).softmax(1).topk(topk)
scores.requires_grad_()

with hybrid_ep.ElasticBuffer(
    dist.group.WORLD, num_max_tokens_per_rank=num_tokens, hidden=hidden, num_topk=topk, timeout_s=30
) as buffer:
    rows, recv_idx, recv_scores, handle = Dispatch.apply(x, topk_idx, scores, buffer)
    weight = torch.where(recv_idx >= 0, recv_scores, 0.0).sum(1, keepdim=True)  # of the experts of this rank
    combined = Combine.apply((2 * rows * weight).to(rows.dtype), handle, buffer)
    combined.float().sum().backward()

assert x.grad is not None
assert scores.grad is not None
total = scores.detach().sum(1, keepdim=True)
assert torch.allclose(combined.float(), 2 * x.detach().float() * total, rtol=2e-2, atol=2e-2)
assert torch.allclose(x.grad.float(), (2 * total).expand_as(x), rtol=2e-2, atol=2e-2)
expected = 2 * x.detach().float().sum(1, keepdim=True).expand_as(scores)
assert torch.allclose(scores.grad, expected, rtol=2e-2, atol=2e-1)
print(f"rank {rank}: {len(rows)} rows arrived; its experts have {handle.num_recv_tokens_per_expert_list}")
dist.destroy_process_group()
