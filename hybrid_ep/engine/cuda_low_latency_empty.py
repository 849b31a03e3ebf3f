"""Low-latency calls of the cuda engine without rows, by which ranks compare calls, or learn that one is refused."""

from __future__ import annotations

import torch

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
    global_scale: int = 0,
) -> None:
    """Launches a dispatch that sends only what its plan publishes.

    Args:
        region: of the call.
        plan: for no tokens.
        buffer_idx: of the dispatch.
        device: of the region.
        stream: the current one.
        counter: as `low_latency_counter` makes it.
        global_scale: address of that of NVFP4 rows.
    """
    results = torch.empty(plan.num_ints_between, dtype=torch.int32, device=device)
    region.dispatch_tokens(plan, buffer_idx, 0, 0, 0, global_scale, counter, 0, 0, 0, results.data_ptr(), stream)


def launch_refused_combine(
    region: _cuda.LowLatencyRegion, plan: _cuda.LowLatencyPlan, buffer_idx: int, device: torch.device, stream: int
) -> None:
    """Launches a combine along the handle of a dispatch that never was; arguments as above, the plan a refused one."""
    results = torch.zeros(plan.num_ints_between, dtype=torch.int32, device=device)
    idx, value = plan.refusal_of_combine
    results[idx] = value
    region.combine_rows(plan, buffer_idx, 0, results.data_ptr(), 0, 0, 0, 0, False, NO_SUMS, 0, stream)
