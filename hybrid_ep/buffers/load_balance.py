"""DeepEP's `lb_prefetch_weights` and `lb_reduce_grads`: checks, and the moves of expert_moves.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_ep.buffers.base import BaseBuffer
from hybrid_ep.buffers.collective import collective
from hybrid_ep.buffers.expert_moves import add_gradients, copy_weights, route_replicas
from hybrid_ep.checks import require, require_int
from hybrid_ep.core.checks import are_packed, require_expert_indices, require_plain, require_tensor
from hybrid_ep.core.event import EventHandle, EventOverlap, as_overlap

__all__ = ["LoadBalanceCalls"]

_MAPPING_DTYPES = (torch.int32, torch.int64)


def _are_none(*given: object) -> bool:
    return all(isinstance(tensors, Sequence) and not tensors for tensors in given)


def _copies_nothing(
    buffer: BaseBuffer,
    redundant_expert_weights: object,
    expert_weights: object,
    redundancy_mapping: object,
    num_sms: object = 0,
    previous_event: object = None,
) -> bool:
    """Whether no rank sends weights for such arguments, of which any may be wrong."""
    return _are_none(redundant_expert_weights, expert_weights)


def _sums_nothing(
    buffer: BaseBuffer,
    redundant_expert_grads: object,
    expert_grads: object,
    redundancy_mapping: object,
    num_sms: object = 0,
    previous_event: object = None,
) -> bool:
    """The same of gradients."""
    return _are_none(redundant_expert_grads, expert_grads)


class LoadBalanceCalls(BaseBuffer):
    """The calls; a part of `Buffer`, `ElasticBuffer` and `EPBuffer`."""

    @collective("copy of experts", is_local=_copies_nothing)
    def lb_prefetch_weights(
        self,
        redundant_expert_weights: Tensor | Sequence[Tensor],
        expert_weights: Tensor | Sequence[Tensor],
        redundancy_mapping: Tensor,
        num_sms: int = 0,
        previous_event: EventOverlap | EventHandle | None = None,
    ) -> EventOverlap:
        """Fills spare slots with the weights of their experts. Collective over the buffer's group.

        Values are copied bit for bit, on the current stream. A slot whose entry in the mapping is −1 is not written.

        Args:
            redundant_expert_weights: ``[B, *shape]`` of any dtype, or several; written where the mapping names an
                expert.
            expert_weights: ``[LE, *shape]`` of the same dtypes: those of this rank's experts.
            redundancy_mapping: ``[ranks of the domain, B]`` int32 or int64, the same on all ranks of the domain: the
                expert in each spare slot, counted within the domain, −1 where it is empty. B is the same on all ranks
                of the group.
            num_sms: SMs to use; 0 = the engine's choice.
            previous_event: the current stream waits for it first.

        Returns:
            An event on the current stream, behind the copies.

        Raises:
            ConfigError: an argument does not fit, a tensor is not contiguous, or, where the mapping is on a CPU, it
                names no expert of the domain. Also if mappings of ranks differ, or inside a domain of the cuda engine
                sizes of experts: on that engine from a later call.
            TimeoutError, TransportError: a rank was lost; on the cuda engine from a later call.
        """
        spare = _tensors("redundant_expert_weights", redundant_expert_weights)
        experts = _tensors("expert_weights", expert_weights)
        mapping = self._check(spare, experts, redundancy_mapping, num_sms, previous_event)
        copy_weights(self, mapping, spare, experts, self.grid.domain.start, num_sms or None)
        return EventOverlap(EventHandle())

    @collective("dispatch", is_local=_sums_nothing)
    def lb_reduce_grads(
        self,
        redundant_expert_grads: Tensor | Sequence[Tensor],
        expert_grads: Tensor | Sequence[Tensor],
        redundancy_mapping: Tensor,
        num_sms: int = 0,
        previous_event: EventOverlap | EventHandle | None = None,
    ) -> EventOverlap:
        """Adds the gradients of replicas to those of their experts, in fp32. Collective over the buffer's group.

        The order of additions is fixed: the home rank's own replicas, then those of the other ranks in ascending
        order. The host waits for how many replicas there are.

        Args:
            redundant_expert_grads: ``[B, *shape]`` float32, or several.
            expert_grads: ``[LE, *shape]`` float32, added to.
            redundancy_mapping: as in `lb_prefetch_weights`.
            num_sms: SMs to use; 0 = the engine's choice.
            previous_event: the current stream waits for it first.

        Returns:
            An event on the current stream, behind the sums.

        Raises:
            ConfigError: as `lb_prefetch_weights`, or gradients are not float32. Nothing is added then.
            TimeoutError, TransportError: a rank was lost.
        """
        spare = _tensors("redundant_expert_grads", redundant_expert_grads)
        homes = _tensors("expert_grads", expert_grads)
        mapping = self._check(spare, homes, redundancy_mapping, num_sms, previous_event)
        num_local = homes[0].shape[0] if homes else 1
        routes = route_replicas(self, mapping, num_local, self.grid.domain.start)
        add_gradients(self, routes, redundancy_mapping.tolist(), spare, homes, num_sms or None)
        return EventOverlap(EventHandle())

    def lb_get_theoretical_num_sms(self) -> int:
        """Returns how many SMs the calls take at most with ``num_sms=0``. Local."""
        return max(self.engine.default_copy_sms, self.engine.default_num_sms)

    def _check(
        self,
        spare: list[Tensor],
        homes: list[Tensor],
        mapping: Tensor,
        num_sms: int,
        previous_event: EventOverlap | EventHandle | None,
    ) -> Tensor:
        """Checks what both calls share, waits for the event, and returns the mapping as int64 beside the tensors."""
        require(len(spare) == len(homes), "tensors of spare slots", len(spare), f"{len(homes)}, as of the experts")
        shape = (self.grid.num_ranks_per_domain, spare[0].shape[0] if spare else None)
        require_tensor("redundancy_mapping", mapping, dtypes=_MAPPING_DTYPES, shape=shape)
        num_experts = self.grid.num_ranks_per_domain * (homes[0].shape[0] if homes else 0)
        require_expert_indices(mapping, num_experts, name="redundancy_mapping")
        require_int("num_sms", num_sms, minimum=0)
        event = as_overlap("previous_event", previous_event)
        if event is not None:
            event.current_stream_wait()
        for ours, theirs in zip(spare, homes, strict=True):
            _require_alike(ours, theirs, (spare[0].shape[0], homes[0].shape[0]))
        return mapping.to(homes[0].device if homes else mapping.device, torch.int64)


def _tensors(name: str, given: Tensor | Sequence[Tensor]) -> list[Tensor]:
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
