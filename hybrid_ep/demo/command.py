"""`hybrid-ep demo`: options, progress, what is printed and written, exit code."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hybrid_ep.demo.results import DemoResult
from hybrid_ep.demo.run import NUM_PHASES, run_demo
from hybrid_ep.demo.settings import Settings
from hybrid_ep.demo.tables import print_result
from hybrid_ep.errors import ConfigError
from hybrid_ep.outputs import OutputFolder
from hybrid_ep.packages import require_package


@click.command(context_settings={"show_default": True})
@click.option("--ranks", default=Settings.num_ranks, help="Ranks, each a process.")
@click.option("--domains", default=Settings.num_domains, help="Simulated NVLink domains, of equal size.")
@click.option("--tokens", default=Settings.num_tokens, help="Tokens of each rank.")
@click.option("--hidden", default=Settings.hidden, help="Hidden size, a multiple of 128.")
@click.option("--topk", default=Settings.num_topk, help="Experts of each token.")
@click.option("--experts", default=Settings.num_experts, help="Experts of all ranks together.")
@click.option("--steps", default=Settings.num_steps, help="Training steps of the small MoE layer.")
@click.option("--seed", default=Settings.seed, help="Seed of tokens, routing and weights.")
@click.option(
    "--skew", is_flag=True, help="Also compare no balance, a placement and the online plan under a skewed router."
)
@click.option("--lose-rank", is_flag=True, help="Also kill a rank, and recover without it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
@click.option("--out", type=OutputFolder(), help="Write pictures, result.json and index.html to this folder.")
@click.pass_context
def demo(
    ctx: click.Context,
    ranks: int,
    domains: int,
    tokens: int,
    hidden: int,
    topk: int,
    experts: int,
    steps: int,
    seed: int,
    skew: bool,
    lose_rank: bool,
    as_json: bool,
    out: Path | None,
) -> None:
    """Run dispatch → experts → combine on a virtual cluster of processes; no GPU is needed.

    Every rank compares its results with a dense float64 reference: in bf16 and fp8, for each kind of calls, under a
    skewed and a uniform routing. The bytes sent are compared with those of an all-to-all and of an all-gather. Then a
    small MoE layer is trained.

    Exits with 1 if a check fails.
    """
    try:
        settings = Settings(ranks, domains, tokens, hidden, topk, experts, steps, seed, skew, lose_rank)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    if out is not None:
        require_package("matplotlib")  # before the ranks run, and not after
    result = _run_with_progress(settings)
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=2))
    else:
        print_result(Console(), result)
    if out is not None:
        _write(result, out)
        Console(stderr=True).print(f"pictures and index.html are in {out}/")
    ctx.exit(0 if result.ok else 1)


def _run_with_progress(settings: Settings) -> DemoResult:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=NUM_PHASES + settings.skew + settings.lose_rank)
        begun = False

        def begin_phase(what: str) -> None:
            nonlocal begun
            if not progress.console.is_terminal:  # a log gets a line for each phase, a terminal the bar
                click.echo(f"demo: {what}", err=True)
            progress.update(task, description=what, advance=1 if begun else 0)
            begun = True

        return run_demo(settings, begin_phase)


def _write(result: DemoResult, folder: Path) -> None:
    # Drawing is loaded only when something is drawn.
    from hybrid_ep.demo.figures import draw_all
    from hybrid_ep.demo.page import render_page

    folder.mkdir(parents=True, exist_ok=True)
    pictures = draw_all(result)
    for picture in pictures.values():
        (folder / f"{picture.name}.png").write_bytes(picture.png)
    (folder / "index.html").write_text(render_page(result, pictures), encoding="utf-8")
    (folder / "result.json").write_text(json.dumps(result.to_json(), indent=2) + "\n", encoding="utf-8")
