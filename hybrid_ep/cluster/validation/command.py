"""`hybrid-ep validation`: pairs of hosts for tests, hosts that are fit for jobs, and the report."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import click
from rich.console import Console

from hybrid_ep.cluster.validation.cluster import load_cluster
from hybrid_ep.cluster.validation.names import Name
from hybrid_ep.cluster.validation.playbooks import COMMANDS
from hybrid_ep.cluster.validation.rounds import Round, rounds
from hybrid_ep.errors import ConfigError
from hybrid_ep.outputs import OutputFolder

_RESULTS = click.argument("results", type=click.Path(exists=True, file_okay=False, path_type=Path))


@click.group()
def validation() -> None:
    """Plan the test jobs of a cluster, and write its report.

    The playbooks call these commands. RESULTS is the folder that they fill; docs/validation.md describes it.
    """


for command in COMMANDS:
    validation.add_command(command)


@validation.command("rounds", short_help="Print rounds of pairs of hosts.")
@click.argument("hosts", nargs=-1, required=True, type=Name("host"))
@click.option(
    "--rounds", "limit", type=click.IntRange(min=1), help="Print at most so many rounds, evenly spread over all."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a line for each round.")
def rounds_command(hosts: tuple[str, ...], limit: int | None, as_json: bool) -> None:
    """Print rounds of pairs: a host is in one pair of a round, and no pair occurs twice.

    Without --rounds, all pairs occur: n − 1 rounds of n hosts. With an odd number, one host rests in each round. One
    host alone has no rounds.
    """
    try:
        tournament = rounds(hosts, limit)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    # Round by round: the whole tournament of a thousand hosts would be half a million pairs in memory.
    if not as_json:
        for item in tournament:
            bye = [f"({item.bye} rests)"] if item.bye is not None else []
            click.echo("  ".join([*(" ".join(pair) for pair in item.pairs), *bye]))
        return
    click.echo('{"rounds": [', nl=False)
    for index, item in enumerate(tournament):
        click.echo(("," if index else "") + "\n" + _to_json(item), nl=False)
    click.echo("]}")


@validation.command("healthy", short_help="Print the hosts that are fit for test jobs.")
@_RESULTS
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with the other hosts and the reasons.")
def healthy_command(results: Path, as_json: bool) -> None:
    """Print the hosts that are fit for test jobs.

    A host is fit if its doctor has sent a report without a fault, and if no test job so far has failed because of it.
    Standard error has the other hosts, with the reason. Exits with 0 even if no host is fit.
    """
    try:
        nodes = load_cluster(results).nodes
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    healthy = [node.name for node in nodes if node.is_fit]
    excluded = []
    for node in nodes:
        if not node.is_fit:
            worst = node.problems[0]
            excluded.append(
                {"host": node.name, "check": worst.id, "reason": f"{worst.id}: {worst.seen}", "remedy": worst.remedy}
            )
    if as_json:
        click.echo(json.dumps({"healthy": healthy, "excluded": excluded}, indent=2))
        return
    for name in healthy:
        click.echo(name)
    for item in excluded:
        click.echo(f"excluded {item['host']}: {item['reason']}: {item['remedy']}", err=True)


@validation.command("bisect", short_help="Print which hosts are tested together next.")
@_RESULTS
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with what is known so far.")
def bisect_command(results: Path, as_json: bool) -> None:
    """Print the next jobs that find why a job of many hosts failed: a name and its hosts on each line.

    They have no host in common, so they may run at once. Nothing is printed when there is no such job, or nothing more
    to find: the report then names the hosts. Each job is recorded with --kind group.
    """
    try:
        cluster = load_cluster(results)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    rounds = [int(job.name.split("-")[1]) for job in cluster.jobs if re.fullmatch(r"bisect-\d+-\d+", job.name)]
    number, found = max(rounds, default=0) + 1, cluster.bisection
    has_more = number <= 2 * math.log2(max(len(cluster.nodes), 2)) + 2
    jobs = [
        {"name": f"bisect-{number}-{place}", "hosts": hosts}
        for place, hosts in enumerate(found.next_round if has_more else ())
    ]
    if as_json:
        known = {"blamed": found.blamed, "together": found.together, "undecided": found.undecided}
        click.echo(json.dumps({"jobs": jobs, **known}, indent=2))
        return
    for job in jobs:
        click.echo(" ".join([str(job["name"]), *job["hosts"]]))


@validation.command("report", short_help="Write the report of a cluster.")
@_RESULTS
@click.option(
    "--out",
    type=OutputFolder(),
    help="Folder of report.html, report.md, report.json and junit.xml; default: RESULTS/report.",
)
@click.pass_context
def report_command(context: click.Context, results: Path, out: Path | None) -> None:
    """Print the summary, and write it as one HTML page, Markdown, JSON and JUnit XML.

    Exit status: 0 = everything passed, 1 = a fault was confirmed, 2 = no fault, but something could not be read.
    """
    # Loaded only here: rounds and healthy need no templates.
    from hybrid_ep.cluster.validation.formats import render, to_junit, to_markdown
    from hybrid_ep.cluster.validation.page import to_html

    try:
        cluster = load_cluster(results)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    out = out or results / "report"
    files = {
        "report.html": to_html(cluster, results),
        "report.md": to_markdown(cluster),
        "report.json": json.dumps(cluster.to_json(), allow_nan=False) + "\n",
        "junit.xml": to_junit(cluster),
    }
    Console(highlight=False).print(render(cluster))
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.UsageError(f"{out} cannot be written: {error.strerror}; --out chooses another folder") from None
    click.echo(f"written: {out}/{', '.join(files)}")
    context.exit(cluster.status.exit_code)


def _to_json(item: Round) -> str:
    return json.dumps({"pairs": item.pairs, "bye": item.bye})
