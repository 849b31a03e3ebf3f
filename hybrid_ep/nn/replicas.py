"""Replicas of experts inside a layer: where a layer's tokens go, and the weights that are there.

Weights of replicas are fetched in each forward pass, because the optimiser has changed them since the last. Backward
sends the gradients of replicas home. So parameters, optimiser state and checkpoints are those of home experts alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep.balance.online import map_online, plan_online
from hybrid_ep.balance.placement import ExpertPlacement
from hybrid_ep.buffers.load_balance import add_gradients, copy_weights, gather_counts
from hybrid_ep.buffers.normal import Buffer
from hybrid_ep.core.checks import require, require_int
from hybrid_ep.core.event import EventOverlap
from hybrid_ep.errors import ConfigError
from hybrid_ep.nn.experts import Experts

__all__ = ["Routed", "count_copies", "make_balancer"]


class Routed(NamedTuple):
    """A layer's tokens and weights after balancing.

    Attributes:
        slots: ``[T, K]`` int64: the slot of each copy, for a dispatch to `Balancer.num_slots` slots of each rank.
        weights: for each parameter, ``[slots of this rank, *shape]``; complete once the current stream has waited for
            `ready`.
        ready: of the weights.
    """

    slots: Tensor
    weights: tuple[Tensor, ...]
    ready: EventOverlap


class Balancer(Protocol):
    """A policy.

    Attributes:
        num_slots: of each rank.
    """

    num_slots: int

    def route(self, topk_idx: Tensor, experts: Experts) -> Routed:
        """Maps ``[T, K]`` experts to slots and gives their weights to the slots. Collective."""
        ...


def make_balancer(
    buffer: Buffer,
    num_experts: int,
    balance: ExpertPlacement | str | None,
    *,
    layer: int,
    num_spare: int,
    weight_buffer: Buffer | None,
) -> Balancer:
    """Makes the policy that `balance` names; arguments as of `MoELayer`."""
    if weight_buffer is not None:
        require(isinstance(weight_buffer, Buffer), "weight_buffer", type(weight_buffer).__name__, "a hybrid_ep.Buffer")
        require(weight_buffer is not buffer, "weight_buffer", "the same as buffer", "another buffer of these ranks")
        found, wanted = _ranks_of(weight_buffer), _ranks_of(buffer)
        require(found == wanted, "ranks and ranks per domain of weight_buffer", found, f"{wanted}, as of buffer")
    num_local = num_experts // buffer.group_size
    if balance is None:
        return _AtHome(num_local)
    if isinstance(balance, ExpertPlacement):
        return _Placed(buffer, num_experts, balance, layer, weight_buffer)
    if balance != "online":
        raise ConfigError(f"balance is {balance!r}; allowed: None, an ExpertPlacement or 'online'")
    require_int("num_spare", num_spare, minimum=0)
    return _Online(buffer, num_experts, num_spare, weight_buffer)


def _ranks_of(buffer: Buffer) -> tuple[list[int], int]:
    ranks = [0] if buffer.group is None else dist.get_process_group_ranks(buffer.group)
    return ranks, buffer.grid.num_ranks_per_domain


class _AtHome:
    """No replicas."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots

    def route(self, topk_idx: Tensor, experts: Experts) -> Routed:
        return Routed(topk_idx, experts.weights(), EventOverlap())


class _Placed:
    """A placement that was made before."""

    def __init__(
        self, buffer: Buffer, num_experts: int, placement: ExpertPlacement, layer: int, weight_buffer: Buffer | None
    ) -> None:
        require_int("layer", layer, minimum=0, maximum=placement.num_layers - 1)
        found = (placement.num_experts, placement.num_ranks, placement.num_ranks_per_domain)
        wanted = (num_experts, buffer.group_size, buffer.grid.num_ranks_per_domain)
        require(found == wanted, "experts, ranks and ranks per domain of balance", found, str(wanted))
        self.num_slots = placement.num_slots
        self._buffer, self._layer, self._placement = buffer, layer, placement
        self._weight_buffer = weight_buffer
        self._mapper = placement.on("cpu", buffer.rank)

    def route(self, topk_idx: Tensor, experts: Experts) -> Routed:
        if self._mapper.phy2log.device != topk_idx.device:
            self._mapper = self._placement.on(topk_idx.device, self._buffer.rank)
        mapping = self._mapper.phy2log[self._layer].view(-1, self.num_slots)
        placed, ready = _replicate(self._buffer, self._weight_buffer, mapping, False, experts)
        return Routed(self._mapper.map_topk(self._layer, topk_idx), placed, ready)


