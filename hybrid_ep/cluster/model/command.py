"""`hybrid-ep model`: predicts the time, bytes and memory of dispatch and combine on any grid of ranks."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import click
from rich.console import Console

from hybrid_ep.checks import require_int, require_number
from hybrid_ep.cluster.model.question import MODES, Machine, Question
from hybrid_ep.cluster.model.report import answer, print_answer
from hybrid_ep.errors import ConfigError
from hybrid_ep.workload import DTYPES, ROUTINGS, SKEWS_PER_EXPONENT, Workload, default_workload_sizes

_MACHINE = Machine()
_HARDWARE = {"nic": "nic_gbits", "nic-latency": "nic_latency_us", "nvlink": "nvlink", "memory": "memory"}
_LEAST, _MOST = 1e-3, 1e6  # of rates and latencies: far beyond hardware, and all results are finite
_MOST_SKEW = 50.0  # above 60, unpopular experts have so few rows that quotients of them are no numbers


@click.command(context_settings={"show_default": True})
@click.option("--domains", "num_domains", default=2, help="NVLink domains.")
@click.option("--ranks-per-domain", "num_ranks_per_domain", default=8, help="Ranks of each domain.")
@click.option("--mode", type=click.Choice(MODES), default="normal", help="Kind of calls.")
@click.option("--tokens", "num_tokens", type=int, help="Tokens of each rank; default: 4096, low-latency: 128.")
@click.option("--hidden", default=7168, help="Hidden size.")
@click.option("--topk", "num_topk", default=8, help="Experts of each token.")
@click.option(
    "--experts",
    "num_experts",
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
@click.option("--cached", "is_cached", is_flag=True, help="Dispatch with the handle of an earlier dispatch.")
@click.option("--in-graph", is_flag=True, help="Low-latency calls that follow each other in a CUDA graph.")
@click.option(
    "--nic", "nic_gbits", default=_MACHINE.nic_gbits, help="Bandwidth of a rank's NIC in each direction, Gbit/s."
)
@click.option(
    "--nic-latency", "nic_latency_us", default=_MACHINE.nic_latency_us, help="Latency of a small write to the peer, µs."
)
@click.option(
    "--nvlink", default=_MACHINE.nvlink, help="NVLink bandwidth of a GPU in each direction by its data sheet, GB/s."
)
@click.option("--memory", default=_MACHINE.memory, help="Memory bandwidth of a GPU by its data sheet, GB/s.")
@click.option(
    "--simulate", default=0, help="Runs of the simulation between domains, which give the tail of the times; 0: none."
)
@click.option("--straggler", default=1.0, help="Factor by which one simulated rank is slower.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
def model(simulate: int, straggler: float, as_json: bool, skew: float | None, **options: Any) -> None:
    """Predict dispatch and combine on a grid of domains × ranks: time, bytes of each hop, memory, and limits.

    Nothing is run and no GPU is needed. The exit status is 1 if the engine does not take the grid; then a line says
    what would have to change.
    """
    if skew is not None and options["routing"] != "skewed":
        raise ConfigError(f"skew is {skew:g} with routing {options['routing']}; allowed: with --routing skewed")
    if skew is not None:
        options["exponent"] = require_number("skew", skew, minimum=0, maximum=_MOST_SKEW) / SKEWS_PER_EXPONENT
    for option, name in _HARDWARE.items():
        require_number(option, options[name], minimum=_LEAST, maximum=_MOST)
    if straggler != 1 and not simulate:
        raise ConfigError(f"straggler is {straggler:g} without a simulation; allowed: with --simulate")
    sizes = default_workload_sizes("cuda", options["mode"])
    if options["num_tokens"] is None:
        options["num_tokens"] = sizes["tokens"]
    require_int("tokens", options["num_tokens"], minimum=1)
    if options["num_experts"] is None:
        # A multiple of the ranks; Question refuses a grid without ranks.
        num_ranks = max(1, options["num_domains"] * options["num_ranks_per_domain"])
        options["num_experts"] = -(-sizes["experts"] // num_ranks) * num_ranks

    def of(kind: Any) -> dict[str, Any]:
        return {each.name: options[each.name] for each in fields(kind) if each.name in options}

    question = Question(Workload(**of(Workload)), machine=Machine(**of(Machine)), **of(Question))
    document = answer(question, num_simulations=simulate, seed=question.workload.seed, straggler=straggler)
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        print_answer(question, document, Console())
    if not document["fits"]:
        raise click.exceptions.Exit(1)
