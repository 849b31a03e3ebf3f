"""What `hybrid-ep bench` refuses before any rank starts, how it adds up what ranks measured, and how it shows it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from benchmarks.figures import file_name
from hybrid_ep.bench.command import print_to_terminal
from hybrid_ep.bench.figures import draw
from hybrid_ep.bench.machine import command_line
from hybrid_ep.bench.measure import RankMeasurement, RowCounts
from hybrid_ep.bench.plan import BenchPlan, Candidate, call_of
from hybrid_ep.bench.results import BenchReport, BenchResult, document_text, summarize
from hybrid_ep.bench.tables import print_report, render_markdown
from hybrid_ep.bench.timing import Holding, Times
from hybrid_ep.bench.wire import RankWire, compared_sms, make_dst_rows
from hybrid_ep.cli import main
from hybrid_ep.errors import ConfigError
from hybrid_ep.launcher import Launcher, find_launcher
from hybrid_ep.workload import Workload

WORKLOAD = Workload(num_tokens=4, hidden=128, num_topk=1, num_experts=2, dtype="fp8")
PLAN = BenchPlan(WORKLOAD, "normal", (Candidate("hybrid_ep", 8), Candidate("hybrid_ep")), 0, 3, False, "cpu")
ROWS = (
    {call: RowCounts(6, 2) for call in ("dispatch", "combine")},
    dict.fromkeys(("dispatch", "combine"), RowCounts(2, 0)),
)


def times(*microseconds: float, in_a_row: tuple[float, ...] = ()) -> Times:
    return Times(list(microseconds), [us / 10 for us in microseconds], list(in_a_row))


def rank(index: int, **operations: Times) -> RankMeasurement:
    named = {name.replace("_", ": ", 1).replace("_", " "): found for name, found in operations.items()}
    return RankMeasurement("torch", [], named, ROWS[index])


RANKS = [
    rank(0, dispatch=times(10, 20, 30), combine=times(1, 1, 1, in_a_row=(3, 9, 4)), layout=times(5, 5, 5)),
    rank(1, dispatch=times(12, 18, 90), combine=times(2, 2, 2, in_a_row=(7, 6, 5)), layout=times(5, 6, 5)),
]
WIRE = [
    RankWire(None, {8: {"dispatch": times(9, 9, 9), "combine": times(1, 1, 1)},
                    16: {"dispatch": times(5, 6, 7), "combine": times(1, 1, 1)}}, ROWS[index])
    for index in range(2)
]  # fmt: skip


def report(*results: BenchResult) -> BenchReport:
    return BenchReport("hybrid-ep bench", "2026-01-01 00:00 UTC", 2, "CPU", {"torch": "2"}, 1.25, 2.5, list(results))


def sweep(mode: str = "normal", tokens: tuple[int, ...] = (4, 8, 16), **forms: Times) -> list[BenchResult]:
    ranks = [rank(i, dispatch=times(10, 20, 30), combine=times(1, 1, 1), **forms) for i in range(2)]
    plans = [
        replace(PLAN, mode=mode, workload=replace(WORKLOAD, num_tokens=n), candidates=(Candidate("hybrid_ep"),))
        for n in tokens
    ]
    return [summarize(plan, None, [ranks]) for plan in plans]


def test_results_add_up() -> None:
    dispatch, combine, layout = summarize(PLAN, None, [RANKS, RANKS]).outcomes[0].operations
    assert (dispatch.min_us, dispatch.median_us, dispatch.max_us) == (12, 20, 90)
    assert (dispatch.p50_us, dispatch.p99_us) == ([20, 18], [30, 90])
    assert (dispatch.rows_bytes, dispatch.remote_rows_bytes, dispatch.most_rows_bytes) == (4 * 132, 132, 6 * 132)
    assert (dispatch.host_us, combine.host_us) == (2, 0.2)
    assert (dispatch.host_in_a_row_us, combine.host_in_a_row_us) == (None, 6)
    assert dispatch.gbps == pytest.approx(4 * 132 / 20e-6 / 1e9)
    assert combine.remote_gbps == pytest.approx(256 / 2e-6 / 1e9)
    assert (layout.rows_bytes, layout.gbps, dispatch.of_wire) == (0, 0, None)


def test_each_candidate_is_compared_with_the_wire_at_its_own_sms() -> None:
    result = summarize(PLAN, WIRE, [RANKS, RANKS])
    told, own_choice = (outcome.operations for outcome in result.outcomes)
    assert [op.wire_us for op in told] == [9, 1, None]
    assert [op.of_wire for op in told] == [9 / 20, 1 / 2, None]
    assert [op.wire_us for op in own_choice] == [6, 1, None]  # 16 SMs, the engine's default
    assert [(limit.candidate.num_sms, limit.operations[0].median_us) for limit in result.wire] == [(8, 9), (16, 6)]


@pytest.mark.parametrize(
    ("operation", "call"),
    [
        ("dispatch", "dispatch"),
        ("combine: graph", "combine"),
        ("combine: graph of 20", None),
        ("dispatch: no sync", "dispatch"),
        ("layout", None),
        ("dispatch: send", None),
        ("combine: receive", None),
        ("dispatch: cached, 4 held", "dispatch"),
        ("combine: until done", None),
        ("dispatch and combine: until done", None),
    ],
)
def test_only_whole_calls_have_bytes(operation: str, call: str | None) -> None:
    assert call_of(operation) == call


def test_a_run_of_several_calls_counts_for_each() -> None:
    assert Times([40, 60], [20, 10], [5]).each_of(20) == Times([2, 3], [1, 0.5], [0.25])


def test_a_row_in_which_another_is_faster_is_printed_as_such() -> None:
    plan = replace(PLAN, candidates=(Candidate("hybrid_ep", 8), Candidate("hybrid_ep", 16), Candidate("deep_ep")))
    quick, slow = rank(0, dispatch=times(10), combine=times(6)), rank(0, dispatch=times(30), combine=times(5))
    peer = rank(0, dispatch=times(20), combine=times(4))
    text = render_markdown(report(summarize(plan, None, [[quick], [slow], [peer]])))
    assert "combine: deep_ep is faster than hybrid_ep, 16 SMs, 4 µs against 5 µs." in text
    assert "dispatch: deep_ep is faster" not in text  # than the better of the two


def test_results_are_held() -> None:
    class Result:
        num_alive = 0

        def __init__(self) -> None:
            Result.num_alive += 1

        def __del__(self) -> None:
            Result.num_alive -= 1

    alive_when_called: list[int] = []

    def call() -> Result:
        alive_when_called.append(Result.num_alive)
        return Result()

    held = Holding(call, 3)
    for _ in range(4):
        held()
    assert alive_when_called == [0, 1, 2, 3, 3, 3, 3]


def test_sms_that_are_compared() -> None:
    assert compared_sms(Candidate("deep_ep", 24), PLAN) == 24
    assert compared_sms(Candidate("hybrid_ep"), PLAN) == 16
    assert compared_sms(Candidate("hybrid_ep"), replace(PLAN, mode="low-latency")) == 32


def test_the_wire_moves_each_row_once_for_each_rank_to_a_place_of_its_own() -> None:
    topk_idx = torch.tensor([[0, 1, 7], [6, 2, 3]])  # 8 experts on 4 ranks: ranks 0 0 3, and 3 1 1
    found = make_dst_rows(topk_idx, 8, 1, 4)
    assert found.tolist() == [[2, -1, (3 << 32) | 2], [(3 << 32) | 3, (1 << 32) | 3, -1]]


def test_table_shows_the_fraction_the_floor_and_what_differs() -> None:
    both = report(summarize(PLAN, WIRE, [RANKS, RANKS]), *sweep(tokens=(8,)))
    markdown = render_markdown(both)
    lines = markdown.splitlines()
    assert lines[0] == (
        "2 ranks on CPU: mode normal, dtype fp8, routing uniform, hidden 128, topk 1, experts 2, no-sync no."
    )
    head = next(line for line in lines if line.startswith("| tokens |"))
    assert head.endswith(
        "| host, in a row | host, default device | bytes | GB/s | bytes remote | GB/s remote | of the wire |"
    )
    (dispatch,) = [line for line in lines if line.startswith("| 4 | hybrid_ep | torch | 8 | dispatch |")]
    assert dispatch.endswith("| 2.00 | – | – | 528 B | 0.0264 | 132 B | 0.0066 | 45% |")
    (layout,) = [line for line in lines if line.startswith("| 4 | hybrid_ep | torch | 8 | layout |")]
    assert layout.endswith("| – | – | – | – | – | – |")
    assert any(line.startswith("| 4 | the wire alone | push | 16 | dispatch | 6.00 µs |") for line in lines)
    assert "Timer floor: 1.25 µs" in markdown
    assert "Host floor: 2.50 µs" in markdown
    assert "not measured" not in markdown
    stream = io.StringIO()
    print_report(Console(file=stream, width=200), both)
    assert "45%" in stream.getvalue()
    assert "every row arrived" in stream.getvalue()


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_narrow_terminals_get_fewer_columns_and_no_cut_ones(width: int) -> None:
    stream = io.StringIO()
    both = report(*sweep(**{"dispatch: layout given": times(123, 123)}))
    print_report(Console(file=stream, width=width), both)
    out = stream.getvalue()
    assert out.count("dispatch: layout given") == 3
    assert out.count("123 µs") == 3
    assert "…" not in out.replace(" … ", "")
    assert ("too narrow for: p50 / p99, slowest rank" in out) == (width < 200)


def test_table_is_whole_on_a_terminal_that_has_no_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As mpirun gives rank 0 one."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((0, 0)))
    print_to_terminal(report(*sweep(**{"dispatch: layout given": times(123, 123)})))
    out = capsys.readouterr().out
    assert "hybrid_ep" in out
    assert "dispatch: layout given" in out


def test_table_says_why_the_wire_was_not_measured_and_what_was_wrong() -> None:
    wrong = [replace(found, times={}, problems=["rank 1 lost a row"]) for found in RANKS]
    markdown = render_markdown(report(summarize(PLAN, [RankWire("no GPU", {}, {})] * 2, [wrong, RANKS])))
    assert "Wire limit not measured: no GPU." in markdown
    assert "- hybrid_ep, 8 SMs: rank 1 lost a row" in markdown


def test_document_has_one_list_of_outcomes_with_their_plans() -> None:
    found = report(summarize(PLAN, WIRE, [RANKS, RANKS]), *sweep(tokens=(8,))).to_json()
    assert [outcome["plan"]["workload"]["num_tokens"] for outcome in found["outcomes"]] == [4, 4, 8]
    assert [wire["candidate"]["num_sms"] for wire in found["wire"]] == [8, 16]
    assert (found["ok"], found["timer_floor_us"], found["num_ranks"], found["wire_obstacle"]) == (True, 1.25, 2, None)


def test_text_of_the_document_has_a_line_for_each_operation() -> None:
    found = report(summarize(PLAN, WIRE, [RANKS, RANKS])).to_json()
    text = document_text(found)
    assert json.loads(text) == found
    assert found["command"] == "hybrid-ep bench"
    num_operations = sum(len(outcome["operations"]) for outcome in (*found["outcomes"], *found["wire"]))
    assert sum('{"name": ' in line for line in text.splitlines()) == num_operations == 10
    assert len(text.splitlines()) == num_operations + len(found["outcomes"] + found["wire"]) + len(found) + 2
    nothing = document_text(report(summarize(PLAN, None, [RANKS, RANKS])).to_json())
    assert json.loads(nothing)["wire"] == []


def test_figures_have_four_digits() -> None:
    thirds = [rank(i, dispatch=times(10 / 3), combine=times(1)) for i in range(2)]
    (outcome, _) = report(summarize(PLAN, None, [thirds, thirds])).to_json()["outcomes"]
    assert (outcome["operations"][0]["median_us"], outcome["operations"][0]["p99_us"]) == (3.333, [3.333, 3.333])


@pytest.mark.parametrize(
    ("device", "only", "name"),
    [
        ("NVIDIA H100 80GB HBM3", (), "h100_2gpu"),
        ("NVIDIA GB200", ("low_latency",), "gb200_2gpu_low_latency"),
        ("NVIDIA RTX 6000 Ada", (), "nvidia_rtx_6000_ada_2gpu"),
    ],
)
def test_file_of_results_is_named_by_the_gpu(device: str, only: tuple[str, ...], name: str) -> None:
    assert file_name(replace(report(), device=device), "cuda", only) == name


def test_command_line_has_the_variables_of_this_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/lib/hybrid_ep/__main__.py", "bench", "--num-sms", "8,16"])
    monkeypatch.setattr("os.environ", {"HYBRID_EP_TRANSPORT": "tcp", "PATH": "/bin"})
    assert command_line() == "HYBRID_EP_TRANSPORT=tcp hybrid-ep bench --num-sms 8,16"


SWEEP_BESIDE_B = (Candidate("a", 8), Candidate("a", 16), Candidate("b"))
FORMS = {f"{call}_{form}": times(1, 2, 3) for call in ("dispatch", "combine") for form in ("send", "receive", "graph")}


@pytest.mark.parametrize(
    ("results", "name", "num_lines", "label"),
    [
        (sweep("low-latency", **FORMS), "latency", 4, "tokens of each rank"),
        (sweep(), "bandwidth", 1, "tokens of each rank"),
        ([summarize(replace(PLAN, candidates=(Candidate("a", 8), Candidate("a", 16))), WIRE, [RANKS, RANKS])],
         "bandwidth", 2, "SMs"),
        ([summarize(PLAN, WIRE, [RANKS, RANKS])], "bandwidth", 0, "GB/s of all received rows"),
        ([*sweep(tokens=(4,)), summarize(replace(PLAN, candidates=SWEEP_BESIDE_B), None, [RANKS] * 3)],
         "bandwidth", 2, "SMs"),
    ],
    ids=["latency", "tokens", "sms", "bars", "sms of one plan among others"],
)  # fmt: skip
def test_picture_has_a_line_for_each_form_and_plan(
    monkeypatch: pytest.MonkeyPatch, results: list[BenchResult], name: str, num_lines: int, label: str
) -> None:
    drawn = []
    monkeypatch.setattr("hybrid_ep.bench.figures.to_png", lambda figure: drawn.append(figure) or b"png")
    picture = draw(report(*results))
    assert (picture.name, picture.png) == (name, b"png")
    for axis in drawn[0].axes:
        assert axis.get_xlabel() == label
        assert len(axis.get_lines()) == num_lines


LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--impl", "no_such_module"], "impl is 'no_such_module'"),
        (["--impl", "json"], "impl is 'json', which has no Buffer"),
        (["--impl", "torch-nccl", "--mode", "low-latency"], "impl is 'torch-nccl' in low-latency mode"),
        (["--num-sms", "8,many"], "num-sms is '8,many'"),
        (["--tokens", "8,-1"], "tokens is '8,-1'"),
        (["--tokens", "all"], "tokens is 'all'"),
        (["--tokens", "8,0", "--mode", "low-latency"], "tokens is 0"),
        (["--num-sms", "8", "--mode", "low-latency"], "num-sms is '8' in low-latency mode"),
        (["--experts", "30"], "experts is 30"),
        (["--dtype", "fp8", "--hidden", "100"], "hidden is 100"),
        (["--ranks", "0"], "ranks is 0"),
        (["--runs", "0"], "runs is 0"),
    ],
)
def test_wrong_usage_exits_with_2_and_names_the_value(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["bench", "--device", "cpu", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr.replace("\n", " ")


def test_launchers_are_found_by_their_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert find_launcher() is None
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "5")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "16")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "1")
    assert find_launcher() == Launcher("mpirun", 5, 16, 1)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="RANK is set; allowed: together with WORLD_SIZE and LOCAL_RANK"):
        find_launcher()


def test_step_of_srun_with_several_tasks_is_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_PROCID", "0")  # as in a batch script, which is no task of a step
    monkeypatch.setenv("SLURM_LOCALID", "0")
    assert find_launcher() is None
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")  # a shell that srun opened
    assert find_launcher() is None
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "16")
    monkeypatch.setenv("SLURM_PROCID", "9")
    monkeypatch.setenv("SLURM_LOCALID", "1")
    assert find_launcher() == Launcher("srun", 9, 16, 1)


def test_the_bench_starts_without_what_only_layers_need() -> None:
    """DTensors take a second to import, and every rank of a launcher would."""
    code = "import sys, hybrid_ep.bench.command; sys.exit('torch.distributed.tensor' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
