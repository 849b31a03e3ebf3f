"""The experts of a `MoELayer`, and their place under torch's wrappers.

With more than one rank, each weight is a DTensor ``[E, …]``, sharded by experts over the ranks of the buffer. So
checkpoints, optimizers and norms of gradients treat them as sharded weights. `fully_shard` and
`DistributedDataParallel` would treat plain tensors as copies of one weight.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from hybrid_ep.buffers.v1 import Buffer
from hybrid_ep.checks import require
from hybrid_ep.errors import ConfigError
from hybrid_ep.nn.grouped import grouped_linear
from hybrid_ep.nn.modules import DispatchedTokens, GroupedTokens

__all__ = ["Experts", "clip_grad_norm_", "expert_parameters"]


class Experts(nn.Module):
    """Two-layer GELU experts: this rank's share of them.

    Gradients are those of the mean over the buffer's ranks of the ranks' losses, as `DistributedDataParallel` gives
    them for weights that every rank has.

    Args:
        buffer: its ranks share the experts.
        up: ``[LE, ffn_hidden, H]``, of this rank.
        down: ``[LE, H, ffn_hidden]``, of this rank.
        mesh: one dimension, of the buffer's ranks; None = one is made.

    Attributes:
        up, down: parameters; DTensors ``[E, …]`` on `mesh` where there is more than one rank.

    Example:
        >>> with hybrid_ep.Buffer(None) as buffer:
        ...     layer = hybrid_ep.nn.MoELayer(buffer, hidden=16, ffn_hidden=32, num_experts=4, topk=2)
        >>> [weight.shape for weight in layer.experts.weights()]
        [torch.Size([4, 32, 16]), torch.Size([4, 16, 32])]
    """

    def __init__(self, buffer: Buffer, up: Tensor, down: Tensor, *, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.num_ranks = buffer.group_size
        self.ranks = [0] if buffer.group is None else dist.get_process_group_ranks(buffer.group)
        self.mesh = _mesh_of(buffer, mesh, up.device)
        if self.mesh is not None:
            _look_at_what_is_sharded()
        self._memory: dict[str, _Slots] = {}  # of `slots`, by parameter
        self.num_moves = 0  # of parameters into that memory
        self.mark_of_spare: object = None  # of the forward pass whose replicas are in the spare slots
        self.up, self.down = (nn.Parameter(self._sharded(weight)) for weight in (up, down))

    def _sharded(self, weight: Tensor) -> Tensor:
        if self.mesh is None:
            return weight
        return DTensor.from_local(weight, self.mesh, [Shard(0)], run_check=False)

    def weights(self) -> tuple[Tensor, Tensor]:
        """Returns this rank's ``[LE, ffn_hidden, H]`` and ``[LE, H, ffn_hidden]``, with gradients to the parameters.

        Raises:
            ConfigError: something has sharded the parameters otherwise.
        """
        up, down = self._local("up", self.up), self._local("down", self.down)
        return up, down

    def slots(self, num_spare: int, mover: Buffer) -> tuple[Tensor, Tensor]:
        """Returns the weights with memory for `num_spare` more behind them, ``[LE + num_spare, …]``; without gradients.

        Parameters move into that memory once, so that later calls copy nothing. Parameters that were replaced since,
        as by `load_state_dict` with ``assign=True``, move into the same memory. Collective if it must be allocated: in
        the first call, and after a change of dtype or device.

        Args:
            num_spare: the same at all ranks.
            mover: whose memory it is, and that fills the spare slots.

        Raises:
            ConfigError: as `weights`; or a CUDA graph is captured, and the memory must be allocated.
            TimeoutError, TransportError: a rank was lost.
        """
        return self._slots("up", self.up, num_spare, mover), self._slots("down", self.down, num_spare, mover)

    @torch.no_grad()
    def _slots(self, name: str, parameter: Tensor, num_spare: int, mover: Buffer) -> Tensor:
        self._require_own_mesh(name, parameter)
        held = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        shape = torch.Size((held.shape[0] + num_spare, *held.shape[1:]))
        slots = self._memory.get(name)
        if slots is None or not slots.fit(shape, held, mover):
            slots = self._memory[name] = _Slots.allocate(shape, held, mover)
        memory = slots.memory
        if memory.data_ptr() != held.data_ptr():
            memory[: held.shape[0]] = held
            held.data = memory[: held.shape[0]]
            self.num_moves += 1
        return memory

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_memory": {}, "mark_of_spare": None}  # a copy makes its own

    def _local(self, name: str, parameter: Tensor) -> Tensor:
        self._require_own_mesh(name, parameter)
        if not isinstance(parameter, DTensor):
            return parameter
        local: Tensor = _MeanOverRanks.apply(parameter.to_local(), self.num_ranks)  # type: ignore[no-untyped-call]
        return local

    def _require_own_mesh(self, name: str, parameter: Tensor) -> None:
        if self.mesh is None:
            return
        if not isinstance(parameter, DTensor) or parameter.device_mesh != self.mesh:
            raise ConfigError(
                f"parameter {name} of the experts is not sharded over the ranks of their buffer in this call; allowed: "
                "fully_shard(layer.experts, mesh=…) over other ranks, and balance=None"
            )

    def forward(
        self, tokens: DispatchedTokens | GroupedTokens, up: Tensor | None = None, down: Tensor | None = None
    ) -> Tensor:
        """Applies experts to received rows; a row's experts are weighted and summed in at least float32.

        Args:
            tokens: received; experts are the slots of this rank. Of `GroupedTokens`, no shape
                depends on a value; in bf16, two grouped matrix products compute all.
            up: ``[slots, ffn_hidden, H]``; None = of this rank's experts.
            down: ``[slots, H, ffn_hidden]``; None as for `up`.

        Returns:
            ``[N, H]`` (``[P, H]``), of the dtype of the rows. Of `GroupedTokens`, rows after the last are 0, or
            undefined where there are no gradients.

        Raises:
            ConfigError: as `weights`.
        """
        if up is None or down is None:
            up, down = self.weights()
        total = (_by_group if isinstance(tokens, GroupedTokens) else _gathered)(tokens, up, down)  # type: ignore[arg-type]
        return total.to(tokens.x.dtype)


class _Slots(NamedTuple):
    """Memory of one weight, with spare slots behind those of the parameter.

    Attributes:
        memory: ``[slots, *shape]``.
        mover: the buffer that fills the spare slots.
    """

    memory: Tensor
    mover: Buffer

    @classmethod
    def allocate(cls, shape: torch.Size, like: Tensor, mover: Buffer) -> _Slots:
        memory = mover.engine.allocate_spare(shape.numel() * like.dtype.itemsize, like.device)
        return cls(memory.view(like.dtype).view(shape), mover)

    def fit(self, shape: torch.Size, like: Tensor, mover: Buffer) -> bool:
        """Whether the memory serves a parameter like this one."""
        found = self.memory.shape, self.memory.dtype, self.memory.device, self.mover
        return found == (shape, like.dtype, like.device, mover)


def _gathered(tokens: DispatchedTokens, up: Tensor, down: Tensor) -> Tensor:
    """Each expert computes the rows that are for it."""
    rows = tokens.x.to(up.dtype)
    total = torch.zeros(rows.shape, dtype=_sum_dtype(up), device=rows.device)
    for expert in range(up.shape[0]):
        row, column = torch.nonzero(tokens.topk_idx == expert, as_tuple=True)
        weighted = _expert(rows[row], up[expert], down[expert]) * tokens.topk_weights[row, column].unsqueeze(1)
        total = torch.index_add(total, 0, row, weighted.to(total.dtype))
    return total


def _by_group(tokens: GroupedTokens, up: Tensor, down: Tensor) -> Tensor:
    """All experts in one grouped matrix product for each of their two layers."""
    kind = tokens.x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else up.dtype
    hidden = F.gelu(grouped_linear(tokens.x.to(dtype), up.to(dtype), tokens.ends))
    rows = grouped_linear(hidden, down.to(dtype), tokens.ends)
    if not torch.is_grad_enabled():
        return rows.mul_(tokens.weights.unsqueeze(1))  # combine reads no row after the last
    # Rows after the last end are undefined.
    is_row = (torch.arange(len(rows), device=rows.device) < tokens.ends[-1]).unsqueeze(1)
    return torch.where(is_row, rows, 0) * torch.where(is_row, tokens.weights.unsqueeze(1), 0)


def _expert(rows: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(rows, up)), down)


def _sum_dtype(weights: Tensor) -> torch.dtype:
    return torch.promote_types(weights.dtype, torch.float32)


class _MeanOverRanks(torch.autograd.Function):
    """Returns the weight. Its backward pass turns the sum of the gradients over ranks into their mean."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, num_ranks: int) -> Tensor:
        ctx.num_ranks = num_ranks
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return grads[0] / ctx.num_ranks, None


