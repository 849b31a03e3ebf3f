"""The shipped jobs, run: their Pods are hosts of their own, their sshd, mpirun, torchrun and ranks are real."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hybrid_ep.cluster.doctor.registry import all_checks
from hybrid_ep.cluster.kubernetes.manifest import Manifest, load
from tests.prerequisites import require, require_programs
from tests.sim.hosts import Cluster, Host, missing_prerequisites
from tests.sim.indexed_job import run_indexed_job, start_group
from tests.sim.mpijob import JobResult, MPIJobRun
from tests.sim.pods import checkout_image

pytestmark = pytest.mark.cluster
K8S = Path(__file__).resolve().parents[2] / "k8s"


def start_cluster(open_mpi: int = 4) -> Cluster:
    require(not missing_prerequisites(), ", ".join(missing_prerequisites()))
    mpirun = "/usr/bin/mpirun" if open_mpi == 4 else "mpirun"
    require_programs("sshd", "ssh-keygen", "kubectl", mpirun)
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout
    require(f"(Open MPI) {open_mpi}." in version, f"Open MPI {open_mpi} at {mpirun}")
    return Cluster(checkout_image(open_mpi=open_mpi))


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with start_cluster() as cluster:
        yield cluster


@cache
def built(overlay: str) -> list[Manifest]:
    return load(K8S / "overlays" / overlay)


def changed(overlay: str, launcher: str | None = None, **policy: Any) -> tuple[list[Manifest], Any]:
    """The overlay with another launcher script and other run policies; also its job's spec, to change more."""
    manifests = copy.deepcopy(built(overlay))
    spec = next(manifest.content["spec"] for manifest in manifests if manifest.kind in ("MPIJob", "Job"))
    if launcher is not None:
        container = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
        container["command"] = ["/bin/sh", "-ec", launcher, "launcher"]
    spec.get("runPolicy", {}).update(policy)
    return manifests, spec


def result_in(log: str) -> Any:
    """The JSON document that bench leaves in a log, after whatever else was said."""
    return json.JSONDecoder().raw_decode(log, log.index("\n{\n") + 1)[0]


def assert_good(log: str) -> None:
    result = result_in(log)
    assert result["ok"]
    assert result["num_ranks"] == 4
    (outcome,) = result["outcomes"]
    assert outcome["problems"] == []
    assert {operation["name"] for operation in outcome["operations"]} >= {"dispatch", "combine"}


@pytest.mark.parametrize("open_mpi", [4, 5])
def test_cpu_overlay_runs_across_two_hosts(open_mpi: int) -> None:
    manifests, _ = changed("cpu")
    has_link = open_mpi == 4  # Open MPI 5 starts the same processes for the link alone as for the bench
    if not has_link:
        launcher_option(manifests, "LINK_OPTIONS", "")
    with start_cluster(open_mpi) as cluster:
        result = MPIJobRun(manifests, cluster).run()
    assert result.succeeded, result.message + result.log
    assert [f"hybrid-ep-worker-{i}: profile cpu" in result.log for i in range(2)] == [True, True]
    assert_good(result.log)
    # The link alone, between the nodes and not on one; then what crosses, judged.
    assert bool(re.search(r"^tcp: ", result.log, re.M)) == has_link, result.log
    assert result.log.count("every chunk right") == (4 if has_link else 0)
    assert re.search(r"^fabric dispatch rail1: \S+ GB/s$", result.log, re.M), result.log
    assert "pass: between domains by engine torch; passed on correctness alone: profile cpu" in result.log
    # cleanPodPolicy: Running
    assert [worker.phase for worker in result.workers] == ["Deleted", "Deleted"]


def launcher_option(manifests: list[Manifest], name: str, value: str) -> None:
    (spec,) = (manifest.content["spec"] for manifest in manifests if manifest.kind == "MPIJob")
    variables = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["env"]
    (variable,) = (variable for variable in variables if variable["name"] == name)
    variable["value"] = value


def test_job_without_a_link_is_judged_by_the_rate_of_the_nics(cluster: Cluster) -> None:
    """Two hosts on a simulated network, held to the NICs of HGX H100: right results, and far too slow.

    The link alone is left out, as the overlay for one NVLink domain over nodes has it: the job says nothing of one.
    """
    manifests, _ = changed("cpu", backoffLimit=0)
    launcher_option(manifests, "JUDGE_OPTIONS", "--profile=hgx-h100")
    launcher_option(manifests, "BENCH_OPTIONS", "--json --tokens 16 --hidden 128 --runs 1 --warmups 1")
    launcher_option(manifests, "LINK_OPTIONS", "")
    result = MPIJobRun(manifests, cluster).run()
    assert_failed(result, "BackoffLimitExceeded")
    assert_good(result.log)
    assert re.search(r"^fail: .*fabric dispatch rail\d \S+ GB/s, expected ≥ 25", result.log, re.M), result.log
    assert "every chunk right" not in result.log


