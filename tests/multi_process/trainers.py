"""A model with a `MoELayer`, the same mixture on one process in float64, and what trainers do with it on each rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import hybrid_ep
from hybrid_ep.nn import MoELayer, clip_grad_norm_, expert_parameters

HIDDEN, WIDTH, EXPERTS, TOPK, TOKENS = 32, 48, 8, 2, 12


class Model(nn.Module):
    """A dense layer and a mixture."""

    def __init__(self, buffer: hybrid_ep.Buffer, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(HIDDEN, HIDDEN)
        sizes = {"hidden": HIDDEN, "ffn_hidden": WIDTH, "num_experts": EXPERTS, "topk": TOPK, "seed": 3}
        self.moe = MoELayer(buffer, **sizes, **options)  # type: ignore[arg-type]
        self.to(here())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.inner(x))


def here() -> str:
    """The device type of this process's rank."""
    return "cuda" if dist.is_initialized() and torch.cuda.is_initialized() else "cpu"


def tokens(rank: int) -> Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(50 + rank)).to(here())


def loss_of(y: Tensor, rank: int) -> Tensor:
    pull = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(90 + rank)).to(y.device)
    return (y.view(TOKENS, HIDDEN).to(torch.promote_types(y.dtype, torch.float32)) * pull).sum()


def dense(num_ranks: int) -> dict[str, Tensor]:
    """Gradients of the mean over ranks of the ranks' losses, and all outputs as ``y``; on one process in float64."""
    with hybrid_ep.Buffer(None) as alone:
        model = Model(alone).double()
    outputs, losses = [], []
    for rank in range(num_ranks):
        x = tokens(rank).double()
        inner = model.inner(x)
        weights, topk_idx = F.softmax(inner @ model.moe.router.t(), dim=-1).topk(TOPK, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        up, down = model.moe.experts.up, model.moe.experts.down
        each = torch.stack([F.gelu(inner @ up[e].t()) @ down[e].t() for e in range(EXPERTS)])
        y = x + (each[topk_idx, torch.arange(TOKENS).unsqueeze(1)] * weights.unsqueeze(-1)).sum(1)
        outputs.append(y.detach())
        losses.append(loss_of(y, rank))
    torch.stack(losses).mean().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"y": torch.cat(outputs), **grads}  # type: ignore[dict-item]


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded. Collective."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    if tensor.is_cuda and dist.get_backend() == "gloo":  # which gathers CPU memory only
        shard = tensor.to_local().detach().cpu()
        shards = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, shard)
        return torch.cat(shards)
    return tensor.full_tensor().detach()


