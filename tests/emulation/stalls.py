"""Checks on a GPU whose CTAs stall now and then, as when the device is shared: other ranks get ahead of them."""

from __future__ import annotations

import importlib
import os
from typing import Any
from unittest import mock

__all__ = ["check_with_stalls"]


def check_with_stalls(check: str, *args: Any) -> None:
    """Runs a check of tests/ where one CTA in four stalls for up to 20 ms, early in a kernel."""
    module, name = check.rsplit(".", 1)
    with mock.patch.dict(os.environ, {"HYBRID_EP_EMULATION_STALLS": "1"}):
        getattr(importlib.import_module(f"tests.{module}"), name)(*args)
