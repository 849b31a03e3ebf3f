"""A small case for compute-sanitizer, which watches one process: every rank is a command of its own.

    compute-sanitizer --tool memcheck python -m tests.multi_gpu.sanitize [RANK NUM_RANKS STORE]

STORE is a file that does not exist yet, through which the ranks meet. Without ranks one process sends to itself, which
runs every line of the kernels except the loops over peers. HYBRID_EP_NUM_RANKS_PER_DOMAIN=1 makes each of two ranks a
domain.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import hybrid_ep
from tests.multi_gpu.random_routings import check_received, check_returned, dispatch, draw_tokens


def main() -> None:
    rank, num_ranks, store = (int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]) if sys.argv[1:] else (0, 1, "")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    group = None
    if num_ranks > 1:
        meet = dist.FileStore(store, num_ranks)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=meet, rank=rank, world_size=num_ranks)
        group = dist.group.WORLD
    num_experts = 12 * num_ranks
    with hybrid_ep.Buffer(group, engine="cuda") as buffer:
        for seed, (tokens, hidden, bound) in enumerate([(37, 264, 0), (130, 1024, 0), (64, 512, 80 * num_ranks)]):
            sent = draw_tokens(seed, [tokens] * num_ranks, hidden, 4, num_experts, holes=0.1)
            result = dispatch(buffer, sent, rank, num_worst_tokens=bound)
            combined, home, _ = buffer.combine(result[0], result[4], result[2])
            check_received(result, sent, rank, f"seed {seed}", bound)
            check_returned(combined, home, sent, rank, f"seed {seed}")
    with hybrid_ep.HybridEPBuffer(group, 512, 64, 12, engine="cuda") as hybrid:
        sent = draw_tokens(9, [64] * num_ranks, 512, 4, num_experts)
        rows, probs, _, _, handle = hybrid.dispatch_with_permute(
            hidden=sent.x[rank],
            topk_idx=sent.topk_idx[rank],
            topk_weights=sent.weights[rank],
            num_of_experts=num_experts,
            pad_multiple=16,
        )
        hybrid.combine_with_unpermute(hidden=rows, probs=probs, handle=handle, pad_multiple=16)
    with hybrid_ep.Buffer(group, low_latency_mode=True, engine="cuda") as buffer:
        for seed, (tokens, hidden, use_fp8) in enumerate([(37, 264, False), (20, 1024, True)]):
            sent = draw_tokens(seed, [tokens] * num_ranks, hidden, 4, num_experts, holes=0.1)
            x, topk_idx, weights = sent.x[rank], sent.topk_idx[rank], sent.weights[rank]
            packed, _, low_latency_handle, _, _ = buffer.low_latency_dispatch(
                x, topk_idx, tokens, num_experts, use_fp8=use_fp8, round_scale=use_fp8, use_ue8m0=use_fp8
            )
            shape = (12, tokens * num_ranks, hidden)
            y = torch.ones(shape, dtype=torch.bfloat16, device="cuda") if use_fp8 else packed
            assert isinstance(y, torch.Tensor)
            buffer.low_latency_combine(y, topk_idx, weights, low_latency_handle)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
