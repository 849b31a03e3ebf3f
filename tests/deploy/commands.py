"""Commands of the distribution, run as a person would run them. If one fails, its output is shown."""

from __future__ import annotations

import subprocess
from pathlib import Path


def run(*command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, whatever that is."""
    return subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)


def must(*command: str | Path, cwd: Path | None = None) -> str:
    """Runs a command that has to succeed, and returns what it wrote to stdout."""
    result = run(*command, cwd=cwd)
    assert result.returncode == 0, f"{command}\n{result.stdout[-2000:]}\n{result.stderr[-3000:]}"
    return result.stdout
