"""`hybrid-ep info` and `hybrid-ep env`: what is installed and built, which engine and transport, what can be set."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import platform
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from hybrid_ep import env
from hybrid_ep._version import __version__
from hybrid_ep.errors import ConfigError
from hybrid_ep.watched import Unreadable, Watched

_LIMIT_S = 30.0  # for torch to be imported, and for CUDA to answer
_DISTRIBUTIONS = ("numpy", "click", "rich", "matplotlib", "nvidia-ml-py", "mpi4py")


@dataclass(frozen=True)
class Info:
    """The facts of this installation.

    Attributes:
        versions: component → version, or None where it is not there.
        built: optional parts of the extension that were built.
        left_out: the others, each with the reason.
        engine: the engine that is chosen, or None if the one asked for cannot run.
        reason: why.
        transport: what would join domains on several hosts, or None if the one asked for cannot run.
        transport_reason: why.
        transports: every other transport, and why it is not the one; "not built: …" where it is missing.
        gpus: names of the visible GPUs.
        python: the interpreter.
        package: where hybrid_ep was imported from.
    """

    versions: dict[str, str | None]
    built: str
    left_out: str
    engine: str | None
    reason: str
    transport: str | None
    transport_reason: str
    transports: dict[str, str]
    gpus: list[str]
    python: str
    package: str


def _collect_in_time() -> Info:
    """Does as `collect` in a child process: if the driver hangs, only its facts are missing, after a limited time."""
    with closing(Watched(lambda watch: watch, limit_s=_LIMIT_S)) as child:
        try:
            return child.run(_collect_watched)
        except Unreadable as error:
            return Info(_versions(), "", "", None, str(error), None, str(error), {}, [], sys.executable, _package())


def _collect_watched(watch: Callable[[str], None]) -> Info:
    watch("import of torch")
    importlib.import_module("torch")
    watch("CUDA")
    return collect()


def collect() -> Info:
    """Looks at this process. Touches no GPU beyond asking for its name."""
    import torch

    from hybrid_ep import _C
    from hybrid_ep.engine.select import choose_engine

    engine: str | None = None
    try:
        engine, reason = choose_engine()
    except ConfigError as error:
        reason = str(error)
    transport, transport_reason, transports = _transports()
    has_gpu = torch.cuda.is_available()
    of_torch = {
        "torch": torch.__version__,
        "CUDA (torch)": torch.version.cuda,
        "NCCL (torch)": ".".join(map(str, torch.cuda.nccl.version())) if hasattr(torch._C, "_nccl_version") else None,
        "compiler of _C": _C.compiler,
    }
    return Info(
        versions=_versions(of_torch),
        built=_C.built,
        left_out=_C.left_out.rstrip("; "),
        engine=engine,
        reason=reason,
        transport=transport,
        transport_reason=transport_reason,
        transports=transports,
        gpus=[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if has_gpu else [],
        python=sys.executable,
        package=_package(),
    )


def _versions(of_torch: Mapping[str, str | None] | None = None) -> dict[str, str | None]:
    return {
        "hybrid_ep": __version__,
        "python": platform.python_version(),
        **(of_torch or {}),
        "NVSHMEM (wheel)": _nvshmem_version(),
        **{name: _distribution_version(name) for name in _DISTRIBUTIONS},
        "linux": platform.release(),
    }


def _package() -> str:
    return str(Path(__file__).resolve().parent)


def _transports() -> tuple[str | None, str, dict[str, str]]:
    """The transport between hosts, why, and why not the others."""
    from hybrid_ep.transport import choose_transport, survey

    states = survey()
    built = {state.name: "" if state.is_built else "not built: " for state in states}
    try:
        choice = choose_transport(states)
    except ConfigError as error:
        return None, str(error), {state.name: built[state.name] + (state.obstacle or "usable") for state in states}
    return choice.name, choice.reason, {name: built[name] + why for name, why in choice.others.items()}


def _distribution_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nvshmem_version() -> str | None:
    """The version of NVIDIA's wheels, whichever CUDA they are for."""
    found = (_distribution_version(name) for name in ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12", "nvshmem4py-cu13"))
    return next((version for version in found if version), None)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of the table.")
@click.pass_context
def info(ctx: click.Context, as_json: bool) -> None:
    """Show versions, built modules, and which engine and transport are chosen and why.

    Exits with 1 if the engine of HYBRID_EP_ENGINE or the transport of HYBRID_EP_TRANSPORT cannot run here.
    """
    found = _collect_in_time()
    if as_json:
        click.echo(json.dumps(asdict(found), indent=2))
    else:
        Console().print(_render(found))
    ctx.exit(0 if found.engine and found.transport else 1)


def _render(found: Info) -> Table:
    table = Table(show_header=False, title="hybrid_ep on this machine", title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    engine = f"[green]{found.engine}[/]" if found.engine else "[red]none[/]"
    table.add_row("engine", f"{engine} — {escape(found.reason)}")
    transport = f"[green]{found.transport}[/]" if found.transport else "[red]none[/]"
    table.add_row("between domains", f"{transport} — {escape(found.transport_reason)}")
    title = "others"
    for name, why in found.transports.items():
        if f"{name} cannot be used: " not in found.transport_reason:  # else the row above has said why
            table.add_row(title, f"[dim]{name}: {escape(why)}[/]")
            title = ""
    table.add_row("built", escape(found.built or "nothing optional"))
    table.add_row("not built", escape(found.left_out or "nothing"))
    if found.versions["NVSHMEM (wheel)"] and "NVSHMEM was not found" in found.left_out:
        table.add_row("", "[dim]NVSHMEM was installed after the build: build again to have _nvshmem[/]")
    table.add_row("GPUs", escape(", ".join(found.gpus)) or "[dim]none visible[/]")
    table.add_section()
    for name, version in found.versions.items():
        absent = "not part of this torch" if name.endswith("(torch)") else "not installed"
        table.add_row(name, escape(version) if version else f"[dim]{absent}[/]")
    table.add_section()
    table.add_row("interpreter", escape(found.python))
    table.add_row("package", escape(found.package))
    return table


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of the table.")
def env_table(as_json: bool) -> None:
    """Show every environment variable: its value here, its default, the allowed values and the effect.

    Exits with 1 if a value is not allowed.
    """
    rows = [_describe(variable) for variable in env.VARIABLES]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        Console().print(_render_variables(rows))
    if any(row["error"] for row in rows):
        raise click.exceptions.Exit(1)


def _describe(variable: env.Variable[Any]) -> dict[str, Any]:
    """One variable as JSON; `value` is what is in force, `error` why it cannot be."""
    value, error = None, None
    try:
        value = variable.get()
    except ConfigError as problem:
        error = str(problem)
    return {
        "name": variable.name,
        "value": value,
        "is_set": variable.is_set,
        "default": variable.default,
        "allowed": variable.allowed,
        "effect": variable.effect,
        "phase": variable.phase,
        "error": error,
    }


def _render_variables(rows: list[dict[str, Any]]) -> Group:
    """A paragraph for each variable: its value, then what it takes and does. Reads well in 80 columns."""
    parts: list[RenderableType] = []
    for row in rows:
        value = "unset" if row["value"] in (None, "") else str(row["value"])
        shown = f"[red]{escape(row['error'])}[/]" if row["error"] else escape(value)
        state = "set here" if row["is_set"] else "default"
        parts.append(f"[bold]{row['name']}[/] = {shown}  [dim]({state})[/]")
        reader = " Read by setup.py." if row["phase"] == "build" else ""
        parts.append(Padding(f"{escape(row['effect'])} [dim]Takes {escape(row['allowed'])}.{reader}[/]", (0, 0, 1, 4)))
    return Group(*parts)
