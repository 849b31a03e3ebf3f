"""The machine that the benchmark ran on, recorded with the results."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from hybrid_ep._version import __version__
from hybrid_ep.topology import probe


def rank_device(device: str) -> torch.device:
    """This rank's GPU, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")


def device_name(device: str) -> str:
    """Name of this rank's GPU, or ``CPU``."""
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def command_line() -> str:
    """The command line of this process, after the variables of this library that are set."""
    variables = [f"{name}={value}" for name, value in os.environ.items() if name.startswith("HYBRID_EP_")]
    program = Path(sys.argv[0]).name
    return shlex.join([*sorted(variables), "hybrid-ep" if program == "__main__.py" else program, *sys.argv[1:]])


def versions(device: str) -> dict[str, str]:
    """Versions of what took part: of the library and its ground, with GPUs of the driver, in a clone the commit."""
    found = {"hybrid_ep": __version__, **_commit(), "python": platform.python_version(), "torch": torch.__version__}
    if device == "cuda":
        found["CUDA"] = str(torch.version.cuda)
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["driver"] = probe().driver_version or "unknown"
    return found


def _commit() -> dict[str, str]:
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return {}
    command = ["git", "-C", str(root), "rev-parse", "--short=8", "HEAD"]
    try:
        return {"commit": subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True).strip()}
    except (OSError, subprocess.CalledProcessError):
        return {}
