"""`hybrid-ep k8s`: check manifests before they reach a cluster; tell a cluster how a node is."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.markup import escape

from hybrid_ep.errors import ConfigError, HybridEPError
from hybrid_ep.k8s.check import check

if TYPE_CHECKING:
    from hybrid_ep.doctor.model import Report

__all__ = ["k8s"]


@click.group()
def k8s() -> None:
    """Check Kubernetes manifests, or report the doctor's findings as a condition of the node."""


@k8s.command("check")
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
@click.pass_context
def check_command(ctx: click.Context, paths: tuple[Path, ...], as_json: bool) -> None:
    """Check YAML files, folders with a kustomization.yaml, or trees of them.

    Builds what kustomize builds, holds it to the schemas of Kubernetes and of the MPI operator with unknown fields
    closed, and to rules about what is accepted and then hangs or falls back.

    Exits with 1 if anything is wrong, with 2 if something could not be checked.
    """
    try:
        result = check(paths)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=2))
        ctx.exit(result.exit_code)
    console = Console(soft_wrap=True, highlight=False)
    for problem in result.problems:
        where = escape(" ".join(part for part in (problem.source, problem.name, problem.path) if part))
        console.print(f"[red]error[/] {where}\n    {problem.rule}: {escape(problem.message)}")
    for line in result.unchecked:
        console.print(f"[yellow]not checked[/] {escape(line)}")
    num_objects = sum(map(len, result.checked.values()))
    console.print(f"{len(result.checked)} sources, {num_objects} objects: {len(result.problems)} problems")
    ctx.exit(result.exit_code)


@k8s.command("mark-node", context_settings={"ignore_unknown_options": True})
@click.option("--every", type=click.FloatRange(min=1), help="Repeat, with so many seconds between; default: once.")
@click.argument("doctor_options", nargs=-1, type=click.UNPROCESSED)
def mark_node_command(every: float | None, doctor_options: tuple[str, ...]) -> None:
    """Run the doctor and write its findings to this Pod's node, as a condition and a label.

    A doctor that gives no report makes the node unknown.

    Takes the doctor's options, too, e.g. --profile hgx-h100. Needs NODE_NAME and a service account that may get and
    patch nodes.
    """
    # The doctor's modules are loaded only here: a check of manifests needs none.
    import datetime

    from hybrid_ep import env
    from hybrid_ep.k8s.node import ApiServer, NodeError, examine_node, mark_node

    node = env.NODE_NAME.get()
    if not node:
        raise click.UsageError(f"{env.NODE_NAME.name} is not set; allowed: the name of this Pod's node")
    while True:
        try:
            found: Report | NodeError
            try:
                found = examine_node(doctor_options)
            except NodeError as error:
                found = error
            now = datetime.datetime.now(datetime.timezone.utc)
            # The token is read anew each time: Kubernetes renews it.
            condition = mark_node(ApiServer.of_this_pod(), node, found, now)
            click.echo(json.dumps({"node": node, **condition}))
            if isinstance(found, NodeError):
                raise found
        except HybridEPError as error:
            if every is None:
                raise
            click.echo(f"hybrid-ep: {type(error).__name__}: {error}", err=True)
        if every is None:
            return
        time.sleep(every)
