"""The preflight as init containers of a gang would run it: each Pod a simulated host, with the files of NVSentinel."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.prerequisites import require, require_programs
from tests.sim.hosts import Cluster, Host, missing_prerequisites
from tests.sim.pods import checkout_image

# Each case starts a doctor, two benches or more on each of three hosts.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
PODS = ("pod-0", "pod-1", "pod-2")
BENCH = "--device cpu --tokens 1024 --hidden 1024 --topk 2 --runs 2 --warmups 1"
# GB/s that sound hosts reach here by far, and a host with a link of 30 Mbit/s cannot.
FIGURES = """
extends: cpu
bandwidth:
  fraction: 1
  figures:
    pair.fabric dispatch: {value: 0.008, unit: GB/s, hosts: 2, source: simulated hosts}
    group.fabric dispatch: {value: 0.008, unit: GB/s, hosts: 3, source: simulated hosts}
"""
Break = Callable[[Host], None]


def slow(host: Host) -> None:
    """Its link sends 30 Mbit/s; jobs on the host alone do not use it."""
    limit = "tc qdisc add dev eth0 root tbf rate 30mbit burst 32kbit latency 400ms"
    assert host.start(limit.split()).wait() == 0


def faulty(host: Host) -> None:
    """Its /dev/shm is too small, which the doctor finds."""
    assert host.start(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm"]).wait() == 0


def run_gang(cluster: Cluster, break_host: Break | None, *, absent: str = "") -> dict[str, tuple[int, str, Host]]:
    """Runs the preflight on all Pods but the absent one; Pod → exit status, termination log, host. Breaks pod-1."""
    hosts = {name: cluster.add_host(name) for name in PODS}
    peers = "\n".join(f"{name};{host.address};{rank}" for rank, (name, host) in enumerate(hosts.items()))
    files = {"expected_count": "3", "peers": peers, "master_addr": hosts["pod-0"].address, "master_port": "29500"}
    names = "".join(f"{host.address} {name}\n" for name, host in hosts.items())
    for host in hosts.values():
        for key, content in files.items():
            host.write(f"/etc/preflight/{key}", content)
        host.write("/etc/hosts", f"127.0.0.1 localhost\n{names}")
        host.write("/dev/termination-log", "")
        host.write("/etc/site.yaml", FIGURES)
    if break_host is not None:
        break_host(hosts["pod-1"])
    words = ["hybrid-ep", "preflight", "--profile=/etc/site.yaml", f"--bench-options={BENCH}", "--ctrf=/tmp/ctrf.json"]
    variables = {"GANG_ID": "gang", "GANG_CONFIG_DIR": "/etc/preflight", "LC_ALL": "C.UTF-8"}
    variables["GANG_TIMEOUT_SECONDS"] = "20" if absent else "120"
    started = {
        name: host.start(words, variables={**variables, "POD_NAME": name}, output=subprocess.DEVNULL)
        for name, host in hosts.items()
        if name != absent
    }
    ended = {name: process.wait() for name, process in started.items()}
    return {
        name: (code, hosts[name].path("/dev/termination-log").read_text(), hosts[name]) for name, code in ended.items()
    }


@pytest.fixture
def cluster() -> Cluster:
    require(not missing_prerequisites(), ", ".join(missing_prerequisites()))
    require_programs("tc")
    return Cluster(checkout_image())


def test_gang_of_sound_hosts_passes(cluster: Cluster, tmp_path: Path) -> None:
    with cluster:
        for name, (code, said, host) in run_gang(cluster, None).items():
            assert (code, said.startswith(f"pass: {name}: "), ". 3 hosts: " in said) == (0, True, True), said
            tests = {
                test["name"]: test for test in json.loads(host.path("/tmp/ctrf.json").read_text())["results"]["tests"]
            }
            assert {tests[check]["status"] for check in ("preflight.alone", "gang.hosts", "gang.job")} == {"passed"}


@pytest.mark.parametrize(
    ("break_host", "absent", "blame", "of_itself"),
    [
        (slow, "", "gang.bisection: pod-1 makes jobs fail (between domains by engine torch; fabric dispatch", ""),
        (None, "pod-1", "gang.hosts: rank 1 (pod-1) has not come within 20 s", ""),
        pytest.param(None, "pod-0", "gang.hosts: rank 0 (pod-0) at ", "", marks=pytest.mark.slow),
        (faulty, "", "gang.hosts: pod-1: host.shm: ", "pod-1 (this host): host.shm: "),
    ],
    ids=["slow", "dead", "first dead", "faulty"],
)
def test_every_host_names_the_one_to_blame(
    cluster: Cluster, break_host: Break | None, absent: str, blame: str, of_itself: str
) -> None:
    with cluster:
        found = run_gang(cluster, break_host, absent=absent)
    assert {name: code for name, (code, _, _) in found.items()} == dict.fromkeys(set(PODS) - {absent}, 1)
    for name, (_, said, _) in found.items():
        expected = of_itself if of_itself and name == "pod-1" else blame
        assert said.startswith(f"fail: {expected}"), said
        assert f"{name} (this host)" in said
