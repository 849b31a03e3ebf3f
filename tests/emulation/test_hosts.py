"""The cuda engine, emulated, between hosts that a network joins: tcp between network namespaces, by mpirun and
torchrun. Packets that are lost or late: test_softroce.py, whose machine has a kernel with netem.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybrid_ep.cluster.kubernetes.manifest import load
from tests.emulation.hosts_job import GO, PAUSE
from tests.prerequisites import require, require_programs
from tests.sim.hosts import Cluster, Host, missing_prerequisites
from tests.sim.mpijob import MPIJobRun
from tests.sim.pods import checkout_image

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]
NUM_HOSTS, RANKS_PER_HOST = 2, 2
TIMEOUT_S = 8.0


@pytest.fixture(scope="module")
def cluster(emulated_module: Path) -> Iterator[Cluster]:
    require(not missing_prerequisites(), ", ".join(missing_prerequisites()))
    image = checkout_image()
    with Cluster(replace(image, visible=(*image.visible, emulated_module.parent))) as cluster:
        yield cluster


def said(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith('{"rank"')]


def by_rank(lines: list[dict[str, Any]], key: str) -> dict[int, Any]:
    """The last value of a key that each rank has said."""
    return {line["rank"]: line[key] for line in lines if key in line}


def test_ranks_that_mpirun_starts(cluster: Cluster, emulated_module: Path) -> None:
    """`auto` takes the kernels, joins the hosts by tcp, and every bit is right."""
    require_programs("sshd", "ssh-keygen", "/usr/bin/mpirun")
    manifests = copy.deepcopy(load(ROOT / "k8s" / "overlays" / "cpu"))
    spec = next(manifest.content["spec"] for manifest in manifests if manifest.kind == "MPIJob")
    launcher = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    job = f"{sys.executable} -m tests.emulation.hosts_job {emulated_module} 60 3"
    launcher["command"] = [
        "/bin/sh",
        "-ec",
        'MASTER_ADDR=$(head -n 1 /etc/mpi/hostfile | cut -d " " -f 1) MASTER_PORT=29500 exec mpirun '
        f"-x MASTER_ADDR -x MASTER_PORT --wdir {ROOT} {job}",
    ]
    result = MPIJobRun(manifests, cluster).run()
    assert result.succeeded, result.message + result.log
    lines = said(result.log)
    assert by_rank(lines, "engine") == dict.fromkeys(range(4), "cuda")
    assert by_rank(lines, "domains") == dict.fromkeys(range(4), NUM_HOSTS)
    assert by_rank(lines, "by") == dict.fromkeys(range(4), "NVLink, tcp")
    assert by_rank(lines, "done") == dict.fromkeys(range(4), True)


def _cut_cable(host: Host) -> None:
    assert host.start(["ip", "link", "set", "eth0", "down"]).wait() == 0


def _kill(host: Host) -> None:
    host.stop()


def _start(host: Host, first: Host, hosts: int, node: int, ranks_per_host: int, *job: str) -> subprocess.Popen[bytes]:
    options = [f"--nnodes={hosts}", f"--node-rank={node}", f"--nproc-per-node={ranks_per_host}"]
    options += [f"--master-addr={first.address}", "--master-port=29500", "-m", "tests.emulation.hosts_job", *job]
    return host.start(
        ["sh", "-c", 'cd "$0" && exec "$@"', str(ROOT), "torchrun", *options],
        user=1000,
        variables={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"},
        output=subprocess.PIPE,
    )


@pytest.mark.parametrize("harm", [_cut_cable, _kill], ids=["link_down", "host_killed"])
def test_a_host_that_is_lost(cluster: Cluster, emulated_module: Path, harm: Callable[[Host], None]) -> None:
    """The ranks of the other host name one of its ranks in their time."""
    hosts = [cluster.add_host(f"{harm.__name__.strip('_').replace('_', '-')}-{i}") for i in range(NUM_HOSTS)]
    job = [str(emulated_module), str(TIMEOUT_S), "1000"]
    agents = [_start(host, hosts[0], NUM_HOSTS, i, RANKS_PER_HOST, *job) for i, host in enumerate(hosts)]
    output = agents[0].stdout
    assert output is not None
    lines: list[str] = []
    is_harmed = False
    for line in map(bytes.decode, output):
        lines.append(line)
        if not is_harmed and sum(f'"round": {PAUSE - 1}}}' in one for one in lines) == RANKS_PER_HOST:
            time.sleep(1)  # the other host's ranks are as far
            harm(hosts[1])
            hosts[0].write(str(GO), "")
            is_harmed = True
    for agent in agents:
        agent.kill()
        agent.wait()
    text = "".join(lines)
    assert is_harmed, text
    found = said(text)
    assert by_rank(found, "engine") == dict.fromkeys(range(RANKS_PER_HOST), "cuda")
    assert set(by_rank(found, "error")) == {0, 1}, text
    assert set(by_rank(found, "peer").values()) <= {2, 3}, text


def test_ranks_recover_from_a_host_without_network(cluster: Cluster, emulated_module: Path) -> None:
    """One rank's network goes away, while it runs. The others recover and go on; it is told that it cannot."""
    hosts = [cluster.add_host(f"cut-off-{i}") for i in range(3)]
    job = [str(emulated_module), str(TIMEOUT_S), "1000", "recover"]
    agents = [_start(host, hosts[0], len(hosts), i, 1, *job) for i, host in enumerate(hosts)]
    lines: list[str] = []
    for agent in agents:
        assert agent.stdout is not None
        for line in map(bytes.decode, agent.stdout):
            lines.append(line)
            if agent is agents[0] and f'"round": {PAUSE - 1}}}' in line:
                time.sleep(1)  # the other hosts' ranks are as far
                _cut_cable(hosts[2])
                for host in hosts:
                    host.write(str(GO), "")
            if "seconds_to_recover" in line or "left_out" in line:
                break  # torchrun's agents now wait for each other, for minutes
    for agent in agents:
        agent.kill()
        agent.wait()
    text_of_all = "".join(lines)
    found = said(text_of_all)
    assert set(by_rank(found, "error")) == {0, 1, 2}, text_of_all
    assert {0: 2, 1: 2}.items() <= by_rank(found, "peer").items(), text_of_all
    assert by_rank(found, "went_on_with") == {0: [0, 1], 1: [0, 1]}, text_of_all
    assert by_rank(found, "lost") == {0: [2], 1: [2]}
    assert by_rank(found, "engine_after") == {0: "cuda", 1: "cuda"}
    assert by_rank(found, "by") == dict.fromkeys(range(3), "NVLink, tcp")
    assert by_rank(found, "round_after") == {0: 2, 1: 2}
    assert by_rank(found, "unserved") == {0: [], 1: []}
    assert sorted(e for experts in by_rank(found, "loaded").values() for e in experts) == [8, 9, 10, 11]
    assert set(by_rank(found, "left_out")) == {2}, text_of_all
