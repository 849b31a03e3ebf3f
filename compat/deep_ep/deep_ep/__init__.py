"""hybrid_ep under the name that Megatron-LM, vLLM, SGLang and TorchTitan import. Nothing lives here."""

from importlib import metadata

try:
    _real = metadata.version("deep_ep")
except metadata.PackageNotFoundError:
    pass
else:
    raise ImportError(
        f"hybrid-ep-as-deep-ep is installed beside the real DeepEP {_real}; allowed: one of them "
        "(`pip uninstall hybrid-ep-as-deep-ep`, then reinstall deep_ep, or the other way round)"
    )

import hybrid_ep
from hybrid_ep import (
    Buffer,
    Config,
    EventHandle,
    EventOverlap,
    HybridEPBuffer,
    HybridEpConfigInstance,
    __version__,
    env,
    topk_idx_t,
)

__all__ = [
    "Buffer",
    "Config",
    "EventHandle",
    "EventOverlap",
    "HybridEPBuffer",
    "HybridEpConfigInstance",
    "__version__",
    "topk_idx_t",
]


# Of DeepEP 2.1 and 2.5. Callers that find them take them, and leave Buffer alone; so they are there when asked for.
_SECOND_VERSION = ("BufferAllocator", "EPBuffer", "EPHandle", "ElasticBuffer")


def __getattr__(name: str) -> object:
    """Says what there is. Callers look for ElasticBuffer by hasattr, or by an import that may fail: both still work."""
    hint = ""
    if name in _SECOND_VERSION:
        if env.ELASTIC_BUFFER.get() == "on":
            return getattr(hybrid_ep, name)
        hint = f"; {env.ELASTIC_BUFFER.name}=on offers {name}"
    raise AttributeError(f"deep_ep, which is hybrid_ep here, has no {name}; there are {', '.join(__all__)}{hint}")
