"""Replicas of experts inside a layer: where a layer's tokens go, and the weights that are there.

Weights of replicas are fetched in each forward pass, because the optimiser has changed them since the last. Backward
sends the gradients of replicas home. So parameters, optimiser state and checkpoints are those of home experts alone.
"""

from __future__ import annotations

from collections.abc import Callable
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
        restore: fetches these weights again if a later forward pass has overwritten them; called before the backward
            pass uses them. Collective.
    """

    slots: Tensor
    weights: tuple[Tensor, ...]
    ready: EventOverlap
    restore: Callable[[], None] = lambda: None


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
        self._mover, self._is_apart = weight_buffer or buffer, weight_buffer is not None
        self._mapper = placement.on("cpu", buffer.rank)

    def route(self, topk_idx: Tensor, experts: Experts) -> Routed:
        if self._mapper.phy2log.device != topk_idx.device:
            self._mapper = self._placement.on(topk_idx.device, self._buffer.rank)
        mapping = self._mapper.phy2log[self._layer].view(-1, self.num_slots)
        weights = experts.weights()
        with self._mover._comm_stream.scope(None, self._is_apart):
            placed = [home.new_zeros(self.num_slots, *home.shape[1:]) for home in weights]
            copy_weights(self._mover, placed, [home.contiguous() for home in weights], mapping, 0)
            # Autograd runs the backward pass on the same stream: gradients go home beside that of the dispatch.
            placed = _Placement.apply(self._mover, mapping, 0, placed, *weights)  # type: ignore[no-untyped-call]
        ready = self._mover._comm_stream.finish(None, self._is_apart, (mapping, *weights, *placed))
        return Routed(self._mapper.map_topk(self._layer, topk_idx), tuple(placed), ready)


class _Online:
    """Replicas for this micro-batch, in spare slots behind the home experts."""

    def __init__(self, buffer: Buffer, num_experts: int, num_spare: int, weight_buffer: Buffer | None) -> None:
        self.num_slots = num_experts // buffer.group_size + num_spare
        self._buffer, self._num_experts, self._num_spare = buffer, num_experts, num_spare
        self._mover, self._is_apart = weight_buffer or buffer, weight_buffer is not None

    def route(self, topk_idx: Tensor, experts: Experts) -> Routed:
        counts = gather_counts(self._buffer, count_copies(topk_idx, self._num_experts))
        per_domain = self._buffer.grid.num_ranks_per_domain
        plan = plan_online(counts, num_ranks_per_domain=per_domain, num_spare=self._num_spare)
        replicas = _Replicas(self._mover, self._is_apart, plan.spare, experts)
        placed, ready = replicas.fetch()
        slots = map_online(plan, counts, topk_idx, self._buffer.rank)
        return Routed(slots, placed, ready, replicas.restore)


def count_copies(topk_idx: Tensor, num_experts: int) -> Tensor:
    """``[T, K]`` experts, none of them −1 → ``[E]`` int64: how often each is named."""
    chosen = topk_idx.flatten()
    return chosen.new_zeros(num_experts).scatter_add_(0, chosen, torch.ones_like(chosen))


class _Replicas:
    """The replicas of one forward pass. They lie behind the home experts in one memory, so no home expert is copied.

    The next forward pass writes its replicas to the same memory. If it runs before the backward pass of this one, this
    backward pass fetches its replicas again. All ranks make their passes in the same order, so they fetch together.

    Args:
        mover: moves the weights.
        is_apart: whether it does so on its communication stream.
        mapping: ``[R, B]`` int64: the expert in each spare slot, or −1.
        experts: of this rank.
    """

    def __init__(self, mover: Buffer, is_apart: bool, mapping: Tensor, experts: Experts) -> None:
        self._mover, self._is_apart, self._mapping, self._experts = mover, is_apart, mapping, experts
        self._memory = experts.slots(mapping.shape[1])
        self._mark, self._versions = object(), _versions_of(experts)

    def fetch(self) -> tuple[tuple[Tensor, ...], EventOverlap]:
        """The weights of all slots, and their event. Collective."""
        weights = self._experts.weights()
        num_local = weights[0].shape[0]
        with self._mover._comm_stream.scope(None, self._is_apart):
            self._copy(num_local)
            # Autograd must not take what a later pass writes for a change of these weights.
            placed = [one.data for one in self._memory]
            placed = _Placement.apply(self._mover, self._mapping, num_local, placed, *weights)  # type: ignore[no-untyped-call]
        return tuple(placed), self._finish()

    def restore(self) -> None:
        """Fetches the replicas again if others are in the slots. Collective.

        Raises:
            ConfigError: a weight has changed since the forward pass.
        """
        # Autograd does not see it: the memory is written by other passes, and DTensors count their changes themselves.
        if _versions_of(self._experts) != self._versions:
            raise ConfigError(
                "the experts' weights are other ones than in the forward pass; allowed: to change them, as an "
                "optimizer's step does, after the backward pass"
            )
        if self._experts.mark_of_spare is self._mark:
            return
        with self._mover._comm_stream.scope(None, self._is_apart):
            self._copy(self._memory[0].shape[0] - self._mapping.shape[1])
        self._finish().current_stream_wait()

    def _copy(self, num_local: int) -> None:
        spare, home = [one[num_local:] for one in self._memory], [one[:num_local] for one in self._memory]
        copy_weights(self._mover, spare, home, self._mapping, 0)
        self._experts.mark_of_spare = self._mark

    def _finish(self) -> EventOverlap:
        return self._mover._comm_stream.finish(None, self._is_apart, (self._mapping, *self._memory))


def _versions_of(experts: Experts) -> list[int]:
    return [parameter._version for parameter in experts.parameters()]


class _Placement(torch.autograd.Function):
    """Gives ``[LE, *shape]`` home weights the gradients of all slots.

    Forward returns `placed`, the weights of all slots, of which the first `num_home` are the home weights themselves.
    """

    @staticmethod
    def forward(
        ctx: Any, buffer: Buffer, mapping: Tensor, num_home: int, placed: list[Tensor], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.buffer, ctx.num_home, ctx.num_local = buffer, num_home, weights[0].shape[0]
        ctx.save_for_backward(mapping)
        return tuple(placed)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (mapping,), num_home = ctx.saved_tensors, ctx.num_home
        sums = [grad.new_zeros(ctx.num_local, *grad.shape[1:], dtype=torch.float32) for grad in grads]
        for home, grad in zip(sums, grads, strict=True):
            home[:num_home] = grad[:num_home]
        add_gradients(ctx.buffer, [grad[num_home:].float().contiguous() for grad in grads], sums, mapping, 0)
        return None, None, None, None, *(home.to(grad.dtype) for home, grad in zip(sums, grads, strict=True))
