"""`hybrid-ep bench`: options, progress, what is printed and written, exit code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hybrid_ep.bench.launch import Run, measure_all, open_ranks
from hybrid_ep.bench.link import print_link_report, run_link_bench
from hybrid_ep.bench.plan import BALANCE, MODES, BenchPlan, Candidate
from hybrid_ep.bench.results import BenchReport, document_text
from hybrid_ep.bench.subjects import BASELINE, require_known
from hybrid_ep.bench.tables import print_report, render_markdown
from hybrid_ep.checks import require_int
from hybrid_ep.errors import ConfigError
from hybrid_ep.launcher import Launcher, find_launcher
from hybrid_ep.outputs import OutputFolder
from hybrid_ep.packages import require_package
from hybrid_ep.workload import DTYPES, ROUTINGS, SKEWS_PER_EXPONENT, ZIPF_EXPONENT, Workload, default_workload_sizes

LINK = "link"
_DEFAULT_RANKS_ON_CPU = 4
_LOG_WIDTH = 200
_DEFAULT_RUNS = {"cpu": 10, "cuda": 30}
_DEFAULT_CHUNKS = 1000


@click.command()
@click.option(
    "--ranks", type=int, help="Ranks to start; default: one for each GPU, or 4 on a CPU. Not under a launcher."
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Device of the tensors; auto: GPUs if there are any.",
)
@click.option(
    "--mode",
    type=click.Choice([*MODES, LINK]),
    default="normal",
    show_default=True,
    help="Calls to measure. balance: under skewed routers, with and without balance. link: only a link between "
    "domains, without kernels; --runs is then the number of chunks.",
)
@click.option(
    "--dtype", type=click.Choice(DTYPES), default="bf16", show_default=True, help="Data type of dispatched tokens."
)
@click.option(
    "--routing",
    type=click.Choice(ROUTINGS),
    default="uniform",
    show_default=True,
    help="How tokens choose experts. skewed: some experts are popular; hot: one expert gets 30 % of the tokens.",
)
@click.option(
    "--tokens",
    help="Tokens of each rank, or several numbers separated by commas; default: 4096 on GPUs, 256 on a CPU; "
    "low-latency: 128, 32.",
)
@click.option("--hidden", type=int, help="Hidden size; default: 7168 on GPUs, 1024 on a CPU.")
@click.option("--topk", type=int, help="Experts of each token; default: 8 on GPUs, 4 on a CPU.")
@click.option("--experts", type=int, help="Experts of all ranks together; default: 256 on GPUs, 32 on a CPU.")
@click.option(
    "--skew",
    default=",".join(map(str, range(11))),
    show_default=True,
    help="Mode balance: skews of the router. The r-th most popular expert is chosen with probability ∝ r^(−skew/5). "
    "With --routing hot, the hot and the uniform routing are measured instead.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of tokens and routing.")
@click.option(
    "--impl",
    "implementations",
    multiple=True,
    default=("hybrid_ep",),
    show_default=True,
    help=f"Implementation: hybrid_ep, {BASELINE} (all_to_all_single of torch; gloo on a CPU), or a module with the "
    "interface of DeepEP or Hybrid-EP. May be repeated.",
)
@click.option(
    "--num-sms", help="SMs of a call, or several numbers separated by commas; default: the implementation's choice."
)
@click.option("--no-sync", is_flag=True, help="Give bounds of received rows, so that the host does not wait.")
@click.option("--wire/--no-wire", default=True, show_default=True, help="Also measure the limit of the link, on GPUs.")
@click.option(
    "--hold", default=4, show_default=True, help="Also time dispatch while so many results are alive; 0: do not."
)
@click.option("--warmups", default=3, show_default=True, help="Calls before the timed ones.")
@click.option("--runs", type=int, help="Timed calls; default: 30 on GPUs, 10 on a CPU.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of the table.")
@click.option("--out", type=OutputFolder(), help="Write JSON, Markdown and pictures to this folder.")
@click.pass_context
def bench(
    ctx: click.Context,
    ranks: int | None,
    device: str,
    mode: str,
    dtype: str,
    routing: str,
    tokens: str | None,
    hidden: int | None,
    topk: int | None,
    experts: int | None,
    skew: str,
    seed: int,
    implementations: tuple[str, ...],
    num_sms: str | None,
    no_sync: bool,
    wire: bool,
    hold: int,
    warmups: int,
    runs: int | None,
    as_json: bool,
    out: Path | None,
) -> None:
    """Check dispatch and combine, then time them.

    It starts its own ranks. Under torchrun or mpirun it uses the launcher's ranks. Every implementation gets the same
    tensors and the same timer. An implementation is timed only if every row is correct.

    Exits with 1 if a row is wrong.
    """
    if out is not None:
        require_package("matplotlib")  # before anything is measured, and not after
    try:
        launcher = find_launcher()
        device = _device(device)
        num_ranks = _num_ranks(ranks, device, launcher)
        asked = {"hidden": hidden, "topk": topk, "experts": experts}
        sizes = default_workload_sizes(device, mode) | {name: n for name, n in asked.items() if n is not None}
        if mode == LINK:
            require_int("ranks", num_ranks, minimum=2)
            chunks = require_int("runs", _DEFAULT_CHUNKS if runs is None else runs, minimum=1)
            ctx.exit(_bench_link(num_ranks, launcher, sizes, chunks, as_json))
        require_int("experts", sizes["experts"], minimum=num_ranks, multiple_of=num_ranks)
        routings = [(routing, ZIPF_EXPONENT)]
        if mode == BALANCE:
            from hybrid_ep.bench.balance import POLICIES  # only here: its import of DTensors takes a second

            if routing == "hot":
                routings.insert(0, ("uniform", ZIPF_EXPONENT))
            else:
                routings = [("skewed", one / SKEWS_PER_EXPONENT) for one in _integers("skew", skew, minimum=0)]
            candidates = tuple(Candidate(policy) for policy in POLICIES)
        else:
            for implementation in implementations:
                require_known(implementation, mode)
            candidates = _candidates(implementations, num_sms, mode)
        plans = [
            BenchPlan(
                workload=Workload(
                    num_tokens=num_tokens,
                    hidden=sizes["hidden"],
                    num_topk=sizes["topk"],
                    num_experts=sizes["experts"],
                    dtype=dtype,
                    routing=one,
                    seed=seed,
                    exponent=exponent,
                ),
                mode=mode,
                candidates=candidates,
                num_warmups=warmups,
                num_runs=_DEFAULT_RUNS[device] if runs is None else runs,
                no_sync=no_sync,
                device=device,
                wire=wire and mode != BALANCE,
                num_held=hold,
            )
            for num_tokens in ([sizes["tokens"]] if tokens is None else _integers("tokens", tokens, minimum=0))
            for one, exponent in routings
        ]
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    is_first = launcher is None or launcher.rank == 0
    with open_ranks(num_ranks, device, launcher) as run:
        report = measure_with_progress(plans, run, quiet=not is_first)
    if is_first:
        if as_json:
            click.echo(document_text(report.to_json()), nl=False)
        else:
            print_to_terminal(report)
        if out is not None:
            write_report(report, out)
    ctx.exit(0 if report.ok else 1)


def _bench_link(
    num_ranks: int, launcher: Launcher | None, sizes: dict[str, int], num_chunks: int, as_json: bool
) -> int:
    """Measures and prints the link; returns the exit code."""
    with open_ranks(num_ranks, "cpu", launcher) as run:
        report = run_link_bench(run, hidden=sizes["hidden"], num_topk=sizes["topk"], num_chunks=num_chunks)
    if launcher is None or launcher.rank == 0:
        if as_json:
            click.echo(json.dumps(report.to_json(), indent=2))
        else:
            print_link_report(report)
    return 0 if report.ok else 1


def _device(asked: str) -> str:
    import torch

    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but no GPU is visible; allowed here: auto or cpu")
    return asked


def _num_ranks(asked: int | None, device: str, launcher: Launcher | None) -> int:
    import torch

    if launcher is not None:
        if asked not in (None, launcher.num_ranks):
            raise ConfigError(f"ranks is {asked}; allowed under {launcher.name}: {launcher.num_ranks}, or leave it out")
        return launcher.num_ranks
    if asked is not None:
        return require_int("ranks", asked, minimum=1)
    return torch.cuda.device_count() if device == "cuda" else _DEFAULT_RANKS_ON_CPU


def _candidates(implementations: tuple[str, ...], num_sms: str | None, mode: str) -> tuple[Candidate, ...]:
    sweep: list[int | None] = [None]
    if num_sms is not None:
        if mode == "low-latency":
            raise ConfigError(f"num-sms is {num_sms!r} in low-latency mode; allowed there: leave it out")
        sweep = [*_integers("num-sms", num_sms, minimum=1)]
    return tuple(
        Candidate(implementation, count)
        for implementation in dict.fromkeys(implementations)
        for count in ([None] if implementation == BASELINE else sweep)
    )


def _integers(name: str, text: str, *, minimum: int) -> list[int]:
    """``8,16`` → each number once."""
    try:
        return list(dict.fromkeys(require_int(name, int(part), minimum=minimum) for part in text.split(",")))
    except ValueError:
        raise ConfigError(f"{name} is {text!r}; allowed: integers ≥ {minimum}, separated by commas") from None


def measure_with_progress(plans: Sequence[BenchPlan], run: Run, *, quiet: bool = False) -> BenchReport:
    """`measure_all`, with a bar on stderr."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as progress:
        task = progress.add_task("measuring", total=sum(len(plan.candidates) + plan.wire for plan in plans))
        begun = 0

        def begin(plan: BenchPlan, what: str) -> None:
            nonlocal begun
            description = f"{what}: {plan.mode}, {plan.workload.dtype}, {plan.workload.num_tokens} tokens"
            progress.update(task, description=description, completed=begun)
            begun += 1

        return measure_all(plans, run, begin)


def print_to_terminal(report: BenchReport) -> None:
    """Prints the table on the terminal as it is; in a log, or where the terminal has no width (mpirun's), in full."""
    console = Console()
    width = shutil.get_terminal_size((_LOG_WIDTH, 0)).columns if console.is_terminal else max(_LOG_WIDTH, console.width)
    print_report(Console(width=width), report)


def write_report(report: BenchReport, folder: Path, name: str = "result") -> None:
    """Writes ``name.json``, ``name.md`` and, where anything was timed, ``name.png``."""
    # Drawing is loaded only when something is drawn.
    from hybrid_ep.bench.figures import draw

    write_document(report, folder, name)
    (folder / f"{name}.md").write_text(render_markdown(report), encoding="utf-8")
    if any(outcome.operations for result in report.results for outcome in result.outcomes):
        (folder / f"{name}.png").write_bytes(draw(report).png)
    Console(stderr=True).print(f"the result is in {folder}/")


def write_document(report: BenchReport, folder: Path, name: str) -> None:
    """Writes ``name.json``, which `--json` prints."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(document_text(report.to_json()), encoding="utf-8")
