"""The README's example is a program that runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

from tests.multi_process.torchrun import run_ranks

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_example_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    program = tmp_path / "example.py"
    program.write_text(example)
    for text in run_ranks([str(program)], 4, tmp_path / "logs"):
        assert text.count("128 tokens back") == 1
