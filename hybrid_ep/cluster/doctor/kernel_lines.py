"""Lines of the kernel log, beside Xids, that show a fault: what the check judges, and what a recording keeps."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import yaml

__all__ = ["fault_lines"]


@cache
def fault_lines() -> list[tuple[re.Pattern[str], str]]:
    """Returns a pattern for each kind of line, and the fault that such a line shows; the first that matches counts."""
    entries = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    return [(re.compile(entry["pattern"]), entry["what"]) for entry in entries]
