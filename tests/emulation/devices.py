"""Other GPUs than the usual emulated one."""

from __future__ import annotations

import importlib
import os
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from tests.battery.normal import unread_values
from tests.emulation.engine import local_kernels


def stalls(longest_s: float) -> AbstractContextManager[object]:
    """CTAs stall now and then, as on a GPU that is shared, for up to so long and at least for half of it."""
    return mock.patch.dict(os.environ, {"HYBRID_EP_EMULATION_STALLS": str(round(longest_s * 1e6))})


def _check(check: str, *args: Any) -> Any:
    module, name = check.rsplit(".", 1)
    return getattr(importlib.import_module(f"tests.{module}"), name)(*args)


def check_with_stalls(check: str, *args: Any) -> None:
    """Runs a check of tests/ on a GPU whose CTAs stall: ranks get far apart."""
    with stalls(0.02):
        _check(check, *args)


def check_unread(check: str, *args: Any) -> Any:
    """Runs a check of tests/ with tensors whose values are not checked, as on a GPU."""
    with unread_values(), local_kernels():
        return _check(check, *args)


def check_with_sms(num_sms: int, check: str, *args: Any) -> None:
    """Runs a check of tests/ on a GPU with so many SMs."""
    with mock.patch.dict(os.environ, {"HYBRID_EP_EMULATION_SMS": str(num_sms)}):
        _check(check, *args)
