"""Rules of `hybrid-ep k8s check`: each mistake is found by its rule alone, and what works is accepted.

In the files of `sites` each name has a `manifest` as a site writes it, in which nothing is wrong, and `cases` that
change it: `edits` replace texts, `more` is put behind it, `text` stands in its place. `finds` are the rules that must
report an error or a warning then, all of them; without it nothing may be found. `public.yaml` has manifests that work
at their source.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid_ep.cluster.kubernetes.check import check
from hybrid_ep.cluster.kubernetes.manifest import Level, Problem, load
from hybrid_ep.cluster.kubernetes.rules import RULES
from hybrid_ep.cluster.kubernetes.rules.parts import amount
from tests.unit.test_k8s_overlays import BREAKS

FOLDER = Path(__file__).resolve().parents[1] / "data" / "manifests"
SOUND = (FOLDER / "sound.yaml").read_text()
SITES = {
    name: site
    for file in sorted((FOLDER / "sites").iterdir())
    for name, site in yaml.safe_load(file.read_text(encoding="utf-8")).items()
}
CASES = [(name, case) for name, site in SITES.items() for case in site["cases"]]
PUBLIC = yaml.safe_load((FOLDER / "public.yaml").read_text(encoding="utf-8"))
J, W = "$.spec.template.spec", "$.spec.mpiReplicaSpecs.Worker.template.spec"
C, COMMAND = f"{J}.containers[0]", f"{J}.containers[0].command"
PROBE = f"{W}.containers[0].readinessProbe.tcpSocket.port"
NETWORKS = "$.spec.template.metadata.annotations['k8s.v1.cni.cncf.io/networks']"
# Rule, JSON path, a text that stands once in the sound build, what takes its place.
BROKEN = [
    ("gpu-limit", f"{C}.resources.limits['nvidia.com/gpu']", "nvidia.com/gpu: 4", "nvidia.com/gpu: 4.5"),
    ("shared-memory", f"{J}.volumes[0].emptyDir.sizeLimit", "sizeLimit: 32Gi", "sizeLimit: 96Gi"),
    ("shared-memory", f"{J}.volumes[0].emptyDir.sizeLimit", "sizeLimit: 32Gi", "sizeLimit: 64Mi"),
    ("ipc-lock", f"{C}.securityContext.capabilities.add", "add: [IPC_LOCK]", "add: [SYS_PTRACE]"),
    ("nic-count", NETWORKS, '[{"name": "rdma"}, ', "["),
    ("torchrun-size", COMMAND, "--nnodes=2", "--nnodes=4"),
    ("torchrun-size", COMMAND, "--nproc-per-node=4", "--nproc_per_node=8"),
    ("job-indexed", "$.spec.completionMode", "  completionMode: Indexed\n", ""),
    ("service", "$.spec.clusterIP", "clusterIP: None # of ranks", "ports: [{port: 29500}]"),
    ("service", "$.spec.selector", "{app: ranks} # of ranks", "{app: rank}"),
    ("service", f"{J}.subdomain", "subdomain: ranks", "subdomain: others"),
    ("service", f"{J}.dnsPolicy", "subdomain: ranks", "subdomain: ranks\n      hostNetwork: true"),
    ("rank-readiness", "$.spec.publishNotReadyAddresses", "  publishNotReadyAddresses: true\n", ""),
    ("compute-domain", "$.spec.numNodes", "numNodes: 2 # of domain", "numNodes: 4"),
    ("mpijob-ssh", PROBE, "{port: 2222} # of sshd", "{port: 22}"),
    ("mpijob-ssh", PROBE, "    Port 2222\n", ""),
    ("mpijob-ssh", "$.spec.sshAuthMountPath", "sshAuthMountPath: /home/user/.ssh", "sshAuthMountPath: /home/hep/.ssh"),
]


def problems_of(text: str, folder: Path) -> list[Problem]:
    (folder / "a.yaml").write_text(text)
    return check([folder / "a.yaml"]).problems


def test_sound_build_passes(tmp_path: Path) -> None:
    assert problems_of(SOUND, tmp_path) == []


@pytest.mark.parametrize(("rule", "path", "old", "new"), BROKEN)
def test_mistake_is_found_where_it_is(rule: str, path: str, old: str, new: str, tmp_path: Path) -> None:
    assert SOUND.count(old) == 1
    problems = problems_of(SOUND.replace(old, new), tmp_path)
    assert {problem.rule for problem in problems} == {rule}
    (line,) = {problem.line for problem in problems if problem.path == path}
    assert line is not None


@pytest.mark.parametrize(("base", "case"), CASES, ids=[f"{base}: {case['name']}" for base, case in CASES])
def test_verdict(base: str, case: dict[str, Any], tmp_path: Path) -> None:
    text = case["text"] if "text" in case else SITES[base]["manifest"]
    for old, new in case.get("edits", []):
        assert old in text
        text = text.replace(old, new)
    found = {p.rule: p.message for p in problems_of(text + case.get("more", ""), tmp_path) if p.level is not Level.HINT}
    assert sorted(found) == sorted(case.get("finds", "").split()), found


@pytest.mark.parametrize("name", PUBLIC)
def test_public_manifests_have_no_error(name: str, tmp_path: Path) -> None:
    problems = problems_of(PUBLIC[name]["manifest"], tmp_path)
    assert {problem.rule for problem in problems} == set(PUBLIC[name].get("finds", "").split())
    assert Level.ERROR not in {problem.level for problem in problems}


def test_every_rule_has_a_failing_example() -> None:
    of_sites = {rule for _, case in CASES for rule in case.get("finds", "").split()}
    assert {rule.id for rule in RULES} <= of_sites | {case[0] for case in (*BROKEN, *BREAKS)}


TORCHRUN = "command: [torchrun, --nnodes=2, "


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("command: [python, -m, torch.distributed.run, --nnodes=4, ", "command: [python, -m, torch.distributed.run, "),
        ("env: [{name: N, value: '4'}]\n        command: [torchrun, --nnodes=$(N), ", TORCHRUN),
        (
            "command: [bash, -c, 'exec torchrun --nnodes=\"4\" x', ",
            "command: [bash, -c, 'exec torchrun --nnodes=2 x', ",
        ),
    ],
)
def test_torchrun_is_read_however_it_is_started(wrong: str, right: str, tmp_path: Path) -> None:
    text = SOUND.replace("        env: [{name: FIRST, value: '1'}]\n", "")
    assert problems_of(text.replace(TORCHRUN, right), tmp_path) == []
    assert [problem.rule for problem in problems_of(text.replace(TORCHRUN, wrong), tmp_path)] == ["torchrun-size"]


MPIRUN = "command: [mpirun, --hostfile, /etc/mpi/hostfile, bench]"


@pytest.mark.parametrize(
    ("command", "rules"),
    [
        ("[mpiexec, --mca, pml, ob1, -x, A, -np, '32', --hostfile, /h, x]", ["mpijob-ranks"]),
        ("[mpiexec, --mca, pml, ob1, -x, A, -np, '16', --hostfile, /h, x]", []),
        ("[mpirun, --hostfile, /h, python, x.py, -n, '32', -np, '32']", []),
        ("[mpirun, --oversubscribe, --hostfile, /h, -np, '32', x]", []),
        ("[mpirun, -np, '16', x]", ["mpijob-hostfile"]),
        ("[mpirun, --hostfile, /h, -x, NCCL_SOCKET_IFNAME=lo, x]", ["fabric-settings"]),
    ],
)
def test_mpirun_is_read_by_its_options(command: str, rules: list[str], tmp_path: Path) -> None:
    assert SOUND.count(MPIRUN) == 1
    found = problems_of(SOUND.replace(MPIRUN, f"command: {command}"), tmp_path)
    assert [problem.rule for problem in found] == rules


def jobset(nodes: int) -> str:
    """One leader and three workers that torchrun joins."""
    container: dict[str, Any] = {"name": "a", "image": "a:1", "command": ["torchrun", f"--nnodes={nodes}", "x.py"]}
    container["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]
    volumes = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}]
    pod = {"spec": {"restartPolicy": "Never", "containers": [container], "volumes": volumes}}
    jobs = [
        {"name": name, "template": {"spec": {"completions": count, "parallelism": count, "template": pod}}}
        for name, count in (("lead", 1), ("rest", 3))
    ]
    head = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": "s"}}
    return yaml.safe_dump({**head, "spec": {"replicatedJobs": jobs}})


def test_torchrun_joins_one_job_of_a_jobset_or_all(tmp_path: Path) -> None:
    assert problems_of(jobset(4), tmp_path) == []
    assert [problem.message for problem in problems_of(jobset(5), tmp_path)] == [
        "--nnodes=5 with 1 or 4 Pods; allowed: 1 or 4",
        "--nnodes=5 with 3 or 4 Pods; allowed: 3 or 4",
    ]


def test_rules_for_ssh_are_not_those_of_the_older_mpijob(tmp_path: Path) -> None:
    """The training operator's MPIJob starts its ranks without sshd."""
    text = SOUND.replace("kubeflow.org/v2beta1", "kubeflow.org/v1").replace("port: 2222} # of sshd", "port: 22}")
    assert {problem.rule for problem in problems_of(text, tmp_path)} == {"unknown-kind"}


@pytest.mark.parametrize(
    ("text", "value"),
    [("64Gi", 64 * 2**30), ("500m", 0.5), ("1e3", 1000), ("1E", 1e18), (".5k", 500), (8, 8), ("1Ei", 2**60)],
)
def test_amounts(text: object, value: float) -> None:
    assert amount(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["64GB", "64 Gi", "", "Gi", "1e", "0x10"])
def test_what_is_no_amount_is_neither_more_nor_less_than_nothing(text: str) -> None:
    assert not amount(text) > 0
    assert not amount(text) < 0


def test_objects_are_counted_by_what_they_make() -> None:
    found = {
        f"{manifest.name} {each.role}": each.num_pods
        for manifest in load(FOLDER / "sound.yaml")
        for each in manifest.pod_templates()
    }
    assert found == {
        "Job/ranks Job": 2,
        "Deployment/server Deployment": 2,
        "MPIJob/mpi Launcher": 1,
        "MPIJob/mpi Worker": 2,
    }
