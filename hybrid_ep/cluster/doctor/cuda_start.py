"""Starts CUDA as a program would: `cuInit`, then one context on each GPU, in a child process with a deadline.

NVML answers on nodes where no CUDA program runs: without nvidia_uvm, without the fabric manager, or with another
libcuda than the kernel module's. The child needs no torch. It prints each code as it has it, so that one that hangs
has said how far it came. That child is this file, run as a program.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

_DEADLINE_S = 60.0  # eight GPUs without persistence mode take some seconds each
_POLL_S = 0.05


@dataclass(frozen=True)
class CudaStart:
    """What CUDA said.

    Attributes:
        init: the CUresult of cuInit; None where it did not return.
        devices: GPUs that CUDA counts; None where it was not asked.
        contexts: GPU by NVML's index → CUresult of its context.
        lost: how the child ended, if not by itself; empty else.
        library: why libcuda.so.1 cannot be loaded; empty where it can.
    """

    init: int | None = None
    devices: int | None = None
    contexts: dict[int, int] = field(default_factory=dict)
    lost: str = ""
    library: str = ""


def start_cuda(gpus: Collection[int], watch: Callable[[], None], *, deadline_s: float = _DEADLINE_S) -> CudaStart:
    """Runs the child.

    Args:
        gpus: make a context on each of these, by NVML's index.
        watch: is called while the child runs; may raise to give up.
        deadline_s: after so many seconds the child is killed, and left to itself if it hangs in the kernel.
    """
    hidden = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as NVML counts
    words = [sys.executable, "-I", __file__, *map(str, gpus)]
    with tempfile.TemporaryFile("w+") as said:
        child = subprocess.Popen(words, stdout=said, stderr=subprocess.DEVNULL, env=environment)
        until = time.monotonic() + deadline_s
        while child.poll() is None and time.monotonic() < until:
            watch()
            time.sleep(_POLL_S)
        lost = "" if child.returncode == 0 else f"ended with status {child.returncode}"
        if child.returncode is None:
            child.kill()
            lost = f"no answer in {deadline_s:g} s"
        said.seek(0)
        lines = [json.loads(line) for line in said.read().splitlines() if line.endswith("}")]
    contexts = {line["gpu"]: line["code"] for line in lines if "gpu" in line}
    fields = {name: value for line in lines for name, value in line.items() if "gpu" not in line}
    return CudaStart(contexts=contexts, lost=lost, **fields)


def _say(**values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def main() -> None:
    """The child: starts CUDA, and prints one line for each code."""
    try:
        libcuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return _say(library=str(error))
    init = int(libcuda.cuInit(0))
    _say(init=init)
    if init:
        return None
    count = ctypes.c_int(0)
    libcuda.cuDeviceGetCount(ctypes.byref(count))
    _say(devices=count.value)
    for gpu in map(int, sys.argv[1:]):
        device, context = ctypes.c_int(0), ctypes.c_void_p()
        code = int(libcuda.cuDeviceGet(ctypes.byref(device), gpu))
        code = code or int(libcuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        if not code:
            libcuda.cuDevicePrimaryCtxRelease_v2(device)
        _say(gpu=gpu, code=code)
    return None


if __name__ == "__main__":
    main()
