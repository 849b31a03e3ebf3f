"""Checks of tensors. Each raises ConfigError with what is allowed.

Those of dtype, shape, device, memory and gradient are native: csrc/calls/judge.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_ep._C import (
    are_packed,
    packed,
    require_no_grad,
    require_plain,
    require_rows,
    require_tensor,
    require_topk,
)
from hybrid_ep.checks import require
from hybrid_ep.errors import ConfigError

__all__ = [
    "are_packed",
    "is_known_to_dynamo",
    "packed",
    "packed_copy",
    "require_device",
    "require_expert_indices",
    "require_no_grad",
    "require_plain",
    "require_rows",
    "require_tensor",
    "require_topk",
    "require_traceable",
]


def require_device(name: str, value: object) -> torch.device:
    """Returns `value` as a device if it is one or the name of one."""
    try:
        return torch.device(value)  # type: ignore[call-overload, no-any-return]
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"{name} is {value!r}; allowed: a torch.device or its name") from error


def is_known_to_dynamo(tensor: object) -> bool:
    """Whether Dynamo compiles the code that calls, and `tensor` is plain: its program is compiled for these facts."""
    return torch.compiler.is_dynamo_compiling() and type(tensor) in (Tensor, torch.nn.Parameter)


def require_traceable(
    name: str,
    tensor: Tensor,
    *,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | None],
    device: torch.device | None = None,
) -> None:
    """The same as `require_tensor`, for calls made of operators of torch: a tracer's tensors are taken, too.

    Dynamo cannot compile a native call, so it calls the judge only to refuse: outside the program that it compiles.
    """
    if is_known_to_dynamo(tensor) and tensor.dtype in dtypes and tensor.device == (device or tensor.device):
        sizes = tensor.shape
        if len(sizes) == len(shape) and all([want in (None, size) for want, size in zip(shape, sizes, strict=True)]):
            return
    require_tensor(name, tensor, dtypes=dtypes, shape=shape, device=device, traced=True)


def packed_copy(tensor: Tensor) -> Tensor:
    """A copy of the tensor in rows without gaps; `clone()` would keep the strides of a transposed one."""
    return tensor.clone(memory_format=torch.contiguous_format)


def require_expert_indices(topk_idx: Tensor, num_experts: int, name: str = "topk_idx") -> None:
    """Checks that every index is −1 or an expert. On a GPU this would cost a host sync, so kernels check there."""
    if not topk_idx.is_cpu or topk_idx.numel() == 0:
        return
    low, high = map(int, topk_idx.aminmax())
    if low < -1 or high >= num_experts:
        require(False, name, low if low < -1 else high, f"−1 … {num_experts - 1}")
