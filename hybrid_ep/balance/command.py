"""`hybrid-ep balance`: the balance that each policy would reach on a trace of loads."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from hybrid_ep.balance.monitor import load_trace
from hybrid_ep.balance.policies import COLUMNS, Outcome, Question, judge_policies, table_rows
from hybrid_ep.outputs import OutputFile, OutputFolder


@click.command(context_settings={"show_default": True})
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--ranks", required=True, type=int, help="Ranks that hold the experts.")
@click.option(
    "--replicas",
    type=int,
    help="Slots of all ranks together in a layer; default: the experts, and one more for each rank.",
)
@click.option("--ranks-per-domain", type=int, help="Ranks of an NVLink domain; default: all ranks.")
@click.option("--groups", default=1, help="Groups of experts, for the hierarchical policy.")
@click.option(
    "--max-moves", default=8, help="Experts whose weights may be loaded in a layer, for the policy of few moves."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
@click.option("--save", type=OutputFile(), help="Write the most balanced placement to this file.")
@click.option("--out", type=OutputFolder(), help="Write pictures, result.json and index.html to this folder.")
def balance(
    trace: Path,
    ranks: int,
    replicas: int | None,
    ranks_per_domain: int | None,
    groups: int,
    max_moves: int,
    as_json: bool,
    save: Path | None,
    out: Path | None,
) -> None:
    """Compare placements of experts on a trace of their loads.

    TRACE is JSON as `hybrid_ep.balance.save_trace` writes it: the loads of each window, layer and expert. A placement
    is made from the loads of one window and judged by those of the next.
    """
    loads = load_trace(trace)
    question = Question(
        num_replicas=loads.shape[2] + ranks if replicas is None else replicas,
        num_ranks=ranks,
        num_ranks_per_domain=ranks if ranks_per_domain is None else ranks_per_domain,
        num_groups=groups,
        max_moves=max_moves,
    )
    outcomes = judge_policies(loads, question)
    document = json.dumps({"outcomes": [item.to_json() for item in outcomes]}, indent=2)
    if as_json:
        click.echo(document)
    else:
        _print(outcomes)
    if save is not None:
        best = max(outcomes, key=lambda item: float(item.balancedness.mean()))
        best.placement.save(save)
        Console(stderr=True).print(f"the placement of policy '{best.policy}' is in {save}")
    if out is not None:
        _write(outcomes, document, out)


def _print(outcomes: list[Outcome]) -> None:
    table = Table(COLUMNS[0])
    for name in COLUMNS[1:]:
        table.add_column(name, justify="right")
    for row in table_rows(outcomes):
        table.add_row(*row)
    Console().print(table)


def _write(outcomes: list[Outcome], document: str, folder: Path) -> None:
    # Drawing is loaded only when something is drawn.
    from hybrid_ep.balance.figures import draw_all, render_page

    folder.mkdir(parents=True, exist_ok=True)
    pictures = draw_all(outcomes)
    for picture in pictures:
        (folder / f"{picture.name}.png").write_bytes(picture.png)
    (folder / "index.html").write_text(render_page(outcomes, pictures), encoding="utf-8")
    (folder / "result.json").write_text(document + "\n", encoding="utf-8")
    Console(stderr=True).print(f"pictures and index.html are in {folder}/")
