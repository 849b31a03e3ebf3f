"""`hybrid-ep doctor`: check this node; `hybrid-ep doctor compare`: check several nodes' reports against each other.

`hybrid-ep topology` prints and draws which GPU sits next to which NIC.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from hybrid_ep.cluster.doctor.capture import ReplayedNode, capture
from hybrid_ep.cluster.doctor.model import Report, Status, to_junit
from hybrid_ep.cluster.doctor.node import Node, WatchedNode
from hybrid_ep.cluster.doctor.profile import Profile, load_profile, propose_profile, shipped_profiles
from hybrid_ep.cluster.doctor.registry import GROUPS
from hybrid_ep.cluster.doctor.rises import Memory
from hybrid_ep.cluster.doctor.runner import Selection, examine
from hybrid_ep.errors import ConfigError, HybridEPError, TopologyError
from hybrid_ep.inputs import Seconds, read_json_input
from hybrid_ep.outputs import OutputFile, RegularFile
from hybrid_ep.packages import explain
from hybrid_ep.topology import Topology
from hybrid_ep.topology.nccl import to_nccl_xml
from hybrid_ep.topology.recording import Recording
from hybrid_ep.topology.svg import draw
from hybrid_ep.watched import Unreadable

_FILE = OutputFile()


def _never_a_verdict(command: Callable[..., None]) -> Callable[..., None]:
    """Exit status 1 means a confirmed fault of the node, so nothing that goes wrong here may end with it."""

    @functools.wraps(command)
    def guarded(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except (click.exceptions.Exit, click.ClickException, HybridEPError):
            raise
        except KeyboardInterrupt:
            raise click.exceptions.Exit(130) from None
        except Exception as error:
            if explain(error) is not None:
                raise  # the command line says what to install
            click.echo(f"hybrid-ep doctor: internal error: {type(error).__name__}: {error}", err=True)
            raise click.exceptions.Exit(2) from error

    return guarded


@click.group(invoke_without_command=True)
@click.option("--quick", is_flag=True, help="Leave out checks that read twice or start a program.")
@click.option(
    "--group", "groups", multiple=True, metavar="GROUP", help=f"Only this group: {', '.join(GROUPS)}. May be repeated."
)
@click.option(
    "--check",
    "ids",
    multiple=True,
    metavar="ID",
    help="Only this check, e.g. gpu.count; with --group, in addition to it. May be repeated.",
)
@click.option(
    "--profile",
    metavar="NAME|FILE",
    help=f"What the node must have: {', '.join(shipped_profiles())}, a YAML file, or - (standard input); default: the "
    "profile that fits.",
)
@click.option(
    "--sysroot",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path("/"),
    help="Check a recorded or simulated node: read /sys, /proc and /dev below this folder.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of the table.")
@click.option(
    "--replay",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Judge a recording that --record wrote, of this node or another, in place of this node.",
)
@click.option("--junit", type=_FILE, help="Also write the report as JUnit XML.")
@click.option("--record", type=_FILE, help="Also write everything that was read, for a replay.")
@click.option(
    "--against",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Also warn of what has changed since --record wrote this file.",
)
@click.option(
    "--state", type=RegularFile(), help="Keep counters in this file, to find those that rose since the last run."
)
@click.option(
    "--kernel-log",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Read this file of `hybrid-ep k8s kernel-log` instead of /dev/kmsg.",
)
@click.option(
    "--asked-at",
    type=Seconds(0, 2**33),
    metavar="SECONDS",
    help="Unix time of the caller, to compare this node's clock with.",
)
@click.option("--active", is_flag=True, help="Also measure the GPUs under load. Takes minutes; the node must be idle.")
@click.option(
    "--burn-seconds",
    type=Seconds(1, 3600),
    default=30.0,
    show_default=True,
    help="With --active: time under load.",
)
@click.option(
    "--accept-unknown",
    is_flag=True,
    help="Exit with 0 if no fault is found, although something could not be read, as in a Pod.",
)
@click.pass_context
@_never_a_verdict
def doctor(
    context: click.Context,
    quick: bool,
    groups: tuple[str, ...],
    ids: tuple[str, ...],
    profile: str | None,
    sysroot: Path,
    as_json: bool,
    replay: Path | None,
    junit: Path | None,
    record: Path | None,
    against: Path | None,
    state: Path | None,
    kernel_log: Path | None,
    asked_at: float | None,
    active: bool,
    burn_seconds: float,
    accept_unknown: bool,
) -> None:
    """Check whether this node is fit to run hybrid_ep.

    Give --profile where the node must have GPUs: one that shows none is otherwise judged as a node without, unless its
    firmware, the loaded driver or the state file say that it had some.

    Exit status: 0 = every check passed, 1 = a fault was confirmed, 2 = no fault, but something could not be read or
    written. Warnings do not count.
    """
    if context.invoked_subcommand is not None:
        return
    if replay is not None:
        live = {"--record": record, "--state": state, "--kernel-log": kernel_log, "--asked-at": asked_at}
        live |= {"--active": active or None, "--sysroot": None if sysroot == Path("/") else sysroot}
        if given := [name for name, value in live.items() if value is not None]:
            raise click.UsageError(f"--replay with {', '.join(given)}, which need a live node; allowed: without")
        report = _with_drift(_replayed(replay, profile, Selection(groups, ids, quick)), against, profile)
        _show(context, report, as_json, {junit: to_junit(report)}, accept_unknown=accept_unknown)
    exchange = {"asked_s": asked_at, "started_s": round(time.time(), 3)} if asked_at is not None else {}
    selection = Selection(groups, ids, quick)
    memory = Memory.load(state) if state is not None else None
    expected = load_profile(profile) if profile else None
    with closing(WatchedNode(sysroot, open_node=functools.partial(Node, kernel_log=kernel_log))) as node:
        source = "given"
        if expected is None:
            name, source = propose(node, memory)
            expected = load_profile(name)
        report = examine(node, expected, source, selection, memory=memory)
        recorded = recording_of(node) if record is not None else None
    if active:
        report = _with_active(report, expected, sysroot, burn_seconds)
    report = _with_drift(report, against, profile)
    report.facts.update(exchange)
    if memory is not None:
        memory.save()
        if memory.complaint:
            click.echo(f"hybrid-ep doctor: {memory.complaint}", err=True)
    files = {junit: to_junit(report), record: recorded}
    _show(context, report, as_json, files, accept_unknown=accept_unknown)


@doctor.command("compare")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of the table.")
@click.option("--junit", type=_FILE, help="Also write the report as JUnit XML.")
@click.pass_context
@_never_a_verdict
def compare_command(context: click.Context, files: tuple[Path, ...], as_json: bool, junit: Path | None) -> None:
    """Compare the JSON reports of several nodes: versions, NVLink domains and clocks."""
    from hybrid_ep.cluster.doctor.compare import compare

    report = compare([_load(path) for path in files])
    _show(context, report, as_json, {junit: to_junit(report)})


def _replayed(file: Path, profile: str | None, selection: Selection) -> Report:
    """The report of a recorded node.

    Raises:
        ConfigError: the file is no recording, or the profile is none.
    """
    recording = Recording.load(file)
    given = load_profile(profile) if profile else None
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        try:
            recording.write(root)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} is not a recording of a node: {error}") from error
        open_node = functools.partial(ReplayedNode, recorded=recording.nvml)
        with closing(WatchedNode(root, open_node=open_node)) as node:
            name, source = (given.name, "given") if given else propose(node)
            # Two readings are as far apart as those of the recorded node.
            return examine(node, given or load_profile(name), source, selection, wait=lambda since: 1.0)


def _with_drift(report: Report, against: Path | None, profile: str | None) -> Report:
    """The report with what differs from a recording of the same node, judged by the same profile."""
    if against is None:
        return report
    from hybrid_ep.cluster.doctor.drift import changes

    accepted = _replayed(against, profile, Selection((), ("driver.version",), True))
    return replace(report, results=report.results + changes(accepted.facts, report.facts))


def _with_active(report: Report, profile: Profile, sysroot: Path, seconds: float) -> Report:
    """The report with the active checks' results, from a child that may load torch and CUDA."""
    from hybrid_ep.cluster.doctor.active import examine_actively

    with closing(WatchedNode(sysroot, limit_s=seconds + 180)) as node:
        return replace(report, results=report.results + examine_actively(node, profile, seconds=seconds))


