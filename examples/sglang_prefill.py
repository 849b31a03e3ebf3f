"""Prefill in the calls of SGLang's `deepep` in mode normal: torchrun --nproc-per-node 2 examples/sglang_prefill.py

Rows cross in FP8 with their scales, on the communication stream. Runs on GPUs, one rank each, and without any.
"""

import torch
import torch.distributed as dist

import hybrid_ep
from hybrid_ep.quantize import cast_from_fp8, cast_to_fp8

dist.init_process_group()
rank, num_ranks = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
num_tokens, hidden, num_local, topk = 64, 512, 4, 2

torch.manual_seed(rank)
x = torch.randn(num_tokens, hidden, device=device, dtype=torch.bfloat16)
topk_weights, topk_idx = torch.rand(num_tokens, num_local * num_ranks, device=device).softmax(1).topk(topk)

Buffer = hybrid_ep.Buffer
configs = Buffer.get_dispatch_config(num_ranks), Buffer.get_combine_config(num_ranks)
num_bytes = max(config.get_nvl_buffer_size_hint(2 * hidden, num_ranks) for config in configs)
with Buffer(dist.group.WORLD, num_bytes, 0, timeout_s=30) as buffer:
    per_rank, per_domain, per_expert, in_rank, event = buffer.get_dispatch_layout(
        topk_idx,
        num_local * num_ranks,
        previous_event=Buffer.capture(),
        async_finish=True,
        allocate_on_comm_stream=True,
    )
    (rows, scales), recv_idx, recv_weights, counts, handle, event = buffer.dispatch(
        cast_to_fp8(x),
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_domain,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        previous_event=event,
        async_finish=True,
        allocate_on_comm_stream=True,
        expert_alignment=128,  # counts are rounded up to whole blocks of a grouped GEMM
        config=configs[0],
    )
    event.current_stream_wait()
    # The experts of this rank, weighted; −1 in recv_idx is an expert of another rank.
    assert recv_weights is not None
    weight = torch.where(recv_idx >= 0, recv_weights, 0.0).sum(1, keepdim=True)
    outputs = (2 * cast_from_fp8(rows, scales) * weight).to(torch.bfloat16)
    combined, _, event = buffer.combine(
        outputs,
        handle,
        previous_event=Buffer.capture(),
        async_finish=True,
        allocate_on_comm_stream=True,
        config=configs[1],
    )
    event.current_stream_wait()
expected = 2 * x.float() * topk_weights.sum(1, keepdim=True)
assert torch.allclose(combined.float(), expected, rtol=0.1, atol=0.1)  # e4m3 has 3 bits of mantissa
print(f"rank {rank}: {len(rows)} rows arrived; blocks of its experts have {counts} rows")
dist.destroy_process_group()
