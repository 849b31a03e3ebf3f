"""What a command line gives: files, read up to a limit and without waiting for a FIFO that nobody writes; seconds."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import click

_MOST_BYTES = 64 << 20


def read_input(path: Path) -> str:
    """Returns the text of a file, or of a pipe, as a shell makes it of ``<(command)``.

    Raises:
        OSError: it cannot be read, or has more than 64 MiB, as a device without end.
        ValueError: it is not UTF-8.
    """
    # A FIFO is opened at once, and without a writer it is empty.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        os.set_blocking(file.fileno(), True)
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise OSError(errno.EFBIG, f"more than {_MOST_BYTES >> 20} MiB", str(path))
    return content.decode()


def read_json_input(path: Path) -> Any:
    """Returns what the JSON of a file says.

    Raises:
        OSError: as `read_input`.
        ValueError: it is not JSON.
    """
    try:
        return json.loads(read_input(path))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


class Seconds(click.FloatRange):
    """A range of seconds. It refuses NaN, which every comparison of `click.FloatRange` lets pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = float(super().convert(value, param, ctx))
        if math.isnan(seconds):
            self.fail(f"{seconds} is not in the range {self._describe_range()}.", param, ctx)
        return seconds
