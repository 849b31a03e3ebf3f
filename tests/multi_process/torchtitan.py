"""Experts as TorchTitan shards them: a `ParallelStyle` on the mesh of their group, then FSDP2 over its replicas."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

import hybrid_ep
from benchmarks.consumer_functions import PermutingCombine, PermutingDispatch
from hybrid_ep.nn import MoELayer
from tests.multi_process.trainers import EXPERTS, HIDDEN, TOKENS, TOPK, Model, gradients, here, loss_of, tokens, whole


class Experts(nn.Module):
    """All experts; those of this rank, once their weights are DTensors."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(whole(weight).clone()) for weight in (source.up, source.down))

    def forward(self, rows: Tensor, probs: Tensor, counts: Tensor) -> Tensor:
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        blocks = rows.to(up.dtype).split(counts.tolist())
        outputs = [F.linear(F.gelu(F.linear(block, up[e])), down[e]) for e, block in enumerate(blocks)]
        return (torch.cat(outputs) * probs.unsqueeze(1)).to(rows.dtype)


class ExpertParallel(ParallelStyle):
    """Shards the experts over a mesh, dispatches what goes into them and combines what comes out."""

    def __init__(self, buffer: hybrid_ep.HybridEPBuffer) -> None:
        super().__init__()
        self.buffer = buffer

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._shard, self._dispatch, self._combine)  # type: ignore[arg-type]

    def _shard(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, weight in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])))

    def _dispatch(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        rows, probs, counts, self.handle = PermutingDispatch.apply(*inputs, False, self.buffer)  # type: ignore[no-untyped-call]
        return rows, probs, counts

    def _combine(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        return PermutingCombine.apply(outputs, self.handle, False, self.buffer)  # type: ignore[no-untyped-call]


class Mixture(nn.Module):
    """Router and experts."""

    def __init__(self, source: MoELayer) -> None:
        super().__init__()
        self.router = nn.Parameter(whole(source.router).clone())
        self.experts = Experts(source.experts)

    def forward(self, x: Tensor) -> Tensor:
        weights, topk_idx = F.softmax(x @ self.router.t(), dim=-1).topk(TOPK, dim=-1)
        routing_map = torch.zeros(len(x), EXPERTS, dtype=torch.bool, device=x.device).scatter(1, topk_idx, True)
        probs = torch.zeros(len(x), EXPERTS, device=x.device).scatter(1, topk_idx, weights / weights.sum(-1, True))
        y: Tensor = self.experts(x.bfloat16(), routing_map, probs)
        return y.to(x.dtype)


def sharded_experts(buffer: hybrid_ep.Buffer) -> dict[str, Tensor]:
    """Groups of two ranks have all experts; each expert's weights are sharded again over the groups."""
    world = dist.get_world_size()
    model = Model(buffer)
    model.moe = Mixture(model.moe)  # type: ignore[assignment]
    mesh = init_device_mesh(here(), (world // 2, 2), mesh_dim_names=("replica", "ep"))
    with hybrid_ep.HybridEPBuffer(mesh["ep"].get_group(), HIDDEN, TOKENS, EXPERTS // 2) as own:
        parallelize_module(model.moe.experts, mesh["ep"], ExpertParallel(own))
        experts = fully_shard(model.moe.experts, mesh=mesh["replica"])
        experts.set_gradient_divide_factor(world)  # a gradient holds the losses of all ranks of its group
        experts.set_force_sum_reduction_for_comms(True)
        fully_shard(model, mesh=init_device_mesh(here(), (world,)))
        y = model(tokens(dist.get_rank()))
        loss_of(y, dist.get_rank()).backward()
        return gradients(model, y)
