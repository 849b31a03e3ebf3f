"""`hybrid-ep k8s`: check manifests before they reach a cluster; report a node's state to a cluster."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.markup import escape

from hybrid_ep.cluster.kubernetes.check import LEFT_TO_THE_SERVER, CheckResult, check
from hybrid_ep.cluster.kubernetes.formats import to_junit, to_sarif
from hybrid_ep.cluster.kubernetes.manifest import Level
from hybrid_ep.cluster.kubernetes.schema import KUBERNETES_VERSION
from hybrid_ep.errors import ConfigError, HybridEPError
from hybrid_ep.inputs import Seconds

if TYPE_CHECKING:
    from hybrid_ep.cluster.doctor.model import Report
    from hybrid_ep.cluster.kubernetes.metrics import Metrics
    from hybrid_ep.cluster.kubernetes.node import Marking

_UNDER_LOAD_S = 1800.0  # for the active checks of one node


@click.group()
def k8s() -> None:
    """Check Kubernetes manifests, or write the doctor's findings to the node."""


@k8s.command("check", short_help="Check manifests.")
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, allow_dash=True, path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "sarif", "junit"]),
    default="text",
    show_default=True,
    help="Format of the output.",
)
@click.option("--json", "form", flag_value="json", help="The same as --format json.")
@click.option("--rule", "rules", multiple=True, metavar="ID", help="Report only this rule; may be repeated.")
@click.option("--ignore", multiple=True, metavar="ID", help="Do not report this rule; may be repeated.")
@click.option(
    "--fail-on",
    type=click.Choice([level.value for level in Level]),
    default="error",
    show_default=True,
    help="Least level of a problem that makes the exit status 1.",
)
@click.option("--kubernetes", default=KUBERNETES_VERSION, show_default=True, help="Kubernetes version of the schemas.")
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
    """Check YAML files and folders; `-` reads standard input.

    kustomize builds a folder with a kustomization.yaml, or all such folders below it. If there is none, the YAML files
    of the folder are one build. Objects must fit the schemas of Kubernetes and its operators, without unknown fields.
    Rules then find what the API server accepts and what would hang, fail on the node or be slow. The annotation
    ignore.hybrid-ep/RULE: REASON turns off a rule for an object. What the API server finds is left to
    `kubectl apply --dry-run=server`.

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
    console.print(f"left to the API server: {LEFT_TO_THE_SERVER}")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


@k8s.command(
    "mark-node",
    short_help="Write the doctor's findings to the node.",
    context_settings={"ignore_unknown_options": True},
)
@click.option("--every", type=Seconds(1, 365 * 86400), help="Repeat after so many seconds; default: run once.")
@click.option(
    "--metrics-port", type=click.IntRange(0, 65535), help="With --every: serve Prometheus metrics on this port."
)
@click.option(
    "--taint",
    type=click.Choice(["NoSchedule", "PreferNoSchedule", "NoExecute"]),
    help="Effect of the taint hybrid-ep/doctor=fail, which a node has while it fails; default: no taint.",
)
@click.option("--remember", is_flag=True, help="Keep the doctor's counters in an annotation of the node.")
@click.option(
    "--changes",
    is_flag=True,
    help="Keep the facts of a node that passes in an annotation, and report when they change.",
)
@click.option(
    "--under-load", is_flag=True, help="Run the active checks of the doctor, which have a condition of their own."
)
@click.argument("doctor_options", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def mark_node_command(
    ctx: click.Context,
    every: float | None,
    metrics_port: int | None,
    taint: str | None,
    remember: bool,
    changes: bool,
    under_load: bool,
    doctor_options: tuple[str, ...],
) -> None:
    """Run the doctor and write its findings to this Pod's node: conditions, a label, events.

    The condition HybridEPFit is the verdict. Each fault has a condition of its own. If the doctor gives no report, the
    verdict is unknown. With --changes the condition HybridEPChanged and an event say what differs since the node first
    passed. With --under-load a fault makes the exit status 1, so that a job can stop there.

    The options of `hybrid-ep doctor` are taken too, e.g. --profile hgx-h100. NODE_NAME must be set, and the service
    account must be allowed to get and patch nodes and to create events.
    """
    # The doctor's modules are loaded only here: a check of manifests needs none.
    from hybrid_ep import env
    from hybrid_ep.cluster.kubernetes.metrics import Metrics, serve
    from hybrid_ep.cluster.kubernetes.node import CONDITION, UNDER_LOAD, Marking

    node = env.NODE_NAME.get()
    if not node:
        raise click.UsageError(f"{env.NODE_NAME.name} is not set; allowed: the name of this Pod's node")
    if metrics_port is not None and every is None:
        raise click.UsageError("--metrics-port without --every; allowed: together")
    if under_load and remember:
        raise click.UsageError("--remember with --under-load; allowed: one of them, as load makes counters rise")
    marking = Marking(UNDER_LOAD if under_load else CONDITION, taint or "", changes=changes)
    metrics = Metrics(node, every or 0.0)
    if metrics_port is not None:
        serve(metrics_port, metrics)
    while True:
        try:
            condition = _mark_once(node, marking, metrics, remember, doctor_options)
        except HybridEPError as error:
            if every is None:
                raise
            click.echo(f"hybrid-ep: {type(error).__name__}: {error}", err=True)
        if every is None:
            ctx.exit(1 if under_load and condition["status"] == "False" else 0)
        time.sleep(every)


def _mark_once(
    node: str, marking: Marking, metrics: Metrics, remember: bool, doctor_options: tuple[str, ...]
) -> dict[str, str]:
    """One run of the doctor, written to the node and to the metrics.

    Returns:
        the condition that sums up.

    Raises:
        NodeError: there was no report, which is written, too, or the API server could not be reached.
    """
    import datetime

    from hybrid_ep.cluster.kubernetes.api import ApiServer, NodeError
    from hybrid_ep.cluster.kubernetes.node import UNDER_LOAD, examine_and_remember, examine_node, mark_node

    under_load = marking.condition == UNDER_LOAD
    limits = {"limit_s": _UNDER_LOAD_S} if under_load else {}
    options = ["--active", *doctor_options] if under_load else list(doctor_options)
    found: Report | NodeError
    try:
        if remember:
            found, memory = examine_and_remember(ApiServer.of_this_pod(), node, options, **limits)
            marking = replace(marking, memory=memory)
        else:
            found = examine_node(options, **limits)
    except NodeError as error:
        found = error
    metrics.note(found)
    now = datetime.datetime.now(datetime.timezone.utc)
    try:
        # The token is read anew each time: Kubernetes renews it.
        condition = mark_node(ApiServer.of_this_pod(), node, found, now, marking)
    except HybridEPError:
        metrics.note_not_written()
        raise
    click.echo(json.dumps({"node": node, **condition}))
    if isinstance(found, NodeError):
        raise found
    return condition


@k8s.command("kernel-log", short_help="Keep kernel messages about GPUs and NICs.")
@click.option("--every", type=Seconds(1, 365 * 86400), help="Repeat after so many seconds; default: run once.")
@click.argument("place", type=click.Path(dir_okay=False, path_type=Path))
def kernel_log_command(every: float | None, place: Path) -> None:
    """Keep kernel messages about GPUs and NICs in the file PLACE, for `hybrid-ep doctor --kernel-log PLACE`.

    Run it in a container beside the doctor's. Then only this container reads /dev/kmsg.
    """
    from hybrid_ep.cluster.doctor.node import Node, Unreadable
    from hybrid_ep.cluster.kubernetes.api import NodeError
    from hybrid_ep.cluster.kubernetes.kernel_log import keep_kernel_log

    while True:
        try:
            keep_kernel_log(Node(), place)
        except OSError as error:
            raise ConfigError(f"{place} cannot be written: {error.strerror}") from error
        except Unreadable as error:
            raise NodeError(f"the kernel log cannot be read: {error}") from error
        if every is None:
            return
        time.sleep(every)
