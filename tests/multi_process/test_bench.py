"""`hybrid-ep bench` at small sizes: every mode and dtype, both ways of starting, and a wrong implementation."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest
from click.testing import CliRunner

from benchmarks.figures import main as figures
from hybrid_ep.bench.measure import RankMeasurement, measure
from hybrid_ep.bench.plan import BenchPlan, Candidate
from hybrid_ep.cli import main
from hybrid_ep.workload import Workload
from tests.conftest import RunRanks

TINY = ["--tokens", "16", "--hidden", "128", "--topk", "2", "--experts", "4", "--runs", "2", "--device", "cpu"]
TINY_BENCH = [sys.executable, "-c", "from hybrid_ep.cli import main; main()", "bench", *TINY, "--json"]
BROKEN = "tests.multi_process.broken_implementation"


def plan(mode: str, dtype: str = "bf16", *, routing: str = "uniform", no_sync: bool = False) -> BenchPlan:
    workload = Workload(num_tokens=24, hidden=256, num_topk=3, num_experts=8, dtype=dtype, routing=routing)
    return BenchPlan(workload, mode, (), num_warmups=0, num_runs=2, no_sync=no_sync, device="cpu")


@pytest.mark.parametrize("routing", ["uniform", "hot"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("mode", "implementation"),
    [
        ("normal", "hybrid_ep"),
        ("normal", "torch-nccl"),
        ("permute", "hybrid_ep"),
        ("permute", "torch-nccl"),
        ("low-latency", "hybrid_ep"),
    ],
)
def test_every_mode_is_right_and_timed(
    run_ranks: RunRanks, mode: str, implementation: str, dtype: str, routing: str
) -> None:
    found: list[RankMeasurement] = run_ranks(4, measure, Candidate(implementation), plan(mode, dtype, routing=routing))
    assert [rank.problems for rank in found] == [[]] * 4
    names = ["dispatch", "combine"]
    if mode == "low-latency":
        names += [f"{call}: {half}" for call in names for half in ("send", "receive")]
    if (mode, implementation) == ("normal", "hybrid_ep"):
        names += ["layout", "dispatch: layout given", "dispatch: no sync", "dispatch: cached"]
    for rank in found:
        assert {name: len(times.microseconds) for name, times in rank.times.items()} == dict.fromkeys(names, 2)
        assert 0 <= rank.rows["dispatch"].remote < rank.rows["dispatch"].total


@pytest.mark.parametrize("mode", ["normal", "permute"])
def test_bounds_instead_of_a_sync_give_the_same_rows(run_ranks: RunRanks, mode: str) -> None:
    found: list[RankMeasurement] = run_ranks(4, measure, Candidate("hybrid_ep", 8), plan(mode, no_sync=True))
    assert [rank.problems for rank in found] == [[]] * 4


@pytest.mark.parametrize("mode", ["normal", "permute", "low-latency"])
def test_a_wrong_implementation_is_caught_and_not_timed(run_ranks: RunRanks, mode: str) -> None:
    found: list[RankMeasurement] = run_ranks(4, measure, Candidate(BROKEN), plan(mode))
    assert "rank 1 received rows that differ from those sent" in found[1].problems
    assert "rank 2 got 1 of 24 combined rows wrong" in found[2].problems
    assert all(rank.times == {} for rank in found)


def test_command_compares_sweeps_and_writes(tmp_path: Path) -> None:
    both = ["--impl", "hybrid_ep", "--impl", "torch-nccl", "--num-sms", "8,16"]
    result = CliRunner().invoke(main, ["bench", "--ranks", "2", *TINY, *both, "--json", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["ok"]
    assert found["timer_floor_us"] > 0
    assert found["wire_obstacle"] == "the ranks are not on GPUs"
    candidates = [(o["candidate"]["implementation"], o["candidate"]["num_sms"]) for o in found["outcomes"]]
    assert candidates == [("hybrid_ep", 8), ("hybrid_ep", 16), ("torch-nccl", None)]
    assert json.loads((tmp_path / "result.json").read_text()) == found
    markdown = (tmp_path / "result.md").read_text()
    assert markdown.count("\n| hybrid_ep | torch |") == 12
    assert markdown.count("\n| torch-nccl |") == 2
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")


def test_command_sweeps_tokens_without_the_wire(tmp_path: Path) -> None:
    sweep = ["--mode", "low-latency", "--tokens", "1,4,1", "--no-wire"]
    result = CliRunner().invoke(main, ["bench", "--ranks", "2", *TINY, *sweep, "--json", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [outcome["plan"]["workload"]["num_tokens"] for outcome in found["outcomes"]] == [1, 4]
    assert (found["wire"], found["wire_obstacle"]) == ([], None)
    assert "not measured" not in (tmp_path / "result.md").read_text()
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")


def test_quoted_figures_come_from_plans(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--ranks", "2", "--quick", "--only", "low_latency", "--out", str(tmp_path)]
    result = CliRunner().invoke(figures, arguments)
    assert result.exit_code == 0, result.output
    assert {path.name for path in tmp_path.iterdir()} == {f"low_latency_2cpu.{kind}" for kind in ("json", "md", "png")}
    found = json.loads((tmp_path / "low_latency_2cpu.json").read_text())
    swept = [(o["plan"]["workload"]["dtype"], o["plan"]["workload"]["num_tokens"]) for o in found["outcomes"]]
    assert swept == [("bf16", 1), ("bf16", 128), ("fp8", 1), ("fp8", 128)]


def test_command_joins_the_ranks_of_torchrun() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python", "--standalone"]
    done = subprocess.run([*torchrun, *TINY_BENCH], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)  # one document, from rank 0 alone
    assert (found["ok"], found["num_ranks"]) == (True, 2)


def test_command_joins_the_ranks_of_mpirun() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            TINY_BENCH, env={**os.environ, **mpi_variables(rank, port)}, stdout=PIPE, stderr=PIPE, text=True
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert json.loads(outputs[0][0])["num_ranks"] == 2
    assert outputs[1][0] == ""


def mpi_variables(rank: int, port: int) -> dict[str, str]:
    """What Open MPI's mpirun sets, and what its caller has to."""
    names = {"RANK": str(rank), "SIZE": "2", "LOCAL_RANK": str(rank)}
    return {f"OMPI_COMM_WORLD_{name}": value for name, value in names.items()} | {"MASTER_PORT": str(port)}
