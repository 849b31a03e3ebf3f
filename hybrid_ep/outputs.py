"""Options that name what a command writes: checked when the command line is read, before any work is done."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import click


def _obstacle(path: Path, *, is_folder: bool) -> str | None:
    """Returns why a file or folder could not be written there, or None."""
    if path.is_fifo():
        return _obstacle_of_fifo(path)
    if path.exists():
        if path.is_dir() != is_folder:
            return "is a file" if is_folder else "is a folder"
        if not is_folder:
            return None if os.access(path, os.W_OK) else "cannot be written to"
    if not is_folder and not path.parent.is_dir():
        return f"cannot be written: there is no folder {path.parent}"
    above = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    if not above.is_dir():
        return f"cannot be made: {above} is a file"
    # To ask for rights is not enough: to root, every folder of /proc is one to write to.
    try:
        tempfile.TemporaryFile(dir=above).close()
    except OSError as error:
        return f"cannot be made in {above}: {error.strerror}"
    return None


def _obstacle_of_fifo(path: Path) -> str | None:
    """Writing waits for a reader, so there must be one: a shell has it for ``>(command)``."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        return (
            "is a FIFO that nobody reads" if error.errno == errno.ENXIO else f"cannot be written to: {error.strerror}"
        )
    return None


class _Output(click.ParamType):  # type: ignore[type-arg]
    is_folder = False

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value)
        obstacle = _obstacle(path, is_folder=self.is_folder)
        if obstacle is not None:
            self.fail(f"{path} {obstacle}", param, ctx)
        return path


class OutputFile(_Output):
    """A file that will be written: its folder is there, and it may be written to."""

    name = "file"


class RegularFile(OutputFile):
    """A file that will be replaced: nothing else may be in its place, as a device or a FIFO."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = super().convert(value, param, ctx)
        if path.exists() and not path.is_file():
            self.fail(f"{path} is no regular file", param, ctx)
        return path


class OutputFolder(_Output):
    """A folder that will be made where it is not there yet, and may be written to."""

    name = "directory"
    is_folder = True
