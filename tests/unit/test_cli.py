"""The `hybrid-ep` command itself: it lists its subcommands fast, without importing them, and reports wrong usage.

`hybrid-ep info` and `hybrid-ep env` say the same as JSON and in words, and their exit codes hold.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from hybrid_ep import __version__, env
from hybrid_ep.cli import COMMANDS, FIRST_STEPS, main
from hybrid_ep.info import Info, _render

_HELP = """
import sys
from click.testing import CliRunner
from hybrid_ep.cli import main
result = CliRunner().invoke(main, ["--help"])
assert result.exit_code == 0
heavy = {"torch", "numpy", "matplotlib", "rich"} & set(sys.modules)
sys.exit(f"--help imports {sorted(heavy)}" if heavy else 0)
"""


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    listing = CliRunner().invoke(main, ["--help"]).stdout
    assert all(f"\n  {name} " in listing for name in COMMANDS)
    done = subprocess.run([sys.executable, "-c", _HELP], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["demo", "bench", "balance", "info", "env"])
def test_each_command_has_help_and_json(name: str) -> None:
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0
    assert "--json" in result.stdout


def test_without_arguments_it_says_what_to_do_first() -> None:
    result = CliRunner().invoke(main, [])
    assert result.exit_code == 2
    shown = result.output.partition("First steps:")[2]
    named = [line.split()[1] for line in shown.splitlines() if line.startswith("  hybrid-ep ")]
    assert named == [command.split()[1] for command, _ in FIRST_STEPS]
    assert set(named) <= set(COMMANDS)


def test_unknown_command_is_wrong_usage() -> None:
    result = CliRunner().invoke(main, ["dispatch"])
    assert result.exit_code == 2
    assert "No such command 'dispatch'" in result.stderr


@pytest.mark.parametrize(("typed", "meant"), [("dem", "demo"), ("topologie", "topology"), ("valdation", "validation")])
def test_a_misspelt_command_gets_the_one_that_was_meant(typed: str, meant: str) -> None:
    result = CliRunner().invoke(main, [typed])
    assert result.exit_code == 2
    assert f"Did you mean {meant}?" in result.stderr


@pytest.mark.parametrize(("words", "status"), [("env", 2), ("env --json", 2), ("--version", 0)])
def test_a_closed_standard_output_is_an_error_in_one_line(words: str, status: int) -> None:
    command = ["sh", "-c", f'"$0" -m hybrid_ep {words} >&-', sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
    if status:
        assert done.stderr == "hybrid-ep: standard output cannot be written: Bad file descriptor\n"


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize(
    "command",
    [
        "doctor --asked-at",
        "doctor --active --burn-seconds",
        "k8s mark-node --every",
        "k8s kernel-log /nowhere/log --every",
    ],
)
def test_seconds_are_finite(command: str, value: str) -> None:
    result = CliRunner().invoke(main, [*command.split(), value])
    assert result.exit_code == 2
    assert f"{value} is not in the range " in result.stderr


def test_a_bad_variable_is_wrong_usage() -> None:
    result = CliRunner().invoke(main, ["env"], env={"HYBRID_EP_LOG_LEVEL": "loud"})
    assert result.exit_code == 2
    assert "ConfigError: HYBRID_EP_LOG_LEVEL='loud' is not allowed" in result.stderr


@pytest.mark.parametrize(
    ("words", "module", "message"),
    [
        (
            ["doctor"],
            "yaml",
            "pip install pyyaml or 'hybrid-ep[cluster]'",
        ),
        (["doctor", "--profile", "-"], "jsonschema", "pip install jsonschema or 'hybrid-ep[cluster]'"),
        (["topology"], "pynvml", "pip install nvidia-ml-py or 'hybrid-ep[cluster]'"),
        (["demo"], "torch", "torch is not installed, and this command needs it: pip install torch\n"),
        (["demo", "--out", "OUT"], "matplotlib", "pip install matplotlib or 'hybrid-ep[pictures]'"),
        (["bench", "--out", "OUT"], "matplotlib", "pip install matplotlib or 'hybrid-ep[pictures]'"),
    ],
)
def test_a_missing_package_is_named_with_what_to_install(
    words: list[str], module: str, message: str, tmp_path: Path
) -> None:
    """In a process that does not find it; pictures are refused before anything runs."""
    code = f"import sys; sys.modules[{module!r}] = None; from hybrid_ep.cli import main; main()"
    words = [str(tmp_path / "out") if word == "OUT" else word for word in words]
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, input="{name: site}", capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("hybrid-ep: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_info_json_names_versions_engine_and_what_was_built() -> None:
    result = CliRunner().invoke(main, ["info", "--json"], env={"HYBRID_EP_ENGINE": "torch"})
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["versions"]["hybrid_ep"] == __version__
    assert found["versions"]["torch"] == torch.__version__
    assert (found["engine"], found["reason"]) == ("torch", "asked for by name")
    assert "_C" in found["built"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is visible, so cuda may be a good answer")
def test_info_says_why_an_engine_cannot_run_and_exits_with_1() -> None:
    result = CliRunner().invoke(main, ["info"], env={"HYBRID_EP_ENGINE": "cuda", "COLUMNS": "200"})
    assert result.exit_code == 1
    assert "none" in result.stdout
    assert "engine is 'cuda', but" in result.stdout


def test_info_names_the_transport_and_why_not_the_others() -> None:
    result = CliRunner().invoke(
        main, ["info", "--json"], env={"HYBRID_EP_ENGINE": "torch", "HYBRID_EP_TRANSPORT": "tcp"}
    )
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert (found["transport"], found["transport_reason"]) == ("tcp", "asked for by name")
    assert sorted(found["transports"]) == ["libfabric", "loopback", "nvshmem", "verbs"]
    assert found["transports"]["loopback"] == "usable; tcp is asked for by name"


def test_info_says_each_reason_once_and_what_was_installed_after_the_build() -> None:
    found = Info(
        versions={"NCCL (torch)": None, "NVSHMEM (wheel)": "3.4.5"},
        built="_C _cuda",
        left_out="_nvshmem (NVSHMEM was not found: pip install …)",
        engine="torch",
        reason="no GPU is visible",
        transport="tcp",
        transport_reason="verbs cannot be used: no port",
        transports={"verbs": "no port", "loopback": "usable on one host"},
        gpus=[],
        python="python",
        package="hybrid_ep",
    )
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(_render(found))
    text = console.export_text()
    assert text.count("no port") == 1
    assert "loopback: usable on one host" in text
    assert "NVSHMEM was installed after the build: build again" in text
    assert "not part of this torch" in text


def test_info_exits_with_1_for_a_transport_that_does_not_exist() -> None:
    result = CliRunner().invoke(main, ["info", "--json"], env={"HYBRID_EP_TRANSPORT": "pigeon"})
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["transport"] is None
    assert "HYBRID_EP_TRANSPORT='pigeon' is not allowed" in found["transport_reason"]


def test_env_json_is_the_table_with_values_in_force() -> None:
    result = CliRunner().invoke(main, ["env", "--json"], env={"HYBRID_EP_TIMEOUT_S": "2.5", "HYBRID_EP_NICS": ""})
    assert result.exit_code == 0
    rows = {row["name"]: row for row in json.loads(result.stdout)}
    assert list(rows) == [variable.name for variable in env.VARIABLES]
    assert (rows["HYBRID_EP_TIMEOUT_S"]["value"], rows["HYBRID_EP_TIMEOUT_S"]["is_set"]) == (2.5, True)
    assert (rows["HYBRID_EP_NICS"]["value"], rows["HYBRID_EP_NICS"]["is_set"]) == (None, False)


def test_env_shows_a_value_that_is_not_allowed_and_exits_with_1() -> None:
    result = CliRunner().invoke(main, ["env"], env={"HYBRID_EP_TIMEOUT_S": "soon", "COLUMNS": "250"})
    assert result.exit_code == 1
    assert "HYBRID_EP_TIMEOUT_S='soon' is not allowed" in result.stdout
