"""`hybrid-ep bench` at small sizes: every mode and dtype, both ways of starting, and a wrong implementation."""

import ctypes
import itertools
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

from benchmarks.figures import main as figures
from hybrid_ep.bench import wire
from hybrid_ep.bench.balance import _check
from hybrid_ep.bench.measure import RankMeasurement, measure
from hybrid_ep.bench.plan import CALLS, BenchPlan, Candidate
from hybrid_ep.bench.timing import time_host, time_until_done
from hybrid_ep.bench.wire import RankWire
from hybrid_ep.cli import main
from hybrid_ep.engine.cuda.symmetric import SymmetricMemory
from hybrid_ep.testing.batch import make_batch, make_routing
from hybrid_ep.workload import Workload
from tests.conftest import RunRanks

TINY = ["--tokens", "16", "--hidden", "128", "--topk", "2", "--experts", "4", "--runs", "2", "--device", "cpu"]
TINY_BENCH = [sys.executable, "-c", "from hybrid_ep.cli import main; main()", "bench", *TINY, "--json"]
BROKEN = "tests.multi_process.broken_implementation"
DESTROYED = "tests.multi_process.destroyed_implementation"


def plan(mode: str, dtype: str = "bf16", *, routing: str = "uniform", no_sync: bool = False) -> BenchPlan:
    workload = Workload(num_tokens=24, hidden=256, num_topk=3, num_experts=8, dtype=dtype, routing=routing)
    return BenchPlan(workload, mode, (), num_warmups=0, num_runs=2, no_sync=no_sync, device="cpu")


