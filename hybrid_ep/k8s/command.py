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
from hybrid_ep.k8s.check import CheckResult, check
from hybrid_ep.k8s.formats import to_junit, to_sarif
from hybrid_ep.k8s.problem import Level
from hybrid_ep.k8s.schema import KUBERNETES_VERSION

if TYPE_CHECKING:
    from hybrid_ep.doctor.model import Report

__all__ = ["k8s"]


@click.group()
def k8s() -> None:
    """Check Kubernetes manifests, or report the doctor's findings as a condition of the node."""


@k8s.command("check")
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, allow_dash=True, path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "sarif", "junit"]),
    default="text",
    show_default=True,
    help="What to print.",
)
@click.option("--json", "form", flag_value="json", help="The same as --format json.")
@click.option("--rule", "rules", multiple=True, metavar="ID", help="Report only this rule; may be repeated.")
@click.option("--ignore", multiple=True, metavar="ID", help="Do not report this rule; may be repeated.")
@click.option(
    "--fail-on",
    type=click.Choice([level.value for level in Level]),
    default="error",
    show_default=True,
    help="Exit with 1 for a problem of this level or a worse one.",
)
@click.option("--kubernetes", default=KUBERNETES_VERSION, show_default=True, help="Version of the schemas.")
@click.pass_context
def check_command(
    ctx: click.Context,
    paths: tuple[Path, ...],
    form: str,
    rules: tuple[str, ...],
    ignore: tuple[str, ...],
    fail_on: str,
    kubernetes: str,
) -> None:
    """Check YAML files, folders with a kustomization.yaml, or trees of them; `-` reads standard input.

    Builds what kustomize builds, holds it to the schemas of Kubernetes and of operators with unknown fields closed, and
    to rules about what is accepted and then refused by a node, hangs or falls back. An object's annotation
    ignore.hybrid-ep/RULE: REASON silences a rule there.

    Exits with 1 if anything is wrong, with 2 if something could not be checked.
    """
    try:
        result = check(paths, rules=rules, ignore=ignore, kubernetes=kubernetes)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    exit_code = result.exit_code(Level(fail_on))
    if form == "text":
        _print(result)
    else:
        click.echo({"json": _to_json, "sarif": to_sarif, "junit": to_junit}[form](result))
    ctx.exit(exit_code)


def _to_json(result: CheckResult) -> str:
    return json.dumps(result.to_json(), indent=2)


def _print(result: CheckResult) -> None:
    console = Console(soft_wrap=True, highlight=False)
    styles = {Level.ERROR: "red", Level.WARNING: "yellow", Level.HINT: "cyan"}
    for problem in sorted(result.open, key=lambda problem: list(Level).index(problem.level)):
        source = f"{problem.source}:{problem.line}" if problem.line else problem.source
        where = escape(" ".join(part for part in (source, problem.name, problem.path) if part))
        level = f"[{styles[problem.level]}]{problem.level.value}[/]"
        console.print(f"{level} {where}\n    {problem.rule}: {escape(problem.message)}")
    for line in result.unchecked:
        console.print(f"[yellow]not checked[/] {escape(line)}")
    silenced = len(result.problems) - len(result.open)
    counts = [_counted(result.counts[level], level.value) for level in Level]
    counts += [f"{silenced} silenced"] if silenced else []
    num_objects = _counted(sum(map(len, result.checked.values())), "object")
    console.print(f"{_counted(len(result.checked), 'source')}, {num_objects}: {', '.join(counts)}")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


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
