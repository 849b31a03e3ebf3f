"""Dispatch along an online plan with a result of static shape: rows by slot, home and spare slots as separate groups.

A plan with enough spare slots gives every rank the same number of copies, so that one size serves every routing. Where
the groups end is known on the device only. A grouped matrix product takes the ends from there, and the host waits for
nothing; weights of home experts and of replicas stay in two tensors.

    S tokens of a rank   K top-k   LE home experts of a rank   B spare slots of a rank   P = rows of the result
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_ep.balance.online import OnlinePlan
from hybrid_ep.buffers.collective import collective
from hybrid_ep.buffers.hybrid import HybridEPBuffer
from hybrid_ep.buffers.hybrid_handles import PermutedHandle
from hybrid_ep.checks import require


class GroupedRows(NamedTuple):
    """Result of `dispatch_online`.

    Attributes:
        rows: ``[P, H]``: those of each home slot, then those of each spare slot; undefined after the last.
        probs: ``[P]`` float32, the weight of each row; None where no weights were given.
        home_ends: ``[LE]`` int32 on the device: where the rows of each home slot end.
        spare_ends: ``[B]`` int32 on the device: where the rows of each spare slot end. The first one begins where the
            last home slot ends.
        handle: for `HybridEPBuffer.combine_with_unpermute`. Its last entry is 1 where more rows arrived than P.
    """

    rows: Tensor
    probs: Tensor | None
    home_ends: Tensor
    spare_ends: Tensor
    handle: PermutedHandle


@collective("dispatch_with_permute")
def dispatch_online(
    buffer: HybridEPBuffer,
    x: Tensor,
    slots: Tensor,
    topk_weights: Tensor | None,
    plan: OnlinePlan,
    *,
    num_rows: int,
    pad_multiple: int = 1,
) -> GroupedRows:
    """Dispatches tokens to the slots of a plan. Collective; on the cuda engine without a host sync.

    Args:
        buffer: moves the rows.
        x: ``[T, H]`` bf16.
        slots: ``[T, K]`` int64, of `map_online`.
        topk_weights: ``[T, K]`` float32, or None.
        plan: that `slots` are of.
        num_rows: P, equal on all ranks: S × K where S is the most tokens of a rank and the plan reaches the mean; (1 +
            ε) times that with a tolerance; and (LE + B) × (pad_multiple − 1) more with pads.
        pad_multiple: the rows of every slot are padded with zeros to a multiple of it.

    Raises:
        ConfigError: an argument does not fit at any rank.
        TimeoutError, TransportError: a rank was lost.
    """
    num_ranks, num_spare = plan.spare.shape
    require(num_ranks == buffer.group_size, "ranks of plan", num_ranks, f"{buffer.group_size}, as of the buffer")
    num_local = plan.quota.shape[0] // num_ranks
    rows, probs, _, per_slot, handle = buffer.dispatch_with_permute(
        hidden=x,
        topk_idx=slots,
        topk_weights=topk_weights,
        num_of_experts=num_ranks * (num_local + num_spare),
        num_permuted_tokens=num_rows,
        pad_multiple=pad_multiple,
        non_blocking=True,
    )
    ends = per_slot.cumsum(0).to(torch.int32)
    return GroupedRows(rows, probs, ends[:num_local], ends[num_local:], handle)
