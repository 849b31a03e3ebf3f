"""Decodes a few steps with the low-latency calls: torchrun --nproc-per-node 2 examples/serve.py

Runs on GPUs, one rank each, and without any. The experts here multiply by a constant, so that the result is known.
"""

import torch
import torch.distributed as dist

import hybrid_ep

dist.init_process_group()
rank, num_ranks = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
max_tokens, hidden, num_experts, topk = 16, 512, 4 * num_ranks, 2

num_bytes = hybrid_ep.Buffer.get_low_latency_rdma_size_hint(max_tokens, hidden, num_ranks, num_experts)
with hybrid_ep.Buffer(dist.group.WORLD, 0, num_bytes, low_latency_mode=True, timeout_s=30) as buffer:
    for step in range(4):
        torch.manual_seed(100 * step + rank)
        x = torch.randn(max_tokens, hidden, device=device, dtype=torch.bfloat16)
        topk_weights, topk_idx = torch.rand(max_tokens, num_experts, device=device).softmax(1).topk(topk)
        rows, counts, handle, _, hook = buffer.low_latency_dispatch(
            x, topk_idx, max_tokens, num_experts, use_fp8=False, return_recv_hook=True
        )
        assert hook is not None
        hook()  # another micro-batch could be computed before this line
        assert isinstance(rows, torch.Tensor)
        outputs = 2 * rows  # of local expert e, the first counts[e] rows are defined
        combined = buffer.low_latency_combine(outputs, topk_idx, topk_weights, handle)[0]
        expected = 2 * x.float() * topk_weights.sum(1, keepdim=True)
        assert torch.allclose(combined.float(), expected, rtol=2e-2, atol=2e-2)
print(f"rank {rank}: its experts received {counts.tolist()} rows in the last step")
dist.destroy_process_group()
