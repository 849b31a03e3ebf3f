"""Low-latency calls of the cuda engine without rows: ranks compare their calls, or learn that a rank refuses one."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_ep import _cuda
from hybrid_ep.engine.calls import NO_SUMS

__all__ = ["launch_refused_combine", "launch_without_tokens"]


def launch_without_tokens(
    region: _cuda.LowLatencyRegion,
    plan: _cuda.LowLatencyPlan,
    buffer_idx: int,
    device: torch.device,
    stream: int,
    *,
    counter: int = 0,
    global_scale: Tensor | None = None,
) -> None:
    """Launches a dispatch without tokens: it publishes the fields of its plan.

    Args:
        region: memory of the call.
        plan: made for 0 tokens.
        buffer_idx: buffer that the dispatch uses.
        device: this rank's GPU.
        stream: the current stream.
        counter: result of `low_latency_counter`.
        global_scale: of NVFP4 rows; None for other formats.
    """
    results = torch.empty(plan.num_ints_between, dtype=torch.int32, device=device)
    region.dispatch_tokens(plan, buffer_idx, None, None, 0, global_scale, counter, None, None, None, results, stream)


def launch_refused_combine(
    region: _cuda.LowLatencyRegion, plan: _cuda.LowLatencyPlan, buffer_idx: int, device: torch.device, stream: int
) -> None:
    """Launches a combine without rows, for which no dispatch was made. `plan` has the refusal."""
    results = torch.zeros(plan.num_ints_between, dtype=torch.int32, device=device)
    idx, value = plan.refusal_of_combine
    results[idx] = value
    region.combine_rows(plan, buffer_idx, None, results, None, None, None, 0, False, NO_SUMS, None, stream)
