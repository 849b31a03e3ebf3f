"""Checks of the arguments of DeepEP's `lb_prefetch_weights` and `lb_reduce_grads`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_ep.checks import require, require_int
from hybrid_ep.core.checks import are_packed, require_expert_indices, require_plain, require_tensor
from hybrid_ep.core.event import EventHandle, EventOverlap, as_overlap
from hybrid_ep.core.geometry import RankGrid

_MAPPING_DTYPES = (torch.int32, torch.int64)


def _are_none(*given: object) -> bool:
    return all(isinstance(tensors, Sequence) and not tensors for tensors in given)


def copies_nothing(
    buffer: object,
    redundant_expert_weights: object,
    expert_weights: object,
    redundancy_mapping: object,
    num_sms: object = 0,
    previous_event: object = None,
) -> bool:
    """Whether no rank sends weights for such arguments, of which any may be wrong."""
    return _are_none(redundant_expert_weights, expert_weights)


def sums_nothing(
    buffer: object,
    redundant_expert_grads: object,
    expert_grads: object,
    redundancy_mapping: object,
    num_sms: object = 0,
    previous_event: object = None,
) -> bool:
    """Whether no rank sends gradients for such arguments, of which any may be wrong."""
    return _are_none(redundant_expert_grads, expert_grads)


def check_replicas(
    grid: RankGrid,
    spare: list[Tensor],
    homes: list[Tensor],
    mapping: Tensor,
    num_sms: int,
    previous_event: EventOverlap | EventHandle | None,
) -> Tensor:
    """Checks what both calls share, waits for the event, and returns the mapping as int64 beside the tensors."""
    require(len(spare) == len(homes), "tensors of spare slots", len(spare), f"{len(homes)}, as of the experts")
    shape = (grid.num_ranks_per_domain, spare[0].shape[0] if spare else None)
    require_tensor("redundancy_mapping", mapping, dtypes=_MAPPING_DTYPES, shape=shape)
    num_experts = grid.num_ranks_per_domain * (homes[0].shape[0] if homes else 0)
    require_expert_indices(mapping, num_experts, name="redundancy_mapping")
    require_int("num_sms", num_sms, minimum=0)
    event = as_overlap("previous_event", previous_event)
    if event is not None:
        event.current_stream_wait()
    for ours, theirs in zip(spare, homes, strict=True):
        _require_alike(ours, theirs, (spare[0].shape[0], homes[0].shape[0]))
    return mapping.to(homes[0].device if homes else mapping.device, torch.int64)


def as_tensors(name: str, given: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Checks tensors of experts, and returns them as a list."""
    allowed = "a tensor, or a sequence of tensors"
    require(isinstance(given, Tensor | Sequence), name, type(given).__name__, allowed)
    tensors = [given] if isinstance(given, Tensor) else list(given)
    for tensor in tensors:
        require_plain(f"an element of {name}", tensor)
        require(tensor.dim() >= 2 and tensor[:1].numel() > 0, f"shape of {name}", list(tensor.shape), "[n, *shape]")
        require(are_packed(tensor), f"strides of {name}", tensor.stride(), "a contiguous (row-major) tensor")
    return tensors


def _require_alike(spare: Tensor, homes: Tensor, lengths: tuple[int, int]) -> None:
    found, wanted = [*spare.shape, spare.dtype, spare.device], [lengths[0], *homes.shape[1:], homes.dtype, homes.device]
    require(
        found == wanted, "shape, dtype and device of a tensor of spare slots", found, f"{wanted}, as of the experts"
    )
    require(homes.shape[0] == lengths[1], "experts of a tensor", homes.shape[0], f"{lengths[1]}, as of the first")
