"""Runs checks in an arena that begins with the smallest slots, so that few tokens make it grow."""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

__all__ = ["check_with_small_slots"]


def check_with_small_slots(function: str, *args: Any) -> None:
    """Runs a function of tests/, as ``multi_gpu.capacity.check_growth``."""
    from hybrid_ep.engine import arena

    module, name = function.rsplit(".", 1)
    with mock.patch.object(arena, "_INITIAL_SLOT_BYTES", 1):
        getattr(importlib.import_module(f"tests.{module}"), name)(*args)