@pytest.mark.parametrize(("open_mpi", "reached"), [(4, 2), (5, 0)])
def test_hosts_are_found_without_a_hostfile_only_by_open_mpi_4(open_mpi: int, reached: int) -> None:
    """Why there is the rule mpijob-hostfile: Open MPI 5 does not know the operator's variable, and stays at home."""
    with start_cluster(open_mpi) as cluster:
        manifests, _ = changed("cpu", "mpirun --map-by ppr:1:node hostname")
        result = MPIJobRun(manifests, cluster).run()
    assert result.succeeded, result.log
    assert sum(line.startswith("hybrid-ep-worker-") for line in result.log.splitlines()) == reached


def test_cpu_torchrun_overlay_runs_across_two_hosts(cluster: Cluster) -> None:
    pods = run_indexed_job(built("cpu-torchrun"), cluster)
    assert [pod.phase for pod in pods] == ["Succeeded", "Succeeded"], "".join(pod.log for pod in pods)
    assert [f"{pod.name}: profile cpu" in pod.log for pod in pods] == [True, True]
    assert_good(pods[0].log)


def test_engine_starts_when_low_latency_calls_have_worked_across_the_nodes(cluster: Cluster) -> None:
    """The overlay for GPUs, asked to do the same on CPUs."""
    manifests = copy.deepcopy(built("lws-serving"))
    (lws,) = (manifest.content for manifest in manifests)
    spec = lws["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
    spec["initContainers"][0]["args"] = ["--profile=cpu", "--accept-unknown"]
    spec["volumes"][0]["emptyDir"]["sizeLimit"] = "1Gi"
    serve = spec["containers"][0]
    serve["command"][4] = "--nproc-per-node=1"
    (options,) = serve["env"]
    options["value"] = (
        options["value"].replace("cuda", "cpu") + " --hidden 512 --topk 2 --experts 4 --tokens 4 --runs 2"
    )
    serve["args"] = ["sh", "-c", "echo the engine runs"]
    pods = start_group(manifests, cluster)
    deadline = time.monotonic() + 120
    while any(pod.phase == "Running" for pod in pods) and time.monotonic() < deadline:
        time.sleep(0.1)
        for pod in pods:
            pod.poll()
    assert [pod.phase for pod in pods] == ["Succeeded", "Succeeded"], "".join(pod.log for pod in pods)
    assert [pod.log.endswith("the engine runs\n") for pod in pods] == [True, True]
    assert [pod.host.path("/tmp/checked").exists() for pod in pods] == [True, True]
    result = result_in(pods[0].log)
    assert (result["ok"], result["num_ranks"]) == (True, 2)


def test_worker_without_sshd_is_named(cluster: Cluster) -> None:
    def remove_sshd(host: Host) -> None:
        if host.name == "hybrid-ep-worker-1":
            host.path("/usr/sbin/sshd").unlink()

    result = MPIJobRun(built("cpu"), cluster, prepare=remove_sshd).run()
    assert_failed(result, "WorkersNotReady", "worker hybrid-ep-worker-1 is Failed", "/usr/sbin/sshd")
    assert "worker-0" not in result.message
    assert result.launchers == []


def test_worker_that_does_not_answer_its_probe_is_named(cluster: Cluster) -> None:
    manifests, spec = changed("cpu")
    container = spec["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    container["command"] = ["/bin/sh", "-c", '[ $(hostname) = hybrid-ep-worker-0 ] || exec "$@"; sleep 60', "sh"]
    container["args"] = ["/usr/sbin/sshd", "-De", "-f", "/etc/hybrid-ep/ssh/sshd_config"]
    result = MPIJobRun(manifests, cluster, ready_limit_s=2).run()
    assert_failed(result, "WorkersNotReady", "worker hybrid-ep-worker-0 is Running and not ready")
    assert "worker-1" not in result.message


def test_node_that_the_doctor_refuses_fails_the_job_with_its_remedy(cluster: Cluster) -> None:
    manifests, spec = changed("cpu", backoffLimit=0)
    spec["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["volumes"][1]["emptyDir"]["sizeLimit"] = "32Mi"
    result = MPIJobRun(manifests, cluster).run()
    assert_failed(result, "BackoffLimitExceeded")
    assert "host.shm" in result.log
    remedy = next(check.remedy for check in all_checks() if check.id == "host.shm")
    assert remedy in " ".join(result.log.split())
    assert "\n{\n" not in result.log  # no benchmark on such a node


def test_init_doctor_refuses_a_node_before_torchrun(cluster: Cluster) -> None:
    manifests, spec = changed("cpu-torchrun")
    spec["template"]["spec"]["volumes"][0]["emptyDir"]["sizeLimit"] = "32Mi"
    pods = run_indexed_job(manifests, cluster)
    assert "Failed" in [pod.phase for pod in pods]
    assert "host.shm" in pods[0].log
    assert pods[0].process is None


def test_deadline_ends_an_indexed_job(cluster: Cluster) -> None:
    manifests, spec = changed("cpu-torchrun")
    spec["activeDeadlineSeconds"] = 3
    spec["template"]["spec"]["initContainers"] = []
    spec["template"]["spec"]["containers"][0]["command"] = ["/bin/sh", "-c", "sleep $(( 60 * $0 ))"]
    spec["template"]["spec"]["containers"][0]["args"] = ["$(JOB_COMPLETION_INDEX)"]
    pods = run_indexed_job(manifests, cluster)
    assert [pod.phase for pod in pods] == ["Succeeded", "Deleted"]


def test_rank_that_dies_fails_the_job(cluster: Cluster) -> None:
    def break_bench(host: Host) -> None:
        if host.name == "hybrid-ep-worker-1":
            host.write("/usr/local/bin/hybrid-ep", "#!/bin/sh\n[ $1 = doctor ] || { echo no memory; exit 9; }\n", 0o755)

    manifests, _ = changed("cpu", backoffLimit=0)
    result = MPIJobRun(manifests, cluster, prepare=break_bench).run()
    # Which of its two notes mpirun still gets to print is a race; both say "non-zero".
    assert_failed(result, "BackoffLimitExceeded", "non-zero")
    assert "no memory" in result.log


@pytest.mark.parametrize("backoff_limit", [0, 2])
def test_launcher_is_tried_again_as_often_as_allowed(cluster: Cluster, backoff_limit: int) -> None:
    manifests, _ = changed("cpu", "echo attempt; exit 3", backoffLimit=backoff_limit, cleanPodPolicy="None")
    result = MPIJobRun(manifests, cluster).run()
    assert_failed(result, "BackoffLimitExceeded", f"failed {backoff_limit + 1} times", "attempt")
    assert [launcher.phase for launcher in result.launchers] == ["Failed"] * (backoff_limit + 1)
    assert [worker.phase for worker in result.workers] == ["Running", "Running"]


def test_deadline_ends_the_launcher(cluster: Cluster) -> None:
    manifests, _ = changed("cpu", "echo started; sleep 60", activeDeadlineSeconds=4, cleanPodPolicy="All")
    result = MPIJobRun(manifests, cluster).run()
    assert_failed(result, "DeadlineExceeded", "more than 4 s", "started")
    assert [pod.phase for pod in [*result.launchers, *result.workers]] == ["Deleted"] * 3


def test_ranks_know_only_what_is_handed_on(cluster: Cluster) -> None:
    """Why there is the rule mpijob-environment: a worker's variables reach no rank, the launcher's do with -x."""
    manifests, spec = changed("cpu", 'export B=2 C=3; "$@" --map-by ppr:1:node -x C env')
    spec["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["env"] = [{"name": "A", "value": "1"}]
    result = MPIJobRun(manifests, cluster).run()
    assert result.succeeded, result.message
    lines = result.log.splitlines()
    assert (lines.count("A=1"), lines.count("B=2"), lines.count("C=3")) == (0, 0, 2)


def test_ranks_read_the_settings_of_their_network(cluster: Cluster) -> None:
    """Those of GKE: the node's script says what NCCL needs on that machine type; a node without it does without."""

    def settle(host: Host) -> None:
        said = "net=$NCCL_NET class=$HYBRID_EP_TRAFFIC_CLASS"
        host.write("/usr/local/bin/hybrid-ep", f'#!/bin/sh\ncase "$*" in "bench --json"*) echo {said} ;; esac\n', 0o755)
        if host.name == "hybrid-ep-worker-1":
            host.write("/usr/local/gib/scripts/set_nccl_env.sh", "export NCCL_NET=gIB NCCL_IB_TC=56\n")

    manifests, spec = changed("cpu")
    gke = {manifest.metadata["name"]: manifest for manifest in built("gke")}
    manifests.append(gke["hybrid-ep-fabric"])
    for role in ("Launcher", "Worker"):
        ours, theirs = (
            job["mpiReplicaSpecs"][role]["template"]["spec"] for job in (spec, gke["hybrid-ep"].content["spec"])
        )
        container, like = ours["containers"][0], theirs["containers"][0]
        ours["volumes"] += [volume for volume in theirs["volumes"] if volume["name"] == "fabric"]
        container["volumeMounts"] += [mount for mount in like["volumeMounts"] if mount["name"] == "fabric"]
        if role == "Launcher":
            container["args"] = like["args"]
            container["env"] += [variable for variable in like["env"] if variable["name"] == "RANK_SETTINGS"]
    result = MPIJobRun(manifests, cluster, prepare=settle).run()
    assert result.succeeded, result.message
    said = [line.strip() for line in result.log.splitlines()]
    assert (said.count("net=gIB class=56"), said.count("net= class=52")) == (2, 2)


@pytest.mark.parametrize("overlay", ["cpu", "cpu-torchrun"])
def test_profile_of_a_site_decides(overlay: str, tmp_path: Path) -> None:
    shutil.copytree(K8S, tmp_path / "k8s")
    (tmp_path / "site.yaml").write_text("extends: cpu\nhost: {shm_mib: 4096}\n")
    (tmp_path / "kustomization.yaml").write_text(
        f"resources: [k8s/overlays/{overlay}]\ncomponents: [k8s/components/doctor-profile]\nconfigMapGenerator:\n"
        "- {name: hybrid-ep-doctor-profile, files: [site.yaml], options: {disableNameSuffixHash: true}}\n"
    )
    with start_cluster() as cluster:
        manifests = load(tmp_path)
        if overlay == "cpu":
            log = MPIJobRun(manifests, cluster).run().log
        else:
            log = run_indexed_job(manifests, cluster)[0].log
    assert "profile site" in log
    assert "4096" in log
    assert "\n{\n" not in log


def test_ssh_trusts_only_the_jobs_own_key(cluster: Cluster) -> None:
    """A host that shows another key is refused, although nobody wrote a known_hosts file."""
    manifests, spec = changed("cpu", backoffLimit=0)
    container = spec["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    impostor = """
        config=/etc/hybrid-ep/ssh/sshd_config
        if [ "$(hostname)" = hybrid-ep-worker-1 ]; then
          ssh-keygen -q -t ed25519 -N '' -f /tmp/key
          sed 's,^HostKey .*,HostKey /tmp/key,' $config >/tmp/config; config=/tmp/config
        fi
        exec /usr/sbin/sshd -De -f $config"""
    container["command"] = ["/bin/sh", "-ec", impostor]
    result = MPIJobRun(manifests, cluster).run()
    assert_failed(result, "BackoffLimitExceeded")
    assert "Host key verification failed" in result.log


def test_clusters_do_not_meet() -> None:
    """Two at once, with equal names and addresses: a server in one is not there in the other."""
    serve = "import socket, time; s = socket.create_server(('', 2222)); print('up', flush=True); time.sleep(60)"
    with start_cluster() as one, start_cluster() as two:
        hosts = [cluster.add_host("a") for cluster in (one, two)]
        assert hosts[0].address == hosts[1].address
        process = hosts[0].start([sys.executable, "-c", serve], user=1000, output=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert [cluster.can_connect(hosts[0].address, 2222) for cluster in (one, two)] == [True, False]
        # Also through a link that is absolute inside the host.
        hosts[1].path("/etc/link").symlink_to("/srv/../etc")
        hosts[1].write("/etc/link/hybrid-ep-mine", "two")
        assert hosts[1].path("/etc/hybrid-ep-mine").read_text() == "two"
        assert not hosts[0].path("/etc/hybrid-ep-mine").exists()
        assert not Path("/etc/hybrid-ep-mine").exists()
    process.wait()
    process.stdout.close()


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    require(not missing_prerequisites(), ", ".join(missing_prerequisites()))
    code = (
        "import sys; from tests.sim.hosts import Cluster, Image; cluster = Cluster(Image()); "
        "host = cluster.add_host('a'); host.start(['sleep', '987654321']); print('up', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=K8S.parent,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "up\n"
    assert await_sleepers(1)
    process.kill()  # no chance to clean up
    process.wait()
    process.stdout.close()
    process.stdin.close()
    assert await_sleepers(0)


def await_sleepers(number: int) -> bool:
    for _ in range(100):
        if sleepers() == number:
            return True
        time.sleep(0.05)
    return False


def sleepers() -> int:
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += path.read_bytes() == b"sleep\x00987654321\x00"
        except OSError:
            continue
    return found


def assert_failed(result: JobResult, reason: str, *says: str) -> None:
    assert (result.succeeded, result.reason) == (False, reason), result.message
    for words in says:
        assert words in result.message
