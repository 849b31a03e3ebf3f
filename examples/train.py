"""Trains a small mixture of experts on random data: torchrun --nproc-per-node 2 examples/train.py

Runs on GPUs, one rank each, and without any.
"""

import torch
import torch.distributed as dist

import hybrid_ep
from hybrid_ep.nn import MoELayer

dist.init_process_group()
rank, num_ranks = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
torch.manual_seed(rank)
x, target = torch.randn(2, 64, 256, device=device).unbind(0)

with hybrid_ep.Buffer(dist.group.WORLD) as buffer:
    layer = MoELayer(buffer, hidden=256, ffn_hidden=512, num_experts=4 * num_ranks, topk=2).to(device)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    losses = []
    for _ in range(10):
        loss = torch.nn.functional.mse_loss(x + layer(x), target)
        (loss + 0.01 * layer.balance_loss).backward()
        layer.sync_router_gradients()  # the router is the same on every rank; experts belong to one rank each
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
assert losses[-1] < losses[0]
print(f"rank {rank}: loss {losses[0]:.3f} → {losses[-1]:.3f}")
dist.destroy_process_group()
