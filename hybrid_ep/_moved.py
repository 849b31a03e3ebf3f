"""Old import paths of modules that are now in a subpackage: each gives the module itself."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["MOVED", "install"]

MOVED = {
    "hybrid_ep.buffer": "hybrid_ep.buffers.normal",
    "hybrid_ep.config": "hybrid_ep.core.config",
    "hybrid_ep.event": "hybrid_ep.core.event",
    "hybrid_ep.hybrid_buffer": "hybrid_ep.buffers.hybrid",
    "hybrid_ep.layout": "hybrid_ep.core.layout",
    "hybrid_ep.quantize": "hybrid_ep.core.quantize",
}


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        # The import system returns what is in sys.modules, so both paths give one module.
        sys.modules[module.__name__] = importlib.import_module(MOVED[module.__name__])


def install() -> None:
    """Makes the old paths importable. Repeated calls change nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
