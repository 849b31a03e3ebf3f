"""`MoELayer`: a router, this rank's experts, and dispatch and combine between them. A small layer that trains, alone
and under DDP, FSDP2 and `torch.compile`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hybrid_ep.balance.placement import ExpertPlacement
from hybrid_ep.buffers.v1 import Buffer
from hybrid_ep.checks import MAX_INT, MAX_TOPK, require, require_int
from hybrid_ep.core.checks import is_known_to_dynamo, require_plain, require_traceable
from hybrid_ep.errors import ConfigError
from hybrid_ep.nn.experts import Experts
from hybrid_ep.nn.modules import MoECombine, MoEDispatch, MoEGroupedDispatch, require_buffer
from hybrid_ep.nn.replicas import make_balancer


class MoELayer(nn.Module):
    """Top-k mixture of two-layer GELU experts, spread over the ranks of a buffer.

    The router is the same on every rank: give every rank the same seed for it (`seed`), and call
    `sync_router_gradients` after the backward pass, or wrap the model in `DistributedDataParallel`. Experts belong to
    one rank each, and their parameters are DTensors where there is more than one rank. All gradients are those of the
    mean over ranks of the ranks' losses. Parameters are made float32; tokens cross in bf16.

    Args:
        buffer: moves the tokens.
        hidden: H.
        ffn_hidden: width inside an expert.
        num_experts: E, a multiple of the ranks.
        topk: K.
        seed: of the initial weights; expert e is the same whatever the number of ranks.
        balance: None: each expert is on its home rank alone. A placement: its replicas, whose weights are
            fetched in each forward pass. ``"online"``: replicas for each micro-batch, planned from its routing; the
            same on all ranks. Parameters are those of home experts with every policy.
        layer: of the placement.
        num_spare: B, spare slots of each rank for ``"online"``; as many as it has experts balance every routing.
        tolerance: ε for ``"online"``, 0 … 10⁶: a rank may receive (1 + ε) times the mean of its domain. Replicas are
            made for copies beyond that. A small tolerance saves copies of experts that take longer than they gain.
        weight_buffer: another buffer of the same ranks, which moves the weights of replicas on its communication
            stream while `buffer` dispatches, and their gradients during the backward pass of the dispatch. None:
            `buffer` moves them, before the dispatch.
        mesh: a DeviceMesh of one dimension and the buffer's ranks, for the experts' DTensors; None = one is made. Give
            ``mesh["ep"]`` of a larger mesh where `fully_shard` shards the experts over another dimension of it.
        num_rows: > 0: at most so many copies of tokens arrive at a rank, one for each of a token's experts there. No
            shape depends on the routing then, as `torch.compile(fullgraph=True)` needs, and on the cuda engine the
            forward pass never waits for the GPU. With S tokens on the most loaded rank, S × K × (1 + ε) is enough for
            ``"online"`` in one domain with as many spare slots as experts; S × K × ranks always is.

    Attributes:
        router: ``[E, H]``, a parameter.
        experts: an `Experts`, with the parameters `up` and `down`.
        balance_loss: of the last forward: E × Σ (share of tokens × mean probability), 1 when balanced (source: Switch
            Transformers, equation 4).

    Raises:
        ConfigError: an argument does not fit.

    Example:
        >>> with hybrid_ep.Buffer(None) as buffer:
        ...     layer = hybrid_ep.nn.MoELayer(buffer, hidden=16, ffn_hidden=32, num_experts=4, topk=2)
        ...     layer(torch.ones(2, 3, 16)).sum().backward()
        >>> layer.experts.up.grad.shape
        torch.Size([4, 32, 16])
    """

    balance_loss: Tensor

    def __init__(
        self,
        buffer: Buffer,
        *,
        hidden: int,
        ffn_hidden: int,
        num_experts: int,
        topk: int,
        seed: int = 0,
        balance: ExpertPlacement | str | None = None,
        layer: int = 0,
        num_spare: int = 2,
        tolerance: float = 0.0,
        weight_buffer: Buffer | None = None,
        mesh: DeviceMesh | None = None,
        num_rows: int = 0,
    ) -> None:
        super().__init__()
        require_buffer(buffer)
        require_int("num_rows", num_rows, minimum=0)
        require_int("seed", seed, minimum=-MAX_INT)
        require_int("hidden", hidden, minimum=1)
        require_int("ffn_hidden", ffn_hidden, minimum=1)
        require_int("num_experts", num_experts, minimum=1, multiple_of=buffer.group_size)
        limit = min(MAX_TOPK, num_experts)
        require(require_int("topk", topk, minimum=1) <= limit, "topk", topk, f"1 … {limit}")
        self.buffer, self.hidden, self.num_experts, self.topk = buffer, hidden, num_experts, topk
        self._balance_is_off = balance is None
        self._balancer = make_balancer(
            buffer,
            num_experts,
            balance,
            layer=layer,
            num_spare=num_spare,
            tolerance=tolerance,
            weight_buffer=weight_buffer,
        )
        num_slots = self._balancer.num_slots
        self.dispatch: MoEDispatch | MoEGroupedDispatch
        if num_rows:
            self.dispatch = MoEGroupedDispatch(buffer, num_slots * buffer.group_size, num_rows)
        else:
            self.dispatch = MoEDispatch(buffer, num_slots * buffer.group_size)
        self.combine = MoECombine(buffer)
        self.router = nn.Parameter(_normal(seed, (num_experts, hidden), hidden))
        num_local = num_experts // buffer.group_size
        mine = range(buffer.rank * num_local, (buffer.rank + 1) * num_local)
        up = torch.stack([_normal(seed + 1 + e, (ffn_hidden, hidden), hidden) for e in mine])
        down = torch.stack([_normal(-seed - 1 - e, (hidden, ffn_hidden), ffn_hidden) for e in mine])
        self.experts = Experts(buffer, up, down, mesh=mesh)

    def __getstate__(self) -> dict[str, Any]:
        # deepcopy refuses tensors with an autograd graph, and the balance loss has one.
        return {name: value for name, value in self.__dict__.items() if name != "balance_loss"}

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer to ``[…, H]`` tokens of this rank; returns the same shape and dtype. Collective.

        Tokens are float32, bf16 or float16, and cross in bf16. The router computes in float32 (float64 if its weights
        are), experts in the dtype of their weights, or that of autocast.

        Raises:
            ConfigError: dtype or hidden does not fit.
            OverflowError: more than `num_rows` copies arrived at any rank; on the cuda engine inside a domain from a
                later call of the buffer.
            TimeoutError, TransportError: a rank was lost.
        """
        allowed = (torch.float32, torch.bfloat16, torch.float16)
        if not is_known_to_dynamo(x):
            require_plain("x", x, traced=True)
        if x.dim() < 2 or x.dtype not in allowed:
            require_traceable("x (whose rows cross in bf16)", x, dtypes=allowed, shape=(None, self.hidden))
        tokens = x.reshape(-1, x.shape[-1])
        require_traceable("x", tokens, dtypes=allowed, shape=(None, self.hidden))
        topk_idx, topk_weights = self.route(tokens)
        rows = tokens.to(torch.bfloat16).contiguous()
        if self._balance_is_off:
            received = self.dispatch(rows, topk_idx, topk_weights)
            computed = self.experts(received)
        else:
            # A compiled layer has a graph break here. What follows is compiled: its shapes do not depend on the plan.
            routed = torch.compiler.disable(self._balancer.route)(topk_idx, self.experts)
            received = self.dispatch(rows, routed.slots, topk_weights)
            routed.ready.current_stream_wait()
            computed = self.experts(received, *routed.weights)
            if computed.requires_grad:
                computed.register_hook(lambda _: routed.restore())  # before the experts' backward pass
        combined: Tensor = self.combine(computed, received.handle)
        return combined.to(x.dtype).view(x.shape)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Routes ``[T, H]`` tokens, and sets `balance_loss`. Local. Gradients flow through the weights and the loss.

        Returns:
            Top-k experts ``[T, K]`` int64 and their weights ``[T, K]`` float32, which sum to 1 for each token.
        """
        precise = torch.promote_types(self.router.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            probs = F.softmax(F.linear(x.to(precise), self.router.to(precise)), dim=-1)
            weights, topk_idx = probs.topk(self.topk, dim=-1)
            chosen = topk_idx.flatten()
            count = probs.new_zeros(self.num_experts).scatter_add(0, chosen, torch.ones_like(chosen, dtype=precise))
            num_tokens = max(1, x.shape[0])
            self.balance_loss = self.num_experts * (count / (num_tokens * self.topk) * probs.sum(0) / num_tokens).sum()
            return topk_idx, (weights / weights.sum(-1, keepdim=True)).float()

    def sync_router_gradients(self) -> None:
        """Averages the router's gradient over the ranks. Collective; call it between backward and the optimizer's
        step. A rank without a gradient counts as zero, and gets the average.

        Gradients of experts need no such call: they come from the tokens of all ranks, and have the same scale.
        `DistributedDataParallel` averages the router's gradient itself, and so does `fully_shard` over these ranks.

        Raises:
            ConfigError: `fully_shard` has sharded the router over ranks of the buffer.
            TimeoutError, TransportError: a rank was lost, or did not come within the buffer's `timeout_s`.
        """
        if self.router.grad is None:
            self.router.grad = torch.zeros_like(self.router)
        grad: Tensor = self.router.grad
        if isinstance(grad, DTensor):
            shared = set(grad.device_mesh.mesh.flatten().tolist()) & set(self.experts.ranks)
            if len(shared) > 1:
                raise ConfigError(
                    f"the router is sharded over ranks {sorted(shared)} of the buffer; allowed: no call of "
                    "sync_router_gradients, because fully_shard averages the gradient"
                )
            grad = grad.to_local()
        grad.copy_(self.buffer.engine.sum_over_ranks(grad) / self.buffer.group_size)


def _normal(seed: int, shape: tuple[int, int], fan_in: int) -> Tensor:
    """The same weights on every device; on torch's default device, as of any module."""
    generator = torch.Generator().manual_seed(seed % (1 << 63))
    weights: Tensor = torch.randn(shape, generator=generator, device="cpu") / fan_in**0.5
    return weights.to(torch.get_default_device())
