"""On every rank: a small `MoELayer` learns a synthetic task, so that the loss falls.

Tokens come from clusters, and each cluster has its own linear map to targets: a task that experts can share. The
gradient descent is written out, because an optimizer of torch.optim first loads torch's compiler, for seconds in every
rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep.buffers.v1 import Buffer
from hybrid_ep.demo.settings import Settings
from hybrid_ep.nn import MoELayer

HIDDEN = 64
_FFN_HIDDEN = 128
_NUM_TOKENS = 128
_NUM_CLUSTERS = 8
_CLUSTER_SPREAD = 0.5
_LEARNING_RATE = 0.8
_MOMENTUM = 0.9
_BALANCE_WEIGHT = 1e-2


def train(settings: Settings) -> list[float]:
    """Trains for `settings.num_steps` steps. Collective.

    Returns:
        The mean squared error over all ranks' tokens at each step, as a fraction of the targets' mean square.
    """
    shared = torch.Generator().manual_seed(settings.seed)
    centers = torch.randn(_NUM_CLUSTERS, HIDDEN, generator=shared, device="cpu")
    maps = torch.randn(_NUM_CLUSTERS, HIDDEN, HIDDEN, generator=shared, device="cpu") / HIDDEN**0.5
    own = torch.Generator().manual_seed((settings.seed << 20) + dist.get_rank())
    cluster = torch.randint(_NUM_CLUSTERS, (_NUM_TOKENS,), generator=own, device="cpu")
    x = centers[cluster] + _CLUSTER_SPREAD * torch.randn(_NUM_TOKENS, HIDDEN, generator=own, device="cpu")
    target = torch.einsum("th,tgh->tg", x, maps[cluster])

    losses = []
    with Buffer(num_ranks_per_domain=settings.num_ranks_per_domain) as buffer:
        layer = MoELayer(
            buffer,
            hidden=HIDDEN,
            ffn_hidden=_FFN_HIDDEN,
            num_experts=settings.num_experts,
            topk=settings.num_topk,
            seed=settings.seed,
        )
        velocities = [torch.zeros_like(parameter) for parameter in layer.parameters()]
        scale = target.square().mean()
        for _ in range(settings.num_steps):
            layer.zero_grad()
            loss = (layer(x) - target).square().mean() / scale
            (loss + _BALANCE_WEIGHT * layer.balance_loss).backward()
            layer.sync_router_gradients()
            _descend(list(layer.parameters()), velocities)
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(total.item() / dist.get_world_size())
    return losses


def _descend(parameters: list[torch.nn.Parameter], velocities: list[Tensor]) -> None:
    """One step of gradient descent with momentum."""
    with torch.no_grad():
        for parameter, velocity in zip(parameters, velocities, strict=True):
            if parameter.grad is not None:
                velocity.mul_(_MOMENTUM).add_(parameter.grad)
                parameter.sub_(velocity, alpha=_LEARNING_RATE)
