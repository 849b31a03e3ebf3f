"""The cuda engine on the CPU: the real engine and the real kernels, on emulated warps (emulator.h) and shared files."""

from __future__ import annotations

import importlib
import importlib.util
import mmap
import os
import sys
import tempfile
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import hybrid_ep
from hybrid_ep.core import kernels
from hybrid_ep.transport import TransportState, choice, nvshmem

_CPU = torch.device("cpu")
_installed: list[str] = []


def install(module_path: str) -> None:
    """Makes this process serve ``engine="cuda"`` with the module that `build` made; once, before the first buffer."""
    if _installed:
        return
    _installed.append(module_path)
    native = _load("_cuda", module_path)
    # The CPU has no index, and it wants one.
    make_slots = native.SlotMemory.__init__
    native.SlotMemory.__init__ = lambda slots, **options: make_slots(slots, **options | {"device": 0})
    sys.modules["hybrid_ep._cuda"] = native
    hybrid_ep._cuda = kernels.native = native

    stream = SimpleNamespace(cuda_stream=0)
    fakes = {
        "current_device": lambda: 0,
        "current_stream": lambda *_: stream,
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda *_: None,
    }
    for name, fake in fakes.items():
        setattr(torch.cuda, name, fake)
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]

    from hybrid_ep.engine import select
    from hybrid_ep.engine.cuda import (
        arena,
        base,
        between,
        engine,
        experts,
        low_latency,
        route,
        symmetric,
    )

    select._cuda_obstacle = lambda: None
    nvshmem._native = lru_cache(1)(lambda: _load("_nvshmem", _beside(module_path)))
    choice._nvshmem_state = lambda: TransportState("nvshmem", True, None, "", dist.get_world_size())
    for module in (arena, base, route):
        module.current_raw_stream = lambda _: stream.cuda_stream
    for module in (arena, base, between, experts, symmetric, low_latency):
        module.is_capturing = lambda _: False
    base.torch = engine.torch = between.torch = experts.torch = _TorchOnCpu("torch on the CPU")
    symmetric.SymmetricMemory._map = staticmethod(_map)


def local_kernels() -> AbstractContextManager[object]:
    """Inside, tensors of the CPU take the kernels that need no other rank, and not their torch form."""
    return mock.patch.multiple(kernels, run_on=lambda _: True, place_of=lambda _: {"device": 0, "stream": 0})


def _beside(module_path: str) -> str:
    path = Path(module_path)
    return str(path.with_name(path.name.replace("_cuda", "_nvshmem")))


def _load(name: str, path: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _TorchOnCpu(ModuleType):
    """torch, whose GPUs are the CPU."""

    def device(self, *_: Any) -> torch.device:
        return _CPU

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _map(num_bytes: int, roll_call: Any, device: torch.device) -> Any:
    """Memory of files that every rank maps."""
    from hybrid_ep.engine.cuda.symmetric import SymmetricMemory

    file, path = tempfile.mkstemp(dir="/dev/shm", prefix="hybrid_ep_emulation_")
    os.ftruncate(file, num_bytes)
    mappings = []
    for name in roll_call.gather("paths", path).values():
        with open(name, "r+b") as peer:
            mappings.append(torch.frombuffer(mmap.mmap(peer.fileno(), num_bytes), dtype=torch.uint8))
    roll_call.gather("mapped", "")
    os.close(file)
    os.unlink(path)
    return SymmetricMemory(mappings[roll_call.rank], [mapping.data_ptr() for mapping in mappings], mappings)


def run(module_path: str, seed: int, function: str, *args: Any) -> Any:
    """Runs a function of tests/, as ``battery.normal.check_bound``, on a rank of an emulated cluster.

    Args:
        module_path: what `build` returned.
        seed: of the order of threads and of the pace of copies.
        function: its module below tests, and name. It is not imported before the engine is installed.
        args: of the function.
    """
    install(module_path)
    os.environ["HYBRID_EP_EMULATION_SEED"] = str(seed + 1000 * (dist.get_rank() if dist.is_initialized() else 0))
    module, name = function.rsplit(".", 1)
    return getattr(importlib.import_module(f"tests.{module}"), name)(*args)
