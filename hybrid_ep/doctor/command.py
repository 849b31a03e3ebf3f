"""`hybrid-ep doctor`: check this node; `hybrid-ep doctor compare`: check several nodes' reports against each other."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import click
from rich.console import Console

from hybrid_ep.doctor.capture import capture
from hybrid_ep.doctor.compare import compare
from hybrid_ep.doctor.model import Report, Status
from hybrid_ep.doctor.node import Node
from hybrid_ep.doctor.profile import load_profile, propose_profile, shipped_profiles
from hybrid_ep.doctor.registry import GROUPS
from hybrid_ep.doctor.render import render, to_junit
from hybrid_ep.doctor.runner import Selection, examine
from hybrid_ep.doctor.unreadable import Unreadable
from hybrid_ep.errors import ConfigError

__all__ = ["doctor"]

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.group(invoke_without_command=True)
@click.option("--quick", is_flag=True, help="Leave out what needs a second reading or another program.")
@click.option("--group", "groups", multiple=True, metavar="GROUP", help=f"Only this group: {', '.join(GROUPS)}.")
@click.option("--check", "ids", multiple=True, metavar="ID", help="Only this check, e.g. gpu.count; adds to --group.")
@click.option("--profile", metavar="NAME|FILE", help=f"{', '.join(shipped_profiles())}, a YAML file, or - (stdin).")
@click.option(
    "--sysroot",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path("/"),
    help="Read /sys, /proc and /dev below this folder: a recorded or simulated node.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of the table.")
@click.option("--junit", type=_FILE, help="Also write the report as JUnit XML.")
@click.option("--record", type=_FILE, help="Also write everything that was read, so that it can be replayed.")
@click.option("--accept-unknown", is_flag=True, help="Exit with 0 where only unreadable things are left, as in a Pod.")
@click.pass_context
def doctor(
    context: click.Context,
    quick: bool,
    groups: tuple[str, ...],
    ids: tuple[str, ...],
    profile: str | None,
    sysroot: Path,
    as_json: bool,
    junit: Path | None,
    record: Path | None,
    accept_unknown: bool,
) -> None:
    """Check whether this node is fit to run hybrid_ep.

    Exit status: 0 = every check passed, 1 = a fault was confirmed, 2 = no fault, but something could not be read.
    Warnings do not count.
    """
    if context.invoked_subcommand is not None:
        return
    with closing(Node(sysroot)) as node:
        name, source = (profile, "given") if profile else _propose(node)
        report = examine(node, load_profile(name), source, Selection(groups, ids, quick))
        if record is not None:
            capture(node).save(record)
    _show(context, report, as_json, junit, accept_unknown=accept_unknown)


@doctor.command("compare")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of the table.")
@click.option("--junit", type=_FILE, help="Also write the report as JUnit XML.")
@click.pass_context
def compare_command(context: click.Context, files: tuple[Path, ...], as_json: bool, junit: Path | None) -> None:
    """Compare the JSON reports of several nodes: versions, cliques, complete domains, clocks."""
    _show(context, compare([_load(path) for path in files]), as_json, junit)


def _propose(node: Node) -> tuple[str, str]:
    try:
        names = [str(node.nvml.gpu(gpu_idx, "name")) for gpu_idx in node.nvml.gpus]
    except Unreadable:
        names = []
    return propose_profile(names, len(node.topology.pci_gpus))


def _load(path: Path) -> Report:
    try:
        return Report.from_json(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no report of `hybrid-ep doctor --json`: {error!r}") from error


def _show(
    context: click.Context, report: Report, as_json: bool, junit: Path | None, *, accept_unknown: bool = False
) -> None:
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        Console().print(render(report))
    if junit is not None:
        junit.write_text(to_junit(report))
    context.exit(0 if accept_unknown and report.status is Status.UNKNOWN else report.exit_code)
