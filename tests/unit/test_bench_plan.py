"""What `hybrid-ep bench` refuses before any rank starts, and how it finds its launcher."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

from hybrid_ep.cli import main
from hybrid_ep.errors import ConfigError
from hybrid_ep.launcher import Launcher, find_launcher

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
