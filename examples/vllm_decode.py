"""Decode steps in the calls of vLLM's `deepep_low_latency`: torchrun --nproc-per-node 2 examples/vllm_decode.py

Rows cross in FP8. While one micro-batch is on its way, the other's experts compute. Runs on GPUs, one rank each, and
without any.
"""

import torch
import torch.distributed as dist

import hybrid_ep
from hybrid_ep.quantize import cast_from_fp8

dist.init_process_group()
rank, num_ranks = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
max_tokens, hidden, num_experts, topk = 16, 512, 4 * num_ranks, 2

num_bytes = hybrid_ep.Buffer.get_low_latency_rdma_size_hint(max_tokens, hidden, num_ranks, num_experts)
with hybrid_ep.Buffer(dist.group.WORLD, 0, num_bytes, low_latency_mode=True, timeout_s=30) as buffer:
    for step in range(3):
        batches, sent = [], []
        for micro_batch in range(2):
            torch.manual_seed(1000 * step + 100 * micro_batch + rank)
            x = torch.randn(max_tokens, hidden, device=device, dtype=torch.bfloat16)
            topk_weights, topk_idx = torch.rand(max_tokens, num_experts, device=device).softmax(1).topk(topk)
            batches.append((x, topk_idx, topk_weights))
            sent.append(
                buffer.low_latency_dispatch(
                    x, topk_idx, max_tokens, num_experts, use_fp8=True, async_finish=False, return_recv_hook=True
                )
            )
        returned = []
        for (_x, topk_idx, topk_weights), ((rows, scales), counts, handle, _event, hook) in zip(
            batches, sent, strict=True
        ):
            assert hook is not None
            hook()
            outputs = torch.zeros(rows.shape, device=device, dtype=torch.bfloat16)
            for expert, count in enumerate(counts.tolist()):  # vLLM's grouped GEMM reads the counts on the GPU
                outputs[expert, :count] = 2 * cast_from_fp8(rows[expert, :count], scales[expert, :count])
            returned.append(buffer.low_latency_combine(outputs, topk_idx, topk_weights, handle, return_recv_hook=True))
        for (x, _topk_idx, topk_weights), (combined, _event, hook) in zip(batches, returned, strict=True):
            assert hook is not None
            hook()
            expected = 2 * x.float() * topk_weights.sum(1, keepdim=True)
            assert torch.allclose(combined.float(), expected, rtol=0.1, atol=0.1)  # e4m3 has 3 bits of mantissa
print(f"rank {rank}: its experts received {counts.tolist()} rows in the last step")
dist.destroy_process_group()
