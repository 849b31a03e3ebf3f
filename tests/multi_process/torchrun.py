"""A program on the ranks of torchrun, and what each rank printed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def run_ranks(
    program: Sequence[str], num_ranks: int, logs: Path, *, max_restarts: int = 0, **variables: str
) -> list[str]:
    """Runs a program on each rank, with one thread a rank and without GPUs.

    Ranks that share one pipe print into each other's lines, so each rank writes to a file of its own.

    Args:
        program: what follows torchrun's own options, a path or `-m` and a module, and arguments.
        num_ranks: how many ranks.
        logs: an empty folder.
        max_restarts: how often torchrun starts all ranks again after one has failed.
        variables: added to the environment.

    Returns:
        What each rank printed to standard output, by rank, in the attempt that ended well.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    options = ["--nproc-per-node", str(num_ranks), "--max-restarts", str(max_restarts)]
    outputs = ["--redirects", "3", "--log-dir", str(logs)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | variables
    command = [*launcher, *options, *outputs, *program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, check=False)
    errors = "\n".join(log.read_text() for log in sorted(logs.rglob("stderr.log")))
    assert done.returncode == 0, done.stderr + errors
    *_, last = sorted(logs.rglob("attempt_*"), key=lambda attempt: int(attempt.name.removeprefix("attempt_")))
    assert {rank.name for rank in last.iterdir() if rank.is_dir()} == {str(rank) for rank in range(num_ranks)}
    return [(last / str(rank) / "stdout.log").read_text() for rank in range(num_ranks)]