def _mesh_of(buffer: Buffer, mesh: DeviceMesh | None, device: torch.device) -> DeviceMesh | None:
    """A mesh of the buffer's ranks; None for a single one. A DTensor moves its weights to the devices of the mesh."""
    if mesh is not None:
        require(isinstance(mesh, DeviceMesh), "mesh", type(mesh).__name__, "a DeviceMesh")
        ranks = [] if buffer.group is None else dist.get_process_group_ranks(buffer.group)
        found = mesh.mesh.flatten().tolist()
        require(mesh.ndim == 1 and found == ranks, "mesh", mesh, f"one dimension of the buffer's ranks {ranks}")
        return mesh
    if buffer.group is None or buffer.group_size == 1:
        return None
    has_nccl = torch.cuda.is_available() and "nccl" in dist.get_backend_config(buffer.group)
    on_gpu = has_nccl or device.type == "cuda"
    return DeviceMesh.from_group(buffer.group, "cuda" if on_gpu else "cpu", mesh_dim_names=("experts",))


def _experts_of(model: nn.Module) -> list[tuple[str, Experts]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, Experts)]


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model that differ between ranks, by name.

        fully_shard(model, ignored_params=set(expert_parameters(model).values()))

    Args:
        model: with `MoELayer`s anywhere in it.

    Example:
        >>> with hybrid_ep.Buffer(None) as buffer:
        ...     layer = hybrid_ep.nn.MoELayer(buffer, hidden=16, ffn_hidden=32, num_experts=4, topk=2)
        >>> list(hybrid_ep.nn.expert_parameters(torch.nn.Sequential(layer)))
        ['0.experts.up', '0.experts.down']
    """
    return {
        f"{prefix}.{name}" if prefix else name: parameter
        for prefix, module in _experts_of(model)
        for name, parameter in module.named_parameters()
    }


def _leave_experts_alone(parent: nn.Module, name: str, model: nn.Module | None) -> None:
    """Makes `DistributedDataParallel` leave the experts of a model out.

    Raises:
        ConfigError: copies of the experts on other ranks would drift apart.
    """
    if not isinstance(parent, DistributedDataParallel) or model is None:
        return
    for prefix, experts in _experts_of(model):
        ranks = dist.get_process_group_ranks(parent.process_group)
        if ranks != experts.ranks:
            raise ConfigError(
                f"DistributedDataParallel averages over ranks {ranks}, and ranks {experts.ranks} share the experts "
                f"{prefix!r}; allowed: the same ranks, or fully_shard(…experts, mesh=…) and fully_shard(model)"
            )
    for parameter in expert_parameters(model):
        # If the model itself is an `Experts`, DDP asks for ".up", too.
        parent.parameters_to_ignore |= {parameter, f".{parameter}"}


register_module_module_registration_hook(_leave_experts_alone)


@functools.cache
def _look_at_what_is_sharded() -> None:
    """Makes `fully_shard` call `_require_other_ranks` before it shards parameters.

    torch has no hook for that. If torch lacks the class that is replaced here, its own error is raised, which does not
    name what to pass.
    """
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    except ImportError:
        return
    make = FSDPParamGroup.__init__

    @functools.wraps(make)
    def make_checked(
        self: Any, params: list[nn.Parameter], modules: tuple[nn.Module, ...], mesh_info: Any, *args: Any, **kwargs: Any
    ) -> None:
        _require_other_ranks(params, modules, mesh_info.mesh)
        make(self, params, modules, mesh_info, *args, **kwargs)

    FSDPParamGroup.__init__ = make_checked  # type: ignore[method-assign]


def _require_other_ranks(params: Iterable[nn.Parameter], modules: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    """Looks at parameters that `fully_shard` is about to shard.

    Raises:
        ConfigError: experts are among them, and their ranks have other experts.
    """
    sharded, ranks = set(params), sorted(mesh.mesh.flatten().tolist())
    for prefix, experts in (found for module in modules for found in _experts_of(module)):
        shared = [rank for rank in experts.ranks if rank in ranks]
        if len(shared) < 2 or sharded.isdisjoint(experts.parameters()):
            continue
        way = "ignored_params=set(hybrid_ep.nn.expert_parameters(model).values())"
        if ranks != sorted(experts.ranks):
            way = "fully_shard(…experts, mesh=…) before, over ranks that have the same experts"
        raise ConfigError(
            f"fully_shard shards over ranks {ranks}, and ranks {shared} have different experts {prefix!r}; "
            f"allowed: {way}"
        )


def clip_grad_norm_(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` where some parameters are the same on every rank and others are sharded.

    A sharded parameter counts with all of its shards, whatever mesh it is on, and one that every rank has counts once.
    So the norm is that of the whole model, and equal on every rank. Collective.

    Args:
        parameters: plain tensors and DTensors; those without a gradient are left out.
        max_norm: of all gradients together, afterwards.
        norm_type: p of the norm; ``inf`` for the largest element.
        error_if_nonfinite: raise RuntimeError where the norm is NaN or infinite.

    Returns:
        The norm before clipping, a scalar tensor.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> hybrid_ep.nn.clip_grad_norm_([weight], max_norm=1.0), weight.grad
        (tensor(5.), tensor([0.6000, 0.8000]))
    """
    of_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            of_mesh.setdefault(mesh, []).append(parameter)
    norms = []
    for held in of_mesh.values():
        norm = nn.utils.get_total_norm([p.grad for p in held if p.grad is not None], norm_type)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not norms:
        return torch.tensor(0.0, device="cpu")
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    if error_if_nonfinite and not math.isfinite(float(total)):
        raise RuntimeError(f"the norm of the gradients is {float(total)}")
    for held in of_mesh.values():
        nn.utils.clip_grads_with_norm_(held, max_norm, total)
    return total
