"""The programs of examples/ run as they stand, on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multi_process.torchrun import run_ranks

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path: Path, tmp_path: Path) -> None:
    """Each rank prints one line."""
    for rank, text in enumerate(run_ranks([str(path)], 2, tmp_path)):
        (line,) = text.splitlines()
        assert line.startswith(f"rank {rank}:")
