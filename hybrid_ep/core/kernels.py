"""Whether a tensor is on a GPU that runs the kernels of `_cuda`, and what every launch of a local kernel takes."""

from __future__ import annotations

import functools

from torch import Tensor

from hybrid_ep.core.streams import current_raw_stream

try:
    from hybrid_ep import _cuda as native
except ImportError:  # not built here
    native = None  # type: ignore[assignment]

__all__ = ["has_kernels", "native", "place_of", "run_on"]


@functools.cache
def has_kernels(device_index: int) -> bool:
    """Whether the kernels of `_cuda` run on this GPU."""
    return native is not None and native.can_run(device_index)


def run_on(tensor: Tensor) -> bool:
    """Whether the kernels run where a tensor is."""
    return tensor.device.type == "cuda" and has_kernels(tensor.device.index)


def place_of(tensor: Tensor) -> dict[str, int]:
    """The arguments `device` and `stream` of a launch that works on a tensor: its GPU, and the current stream there."""
    index = tensor.device.index
    return {"device": index, "stream": current_raw_stream(index)}
