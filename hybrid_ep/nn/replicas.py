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

from hybrid_ep.balance.online import map_online, plan_online, require_tolerance
from hybrid_ep.balance.placement import ExpertPlacement
from hybrid_ep.buffers.expert_moves import (
    CountExchange,
    ReplicaRoutes,
    add_gradients,
    copy_weights,
    route_replicas,
)
from hybrid_ep.buffers.v1 import Buffer
from hybrid_ep.checks import require, require_int
from hybrid_ep.core.event import EventOverlap
from hybrid_ep.core.streams import is_capturing
from hybrid_ep.errors import ConfigError
from hybrid_ep.nn.experts import Experts


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
    tolerance: float,
    weight_buffer: Buffer | None,
) -> Balancer:
    """Makes the policy that `balance` names; arguments as in `MoELayer`."""
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
    require_tolerance(tolerance)
    return _Online(buffer, num_experts, num_spare, tolerance, weight_buffer)


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
        mapping = self._mapper.phy2log[layer].view(-1, self.num_slots)
        self._num_local, self._mapping = num_experts // buffer.group_size, mapping.tolist()
        self._routes = route_replicas(self._mover, mapping, self._num_local)

    def _routes_on(self, device: torch.device) -> ReplicaRoutes:
        """The routes on the device of the tokens; made on the current stream, where they are used."""
        if self._routes.sent.device != device:
            mapping = self._mapper.phy2log[self._layer].view(-1, self.num_slots)
            self._routes = route_replicas(self._mover, mapping, self._num_local)
        return self._routes

    def route(self, topk_idx: Tensor, experts: Experts) -> Routed:
        if self._mapper.phy2log.device != topk_idx.device:
            self._mapper = self._placement.on(topk_idx.device, self._buffer.rank)
        weights = experts.weights()
        with self._mover._comm_stream.scope(None, self._is_apart):
            placed = [home.new_zeros(self.num_slots, *home.shape[1:]) for home in weights]
            mapping = self._mapper.phy2log[self._layer].view(-1, self.num_slots)
            copy_weights(self._mover, mapping, placed, [home.contiguous() for home in weights])
            routes = self._routes_on(topk_idx.device)
            # Autograd runs the backward pass on the same stream: gradients go home beside that of the dispatch.
            placed = _Placement.apply(self._mover, routes, lambda: self._mapping, 0, placed, *weights)  # type: ignore[no-untyped-call]
        ready = self._mover._comm_stream.finish(None, self._is_apart, (*weights, *placed))
        return Routed(self._mapper.map_topk(self._layer, topk_idx), tuple(placed), ready)


class _Online:
    """Replicas for this micro-batch, in spare slots behind the home experts."""

    def __init__(
        self, buffer: Buffer, num_experts: int, num_spare: int, tolerance: float, weight_buffer: Buffer | None
    ) -> None:
        self.num_slots = num_experts // buffer.group_size + num_spare
        self._buffer, self._num_spare, self._tolerance = buffer, num_spare, tolerance
        self._counts = CountExchange(buffer, num_experts)
        self._mover, self._is_apart = weight_buffer or buffer, weight_buffer is not None

    def route(self, topk_idx: Tensor, experts: Experts) -> Routed:
        counts = self._counts.gather(topk_idx)
        per_domain = self._buffer.grid.num_ranks_per_domain
        plan = plan_online(
            counts, num_ranks_per_domain=per_domain, num_spare=self._num_spare, tolerance=self._tolerance
        )
        replicas = _Replicas(self._mover, self._is_apart, plan.spare, experts)
        placed, ready = replicas.fetch()
        slots = map_online(plan, counts, topk_idx, self._buffer.rank)
        return Routed(slots, placed, ready, replicas.restore)


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
        self._memory = experts.slots(mapping.shape[1], mover)
        self._num_local = self._memory[0].shape[0] - mapping.shape[1]
        self._home = [one[: self._num_local] for one in self._memory]
        self._spare = [one[self._num_local :] for one in self._memory]
        self._mark, self._versions = object(), _versions_of(experts)

    def fetch(self) -> tuple[tuple[Tensor, ...], EventOverlap]:
        """The weights of all slots, and their event. Collective."""
        weights = self._experts.weights()
        with self._mover._comm_stream.scope(None, self._is_apart):
            self._copy()
            read_mapping, routes = None, None
            if torch.is_grad_enabled():
                read_mapping = _OnHost(self._mapping).read
                routes = route_replicas(self._mover, self._mapping, self._num_local)
            # Autograd must not take what a later pass writes for a change of these weights.
            placed = [one.data for one in self._memory]
            placed = _Placement.apply(  # type: ignore[no-untyped-call]
                self._mover, routes, read_mapping, self._num_local, placed, *weights
            )
        return tuple(placed), self._finish()

    def restore(self) -> None:
        """Fetches the replicas again if others are in the slots. Collective.

        Raises:
            ConfigError: a weight has changed since the forward pass.
        """
        # Autograd sees no such change: other passes write the memory, and DTensors count their own changes.
        if _versions_of(self._experts) != self._versions:
            raise ConfigError(
                "the experts' weights have changed since the forward pass; allowed: to change them, as an optimizer's "
                "step does, after the backward pass"
            )
        if self._experts.mark_of_spare is self._mark:
            return
        with self._mover._comm_stream.scope(None, self._is_apart):
            self._copy()
        self._finish().current_stream_wait()

    def _copy(self) -> None:
        copy_weights(self._mover, self._mapping, self._spare, self._home)
        self._experts.mark_of_spare = self._mark

    def _finish(self) -> EventOverlap:
        return self._mover._comm_stream.finish(None, self._is_apart, (self._mapping, *self._memory))


def _versions_of(experts: Experts) -> list[int]:
    return [experts.num_moves, *(parameter._version for parameter in experts.parameters())]


class _OnHost:
    """A small tensor that is copied to the host. The host waits for the copy when it reads the tensor.

    Args:
        tensor: written on the current stream. In a CUDA graph the copy begins when it is read.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._event = tensor, None
        if tensor.is_cuda and not is_capturing(tensor.device.index):
            self._tensor, self._event = tensor.to("cpu", non_blocking=True), torch.cuda.Event()
            self._event.record()

    def read(self) -> list[list[int]]:
        if self._event is not None:
            self._event.synchronize()
        values: list[list[int]] = self._tensor.tolist()
        return values


class _Placement(torch.autograd.Function):
    """Gives ``[LE, *shape]`` home weights the gradients of all slots.

    Forward returns `placed`, the weights of all slots, of which the first `num_home` are the home weights themselves.
    """

    @staticmethod
    def forward(
        ctx: Any,
        buffer: Buffer,
        routes: ReplicaRoutes | None,
        read_mapping: Callable[[], list[list[int]]] | None,
        num_home: int,
        placed: list[Tensor],
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.buffer, ctx.routes, ctx.read_mapping, ctx.num_home = buffer, routes, read_mapping, num_home
        ctx.num_local = weights[0].shape[0]
        return tuple(placed)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        num_home = ctx.num_home
        if num_home:
            sums = [grad[:num_home].to(torch.float32, copy=True) for grad in grads]
        else:
            sums = [grad.new_zeros(ctx.num_local, *grad.shape[1:], dtype=torch.float32) for grad in grads]
        replicas = [grad[num_home:].contiguous() for grad in grads]
        add_gradients(ctx.buffer, ctx.routes, ctx.read_mapping(), replicas, sums)
        return *[None] * 5, *(home.to(grad.dtype) for home, grad in zip(sums, grads, strict=True))