class _Online:
    """Replicas for this micro-batch, in spare slots behind the home experts."""

    def __init__(self, buffer: Buffer, num_experts: int, num_spare: int, weight_buffer: Buffer | None) -> None:
        self.num_slots = num_experts // buffer.group_size + num_spare
        self._buffer, self._num_experts, self._num_spare = buffer, num_experts, num_spare
        self._weight_buffer = weight_buffer

    def route(self, topk_idx: Tensor, experts: Experts) -> Routed:
        counts = gather_counts(self._buffer, count_copies(topk_idx, self._num_experts))
        per_domain = self._buffer.grid.num_ranks_per_domain
        plan = plan_online(counts, num_ranks_per_domain=per_domain, num_spare=self._num_spare)
        placed, ready = _replicate(self._buffer, self._weight_buffer, plan.spare, True, experts)
        return Routed(map_online(plan, counts, topk_idx, self._buffer.rank), placed, ready)


def count_copies(topk_idx: Tensor, num_experts: int) -> Tensor:
    """``[T, K]`` experts, none of them −1 → ``[E]`` int64: how often each is named."""
    chosen = topk_idx.flatten()
    return chosen.new_zeros(num_experts).scatter_add_(0, chosen, torch.ones_like(chosen))


def _replicate(
    buffer: Buffer, weight_buffer: Buffer | None, mapping: Tensor, keeps_home: bool, experts: Experts
) -> tuple[tuple[Tensor, ...], EventOverlap]:
    """The weights of all slots, and their event. A buffer of its own moves them on its communication stream.

    Autograd runs the backward pass on the stream of the forward pass, so that gradients go home beside the backward
    pass of the dispatch. Without gradients, replicas go behind the home experts, which need not be copied. With
    gradients, the weights of a forward pass are kept for its backward pass.
    """
    is_apart = weight_buffer is not None
    mover = buffer if weight_buffer is None else weight_buffer
    weights = experts.weights()
    with mover._comm_stream.scope(None, is_apart):
        if keeps_home and not torch.is_grad_enabled():
            num_local = weights[0].shape[0]
            placed: tuple[Tensor, ...] = experts.slots(mapping.shape[1])
            spare, home = [one[num_local:] for one in placed], [one[:num_local] for one in placed]
            copy_weights(mover, spare, home, mapping, 0)
        else:
            placed = _Replicate.apply(mover, mapping, keeps_home, *weights)  # type: ignore[no-untyped-call]
    return placed, mover._comm_stream.finish(None, is_apart, (mapping, *weights, *placed))


class _Replicate(torch.autograd.Function):
    """``[LE, *shape]`` home weights → those of all slots; backwards the gradients of all slots → home."""

    @staticmethod
    def forward(ctx: Any, buffer: Buffer, mapping: Tensor, keeps_home: bool, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.buffer, ctx.keeps_home, ctx.num_local = buffer, keeps_home, weights[0].shape[0]
        ctx.save_for_backward(mapping)
        num_home = ctx.num_local if keeps_home else 0
        placed = tuple(home.new_empty(num_home + mapping.shape[1], *home.shape[1:]) for home in weights)
        for slots, home in zip(placed, weights, strict=True):
            slots[:num_home] = home[:num_home]
            slots[num_home:].zero_()
        copy_weights(buffer, [one[num_home:] for one in placed], [one.contiguous() for one in weights], mapping, 0)
        return placed

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (mapping,) = ctx.saved_tensors
        num_home = ctx.num_local if ctx.keeps_home else 0
        sums = [grad.new_zeros(ctx.num_local, *grad.shape[1:], dtype=torch.float32) for grad in grads]
        for home, grad in zip(sums, grads, strict=True):
            home[:num_home] = grad[:num_home]
        add_gradients(ctx.buffer, [grad[num_home:].float().contiguous() for grad in grads], sums, mapping, 0)
        return None, None, None, *(home.to(grad.dtype) for home, grad in zip(sums, grads, strict=True))
