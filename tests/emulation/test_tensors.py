"""Tensors that `_cuda` makes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulation.build import HERE


@pytest.mark.parametrize("by_python", [False, True], ids=["by the C interface", "by Python"])
def test_new_tensors_are_those_of_torch(emulated_module: Path, by_python: bool) -> None:
    """Shape, strides, dtype and owner of new tensors are those of `torch.empty_strided`, and so are errors."""
    program = """
import sys
import weakref
import torch
from tests.emulation.engine import _load

native, by_python = _load("_cuda", sys.argv[1]), sys.argv[2] == "True"
calls = []
empty = torch.empty_strided
torch.empty_strided = lambda *args, **options: calls.append(args) or empty(*args, **options)
device, shape, strides = torch.device("cpu"), (3, 4, 5), (20, 1, 4)
types = [getattr(torch, name) for name in "bfloat16 float32 float8_e4m3fn int8 int32 int64 uint8 bool".split()]
for dtype in types:
    make = native.NewTensor(shape, strides, dtype, device, by_python=by_python)
    one, other = make(), make()
    assert (one.shape, one.stride(), one.dtype, one.device) == (shape, strides, dtype, device), one
    assert one.data_ptr() != other.data_ptr()
    assert type(one) is torch.Tensor and not one.requires_grad
    assert one.untyped_storage().nbytes() == 60 * dtype.itemsize
    assert one.untyped_storage().resizable()  # by torch's allocator
    held = weakref.ref(one)
    assert sys.getrefcount(one) == 2
    del one
    assert held() is None
assert len(calls) == (2 * len(types) if by_python else 0)
assert native.NewTensor((0, 4), (4, 1), torch.int32, device, by_python=by_python)().shape == (0, 4)
try:
    native.NewTensor((1 << 50,), (1,), torch.int32, device, by_python=by_python)()
except RuntimeError as error:
    assert "allocate" in str(error), error
else:
    raise AssertionError("allocated 4 PiB")
"""
    command = [sys.executable, "-c", program, str(emulated_module), str(by_python)]
    ran = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
