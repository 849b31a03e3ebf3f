"""hybrid_ep moves the tokens of Mixture-of-Experts models between ranks: dispatch and combine.

The public names are loaded when they are first used, so that commands which need no tensors (`hybrid-ep doctor`) start
without importing torch. The submodules `nn` and `quantize` are public, too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hybrid_ep._version import __version__
from hybrid_ep.errors import (
    ClosedError,
    ConfigError,
    CudaError,
    HybridEPError,
    TopologyError,
    TransportError,
)
from hybrid_ep.errors import (
    OverflowError as OverflowError,
)
from hybrid_ep.errors import (
    TimeoutError as TimeoutError,
)

if TYPE_CHECKING:
    from hybrid_ep import nn as nn
    from hybrid_ep import quantize as quantize
    from hybrid_ep.buffers.allocator import BufferAllocator
    from hybrid_ep.buffers.elastic import ElasticBuffer, EPBuffer
    from hybrid_ep.buffers.elastic_handle import EPHandle
    from hybrid_ep.buffers.hybrid import HybridEPBuffer
    from hybrid_ep.buffers.hybrid_config import HybridEpConfigInstance
    from hybrid_ep.buffers.v1 import Buffer, topk_idx_t
    from hybrid_ep.buffers.v1_handle import BufferHandle
    from hybrid_ep.core.config import Config
    from hybrid_ep.core.event import EventHandle, EventOverlap
    from hybrid_ep.core.layout import indices_to_map
    from hybrid_ep.engine.calls import LowLatencyHandle, PermuteHandle

__all__ = [
    "Buffer",
    "BufferAllocator",
    "BufferHandle",
    "ClosedError",
    "Config",
    "ConfigError",
    "CudaError",
    "EPBuffer",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "HybridEPBuffer",
    "HybridEPError",
    "HybridEpConfigInstance",
    "LowLatencyHandle",
    "PermuteHandle",
    "TopologyError",
    "TransportError",
    "__version__",
    "indices_to_map",
    "topk_idx_t",
]

_HOME = {
    "Buffer": "buffers.v1",
    "BufferAllocator": "buffers.allocator",
    "BufferHandle": "buffers.v1_handle",
    "ElasticBuffer": "buffers.elastic",
    "EPBuffer": "buffers.elastic",
    "EPHandle": "buffers.elastic_handle",
    "topk_idx_t": "buffers.v1",
    "Config": "core.config",
    "EventHandle": "core.event",
    "EventOverlap": "core.event",
    "HybridEPBuffer": "buffers.hybrid",
    "HybridEpConfigInstance": "buffers.hybrid_config",
    "indices_to_map": "core.layout",
    "LowLatencyHandle": "engine.calls",
    "PermuteHandle": "engine.calls",
}
_BY_NAME = ("OverflowError", "TimeoutError")  # `import *` would replace the built-in ones
_SUBMODULES = ("nn", "quantize")


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_BY_NAME, *_SUBMODULES])
