"""Calls under `torch.set_default_device`: it intercepts attributes of tensors and says where new ones are made."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from hybrid_ep import Buffer, HybridEPBuffer

_EXPERTS = 8


class _Counter(TorchFunctionMode):
    """Counts what it intercepts."""

    def __init__(self) -> None:
        super().__init__()
        self.intercepted: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.intercepted.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def _batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 128, generator=generator).bfloat16()
    topk_weights, topk_idx = torch.rand(5, _EXPERTS, generator=generator).topk(2)
    return x, topk_idx, topk_weights


def _normal(buffer: Buffer, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, _EXPERTS)
    given = {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}
    received, _, _, _, handle, _ = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, **given)
    assert isinstance(received, torch.Tensor)
    assert handle is not None
    buffer.dispatch(x, handle)
    return buffer.combine(received, handle)[0]


def _low_latency(buffer: Buffer, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    rows, _, handle, _, hook = buffer.low_latency_dispatch(x, idx, 8, _EXPERTS, use_fp8=False, return_recv_hook=True)
    assert hook is not None
    hook()
    assert isinstance(rows, torch.Tensor)
    return buffer.low_latency_combine(rows, idx, weights, handle)[0]


def _permuted(buffer: HybridEPBuffer, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    rows, _, _, _, handle = buffer.dispatch_with_permute(
        hidden=x, topk_idx=idx, topk_weights=weights, num_of_experts=_EXPERTS, pad_multiple=4
    )
    return buffer.combine_with_unpermute(hidden=rows, handle=handle, pad_multiple=4)[0]


Call = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_CALLS: list[Call] = [_normal, _low_latency, _permuted]
every_call = pytest.mark.parametrize("call", _CALLS, ids=lambda call: call.__name__[1:])


@pytest.fixture
def buffers() -> Iterator[dict[Call, Buffer | HybridEPBuffer]]:
    with (
        Buffer(low_latency_mode=True, engine="torch") as buffer,
        HybridEPBuffer(None, 128, 8, _EXPERTS, engine="torch") as hybrid,
    ):
        yield {_normal: buffer, _low_latency: buffer, _permuted: hybrid}


@every_call
def test_no_call_is_intercepted(buffers: dict[Call, Any], call: Call) -> None:
    batch = _batch()
    with _Counter() as counter:
        call(buffers[call], *batch)
    assert counter.intercepted == []


@every_call
def test_tensors_stay_on_the_device_of_the_arguments(buffers: dict[Call, Any], call: Call) -> None:
    batch = _batch()
    expected = call(buffers[call], *batch)
    torch.set_default_device("meta")
    try:
        found = call(buffers[call], *batch)
    finally:
        torch.set_default_device(None)
    assert torch.equal(found, expected)


def test_every_creation_names_a_device(tmp_path: Path) -> None:
    """ci/devices.py finds one that does not."""
    lint = Path(__file__).parents[2] / "ci/devices.py"
    done = subprocess.run([sys.executable, lint], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "")
    source = tmp_path / "made.py"
    source.write_text(
        "a = torch.zeros(2, pin_memory=True)\nb = torch.full((2,), 1, device=a.device)\n"
        "c = self._torch.arange(\n    3)\nd = a.new_zeros(2)\ne = np.zeros(3)\n"
    )
    done = subprocess.run([sys.executable, lint, source], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        f"{source}:1: torch.zeros without a device",
        f"{source}:3: torch.arange without a device",
    ]
