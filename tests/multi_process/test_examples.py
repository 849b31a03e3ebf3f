"""The programs of examples/ run as they stand, on two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))
NUM_RANKS = 2


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path: Path, tmp_path: Path) -> None:
    """Each rank prints one line. Ranks write to files of their own, so that their lines do not mix."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
    command = [sys.executable, "-m", *launcher, "--redirects", "3", "--log-dir", str(tmp_path), str(path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, check=False)
    written = {log.parent.name: log.with_name("stdout.log").read_text() for log in tmp_path.rglob("stderr.log")}
    errors = "\n".join(log.read_text() for log in tmp_path.rglob("stderr.log"))
    assert done.returncode == 0, done.stderr + errors
    assert sorted(written) == [str(rank) for rank in range(NUM_RANKS)]
    for rank, text in written.items():
        (line,) = text.splitlines()
        assert line.startswith(f"rank {rank}:")
