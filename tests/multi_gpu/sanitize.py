"""A small case for compute-sanitizer: `compute-sanitizer --tool memcheck python -m tests.multi_gpu.sanitize`.

One process and one GPU: a rank that sends to itself runs every line of the kernels except the loops over peers.
"""

from __future__ import annotations

import torch

import hybrid_ep
from tests.multi_gpu.random_routings import check_received, check_returned, dispatch, draw_tokens


def main() -> None:
    torch.cuda.set_device(0)
    with hybrid_ep.Buffer(None, engine="cuda") as buffer:
        for seed, (tokens, hidden, bound) in enumerate([(37, 264, 0), (130, 1024, 0), (64, 512, 80)]):
            sent = draw_tokens(seed, [tokens], hidden, 4, 12, holes=0.1)
            result = dispatch(buffer, sent, 0, num_worst_tokens=bound)
            combined, home, _ = buffer.combine(result[0], result[4], result[2])
            check_received(result, sent, 0, f"seed {seed}", bound)
            check_returned(combined, home, sent, 0, f"seed {seed}")
    with hybrid_ep.HybridEPBuffer(None, 512, 64, 12, engine="cuda") as hybrid:
        sent = draw_tokens(9, [64], 512, 4, 12)
        rows, probs, _, _, handle = hybrid.dispatch_with_permute(
            hidden=sent.x[0],
            topk_idx=sent.topk_idx[0],
            topk_weights=sent.weights[0],
            num_of_experts=12,
            pad_multiple=16,
        )
        hybrid.combine_with_unpermute(hidden=rows, probs=probs, handle=handle, pad_multiple=16)
    with hybrid_ep.Buffer(None, low_latency_mode=True, engine="cuda") as buffer:
        for seed, (tokens, hidden, use_fp8) in enumerate([(37, 264, False), (20, 1024, True)]):
            sent = draw_tokens(seed, [tokens], hidden, 4, 12, holes=0.1)
            packed, _, low_latency_handle, _, _ = buffer.low_latency_dispatch(
                sent.x[0], sent.topk_idx[0], tokens, 12, use_fp8=use_fp8, round_scale=use_fp8, use_ue8m0=use_fp8
            )
            rows = torch.ones(12, tokens, hidden, dtype=torch.bfloat16, device="cuda") if use_fp8 else packed
            assert isinstance(rows, torch.Tensor)
            buffer.low_latency_combine(rows, sent.topk_idx[0], sent.weights[0], low_latency_handle)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