def test_balance_is_right_and_timed(tmp_path: Path) -> None:
    asked = ["--mode", "balance", "--ranks", "4", "--skew", "0,10", "--warmups", "0", "--json", "--out", str(tmp_path)]
    result = CliRunner().invoke(main, ["bench", *TINY, *asked])
    assert result.exit_code == 0, result.output
    outcomes = json.loads(result.stdout)["outcomes"]
    assert [(one["plan"]["workload"]["exponent"], one["candidate"]["implementation"]) for one in outcomes] == [
        (exponent, policy) for exponent in (0.0, 2.0) for policy in ("none", "placement", "online", "online, 5 %")
    ]
    names = [[operation["name"] for operation in one["operations"]] for one in outcomes]
    parts = ["counts of all ranks", "plan", "map", "weights to replicas"]
    assert names == [["layer"], ["layer", "map_topk"], ["layer", *parts], ["layer", *parts]] * 2
    none, placement, online, nearly = (one["fullest"] for one in outcomes[4:])
    assert none > 1.3
    assert placement < none
    assert online == 1.0 < nearly < 1.07
    assert "skew 10, online: the most loaded rank has 1.00 × the mean copies" in (tmp_path / "result.md").read_text()
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")
    hot = ["--mode", "balance", "--ranks", "4", "--routing", "hot", "--topk", "1", "--warmups", "0"]
    result = CliRunner().invoke(main, ["bench", *TINY, *hot, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    text = (tmp_path / "result.md").read_text()
    assert "hot, none: the most loaded rank has" in text
    assert "uniform, online: the most loaded rank has 1.0" in text
    refused = CliRunner().invoke(main, ["bench", *TINY, "--mode", "balance", "--skew", "-1"])
    assert "skew is '-1'; allowed: integers ≥ 0, separated by commas" in refused.output


def _wrong_layer() -> list[str]:
    batch = make_batch(plan("balance").workload, dist.get_rank())
    return _check(torch.zeros_like(batch.x), batch, plan("balance"))


def test_a_wrong_layer_is_seen(run_ranks: RunRanks) -> None:
    for rank, problems in enumerate(run_ranks(2, _wrong_layer)):
        assert problems == [f"rank {rank}: rms error 100.00%; allowed 3.12%"]


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
        names += ["dispatch: 4 held", "dispatch: cached, 4 held"]
    if (mode, implementation) == ("permute", "hybrid_ep"):
        names += [f"dispatch: {form}" for form in ("no sync", "cached", "4 held", "no sync, 4 held", "cached, 4 held")]
    names += [f"{name}: until done" for name in ("dispatch", "combine", "dispatch and combine")]
    for rank in found:
        assert {name: len(times.microseconds) for name, times in rank.times.items()} == dict.fromkeys(names, 2)
        assert 0 <= rank.rows["dispatch"].remote < rank.rows["dispatch"].total


@pytest.mark.parametrize("mode", ["normal", "permute"])
def test_bounds_instead_of_a_sync_give_the_same_rows(run_ranks: RunRanks, mode: str) -> None:
    found: list[RankMeasurement] = run_ranks(4, measure, Candidate("hybrid_ep", 8), plan(mode, no_sync=True))
    assert [rank.problems for rank in found] == [[]] * 4


@pytest.mark.parametrize("mode", ["normal", "low-latency"])
def test_a_buffer_that_must_be_made_for_its_destruction(run_ranks: RunRanks, mode: str) -> None:
    found: list[RankMeasurement] = run_ranks(2, measure, Candidate(DESTROYED), plan(mode))
    assert [rank.problems for rank in found] == [[]] * 2


@pytest.mark.parametrize("mode", ["normal", "permute", "low-latency"])
def test_a_wrong_implementation_is_caught_and_not_timed(run_ranks: RunRanks, mode: str) -> None:
    found: list[RankMeasurement] = run_ranks(4, measure, Candidate(BROKEN), plan(mode))
    assert "rank 1 received rows that differ from those sent" in found[1].problems
    assert "rank 2 got 1 of 24 combined rows wrong" in found[2].problems
    assert all(rank.times == {} for rank in found)


def wire_on_this_host(folder: str, asked: BenchPlan, loses_a_row: bool) -> RankWire:
    """The wire's measurement with files for symmetric memory and `memmove` for the kernel."""
    num_allocated = itertools.count()

    def allocate(num_bytes: int, group: object, device: torch.device) -> SymmetricMemory:
        name, rank = f"{folder}/{next(num_allocated)}", dist.get_rank()
        (Path(f"{name}.{rank}")).write_bytes(bytes(num_bytes))
        dist.barrier()
        parts = [torch.from_file(f"{name}.{r}", shared=True, size=num_bytes, dtype=torch.uint8) for r in range(4)]
        return SymmetricMemory(parts[rank], [part.data_ptr() for part in parts], parts)

    def with_sms(push: wire.Push, num_sms: int) -> Callable[[], None]:
        def move() -> None:
            for token, row_places in enumerate(push.dst_rows.tolist()):
                for place in row_places:
                    if place >= 0 and not (loses_a_row and token == 3):
                        target = push.memory.addresses[place >> 32] + (place & 0xFFFFFFFF) * push.row_bytes
                        ctypes.memmove(target, push.rows[token].data_ptr(), push.row_bytes)

        return move

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "_obstacle", lambda plan: None)
        patch.setattr(SymmetricMemory, "allocate", allocate)
        patch.setattr(wire.Push, "with_sms", with_sms)
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        return wire.measure_wire(asked)


@pytest.mark.parametrize("mode", ["normal", "low-latency"])
def test_the_wire_moves_every_row_of_the_plan(run_ranks: RunRanks, tmp_path: Path, mode: str) -> None:
    asked = replace(plan(mode, "fp8"), candidates=(Candidate("hybrid_ep"),))
    found: list[RankWire] = run_ranks(4, wire_on_this_host, str(tmp_path), asked, False)
    ranks: list[RankMeasurement] = run_ranks(4, measure, Candidate("hybrid_ep"), asked)
    for pushed, measured in zip(found, ranks, strict=True):
        assert pushed.obstacle is None
        (timed,) = pushed.times.values()
        assert {name: len(times.microseconds) for name, times in timed.items()} == {"dispatch": 2, "combine": 2}
        for call in CALLS:
            if mode == "low-latency":  # an implementation's rows count once for each expert there
                assert pushed.rows[call].total < measured.rows[call].total
            else:
                assert pushed.rows[call] == measured.rows[call]


def test_a_wire_that_loses_a_row_is_not_measured(run_ranks: RunRanks, tmp_path: Path) -> None:
    asked = replace(plan("normal"), candidates=(Candidate("hybrid_ep"),))
    for pushed in run_ranks(4, wire_on_this_host, str(tmp_path), asked, True):
        assert re.fullmatch(r"rank 0: of \d+ pushed rows \d+ landed, \d+ of them right", pushed.obstacle)
        assert pushed.times == {}


def calls_in_a_row() -> tuple[list[str], dict[str, list[float]]]:
    """What `time_host` calls, in order, and what it returns."""
    called: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", lambda: called.append("wait"))
        times = time_host({"a": lambda: time.sleep(0.002) or called.append("a"), "b": lambda: called.append("b")})
    return called, times


def test_host_time_is_of_calls_in_turn_without_waits_between(run_ranks: RunRanks) -> None:
    for called, times in run_ranks(2, calls_in_a_row):
        assert "".join(name[0] for name in called) == ("w" + "ab" * 2) * 48 + "w"
        assert {name: len(found) for name, found in times.items()} == {"a": 96, "b": 96}
        assert min(times["a"]) >= 2000 > statistics.median(times["b"])


def first_of_a_row_left_out() -> tuple[int, int]:
    """How many calls `time_host` makes, and how many it counts."""
    called: list[None] = []
    times = time_host({"a": lambda: called.append(None)}, "cpu", num_rows=3, in_a_row=5, num_skipped=2)
    return len(called), len(times["a"])


def test_host_time_leaves_the_first_calls_of_a_row_out(run_ranks: RunRanks) -> None:
    assert run_ranks(2, first_of_a_row_left_out) == [(15, 9)] * 2


def slow_first_call_until_done() -> tuple[int, list[float]]:
    """How many calls `time_until_done` makes, of which the first two are slow, and what it returns."""
    called: list[None] = []

    def call() -> None:
        called.append(None)
        time.sleep(0.02 if len(called) <= 2 else 0)

    times = time_until_done({"a": call}, num_warmups=2, num_runs=5, device="cpu")
    return len(called), times["a"].microseconds


def test_time_until_done_leaves_the_first_calls_out(run_ranks: RunRanks) -> None:
    for num_calls, microseconds in run_ranks(2, slow_first_call_until_done):
        assert (num_calls, len(microseconds)) == (7, 5)
        assert min(microseconds) < 20_000
        assert statistics.median(microseconds) < 20_000


def test_command_compares_sweeps_and_writes(tmp_path: Path) -> None:
    both = ["--impl", "hybrid_ep", "--impl", "torch-nccl", "--num-sms", "8,16"]
    result = CliRunner().invoke(main, ["bench", "--ranks", "2", *TINY, *both, "--json", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["ok"]
    assert found["timer_floor_us"] > 0
    assert found["host_floor_us"] > 0
    assert found["wire_obstacle"] == "the ranks are not on GPUs"
    candidates = [(o["candidate"]["implementation"], o["candidate"]["num_sms"]) for o in found["outcomes"]]
    assert candidates == [("hybrid_ep", 8), ("hybrid_ep", 16), ("torch-nccl", None)]
    assert json.loads((tmp_path / "result.json").read_text()) == found
    markdown = (tmp_path / "result.md").read_text()
    assert markdown.count("\n| hybrid_ep | torch |") == 22
    assert markdown.count("\n| torch-nccl |") == 5
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
    assert [path.name for path in tmp_path.iterdir()] == ["2cpu_low_latency.json"]
    found = json.loads((tmp_path / "2cpu_low_latency.json").read_text())
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


@pytest.mark.parametrize("transport", ["loopback", "tcp"])
def test_link_alone(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank is a domain; each says what carried its chunks, how fast, and that all were right."""
    monkeypatch.setenv("HYBRID_EP_TRANSPORT", transport)
    command = ["bench", "--mode", "link", "--ranks", "3", "--hidden", "128", "--topk", "2", "--runs", "40", "--json"]
    result = CliRunner().invoke(main, [*command, "--device", "cpu"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["ok"]
    assert report["chunk_bytes"] == 16 * 288  # 256 of the row, 24 of two experts, 8 of the source; a multiple of 16
    assert [rank["transport"] for rank in report["ranks"]] == [transport] * 3
    assert [metric["name"] for metric in report["metrics"]] == ["write", "write rail0"]  # each rank is a domain
    for rank in report["ranks"]:
        assert (rank["num_peers"], rank["num_wrong"]) == (2, 0)
        assert rank["gbytes_per_s"] == pytest.approx(report["chunk_bytes"] * 40 * 2 / rank["seconds"] / 1e9)
        assert rank["post_ns"] > 0


def _crossing(sender: int, receiver: int) -> int:
    """Tokens of a rank with an expert in another one's domain, counted token by token; two domains of two ranks."""
    routing = make_routing(Workload(num_tokens=16, hidden=128, num_topk=2, num_experts=4), sender)[0].tolist()
    return sum(any(expert // 2 == receiver // 2 for expert in experts) for experts in routing)


def test_what_crosses_between_domains_is_a_metric() -> None:
    """Bytes between a rank and its peer over the rank's time; the slowest rank, and the slowest of each rail."""
    variables = {**os.environ, "HYBRID_EP_NUM_RANKS_PER_DOMAIN": "2"}
    done = subprocess.run([*TINY_BENCH, "--ranks", "4"], env=variables, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    (outcome,) = report["outcomes"]
    assert outcome["num_ranks_per_domain"] == 2
    metrics = {metric["name"]: metric["value"] for metric in report["metrics"]}
    names = [f"fabric {call}{rail}" for call in CALLS for rail in ("", " rail0", " rail1")]
    assert list(metrics) == names
    for operation in outcome["operations"]:
        if operation["name"] not in CALLS:
            continue
        rows = [max(_crossing(rank, rank ^ 2), _crossing(rank ^ 2, rank)) for rank in range(4)]
        expected = [256 * num / us / 1e3 for num, us in zip(rows, operation["p50_us"], strict=True)]
        assert operation["fabric_gbps"] == pytest.approx(expected, rel=1e-3)  # four digits
        rails = [min(expected[rail::2]) for rail in (0, 1)]
        found = [metrics[f"fabric {operation['name']}{rail}"] for rail in ("", " rail0", " rail1")]
        assert found == pytest.approx([min(rails), *rails], rel=1e-3)


def test_one_domain_has_no_metric_of_a_fabric() -> None:
    result = CliRunner().invoke(main, ["bench", *TINY, "--ranks", "2", "--json"])
    report = json.loads(result.stdout)
    assert (report["metrics"], report["outcomes"][0]["num_ranks_per_domain"]) == ([], None)


def test_link_needs_two_ranks() -> None:
    result = CliRunner().invoke(main, ["bench", "--mode", "link", "--ranks", "1", "--device", "cpu"])
    assert result.exit_code == 2
    assert "ranks is 1; allowed: an integer ≥ 2" in result.output
