"""What the doctor reads beside files and NVML: the kernel's log, DCB by netlink, and its own memory of the last run.

A node is read by a child process: if that hangs or dies, one answer is lost, and the doctor goes on.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hybrid_ep.cluster.doctor import Node, Unreadable, WatchedNode
from hybrid_ep.cluster.doctor.capture import capture
from hybrid_ep.cluster.doctor.cuda_start import CudaStart, start_cuda
from hybrid_ep.cluster.doctor.dcb import DcbState, parse_ieee, read_dcb
from hybrid_ep.cluster.doctor.node import LogLine
from hybrid_ep.cluster.doctor.rises import Limits, Memory, judge_rise
from hybrid_ep.cluster.doctor.xid import ACTIONS, catalogue, read_incidents
from hybrid_ep.errors import ConfigError
from tests.sim.platforms import healthy

_GPU = "PCI:0000:23:00"


# ---- Xids ----


def _actions(*messages: str) -> dict[str, str]:
    lines = [LogLine(60.0 * (number + 1), message) for number, message in enumerate(messages)]
    return {incident.name: incident.action for incident in read_incidents(lines, {109: "restart_app"})}


def test_catalogue_is_complete_and_consistent() -> None:
    assert {46, 48, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 145, 149, 154, 155, 158} <= set(catalogue())
    for number, entry in catalogue().items():
        assert set(entry) <= {"what", "action", "gpus", "note"}, number
        assert entry["action"] in ACTIONS
        assert entry["gpus"]
        assert set(entry["gpus"]) <= set("AHBG")


@pytest.mark.parametrize(
    ("message", "action"),
    [
        (f"NVRM: Xid ({_GPU}): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", "reboot the node"),
        ("NVRM: Xid (0000:23:00): 46, Channel 00000001", "reset the GPU"),
        (f"NVRM: Xid ({_GPU}.0): 48, DBE", "reset the GPU"),
        (f"NVRM: Xid ({_GPU}): 13, Graphics Exception", ""),
        (f"NVRM: Xid ({_GPU}): 109, pid=1, CTX SWITCH TIMEOUT", ""),  # the site's own word
        (f"NVRM: Xid ({_GPU}): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6 0x0)", "reset the GPU"),
        (f"NVRM: Xid ({_GPU}): 145, RLW_CTRL Nonfatal XC0 i0 Link 01 (0x1 0x80000000)", ""),
        (f"NVRM: Xid ({_GPU}): 145, RLW_CTRL Non-fatal XC0 i0 Link 01 (0x1 0x80000000)", ""),
        (
            f"NVRM: Xid ({_GPU}): 154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)",
            "drain and reset",
        ),
        (f"NVRM: Xid ({_GPU}): 999, from the future", ""),
    ],
)
def test_xid_is_judged_by_the_catalogue(message: str, action: str) -> None:
    assert list(_actions(message).values()) == [action]


@pytest.mark.parametrize("message", ["NVRM: Xid (invalid): 79, x", "Xid error: xyz", "eth0: link up"])
def test_other_lines_are_no_xid(message: str) -> None:
    assert _actions(message) == {}


def test_reset_clears_what_stood_before() -> None:
    fatal = f"NVRM: Xid ({_GPU}): 95, Uncontained"
    other = "NVRM: Xid (PCI:0000:33:00): 95, Uncontained"
    cleared = f"NVRM: Xid ({_GPU}): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
    assert _actions(fatal, cleared) == {}
    assert _actions(fatal, other, cleared) == {"Xid 95": "reset the GPU"}  # of the other GPU
    assert _actions(fatal, other, "NVRM: loading NVIDIA UNIX Open Kernel Module") == {}
    assert _actions(cleared, fatal) == {"Xid 95": "reset the GPU"}


def test_incident_says_when_and_how_often() -> None:
    lines = [LogLine(3600.0 * hour, f"NVRM: Xid ({_GPU}): 119, GSP RPC timeout") for hour in (1, 5)]
    (incident,) = read_incidents(lines, {})
    assert str(incident) == (
        "Xid 119 on 0000:23:00 (GSP RPC timeout), 2 times, last 5 h 0 min after the boot; reset the GPU"
    )


def test_journal_steps_in_where_the_log_lost_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "kmsg").write_text("6,500,7000000,-;late\n")
    node = Node(tmp_path)
    with pytest.raises(Unreadable, match=r"no longer reaches back to the boot; .*not recorded") as caught:
        node.kernel_log()
    assert caught.value.log == (LogLine(7.0, "late"),)
    journal = "[    1.500000] host kernel: early\n-- no entry --\n[ 9000.000001] host kernel: late\n"
    monkeypatch.setattr(Node, "command", lambda self, *words: journal)
    assert node.kernel_log() == [LogLine(1.5, "early"), LogLine(9000.000001, "late")]


# ---- DCB ----


def _attribute(kind: int, content: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(content), kind) + content + b"\0" * (-len(content) % 4)


def test_dcb_answer_is_read() -> None:
    """As linux/dcbnl.h lays it out: nested attributes, struct ieee_pfc, struct dcb_app (selector 5 is DSCP)."""
    pfc = _attribute(2, bytes([8, 0b1000, 0, 0]) + b"\0" * 132)
    by_dscp = _attribute(3, _attribute(1, struct.pack("=BBH", 5, 3, 26)))
    by_vlan = _attribute(3, _attribute(1, struct.pack("=BBH", 1, 3, 0x8915)))
    name = _attribute(1, b"eth0\0")
    assert parse_ieee(name + _attribute(13 | 0x8000, pfc + by_dscp)) == DcbState(0b1000, True)
    assert parse_ieee(name + _attribute(13, pfc + by_vlan)) == DcbState(0b1000, False)
    assert parse_ieee(name) == DcbState(0, False)
    assert parse_ieee(b"\x02\0\x0d\0" * 3) == DcbState(0, False)  # a length that is too small


def test_dcb_of_no_interface_is_unreadable() -> None:
    with pytest.raises(Unreadable, match="DCB of nothing0: "):
        read_dcb("nothing0")


# ---- memory between runs ----


def test_memory_survives_a_file(tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    memory = Memory.load(path)
    assert (memory.elapsed_s(), memory.complaint) == (0.0, "")
    memory.note("nic.errors", {("mlx5_0/1", "link_downed"): 3})
    memory.save()
    memory = Memory.load(path)
    assert memory.counters == {"nic.errors": {("mlx5_0/1", "link_downed"): 3}}
    assert 0 <= memory.elapsed_s() < 60
    memory.note("gpu.errors", {("GPU 0", "pcie_replay"): 1})
    memory.save()
    assert set(Memory.load(path).counters) == {"nic.errors", "gpu.errors"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["doctor.json"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": 2}', '{"schema": 1, "unix_time_s": 1, "counters": {"a": 5}}']
)
def test_damaged_memory_starts_over(tmp_path: Path, text: str) -> None:
    path = tmp_path / "doctor.json"
    path.write_text(text)
    memory = Memory.load(path)
    assert memory.counters == {}
    assert "is not used" in memory.complaint
    memory.save()
    assert json.loads(path.read_text())["counters"] == {}


def test_memory_that_cannot_be_written_is_said() -> None:
    memory = Memory(Path("/proc/nothing/doctor.json"))
    memory.save()
    assert "cannot be written" in memory.complaint


@pytest.mark.parametrize(
    ("value", "hours", "status"),
    [(10, 0.1, "pass"), (11, 0.1, "fail"), (100, 10, "pass"), (101, 10, "fail"), (0, 10, "pass")],
)
def test_limit_holds_per_hour(value: int, hours: float, status: str) -> None:
    """Ten an hour; in less than an hour as many as in one."""
    key = ("mlx5_0/1", "symbol_error")
    now = {key: 1000 + value}
    found = judge_rise(Limits({}, {"symbol_error": 10}), now, now, 1.0, {key: 1000}, hours * 3600)[0]
    assert found.status.value == status


def test_counter_that_started_over_counts_from_zero() -> None:
    key = ("GPU 0 link 1", "replay")
    now = {key: 2}
    found = judge_rise(Limits({}, {}), now, now, 1.0, {key: 900}, 3600.0)[0]
    assert "rose by 2 in 1.0 h since the last run, allowed: 0" in found.seen


def test_clock_that_went_back_is_no_interval() -> None:
    assert Memory(Path("x"), time.time() + 3600).elapsed_s() == 0.0


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


# ---- CUDA's start ----

_LIBCUDA = """
#include <stdlib.h>
#include <unistd.h>
static int code(const char* name) { const char* text = getenv(name); return text ? atoi(text) : 0; }
int cuInit(unsigned flags) { if (flags) return 1; if (code("INIT") < 0) abort(); return code("INIT"); }
int cuDeviceGetCount(int* count) { *count = 2; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return ordinal < 2 ? 0 : 101; }
int cuDevicePrimaryCtxRetain(void** context, int device) {
  (void)context;
  while (device == 1 && code("HANG")) pause();
  return device == 1 ? code("CONTEXT") : 0;
}
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return 0; }
"""


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a stub of libcuda.so.1, which answers from the environment."""
    folder = tmp_path_factory.mktemp("libcuda")
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(folder / "libcuda.so.1")]
    subprocess.run(command, input=_LIBCUDA, text=True, check=True)
    return folder


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ({}, CudaStart(0, 2, {0: 0, 1: 0})),
        ({"INIT": "802"}, CudaStart(802)),
        ({"CONTEXT": "46"}, CudaStart(0, 2, {0: 0, 1: 46})),
        ({"INIT": "-1"}, CudaStart(lost="ended with status -6")),
        ({"HANG": "1"}, CudaStart(0, 2, {0: 0}, lost="no answer in 2 s")),
        ({"CUDA_VISIBLE_DEVICES": "7"}, CudaStart(0, 2, {0: 0, 1: 0})),  # a job's setting hides no GPU here
    ],
)
def test_cuda_is_started_by_a_child(
    libcuda: Path, monkeypatch: pytest.MonkeyPatch, answers: dict[str, str], found: CudaStart
) -> None:
    for name, value in {"LD_LIBRARY_PATH": str(libcuda), **answers}.items():
        monkeypatch.setenv(name, value)
    watched: list[int] = []
    assert start_cuda([0, 1], lambda: watched.append(1), deadline_s=2) == found
    assert watched


def test_without_libcuda_the_loader_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    found = start_cuda([0], lambda: None)
    assert (found.init, found.lost) == (None, "")
    assert "libcuda.so.1" in found.library


# ---- recordings ----


def test_an_interface_whose_name_is_too_long_is_not_looked_for(tmp_path: Path) -> None:
    recording = healthy("hgx-h200")
    path = next(path for path in recording.files if path.endswith("/gid_attrs/ndevs/0"))
    recording.files[path] = "n" * 300
    recording.write(tmp_path)
    with closing(Node(tmp_path)) as node:
        assert capture(node).files[path] == "n" * 300