def propose(node: Node | WatchedNode, memory: Memory | None = None) -> tuple[str, str]:
    """The profile that fits this node, and why; one for GPUs where nothing can be read, so that nothing passes."""
    num_known = len({thing for thing, _ in memory.counters.get("gpu.errors", {})}) if memory else 0
    try:
        return node.insist(_propose, num_known)
    except Unreadable as error:
        return propose_profile([], 1)[0], str(error)


def _propose(node: Node, num_known: int) -> tuple[str, str]:
    """A node without GPUs had some if the last run read their counters, or if the driver is loaded, which needs one."""
    had = f"the last run saw {num_known} GPUs, and now there is none" if num_known else ""
    if node.driver_is_loaded:
        had = had or "the NVIDIA driver is loaded, and there is no GPU"
    try:
        names = [str(node.nvml.gpu(gpu_idx, "name")) for gpu_idx in node.nvml.gpus]
    except Unreadable:
        names = []
    try:
        num_pci = len(node.topology.pci_gpus)
        return propose_profile(names, num_pci, machine=node.machine, product=node.product, had_gpus=had)
    except Unreadable as error:
        return propose_profile(names, 1)[0], f"PCI cannot be seen: {error}"


def recording_of(node: Node | WatchedNode) -> str | None:
    """What `capture` read; None where it could not, which is said."""
    try:
        return node.insist(capture).to_text()
    except Unreadable as error:
        click.echo(f"hybrid-ep doctor: --record writes nothing: {error}", err=True)
        return None


