"""The machine that the benchmark ran on, recorded with the results."""

from __future__ import annotations

import platform

import torch

from hybrid_ep._version import __version__
from hybrid_ep.topology import probe

__all__ = ["device_name", "rank_device", "versions"]


def rank_device(device: str) -> torch.device:
    """This rank's GPU, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")


def device_name(device: str) -> str:
    """Name of this rank's GPU, or ``CPU``."""
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def versions(device: str) -> dict[str, str]:
    """Versions of what took part: of the library and its ground, and with GPUs of the driver."""
    found = {"hybrid_ep": __version__, "python": platform.python_version(), "torch": torch.__version__}
    if device == "cuda":
        found["CUDA"] = str(torch.version.cuda)
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["driver"] = probe().driver_version or "unknown"
    return found
