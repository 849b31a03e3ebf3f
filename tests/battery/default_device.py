"""The battery under `torch.set_default_device`: whatever hybrid_ep makes without a device has no memory there.

The default device is ``meta``, for creations of hybrid_ep alone. The checks make their own tensors as they are used to.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import hybrid_ep
from hybrid_ep import ElasticBuffer, EPBuffer
from tests.battery import elastic, grouped, hybrid, low_latency, normal
from tests.battery.cases import Case

_PACKAGE, _TORCH = (str(Path(module.__file__).parent) for module in (hybrid_ep, torch) if module.__file__)


class MetaInside(TorchFunctionMode):
    """Inside, tensors that hybrid_ep makes without a device, also by way of torch's own functions, are on ``meta``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _device_constructors() and kwargs.get("device") is None and _called_by_package():
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _called_by_package() -> bool:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(_PACKAGE)


def check_under_default_device(case: Case, device: str = "cpu") -> None:
    """Checks every kind of call."""
    with MetaInside():
        normal.check_round_trip(case, device)
        normal.check_cached(case, device)
        normal.check_bound(case, device)
        normal.check_fp8(case, device)
        normal.check_nvfp4(case, device)
        hybrid.check_plain(case, device)
        hybrid.check_permuted(case, device)
        hybrid.check_permuted_cached(case, device)
        for name in ("bf16", "fp8"):
            low_latency.check_low_latency(case, name, device)
        low_latency.check_mixed_hooks(case, device)
        low_latency.check_logfmt(case, device)
        low_latency.check_cleaned(case, device)
        for kind in (ElasticBuffer, EPBuffer):
            elastic.check_other_values(case, device, kind)
        elastic.check_scales(case, device)
        elastic.check_gradients(case, device)
        grouped.check_too_few_rows(device)
