"""Pages and pictures of the documentation that are made from the code. None of them is in the repository."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import click

from ci.layers import draw
from hybrid_ep import env
from hybrid_ep.cli import COMMANDS, main
from hybrid_ep.cluster.doctor.document import document as doctor_reference
from tests.sim.document import document as doctor_scenarios

__all__ = ["PICTURES", "pages"]

# Below docs/, with what makes them.
PICTURES = {"images/architecture.svg": draw}


def pages() -> dict[str, str]:
    """Path below docs/ → Markdown."""
    return {
        "doctor_reference.md": f"{doctor_reference()}\n{doctor_scenarios()}",
        "reference/cli.md": "\n".join(_command_line()),
        "reference/environment.md": _environment(),
    }


def _environment() -> str:
    """The table of environment variables, from the one that the code reads."""
    lines = ["# Environment variables", "", "`hybrid-ep env` prints this table with the values in force.", ""]
    for phase, title in (("run", "Read by the package"), ("build", "Read by the build")):
        rows: list[list[Any]] = [
            [f"`{v.name}`", "unset" if v.default is None else f"`{v.default}`", v.allowed, v.effect]
            for v in env.VARIABLES
            if v.phase == phase
        ]
        lines += [f"## {title}", "", "| variable | default | takes | effect |", "|---|---|---|---|"]
        lines += [f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in row)} |" for row in rows] + [""]
    return "\n".join(lines)


def _command_line() -> Iterator[str]:
    """Every command with its usage, arguments and options, from the objects that read the command line."""
    yield "# Command line\n"
    yield "Exit status of every command: 0 = good, 1 = a confirmed fault or a failed check, 2 = unknown, or wrong"
    yield "usage. Every command takes `--help`.\n"
    context = click.Context(main, info_name="hybrid-ep")
    for name in COMMANDS:
        command = main.get_command(context, name)
        assert command is not None
        yield from _command(command, click.Context(command, context, name, **command.context_settings), 2)


def _command(command: click.Command, context: click.Context, level: int) -> Iterator[str]:
    yield f"{'#' * level} {context.command_path}\n"
    yield f"{click.unstyle(inspect.cleandoc(command.help or '')).replace(chr(8), '')}\n"
    yield f"```text\n{context.command_path} {' '.join(command.collect_usage_pieces(context))}\n```\n"
    rows = [_option(option, context) for option in command.params if isinstance(option, click.Option)]
    if rows:
        yield "\n".join(["| option | takes | default | effect |", "|---|---|---|---|", *rows, ""])
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from _command(child, click.Context(child, context, name, **child.context_settings), level + 1)


def _option(option: click.Option, context: click.Context) -> str:
    """One row; the default is the one that `--help` shows, if any."""
    takes = "" if option.is_flag else option.make_metavar(context).replace("|", "\\|")
    extra = option.get_help_extra(context)
    default = "required" if option.required else f"`{extra['default']}`" if "default" in extra else ""
    effect = (option.help or "").replace("|", "\\|")
    effect += f" In the range {extra['range'].replace('x', 'value')}." if "range" in extra else ""
    cells = ["`" + "`, `".join((*option.opts, *option.secondary_opts)) + "`", takes and f"`{takes}`"]
    return f"| {' | '.join([*cells, default, effect])} |"
