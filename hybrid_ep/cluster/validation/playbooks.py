"""Commands of `hybrid-ep validation` that only the playbooks call: each writes a part of the results folder."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path

import click

from hybrid_ep.cluster.validation.names import Name
from hybrid_ep.errors import ConfigError, TransportError
from hybrid_ep.inputs import Seconds, read_input

KINDS = ("pair", "group", "link", "nic")
_NEW_FOLDER = click.Path(file_okay=False, path_type=Path)
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command("begin", short_help="Begin a validation.")
@click.argument("results", type=_NEW_FOLDER)
def begin_command(results: Path) -> None:
    """Begin a validation: check the inventory (JSON on standard input), write it and remove earlier results."""
    from hybrid_ep.cluster.validation.record import Inventory, begin_validation

    begin_validation(results, Inventory.from_json(sys.stdin.read()))


@click.command("begin-jobs", short_help="Remove results of earlier test jobs.")
@click.argument("results", type=_FOLDER)
def begin_jobs_command(results: Path) -> None:
    """Remove results of earlier test jobs, so that only those of this run exclude a host."""
    from hybrid_ep.cluster.validation.record import remove_jobs

    click.echo(f"removed {remove_jobs(results)} earlier jobs")


@click.command("compare", short_help="Compare the nodes' reports.")
@click.argument("results", type=_FOLDER)
def compare_command(results: Path) -> None:
    """Compare the nodes' reports with each other, and write compare.json."""
    from hybrid_ep.cluster.validation.record import compare_nodes

    compared = compare_nodes(results)
    click.echo("fewer than two reports: nothing to compare" if compared is None else compared.status.value)


@click.command("domains", short_help="Compare NVLink domains with the inventory.")
@click.argument("results", type=_FOLDER)
def domains_command(results: Path) -> None:
    """Compare the inventory's NVLink domains with the cliques of the GPUs."""
    from hybrid_ep.cluster.validation.record import check_domains

    for result in check_domains(results):
        click.echo(f"{result.name}: {result.status} {result.reason}".rstrip())


@click.command("record", short_help="Write the result of a test job.")
@click.argument("results", type=_FOLDER)
@click.argument("name", type=Name("job"))
@click.option("--kind", type=click.Choice(KINDS), required=True, help="Kind of the job.")
@click.option(
    "--host",
    "hosts",
    type=Name("host"),
    multiple=True,
    required=True,
    help="Host on which the job ran; may be repeated.",
)
@click.option("--exit-code", type=int, required=True, help="Exit status of the job or its launcher.")
def record_command(results: Path, name: str, kind: str, hosts: tuple[str, ...], exit_code: int) -> None:
    """Write jobs/NAME.json, and jobs/NAME.log from what the job printed (on standard input)."""
    from hybrid_ep.cluster.validation.record import record

    job = record(results, name, kind, hosts, exit_code, sys.stdin.read())
    click.echo(f"{name}: {job.status} {job.reason}".rstrip())


