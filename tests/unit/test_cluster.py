"""What a virtual cluster refuses before it starts a process, and what it says of ranks that end or take long."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_ep import ConfigError
from hybrid_ep.testing.cluster import RankError, VirtualCluster
from tests.prerequisites import require_programs


@pytest.mark.parametrize(
    ("num_gpus", "options", "message"),
    [
        (2, {"num_ranks": 0}, "num_ranks is 0; allowed: ≥ 1"),
        (2, {"num_ranks": 1, "device": "tpu"}, "device is 'tpu'; allowed: 'cpu' or 'cuda'"),
        (2, {"num_ranks": 3, "device": "cuda"}, "num_ranks is 3; allowed with cuda: ≤ 2 GPUs"),
        (
            0,
            {"num_ranks": 3, "device": "cuda", "ranks_share_gpus": True},
            "no GPU is visible; allowed: with at least one",
        ),
        (2, {"num_ranks": 3, "ranks_share_gpus": True}, "ranks_share_gpus is True with device 'cpu'; allowed"),
    ],
)
def test_refused(monkeypatch: pytest.MonkeyPatch, num_gpus: int, options: dict[str, Any], message: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    with pytest.raises(ConfigError, match=message):
        VirtualCluster(**options)


@pytest.mark.parametrize("name", ["HYBRID_EP_LOST_RANKS", "HYBRID_EP_TRANSPORT", "HYBRID_EP_TIMEOUT_S"])
def test_a_bad_variable_is_told_once_and_not_by_each_rank(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "x")
    with pytest.raises(ConfigError, match=f"{name}='x' is not allowed"):
        VirtualCluster(2)


def test_a_rank_that_has_ended_is_named_in_every_later_run() -> None:
    with VirtualCluster(2) as cluster:
        cluster.start(os._exit, 3, ranks=[1])
        for _ in range(2):
            with pytest.raises(RankError, match="rank 1: its process ended") as raised:
                cluster.run(os.getpid, limit_s=30)
            assert list(raised.value.errors) == [1]


def _meet() -> float:
    total = torch.ones(1)
    dist.all_reduce(total)
    return float(total)


def test_ranks_meet_where_the_host_does_not_know_its_own_name() -> None:
    """Otherwise gloo looks its address up by the name of the host, and warns at each rank."""
    require_programs("unshare")
    program = (
        "import socket; socket.sethostname('no-such-host-name')\n"
        "from hybrid_ep.testing.cluster import VirtualCluster\n"
        "from tests.unit.test_cluster import _meet\n"
        "with VirtualCluster(2) as cluster: print(cluster.run(_meet, limit_s=60))"
    )
    command = ["unshare", "--uts", *([] if os.geteuid() == 0 else ["--map-root-user"]), sys.executable, "-c", program]
    variables = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[2.0, 2.0]", "")


def _print_rank_and_stay() -> None:
    os.write(1, f"{os.getpid()}\n".encode())
    time.sleep(600)


def test_ranks_end_when_their_parent_is_killed_in_the_middle_of_a_call() -> None:
    program = "from tests.unit.test_cluster import _run_until_killed; _run_until_killed()"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        ranks = [int(parent.stdout.readline()) for _ in range(2)]
        parent.kill()
    deadline = time.monotonic() + 60
    while any(map(_is_running, ranks)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [rank for rank in ranks if _is_running(rank)] == []


def _run_until_killed() -> None:
    VirtualCluster(2).run(_print_rank_and_stay)


def _is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_the_limit_is_of_all_ranks_together() -> None:
    with VirtualCluster(3) as cluster:
        for rank in range(3):
            cluster.start(time.sleep, 1.5 * rank, ranks=[rank])
        with pytest.raises(RankError, match="rank 2: no answer within 2 s"):
            cluster.collect(limit_s=2.0)


def test_an_answer_that_came_too_late_is_not_taken_for_the_next() -> None:
    with VirtualCluster(1) as cluster:
        with pytest.raises(RankError, match=r"no answer within 0.2 s"):
            cluster.run(_after, 0.5, "late", limit_s=0.2)
        assert cluster.run(_after, 0.0, "next", limit_s=30) == ["next"]


def _after(seconds: float, answer: str) -> str:
    time.sleep(seconds)
    return answer
