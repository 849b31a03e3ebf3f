"""slurm/: the validation in an allocation of a real slurmctld with real slurmds, and the prolog that drains a node.

Each node is a host of tests/sim/hosts.py. The hosts share no folder: the files that the job writes are on its first
node.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.prerequisites import require, require_programs
from tests.sim.hosts import Cluster, Host, missing_prerequisites
from tests.sim.platforms import healthy
from tests.sim.pods import checkout_image
from tests.sim.scenario import Scenario, build_stub

# A validation starts tens of processes, one after the other. Where others use the machine, too, it takes minutes.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
NODES = ("node-a", "node-b", "node-c")
RESULTS = "/tmp/results"
_CONFIG = """
ClusterName=simulated
SlurmctldHost=controller
SlurmUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation=/run/slurm/state
SlurmdSpoolDir=/run/slurm/spool
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdTimeout=30
SlurmdParameters=config_overrides
{prolog}
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


class Slurm:
    """A controller and nodes; commands run on the controller."""

    def __init__(self, files: dict[str, str], prolog: str = "") -> None:
        image = checkout_image()
        self.cluster = Cluster(replace(image, files={**image.files, **files}))
        addresses = {name: self.cluster.reserve_address() for name in ("controller", *NODES)}
        lines = [f"NodeName={name} CPUs=4 RealMemory=500 State=UNKNOWN" for name in NODES]
        config = _CONFIG.format(prolog=prolog, nodes="\n".join(lines))
        self.hosts: dict[str, Host] = {}
        for name, address in addresses.items():
            host = self.hosts[name] = self.cluster.add_host(name, address)
            known = [f"{address} {other}" for other, address in addresses.items()]
            host.write("/etc/hosts", "\n".join(["127.0.0.1 localhost", *known, ""]))
            host.write("/etc/slurm/slurm.conf", config)
            host.write("/etc/slurm/cgroup.conf", "CgroupPlugin=cgroup/v1\n")  # these hosts have none to be put into
            for folder in ("state", "spool"):
                host.path(f"/run/slurm/{folder}").mkdir(parents=True, exist_ok=True)
        self._start("controller", "slurmctld")
        for name in NODES:
            self._start(name, "slurmd")

    def _start(self, name: str, program: str) -> None:
        words = ["sh", "-c", f"exec {program} -D >/tmp/{program}.log 2>&1"]
        self.hosts[name].start(words, output=subprocess.DEVNULL, variables={"LC_ALL": "C.UTF-8"})

    def run(self, *words: str, variables: dict[str, str] | None = None) -> str:
        """What a command on the controller printed, whatever its end."""
        process = self.hosts["controller"].start(list(words), output=subprocess.PIPE, variables=variables)
        return process.communicate()[0].decode()

    def await_state(self, state: str, *nodes: str, limit_s: float = 200) -> None:
        """Waits until the nodes are in that state."""
        begun = time.monotonic()
        while (found := self.states()) | dict.fromkeys(nodes, state) != found:
            assert time.monotonic() - begun < limit_s, (found, self.log("controller", "slurmctld"))
            time.sleep(0.5)

    def await_job(self, number: str, limit_s: float = 800) -> int:
        """Waits until the job has ended and returns its exit status. sbatch --wait looks every 10 s only."""
        begun = time.monotonic()
        while True:
            shown = self.run("scontrol", "show", "job", "--oneliner", number)
            found = re.search(r" JobState=(\w+) .* ExitCode=(\d+):", shown)
            assert found is not None, shown
            if found[1] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
                return int(found[2])
            assert time.monotonic() - begun < limit_s, shown
            time.sleep(0.5)

    def states(self) -> dict[str, str]:
        """Node → its state, e.g. ``idle`` or ``drained``."""
        lines = self.run("sinfo", "--Node", "--noheader", "--format=%N %T").splitlines()
        return {words[0]: words[1].rstrip("*") for line in lines if len(words := line.split()) == 2}

    def log(self, name: str, program: str) -> str:
        return self.hosts[name].path(f"/tmp/{program}.log").read_text()[-3000:]


def started(files: dict[str, str], prolog: str = "") -> Slurm:
    require(not missing_prerequisites(), ", ".join(missing_prerequisites()))
    require_programs("slurmctld", "slurmd", "srun")
    slurm = Slurm(files, prolog)
    try:
        slurm.await_state("idle", *NODES)
    except BaseException:
        slurm.cluster.close()
        raise
    return slurm


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    slurm = started({})
    with slurm.cluster:
        yield slurm


def validate(slurm: Slurm, **settings: str) -> tuple[int, Path, str]:
    """Runs the batch script; returns its exit status, the results folder and its output, all of the first node."""
    variables = {
        "PATH": f"{Path(sys.prefix, 'bin')}:/usr/sbin:/usr/bin:/sbin:/bin",
        "LC_ALL": "C.UTF-8",
        "PLATFORM": "cpu",
        "RANKS_PER_NODE": "1",
        "NIC": "0",
        "ROUNDS": "0",
        "RESULTS": RESULTS,
        "JOB_LIMIT_S": "200",
        "BENCH_OPTIONS": "--device cpu --tokens 16 --hidden 128 --topk 2 --runs 1 --warmups 1",
        **settings,
    }
    words = ["sbatch", "--parsable", "--nodes=3", "--chdir=/tmp", "--output=/tmp/job.log"]
    process = slurm.hosts["controller"].start(
        [*words, str(ROOT / "slurm/validate.sbatch")], output=subprocess.PIPE, variables=variables
    )
    said = process.communicate()[0].decode()
    code = slurm.await_job(said.strip())
    first = slurm.hosts[NODES[0]]
    log = first.path("/tmp/job.log")
    return code, first.path(settings.get("RESULTS", RESULTS)), said + (log.read_text() if log.exists() else "")