def gradients(model: nn.Module, y: Tensor) -> dict[str, Tensor]:
    """What a rank gives back: its outputs and the whole gradients, under the names of `Model`."""
    grads = {name.removeprefix("module."): whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {name: tensor.cpu() for name, tensor in {"y": y.detach().view(TOKENS, HIDDEN), **grads}.items()}


def average_by_hand(model: Model) -> None:
    """What a loop without a wrapper does."""
    model.moe.sync_router_gradients()
    for parameter in model.inner.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def by_hand(buffer: hybrid_ep.Buffer) -> dict[str, Tensor]:
    model = Model(buffer)
    y = model(tokens(dist.get_rank()))
    loss_of(y, dist.get_rank()).backward()
    average_by_hand(model)
    return gradients(model, y)


def in_three_dimensions(buffer: hybrid_ep.Buffer) -> dict[str, Tensor]:
    model = Model(buffer)
    y = model(tokens(dist.get_rank()).view(3, -1, HIDDEN))
    assert y.shape == (3, TOKENS // 3, HIDDEN)
    loss_of(y, dist.get_rank()).backward()
    average_by_hand(model)
    return gradients(model, y)


def plain_ddp(buffer: hybrid_ep.Buffer) -> dict[str, Tensor]:
    model = DistributedDataParallel(Model(buffer))
    y = model(tokens(dist.get_rank()))
    loss_of(y, dist.get_rank()).backward()
    return gradients(model, y)


def ddp_of_the_layer(buffer: hybrid_ep.Buffer) -> dict[str, Tensor]:
    model = Model(buffer)
    wrapped = DistributedDataParallel(model.moe)
    y = tokens(dist.get_rank()) + wrapped(model.inner(tokens(dist.get_rank())))
    loss_of(y, dist.get_rank()).backward()
    average_by_hand(model)
    return gradients(model, y)


def fsdp_without_experts(buffer: hybrid_ep.Buffer) -> dict[str, Tensor]:
    model = Model(buffer)
    mesh = init_device_mesh(here(), (dist.get_world_size(),))
    fully_shard(model, mesh=mesh, ignored_params=set(expert_parameters(model).values()))
    y = model(tokens(dist.get_rank()))
    loss_of(y, dist.get_rank()).backward()
    return gradients(model, y)


def fsdp_over_replicas(buffer: hybrid_ep.Buffer) -> dict[str, Tensor]:
    """Two groups of two ranks: experts are spread within a group, and sharded over the two groups."""
    world = dist.get_world_size()
    mesh = init_device_mesh(here(), (world // 2, 2), mesh_dim_names=("replica", "ep"))
    with hybrid_ep.Buffer(mesh["ep"].get_group()) as own:
        model = Model(own, mesh=mesh["ep"])
        fully_shard(model.moe.experts, mesh=mesh["replica"])
        fully_shard(model, mesh=init_device_mesh(here(), (world,)))
        y = model(tokens(dist.get_rank()))
        loss_of(y, dist.get_rank()).backward()
        return gradients(model, y)


def under_checkpoint(buffer: hybrid_ep.Buffer, how: str) -> dict[str, Tensor]:
    """Plain activation checkpointing dispatches again in the backward pass; selective may keep the calls' results."""
    model, x = Model(buffer), tokens(dist.get_rank()).requires_grad_()
    options: dict[str, Any] = {"use_reentrant": how == "reentrant"}
    kept = torch.ops.hybrid_ep.dispatch.default, torch.ops.hybrid_ep.combine.default

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    if how == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    y = checkpoint(model, x, **options)
    forward = buffer.traffic.within_domain
    loss_of(y, dist.get_rank()).backward()
    backward = buffer.traffic.within_domain - forward
    # Backward itself moves as many rows as forward does; a plain checkpoint dispatches again on top.
    assert (backward > 1.3 * forward) == (how != "selective"), (forward, backward)
    average_by_hand(model)
    return gradients(model, y)


def compiled(buffer: hybrid_ep.Buffer, backend: str) -> dict[str, Tensor]:
    model = Model(buffer, num_rows=TOKENS * TOPK * dist.get_world_size())
    y = torch.compile(model, fullgraph=True, backend=backend)(tokens(dist.get_rank()))
    loss_of(y, dist.get_rank()).backward()
    average_by_hand(model)
    return gradients(model, y)


def in_dtype(buffer: hybrid_ep.Buffer, dtype: torch.dtype) -> dict[str, Tensor]:
    model = Model(buffer).to(dtype)
    y = model(tokens(dist.get_rank()).to(dtype))
    assert y.dtype == dtype
    loss_of(y, dist.get_rank()).backward()
    average_by_hand(model)
    return gradients(model, y)


def under_autocast(buffer: hybrid_ep.Buffer) -> dict[str, Tensor]:
    model = Model(buffer)
    with torch.autocast(here(), torch.bfloat16):
        y = model(tokens(dist.get_rank()))
    loss_of(y, dist.get_rank()).backward()
    average_by_hand(model)
    return gradients(model, y)


def on_each_rank(trainer: Callable[..., dict[str, Tensor]], *args: Any) -> dict[str, Tensor]:
    with hybrid_ep.Buffer() as buffer:
        return trainer(buffer, *args)


def exported() -> float:
    """The largest difference between the exported layer and the layer."""
    with hybrid_ep.Buffer() as buffer, torch.no_grad():
        model, x = Model(buffer, num_rows=TOKENS * TOPK * dist.get_world_size()), tokens(dist.get_rank())
        program = torch.export.export(model, (x,), strict=False)
        called = [node.target for node in program.graph.nodes]
        assert torch.ops.hybrid_ep.dispatch_grouped.default in called
        assert torch.ops.hybrid_ep.combine.default in called
        other = tokens(7 + dist.get_rank())
        return float((program.module()(other) - model(other)).abs().max())


def clipped(max_norm: float) -> dict[str, Tensor]:
    """The norm before, and the gradients after."""
    with hybrid_ep.Buffer() as buffer:
        model = Model(buffer)
        y = model(tokens(dist.get_rank()))
        loss_of(y, dist.get_rank()).backward()
        average_by_hand(model)
        norm = clip_grad_norm_(model.parameters(), max_norm)
        return {"norm": norm, **gradients(model, y)}


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def save(folder: str) -> dict[str, Tensor]:
    """A step of Adam, then a distributed checkpoint; gives back the whole parameters."""
    with hybrid_ep.Buffer() as buffer:
        model = Model(buffer)
        optimizer = _adam(model)
        loss_of(model(tokens(dist.get_rank())), dist.get_rank()).backward()
        average_by_hand(model)
        optimizer.step()
        states = get_state_dict(model, optimizer)
        dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=folder)
        return _states(model, optimizer)


def load(folder: str) -> dict[str, Tensor]:
    """The same from a checkpoint, whatever the number of ranks that saved it."""
    with hybrid_ep.Buffer() as buffer:
        model = Model(buffer)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        optimizer = _adam(model)
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return _states(model, optimizer)


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = whole(parameter)
        found[f"{name}: exp_avg"] = whole(optimizer.state[parameter]["exp_avg"])
    return found
