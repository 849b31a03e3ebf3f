"""What `hybrid-ep bench` refuses before any rank starts, how it finds its launcher, and how it adds results up."""

import pytest
from click.testing import CliRunner

from hybrid_ep.bench.launch import Launcher, find_launcher
from hybrid_ep.bench.measure import RankMeasurement
from hybrid_ep.bench.plan import BenchPlan, Candidate
from hybrid_ep.bench.results import summarize
from hybrid_ep.bench.timing import Times
from hybrid_ep.cli import main
from hybrid_ep.errors import ConfigError
from hybrid_ep.workload import Workload

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--impl", "no_such_module"], "impl is 'no_such_module'"),
        (["--impl", "json"], "impl is 'json', which has no Buffer"),
        (["--impl", "torch-nccl", "--mode", "low-latency"], "impl is 'torch-nccl' in low-latency mode"),
        (["--num-sms", "8,many"], "num-sms is '8,many'"),
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


def times(*microseconds: float) -> Times:
    return Times(list(microseconds), [us / 10 for us in microseconds])


def test_results_add_up() -> None:
    workload = Workload(num_tokens=4, hidden=128, num_topk=1, num_experts=2, dtype="fp8")
    plan = BenchPlan(workload, "normal", (Candidate("hybrid_ep", 8),), 0, 3, False, "cpu")
    ranks = [
        RankMeasurement("torch", [], {"dispatch": times(10, 20, 30), "combine": times(1, 1, 1)}, 6, 2, "CPU"),
        RankMeasurement("torch", [], {"dispatch": times(12, 18, 90), "combine": times(2, 2, 2)}, 2, 0, "CPU"),
    ]
    result = summarize(plan, [ranks])
    dispatch, combine = result.outcomes[0].operations
    assert (dispatch.min_us, dispatch.median_us, dispatch.max_us) == (12, 20, 90)
    assert (dispatch.p50_us, dispatch.p99_us) == ([20, 18], [30, 90])
    assert (dispatch.rows_bytes, dispatch.remote_rows_bytes, dispatch.most_rows_bytes) == (4 * 132, 132, 6 * 132)
    assert (dispatch.host_us, combine.host_us) == (2, 0.2)
    assert dispatch.gbps == pytest.approx(4 * 132 / 20e-6 / 1e9)
    assert combine.remote_gbps == pytest.approx(256 / 2e-6 / 1e9)
    assert result.ok
