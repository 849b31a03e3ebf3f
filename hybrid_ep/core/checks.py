"""Checks of tensors, and what a repeated check need not look at. Each raises ConfigError with what is allowed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from hybrid_ep import _C
from hybrid_ep.checks import require
from hybrid_ep.errors import ConfigError

__all__ = [
    "Passed",
    "are_packed",
    "packed",
    "packed_copy",
    "require_device",
    "require_expert_indices",
    "require_no_grad",
    "require_plain",
    "require_tensor",
    "traits",
]

_PLAIN = (Tensor, torch.nn.Parameter)
_MODES_OF_TRACERS = tuple(torch._C._TorchDispatchModeKey.__members__.values())


def require_device(name: str, value: object) -> torch.device:
    """Returns `value` as a device if it is one or the name of one."""
    try:
        return torch.device(value)  # type: ignore[call-overload, no-any-return]
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"{name} is {value!r}; allowed: a torch.device or its name") from error


def require_plain(name: str, tensor: object, *, traced: bool = False) -> None:
    """Raises ConfigError unless `tensor` is a dense tensor with memory of its own, which kernels can read by address.

    Args:
        name: of the argument, for messages.
        tensor: the argument.
        traced: whether a tracer's tensors are taken, too: the call is made of operators of torch.
    """
    kind = type(tensor)
    if kind not in _PLAIN and not (traced and kind in (FakeTensor, FunctionalTensor)):
        if not isinstance(tensor, Tensor):
            raise ConfigError(f"{name} is {kind.__name__}; allowed: a torch.Tensor")
        advice = ": pass `.to_local()`" if hasattr(tensor, "to_local") else " or torch.nn.Parameter, and no subclass"
        raise ConfigError(f"{name} is {kind.__name__}; allowed: a plain torch.Tensor{advice}")
    assert isinstance(tensor, Tensor)
    if tensor.layout is not torch.strided:
        require(False, f"{name}.layout", tensor.layout, "torch.strided")
    if traced:
        return
    if torch._C._is_tracing() or any(torch._C._get_dispatch_mode(mode) is not None for mode in _MODES_OF_TRACERS):
        raise ConfigError(
            f"{name} is passed while the program is traced, which would record this call's result as a constant; "
            "allowed: no trace, or the modules of hybrid_ep.nn"
        )
    if torch._C._functorch.peek_interpreter_stack() is not None or tensor._is_zerotensor() or tensor.is_neg():
        raise ConfigError(
            f"{name} is a tensor without memory of its own, as transforms of torch.func pass it, or a lazy one; "
            "allowed: a plain torch.Tensor, so no transform around this call"
        )


def require_tensor(
    name: str,
    tensor: object,
    *,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | None],
    device: torch.device | None = None,
    contiguous: bool = False,
    traced: bool = False,
) -> Tensor:
    """Returns `tensor` if it is plain, its dtype is one of `dtypes` and its shape fits (None = any size).

    Only what a call writes to must be `contiguous`; what it reads may have any strides, and is copied by `packed`.
    `traced`: as in `require_plain`.
    """
    require_plain(name, tensor, traced=traced)
    assert isinstance(tensor, Tensor)
    # Calls are checked on every step of a training loop, so messages are only made where one is needed.
    if tensor.dtype not in dtypes:
        require(False, f"{name}.dtype", tensor.dtype, " or ".join(str(d) for d in dtypes))
    if not _fits(tensor.shape, shape):
        wanted = "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
        require(False, f"{name}.shape", list(tensor.shape), wanted)
    if device is not None and tensor.device != device:
        require(False, f"{name}.device", tensor.device, str(device))
    if tensor.is_meta and not traced:
        require(False, f"{name}.device", tensor.device, "a device that holds values")
    if contiguous and not are_packed(tensor):
        require(False, f"{name}.stride()", tensor.stride(), "a contiguous (row-major) tensor")
    return tensor


@overload
def packed(tensor: Tensor) -> Tensor: ...
@overload
def packed(tensor: None) -> None: ...
@overload
def packed(tensor: Tensor | None) -> Tensor | None: ...
def packed(tensor: Tensor | None) -> Tensor | None:
    """The tensor in rows without gaps, as engines and kernels read it; copied on the current stream where it is not.

    Whoever takes an address of a caller's tensor takes that of the packed one. Nothing else judges contiguity.
    """
    return None if tensor is None else tensor.contiguous()


def packed_copy(tensor: Tensor) -> Tensor:
    """A copy of the tensor in rows without gaps; `clone()` would keep the strides of a transposed one."""
    return tensor.clone(memory_format=torch.contiguous_format)


def are_packed(*tensors: Tensor | None) -> bool:
    """Whether `packed` would copy none of them."""
    return all(tensor is None or tensor.is_contiguous() for tensor in tensors)


def require_no_grad(name: str, tensor: Tensor) -> None:
    """Refuses a tensor whose gradient would be lost: no call of a buffer has a backward pass."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ConfigError(
            f"{name}.requires_grad is True, and this call has no backward pass; allowed: hybrid_ep.nn.MoEDispatch and "
            "MoECombine, an autograd.Function around it, torch.no_grad(), or detach()"
        )


def _traits_of_any(*arguments: object) -> object:
    """The same as `traits`, of any arguments and with any torch."""
    keeps_grad = torch.is_grad_enabled()
    found: list[object] = []
    for tensor in arguments:
        if tensor is None:
            found.append(None)
        elif isinstance(tensor, int):
            found += (type(tensor), tensor)
        elif isinstance(tensor, Tensor):
            found += (
                type(tensor),
                tensor.dtype,
                tensor.shape,
                tensor.device,
                tensor.layout,
                tensor.is_contiguous(),
                keeps_grad and tensor.requires_grad,
            )
        else:
            found.append(type(tensor))
    return tuple(found)


# What checks read of tensors, but for their values, and of bools and ints: equal traits give the same outcome.
traits: Callable[..., object] = _C.traits_or(_traits_of_any)
# The same, of a number of rows and tensors. Equal traits also give the same outcome where the first size of a tensor is
# the number of rows, in both calls.
row_traits: Callable[..., object] = _C.row_traits_or(_traits_of_any)


class Passed(dict[object, Any]):
    """Traits that have passed a check. The calls of a training loop repeat a few, and need not be checked again.

    The value of some traits is how the engine repeats a call with them.
    """

    _MOST = 1024

    def add(self, traits: object, value: Any = None) -> None:
        """Remembers traits; forgets all others when there are many."""
        if len(self) >= self._MOST:
            self.clear()
        self[traits] = value


def _fits(given: Sequence[int], wanted: Sequence[int | None]) -> bool:
    if given == wanted:
        return True
    if len(given) != len(wanted):
        return False
    for i, size in enumerate(wanted):  # noqa: SIM110 - a generator would take longer than the rest of a check
        if size is not None and size != given[i]:
            return False
    return True


def require_expert_indices(topk_idx: Tensor, num_experts: int, name: str = "topk_idx") -> None:
    """Checks that every index is −1 or an expert. On a GPU this would cost a host sync, so kernels check there."""
    if not topk_idx.is_cpu or topk_idx.numel() == 0:
        return
    low, high = (int(v) for v in topk_idx.aminmax())
    require(low >= -1 and high < num_experts, name, low if low < -1 else high, f"−1 … {num_experts - 1}")