def test_allocation_is_validated_by_srun_alone(slurm: Slurm) -> None:
    code, results, said = validate(slurm)
    report: dict[str, Any] = json.loads((results / "report" / "report.json").read_text())
    assert [node["fit"] for node in report["nodes"]] == [True] * 3, said
    jobs = {job["name"]: job["status"] for job in report["jobs"]}
    assert jobs == {
        **dict.fromkeys(("pair-node-a-node-b", "pair-node-b-node-c", "pair-node-c-node-a"), "pass"),
        **dict.fromkeys(("link-node-a-node-b", "link-node-b-node-c", "link-node-c-node-a"), "pass"),
        "all": "pass",
    }, said
    (whole,) = (job for job in report["jobs"] if job["name"] == "all")
    assert sorted(whole["hosts"]) == list(NODES)
    assert {metric["name"] for metric in whole["metrics"]} >= {"dispatch", "combine"}
    # The hosts share this machine's kernel, whose clock nothing keeps: no fault of the jobs.
    assert code == report["exit_code"]


def test_node_without_the_program_is_named_and_left_out(slurm: Slurm) -> None:
    """A prefix that is missing on one node alone: its doctor gives no report, and the others are tested.

    The link alone is left out.
    """
    for name in NODES[:2]:
        slurm.hosts[name].write("/opt/site/hybrid-ep", f'#!/bin/sh\nexec {sys.prefix}/bin/hybrid-ep "$@"\n', 0o755)
    code, results, said = validate(slurm, HYBRID_EP="/opt/site/hybrid-ep", RESULTS="/tmp/missing", LINK="0")
    report = json.loads((results / "report" / "report.json").read_text())
    assert [node["name"] for node in report["nodes"] if not node["fit"]] == ["node-c"], said
    names = ("pair-node-a-node-b", "all")
    assert {job["name"]: job["status"] for job in report["jobs"]} == dict.fromkeys(names, "pass")
    assert report["to_do"][0]["hosts"] == ["node-c"]
    assert "Install the program" in report["to_do"][0]["remedy"]
    assert code == 1


def test_unknown_launcher_is_refused(slurm: Slurm) -> None:
    code, _, said = validate(slurm, LAUNCH="ssh")
    assert (code, "LAUNCH is 'ssh'; allowed: srun, mpirun" in said) == (2, True), said


def test_prolog_drains_a_node_with_a_fault_and_no_other(tmp_path: Path) -> None:
    stub = build_stub(tmp_path)
    options = (
        f"HYBRID_EP='env LD_LIBRARY_PATH=/opt/stub HYBRID_EP_NVML_STUB=/opt/node/hybrid_ep/nvml.conf "
        f"{sys.prefix}/bin/hybrid-ep'\nDOCTOR_OPTIONS='--profile hgx-h100 --sysroot /opt/node --group=nvlink'\n"
    )
    prolog = f"Prolog={ROOT}/slurm/prolog.sh\nPrologFlags=Alloc"
    slurm = started({"/etc/default/hybrid-ep": options}, prolog)
    with slurm.cluster:
        broken = Scenario("link down", "hgx-h100", nvml={"gpu.3.link.7.state": 0}).build()
        for name in NODES:
            host = slurm.hosts[name]
            (broken if name == "node-b" else healthy("hgx-h100")).write(host.path("/opt/node"))
            host.path("/opt/stub").mkdir()
            host.path("/opt/stub/libnvidia-ml.so.1").write_bytes((stub / "libnvidia-ml.so.1").read_bytes())
        assert "node-a" in slurm.run("srun", "--nodelist=node-a", "--chdir=/tmp", "hostname")
        slurm.run("sbatch", "--nodelist=node-b", "--chdir=/tmp", "--output=/dev/null", "--wrap=true")
        slurm.await_state("drained", "node-b")
        reason = slurm.run("sinfo", "--noheader", "--nodes=node-b", "--format=%E")
        assert reason.startswith("hybrid-ep doctor: nvlink.links")
        assert slurm.states()["node-a"] == "idle"
        # As HealthCheckProgram: it resumes a node that passes, if it has itself drained it.
        slurm.run("scontrol", "update", "NodeName=node-c", "State=DRAIN", "Reason=memory is exchanged")
        shutil.rmtree(slurm.hosts["node-b"].path("/opt/node"))
        healthy("hgx-h100").write(slurm.hosts["node-b"].path("/opt/node"))
        for name in ("node-b", "node-c"):
            host = slurm.hosts[name]
            variables = {"SLURMD_NODENAME": name, "LC_ALL": "C.UTF-8"}
            assert host.start([str(ROOT / "slurm/prolog.sh")], variables=variables).wait() == 0
        slurm.await_state("idle", "node-b")
        assert slurm.states()["node-c"] == "drained"
