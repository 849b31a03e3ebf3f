"""Checks on other GPUs than the usual emulated one."""

from __future__ import annotations

import importlib
import os
from typing import Any
from unittest import mock

__all__ = ["check_with_sms", "check_with_stalls"]


def _check_on(device: dict[str, str], check: str, *args: Any) -> None:
    module, name = check.rsplit(".", 1)
    with mock.patch.dict(os.environ, device):
        getattr(importlib.import_module(f"tests.{module}"), name)(*args)


def check_with_stalls(check: str, *args: Any) -> None:
    """Runs a check of tests/ on a GPU whose CTAs stall now and then, as when it is shared: ranks get far apart."""
    _check_on({"HYBRID_EP_EMULATION_STALLS": "1"}, check, *args)


def check_with_sms(num_sms: int, check: str, *args: Any) -> None:
    """Runs a check of tests/ on a GPU with so many SMs."""
    _check_on({"HYBRID_EP_EMULATION_SMS": str(num_sms)}, check, *args)