@click.command("judge", short_help="Judge a test job without a results folder.")
@click.option("--result", type=click.Path(path_type=Path), required=True, help="File with what the job printed.")
@click.option("--profile", default="", help="Profile, as of `hybrid-ep doctor`; default: the one that fits this node.")
@click.option(
    "--hosts", "num_hosts", type=click.IntRange(min=1), required=True, help="Number of hosts on which the job ran."
)
@click.option("--kind", type=click.Choice(KINDS), help="Kind of the job; default: pair on two hosts, else group.")
@click.pass_context
def judge_command(ctx: click.Context, result: Path, profile: str, num_hosts: int, kind: str | None) -> None:
    """Judge a test job that has ended with 0, without a results folder.

    Exit status: 0 = passed, 1 = too slow or wrong, 2 = the job has left no result, or the profile cannot be used.
    """
    from hybrid_ep.cluster.doctor import WatchedNode
    from hybrid_ep.cluster.doctor.command import propose
    from hybrid_ep.cluster.validation.judge import Profiles, judge
    from hybrid_ep.cluster.validation.record import judge_output

    try:
        output = read_input(result)
    except (OSError, ValueError) as error:
        raise ConfigError(f"result {result} cannot be read: {error}") from None
    if not profile:
        with closing(WatchedNode()) as node:
            profile = propose(node)[0]
    hosts = tuple(f"host {idx}" for idx in range(num_hosts))
    found = judge_output("job", kind or ("pair" if num_hosts == 2 else "group"), hosts, 0, output)
    job = judge(found, dict.fromkeys(hosts, profile), Profiles())
    for metric in job.metrics:
        floor = f", expected ≥ {metric.least:.4g}: {metric.source}" if metric.least is not None else ""
        click.echo(f"{metric.name}: {metric.text}{floor}")
    click.echo(f"{job.status}: {job.reason or job.expected}")
    ctx.exit({"pass": 0, "skipped": 0, "fail": 1, "unknown": 2}[job.status])


@click.command("record-node", short_help="Write the doctor's report of a node.")
@click.argument("results", type=_FOLDER)
@click.argument("host", type=Name("host"))
def record_node_command(results: Path, host: str) -> None:
    """Write nodes/HOST.json from standard input: what `hybrid-ep doctor --json` has printed on HOST.

    If that is no report, the file says why.
    """
    from hybrid_ep.cluster.validation.record import record_node

    click.echo(f"{host}: {record_node(results, host, sys.stdin.read())}")


@click.command("nic-bandwidth", short_help="Measure the NICs of two nodes.")
@click.option(
    "--gid-index", type=click.IntRange(min=0), help="GID index of Ethernet ports; default: perftest's choice."
)
@click.option(
    "--limit-s", type=Seconds(1, 3600), default=30.0, show_default=True, help="Time limit for each NIC, seconds."
)
@click.option(
    "--sysroot",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path("/"),
    help="Read /sys below this folder, as of `hybrid-ep doctor`.",
)
@click.pass_context
def nic_bandwidth_command(ctx: click.Context, gid_index: int | None, limit_s: float, sysroot: Path) -> None:
    """Measure the bandwidth from each NIC to the other node's NIC, and print JSON.

    It runs as two ranks of mpirun or srun, one on each node.
    """
    from datetime import timedelta

    from torch._C._distributed_c10d import TCPStore

    from hybrid_ep import env
    from hybrid_ep.agree.rendezvous import exchange
    from hybrid_ep.cluster.validation.nic_meeting import measure_between
    from hybrid_ep.launcher import find_launcher
    from hybrid_ep.topology import probe

    launcher = find_launcher()
    if launcher is None or launcher.num_ranks != 2:
        found = f"{launcher.num_ranks} ranks of {launcher.name}" if launcher else "no ranks of mpirun or srun"
        raise ConfigError(f"there are {found}; allowed: 2, one on each node")
    topology = probe(sysroot)
    address, port, rank = env.MASTER_ADDR.get(), env.MASTER_PORT.get(), launcher.rank
    try:
        store = TCPStore(address, port, 2, rank == 0, timeout=timedelta(seconds=limit_s), wait_for_workers=False)
    except RuntimeError as error:
        raise TransportError("NIC to NIC", rank, 1 - rank, f"no rendezvous at {address} port {port}: {error}") from None
    result = measure_between(rank, store, address, topology, gid_index, limit_s)
    if rank == 0:  # it holds the store
        exchange(store, "end", 0, (0, 1), b"", limit_s, where="NIC to NIC")
        return
    store.set("end/1", "+")
    click.echo("\n" + json.dumps(result, indent=2))
    ctx.exit(0 if result["ok"] else 1)


COMMANDS = (
    begin_command,
    begin_jobs_command,
    compare_command,
    domains_command,
    record_command,
    judge_command,
    record_node_command,
    nic_bandwidth_command,
)
