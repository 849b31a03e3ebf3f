"""Names of hosts and jobs. They name files of the results folder, and stand in lists of words on command lines."""

from __future__ import annotations

import re
from typing import Any

import click

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,249}")  # with .json no more than the 255 bytes of a file name
_ALLOWED = "1 to 250 letters, digits, '.', '_', ':' and '-', the first a letter or digit"


def fault_of_name(what: str, name: object) -> str | None:
    """Returns what is wrong with the name of a host or a job, or None."""
    if isinstance(name, str) and _NAME.fullmatch(name):
        return None
    return f"{what} is {name!r}; allowed: {_ALLOWED}"


class Name(click.ParamType):  # type: ignore[type-arg]
    """The name of a host or a job on the command line."""

    def __init__(self, what: str) -> None:
        self.name = what

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        fault = fault_of_name(self.name, value)
        if fault is not None:
            self.fail(fault, param, ctx)
        return str(value)
