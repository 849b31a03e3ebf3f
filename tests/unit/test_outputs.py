"""What a command writes is checked before it works, and a command that is interrupted leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from hybrid_ep.cli import main
from hybrid_ep.inputs import read_json_input

_LIMIT_S = 240.0  # of what takes a few seconds on an idle machine
# Options that name a file or folder which a command writes.
WRITTEN = {"--junit", "--nccl", "--out", "--record", "--save", "--state", "--svg"}


def _outputs(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command that has an option of `WRITTEN`, with that option last."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from _outputs(below, (*words, name))
    for parameter in command.params:
        for option in WRITTEN.intersection(parameter.opts):
            yield *words, option


OUTPUTS = [" ".join(words) for words in _outputs(main)]


@pytest.mark.parametrize("command", OUTPUTS)
def test_outputs_are_checked_before_the_work(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    *words, option = command.split()
    # Arguments that the command needs besides are missing: click looks at what is given first.
    result = CliRunner().invoke(main, [*words, option, str(tmp_path / "file" / "below")])
    assert result.exit_code == 2
    assert "cannot be" in result.stderr
    assert f"{tmp_path / 'file'}" in result.stderr
    assert not result.stdout


@pytest.mark.parametrize("command", [["demo", "--out"], ["bench", "--out"]], ids=lambda command: " ".join(command))
def test_a_folder_that_takes_no_files_is_told_before_the_work(command: list[str]) -> None:
    result = CliRunner().invoke(main, [*command, "/proc/nothing/here"])
    assert result.exit_code == 2
    assert "/proc/nothing/here cannot be made in /proc" in result.stderr


@pytest.mark.parametrize("option", ["--junit", "--record", "--state"])
def test_a_fifo_that_nobody_reads_is_told_before_the_work(tmp_path: Path, option: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    done = _run(["doctor", option, str(tmp_path / "fifo")])
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{tmp_path / 'fifo'} is a FIFO that nobody reads" in done.stderr


def test_a_state_file_does_not_take_the_place_of_a_device() -> None:
    done = _run(["doctor", "--state", "/dev/full"])
    assert (done.returncode, done.stdout) == (2, "")
    assert "/dev/full is no regular file" in done.stderr


COMMANDS = [
    ["doctor", "--quick", "--profile"],
    ["doctor", "compare"],
    ["balance", "--ranks", "4"],
]


@pytest.mark.parametrize("kind", ["FIFO", "endless", "deep", "not UTF-8"])
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_inputs_that_would_hold_a_command_up(tmp_path: Path, kind: str, words: list[str]) -> None:
    """They end with one line and 2: nothing is confirmed."""
    path = Path("/dev/zero") if kind == "endless" else tmp_path / "input.yaml"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind != "endless":
        path.write_bytes(b"[" * 100_000 if kind == "deep" else b"\xff\xfe")
    done = _run([*words, str(path)])
    assert done.returncode == 2
    assert "internal error" not in done.stderr
    assert f"{path} " in done.stderr


def test_a_manifest_that_is_nested_too_deeply_is_a_finding(tmp_path: Path) -> None:
    path = tmp_path / "deep.yaml"
    path.write_text("[" * 100_000)
    done = _run(["k8s", "check", str(path)])
    assert (done.returncode, done.stderr) == (1, "")
    assert "cannot be read: it is nested too deeply" in done.stdout


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    """As a shell makes it of <(command)."""
    reading, writing = os.pipe()
    os.write(writing, b'{"of": ["a"')
    thread = threading.Timer(0.3, lambda: (os.write(writing, b"]}"), os.close(writing)))
    thread.start()
    assert read_json_input(Path(f"/dev/fd/{reading}")) == {"of": ["a"]}
    thread.join()
    os.close(reading)


def _run(arguments: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from hybrid_ep.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, env=os.environ | variables)


@pytest.mark.parametrize("buffered", [True, False], ids=["buffered", "unbuffered"])
def test_output_that_is_not_taken_is_one_line(buffered: bool) -> None:
    command = [sys.executable, "-c", "from hybrid_ep.cli import main; main()", "env"]
    environment = os.environ | {"PYTHONUNBUFFERED": "" if buffered else "1"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=_LIMIT_S, env=environment
        )
    assert done.returncode == 2
    assert done.stderr == "hybrid-ep: standard output cannot be written: No space left on device\n"


def test_a_bad_variable_is_one_line_for_all_ranks() -> None:
    done = _run(["demo", "--ranks", "2", "--domains", "1"], HYBRID_EP_TIMEOUT_S="soon")
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("hybrid-ep: ConfigError: HYBRID_EP_TIMEOUT_S='soon'")
    assert "Traceback" not in done.stderr


def test_the_demo_does_not_take_another_engine_than_asked_for() -> None:
    done = _run(["demo"], HYBRID_EP_ENGINE="cuda")
    assert done.returncode == 2
    assert "HYBRID_EP_ENGINE is 'cuda'; allowed for the demo" in done.stderr


def test_messages_name_what_was_given() -> None:
    result = CliRunner().invoke(main, ["demo", "--ranks", "3"])
    assert result.exit_code == 2
    assert "ranks is 3; allowed: multiples of domains = 2" in result.stderr


@pytest.mark.timeout(900)
@pytest.mark.parametrize("after_s", [0.0, 1.0])  # while ranks start, and when they run
def test_ctrl_c_ends_all_processes_without_a_traceback(after_s: float) -> None:
    command = [sys.executable, "-c", "from hybrid_ep.cli import main; main()", "demo", "--steps", "100000"]
    # A session of its own: the signal goes to every process of it, as a terminal sends it. A shell that starts the
    # tests in the background has it ignored, and children inherit that.
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as demo:
        deadline = time.monotonic() + _LIMIT_S
        while len(_group_members(demo.pid)) < 6 and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(after_s)
        os.killpg(demo.pid, signal.SIGINT)
        _, told = demo.communicate(timeout=_LIMIT_S)
    assert demo.returncode == 130, told
    assert "Traceback" not in told
    assert told.strip().endswith("hybrid-ep: interrupted")
    deadline = time.monotonic() + 60
    while _group_members(demo.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _group_members(demo.pid) == []


def _group_members(group: int) -> list[int]:
    """Processes of a process group that have not ended."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, their_group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it ended meanwhile
            continue
        if int(their_group) == group and state != "Z":
            members.append(int(stat.parent.name))
    return members