def _load(path: Path) -> Report:
    try:
        return Report.from_json(read_json_input(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a report of `hybrid-ep doctor --json`: {error!r}") from error


def _show(
    context: click.Context,
    report: Report,
    as_json: bool,
    files: dict[Path | None, str | None],
    *,
    accept_unknown: bool = False,
) -> None:
    """Prints the report, writes the files that were asked for, and exits; one that cannot be written is no fault.

    A file without text could not be made, which was said; it is no fault either.
    """
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        from rich.console import Console

        from hybrid_ep.cluster.doctor.render import render

        Console().print(render(report))
    sys.stdout.flush()
    exit_code = 0 if accept_unknown and report.status is Status.UNKNOWN else report.exit_code
    for path, text in files.items():
        if path is not None and text is None:
            exit_code = exit_code or 2
        elif path is not None and text is not None:
            try:
                path.write_text(text)
            except OSError as error:
                click.echo(f"hybrid-ep doctor: {path} cannot be written: {error.strerror}", err=True)
                exit_code = exit_code or 2
    context.exit(exit_code)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of the tree and the matrix.")
@click.option("--svg", type=OutputFile(), help="Draw the node into this SVG file.")
@click.option("--nccl", type=OutputFile(), help="Write an NCCL topology file (XML).")
@click.option(
    "--sysroot",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path("/"),
    help="Show a recorded or simulated node: read /sys below this folder.",
)
def topology(as_json: bool, svg: Path | None, nccl: Path | None, sysroot: Path) -> None:
    """Print or draw how GPUs, NICs and NVLink are connected.

    It also runs on a node without GPUs, NICs or drivers. What cannot be read is listed with the reason.
    """
    with closing(WatchedNode(sysroot)) as node:
        try:
            found = node.insist(read_topology)
        except Unreadable as error:
            raise TopologyError(f"this node cannot be read: {error}") from error
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2))
    else:
        from rich.console import Console

        from hybrid_ep.topology.render import render

        Console().print(render(found))
    for path, text in ((svg, draw(found)), (nccl, to_nccl_xml(found))):
        if path is not None:
            try:
                path.write_text(text)
            except OSError as error:
                raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def read_topology(node: Node) -> Topology:
    """The task of a `WatchedNode`."""
    return node.topology
