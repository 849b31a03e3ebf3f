"""`hybrid-ep model`: predicts the time, bytes and memory of dispatch and combine on any grid of ranks."""

from __future__ import annotations

import json

import click
from rich.console import Console

from hybrid_ep.checks import require_int, require_number
from hybrid_ep.cluster.model.machine import Machine
from hybrid_ep.cluster.model.question import MODES, Question
from hybrid_ep.cluster.model.report import answer, print_answer
from hybrid_ep.errors import ConfigError
from hybrid_ep.workload import DTYPES, ROUTINGS, SKEWS_PER_EXPONENT, ZIPF_EXPONENT, Workload, default_workload_sizes

__all__ = ["model"]

_MACHINE = Machine()
_LEAST, _MOST = 1e-3, 1e6  # of rates and latencies: far beyond hardware, and all results are finite
_MOST_SKEW = 50.0  # above 60, unpopular experts have so few rows that quotients of them are no numbers


@click.command(context_settings={"show_default": True})
@click.option("--domains", default=2, help="NVLink domains.")
@click.option("--ranks-per-domain", default=8, help="Ranks of each domain.")
@click.option("--mode", type=click.Choice(MODES), default="normal", help="Kind of calls.")
@click.option("--tokens", type=int, help="Tokens of each rank; default: 4096, low-latency: 128.")
@click.option("--hidden", default=7168, help="Hidden size.")
@click.option("--topk", default=8, help="Experts of each token.")
@click.option(
    "--experts",
    type=int,
    help="Experts of all ranks together; default: 256, or one for each rank if there are more ranks.",
)
@click.option("--dtype", type=click.Choice(DTYPES), default="bf16", help="Data type of dispatched tokens.")
@click.option(
    "--routing",
    type=click.Choice(ROUTINGS),
    default="uniform",
    help="How tokens choose experts, as in `hybrid-ep bench`.",
)
@click.option("--skew", type=float, help="Skew of the skewed routing: 5 is Zipf's law; default: 3.")
@click.option("--seed", default=0, help="Seed of the popular experts.")
@click.option("--num-sms", default=16, help="SMs of a call, but for low-latency ones.")
@click.option("--cached", is_flag=True, help="Dispatch with the handle of an earlier dispatch.")
@click.option("--in-graph", is_flag=True, help="Low-latency calls that follow each other in a CUDA graph.")
@click.option("--nic", default=_MACHINE.nic_gbits, help="Bandwidth of a rank's NIC in each direction, Gbit/s.")
@click.option("--nic-latency", default=_MACHINE.nic_latency_us, help="Latency of a small write to the peer, µs.")
@click.option(
    "--nvlink", default=_MACHINE.nvlink, help="NVLink bandwidth of a GPU in each direction by its data sheet, GB/s."
)
@click.option("--memory", default=_MACHINE.memory, help="Memory bandwidth of a GPU by its data sheet, GB/s.")
@click.option(
    "--simulate", default=0, help="Runs of the simulation between domains, which give the tail of the times; 0: none."
)
@click.option("--straggler", default=1.0, help="Factor by which one simulated rank is slower.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
def model(
    domains: int,
    ranks_per_domain: int,
    mode: str,
    tokens: int | None,
    hidden: int,
    topk: int,
    experts: int | None,
    dtype: str,
    routing: str,
    skew: float | None,
    seed: int,
    num_sms: int,
    cached: bool,
    in_graph: bool,
    nic: float,
    nic_latency: float,
    nvlink: float,
    memory: float,
    simulate: int,
    straggler: float,
    as_json: bool,
) -> None:
    """Predict dispatch and combine on a grid of domains × ranks: time, bytes of each hop, memory, and limits.

    Nothing is run and no GPU is needed. The exit status is 1 if the engine does not take the grid; then a line says
    what would have to change.
    """
    if skew is not None and routing != "skewed":
        raise ConfigError(f"skew is {skew:g} with routing {routing}; allowed: with --routing skewed")
    if skew is not None:
        require_number("skew", skew, minimum=0, maximum=_MOST_SKEW)
    if tokens is not None:
        require_int("tokens", tokens, minimum=1)
    for option, value in (("nic", nic), ("nic-latency", nic_latency), ("nvlink", nvlink), ("memory", memory)):
        require_number(option, value, minimum=_LEAST, maximum=_MOST)
    sizes = default_workload_sizes("cuda", mode)
    workload = Workload(
        num_tokens=sizes["tokens"] if tokens is None else tokens,
        hidden=hidden,
        num_topk=topk,
        num_experts=_experts(experts, sizes["experts"], domains * ranks_per_domain),
        dtype=dtype,
        routing=routing,
        seed=seed,
        exponent=ZIPF_EXPONENT if skew is None else skew / SKEWS_PER_EXPONENT,
    )
    machine = Machine(nic_gbits=nic, nic_latency_us=nic_latency, nvlink=nvlink, memory=memory)
    question = Question(workload, domains, ranks_per_domain, mode, num_sms, cached, in_graph, machine)
    if straggler != 1 and not simulate:
        raise ConfigError(f"straggler is {straggler:g} without a simulation; allowed: with --simulate")
    document = answer(question, num_simulations=simulate, seed=seed, straggler=straggler)
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        print_answer(question, document, Console())
    if not document["fits"]:
        raise click.exceptions.Exit(1)


def _experts(asked: int | None, usual: int, num_ranks: int) -> int:
    """Returns the number asked for; without one the usual number, rounded up to a multiple of the ranks."""
    if asked is not None or num_ranks < 1:
        return usual if asked is None else asked
    return -(-usual // num_ranks) * num_ranks
