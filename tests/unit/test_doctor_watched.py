"""A node that is read by a child process: if that hangs or dies, one answer is lost, and the doctor goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hybrid_ep.cluster.doctor import Node, Unreadable, WatchedNode
from hybrid_ep.errors import ConfigError

_LIMIT_S = 0.4


@pytest.fixture
def node(tmp_path: Path) -> Iterator[WatchedNode]:
    with closing(WatchedNode(tmp_path, limit_s=_LIMIT_S)) as found:
        yield found


def _answer(node: Node, value: int) -> tuple[int, int]:
    return value, os.getpid()


def _hang(node: Node, source: str) -> None:
    node.watch(source)
    time.sleep(60)


def _hang_and_note(node: Node, source: str, asked: Path) -> None:
    node.watch(source)
    with asked.open("a") as file:
        file.write(f"{source}\n")
    time.sleep(60)


def _read_what_answers(node: Node, *sources: str) -> list[str]:
    """A task that copes: what every source says, of which NVML and CUDA hang."""
    found = []
    for source in sources:
        try:
            node.watch(source)
        except Unreadable as error:
            found.append(str(error))
        else:
            time.sleep(60 if source in ("NVML", "CUDA") else 0)
            found.append(f"{source}: read")
    return found


def _die(node: Node, source: str) -> None:
    node.watch(source)
    os.kill(os.getpid(), signal.SIGKILL)


def _work(node: Node) -> str:
    """Takes longer than the limit, and always has something new to read."""
    for _ in range(8):
        node.watch("a counter")
        time.sleep(_LIMIT_S / 4)
    return "done"


def _mistake(node: Node) -> None:
    raise KeyError("gpu")


def _refuse(node: Node) -> None:
    raise ConfigError("facts.json holds a list; allowed: an object")


def _cannot_tell(node: Node) -> None:
    raise Unreadable("closed", 4)


def test_answers_come_from_another_process(node: WatchedNode) -> None:
    value, pid = node.run(_answer, 7)
    assert value == 7
    assert pid != os.getpid()
    assert node.run(_answer, 8)[1] == pid


def test_source_that_hangs_is_named_and_not_asked_again(node: WatchedNode, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    for _ in range(2):
        with pytest.raises(Unreadable, match=r"^NVML: no answer in 0.4 s$"):
            node.run(_hang_and_note, "NVML", asked)
    assert asked.read_text() == "NVML\n"
    assert node.run(_answer, 1)[0] == 1


def test_task_that_copes_begins_again_without_what_hangs(node: WatchedNode) -> None:
    silent = ["NVML: no answer in 0.4 s", "CUDA: no answer in 0.4 s"]
    assert node.insist(_read_what_answers, "/sys", "NVML", "CUDA") == ["/sys: read", *silent]
    with pytest.raises(Unreadable, match=r"^closed$"):
        node.insist(_cannot_tell)


def test_source_that_kills_the_reader_is_named(node: WatchedNode) -> None:
    with pytest.raises(Unreadable, match=r"^/sys: ended the process that read it$"):
        node.run(_die, "/sys")
    assert node.run(_answer, 1)[0] == 1


def test_slow_is_not_silent(node: WatchedNode) -> None:
    assert node.run(_work) == "done"


def test_node_on_which_much_hangs_is_given_up(node: WatchedNode) -> None:
    for source in "abcd":
        with pytest.raises(Unreadable, match="no answer"):
            node.run(_hang, source)
    with pytest.raises(Unreadable, match="not asked: 4 sources of this node did not answer"):
        node.run(_answer, 1)


def test_errors_keep_their_kind(node: WatchedNode) -> None:
    with pytest.raises(RuntimeError, match="KeyError: 'gpu'"):
        node.run(_mistake)
    with pytest.raises(ConfigError, match="holds a list"):
        node.run(_refuse)
    with pytest.raises(Unreadable, match="closed") as caught:
        node.run(_cannot_tell)
    assert caught.value.nvml_code == 4


def test_no_child_is_left(tmp_path: Path) -> None:
    with closing(WatchedNode(tmp_path)) as node:
        pid = node.run(_answer, 1)[1]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
