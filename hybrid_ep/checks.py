"""Checks of what a caller hands in. Each raises ConfigError with the value that was given and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_ep.errors import ConfigError

__all__ = ["require", "require_expert_indices", "require_int", "require_tensor", "unsupported"]

MAX_TOPK = 32


def require(ok: bool, name: str, value: object, allowed: str) -> None:
    """Raises ConfigError unless `ok`."""
    if not ok:
        raise ConfigError(f"{name} is {value}; allowed: {allowed}")


def require_int(name: str, value: object, *, minimum: int, multiple_of: int = 1) -> int:
    """Returns `value` if it is an int ≥ `minimum` and a multiple of `multiple_of`."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= minimum and value % multiple_of == 0:
        return value
    allowed = f"an integer ≥ {minimum}" + (f" that is a multiple of {multiple_of}" if multiple_of > 1 else "")
    raise ConfigError(f"{name} is {value!r}; allowed: {allowed}")


def require_tensor(
    name: str,
    tensor: object,
    *,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | None],
    device: torch.device | None = None,
    contiguous: bool = True,
) -> Tensor:
    """Returns `tensor` if its dtype is one of `dtypes` and its shape fits (None = any size)."""
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"{name} is {type(tensor).__name__}; allowed: a torch.Tensor")
    # Calls are checked on every step of a training loop, so messages are only made where one is needed.
    if tensor.dtype not in dtypes:
        require(False, f"{name}.dtype", tensor.dtype, " or ".join(str(d) for d in dtypes))
    if not _fits(tensor.shape, shape):
        wanted = "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
        require(False, f"{name}.shape", list(tensor.shape), wanted)
    if device is not None and tensor.device != device:
        require(False, f"{name}.device", tensor.device, str(device))
    if contiguous and not tensor.is_contiguous():
        require(False, f"{name}.stride()", tensor.stride(), "a contiguous (row-major) tensor")
    return tensor


def _fits(given: Sequence[int], wanted: Sequence[int | None]) -> bool:
    if given == wanted:
        return True
    return len(given) == len(wanted) and all(w is None or w == g for w, g in zip(wanted, given, strict=True))


def require_expert_indices(topk_idx: Tensor, num_experts: int) -> None:
    """Checks that every index is −1 or an expert. On a GPU this would cost a host sync, so kernels check there."""
    if not topk_idx.is_cpu or topk_idx.numel() == 0:
        return
    low, high = (int(v) for v in topk_idx.aminmax())
    require(low >= -1 and high < num_experts, "topk_idx", low if low < -1 else high, f"−1 … {num_experts - 1}")


def unsupported(**arguments: object) -> None:
    """Raises NotImplementedError naming the first argument that was given (is neither None nor False)."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{name}={value!r} is not supported; allowed: leaving it out")
