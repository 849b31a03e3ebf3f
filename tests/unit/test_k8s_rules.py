"""Rules of `hybrid-ep k8s check` on a sound build that is broken in one place each, and Pod rules in every workload."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from click.testing import CliRunner, Result

from hybrid_ep.cli import main
from hybrid_ep.cluster.kubernetes.check import check, known_rules
from hybrid_ep.cluster.kubernetes.manifest import load
from hybrid_ep.cluster.kubernetes.problem import Level, Problem
from hybrid_ep.cluster.kubernetes.rules import RULES
from hybrid_ep.cluster.kubernetes.rules.parts import amount
from hybrid_ep.cluster.kubernetes.schema import kubernetes_versions
from hybrid_ep.errors import ConfigError
from tests.unit.k8s_overlays import OVERLAYS, built
from tests.unit.test_k8s_check import BREAKS
from tests.unit.test_k8s_fields import EXAMPLES
from tests.unit.test_k8s_ranks import EXAMPLES as OF_RANKS
from tests.unit.test_k8s_sites import OF_SITES

SOUND = (Path(__file__).resolve().parents[1] / "data" / "manifests" / "sound.yaml").read_text()
J = "$.spec.template.spec"
W = "$.spec.mpiReplicaSpecs.Worker.template.spec"
C = f"{J}.containers[0]"
SERVER = "image: registry.example/server:1.0"
NETWORKS = "$.spec.template.metadata.annotations['k8s.v1.cni.cncf.io/networks']"


@dataclass(frozen=True)
class Broken:
    """One way to break the sound build.

    Attributes:
        rule: that must find it, and no other.
        path: the JSON path that must be named.
        old: stands once in the build.
        new: takes its place.
        level: how bad it must be.
    """

    rule: str
    path: str
    old: str
    new: str
    level: Level = Level.ERROR

    def __str__(self) -> str:
        return f"{self.rule} {self.new.strip()[:40]}"


CASES = [
    # What Kubernetes' schemas say in prose only.
    Broken(
        "schema",
        f"{C}.resources.limits.memory",
        "{memory: 64Gi, hugepages-2Mi: 1Gi, nv",
        "{memory: 64GB, hugepages-2Mi: 1Gi, nv",
    ),
    Broken(
        "schema",
        f"{C}.resources.limits.memory",
        "{memory: 64Gi, hugepages-2Mi: 1Gi, nv",
        '{memory: "64 Gi", hugepages-2Mi: 1Gi, nv',
    ),
    Broken("schema", f"{J}.volumes[0].emptyDir.sizeLimit", "sizeLimit: 32Gi", "sizeLimit: 32gb"),
    Broken("schema", f"{J}.volumes[0].emptyDir.medium", "Memory, sizeLimit: 32Gi", "memory, sizeLimit: 32Gi"),
    Broken("schema", f"{J}.tolerations[0].operator", "operator: Exists,", "operator: Exist,"),
    Broken("schema", f"{J}.tolerations[0].effect", "effect: NoSchedule", "effect: NoSchedul"),
    Broken("schema", f"{J}.restartPolicy", "restartPolicy: Never", "restartPolicy: Neve"),
    Broken("schema", f"{C}.imagePullPolicy", SERVER, SERVER + "\n        imagePullPolicy: Alway"),
    Broken("schema", f"{C}.ports[0].containerPort", "containerPort: 8080", "containerPort: 80800"),
    Broken("schema", f"{C}.ports[0].protocol", "protocol: TCP", "protocol: tcp"),
    Broken("schema", "$.spec.completionMode", "completionMode: Indexed", "completionMode: indexed"),
    Broken("schema", "$.spec.template.metadata.labels.app", "labels: {app: ranks}", "labels: {app: 'ranks of 2'}"),
    # The document itself.
    Broken("duplicate-key", "$.spec.backoffLimit", "backoffLimit: 0", "backoffLimit: 6\n  backoffLimit: 0"),
    Broken("name", "$.metadata.name", "metadata: {name: domain}", "metadata: {name: Domain}"),
    Broken("annotation-json", NETWORKS, '{"name": "rdma"}]', '{"name": "rdma"},]'),
    # One Pod.
    Broken("volume-mount", f"{C}.volumeMounts[1].name", "{name: scratch, mountPath", "{name: scrtch, mountPath"),
    Broken(
        "volume-mount",
        f"{C}.volumeMounts[2].mountPath",
        "mountPath: /scratch}",
        "mountPath: /scratch}\n        - {name: scratch, mountPath: /scratch}",
    ),
    Broken(
        "unique-name",
        f"{J}.volumes[2].name",
        "- name: scratch\n        emptyDir: {}",
        "- name: scratch\n        emptyDir: {}\n      - name: scratch\n        emptyDir: {}",
    ),
    Broken("unique-name", f"{C}.ports[1].name", "name: metrics", "name: http"),
    Broken("environment-twice", f"{C}.env[1]", "name: SECOND", "name: FIRST", Level.WARNING),
    Broken("port", f"{C}.readinessProbe.httpGet.port", "port: http, path", "port: https, path"),
    Broken("port", f"{C}.ports[0].hostPort", "hostPort: 8080", "hostPort: 80"),
    Broken("request-over-limit", f"{C}.resources.requests.memory", "memory: 32Gi,", "memory: 128Gi,"),
    Broken("request-over-limit", f"{C}.resources.requests.memory", "memory: 32Gi,", "memory: 70000000000,"),
    Broken("gpu-limit", f"{C}.resources.limits['nvidia.com/gpu']", "nvidia.com/gpu: 4", "nvidia.com/gpu: 4.5"),
    Broken("hugepages", f"{C}.resources", SERVER, SERVER + "\n        resources: {limits: {hugepages-2Mi: 1Gi}}"),
    Broken(
        "privileged",
        f"{C}.securityContext.allowPrivilegeEscalation",
        SERVER,
        SERVER + "\n        securityContext: {privileged: true, allowPrivilegeEscalation: false}",
    ),
    Broken("run-as-root", f"{J}.securityContext.runAsUser", "runAsUser: 1000", "runAsUser: 0"),
    Broken(
        "architecture",
        f"{J}.nodeSelector['kubernetes.io/arch']",
        "kubernetes.io/arch: arm64",
        "kubernetes.io/arch: aarch64",
    ),
    Broken(
        "restart-policy",
        f"{J}.restartPolicy",
        "containers:\n      - name: server",
        "restartPolicy: OnFailure\n      containers:\n      - name: server",
    ),
    Broken("toleration", f"{J}.tolerations[0].value", "operator: Exists,", "operator: Exists, value: present,"),
    Broken(
        "selector", "$.spec.selector.matchLabels.app", "{app: server} # of Deployment", "{app: serve} # of Deployment"
    ),
    Broken("shared-memory", f"{J}.volumes[0].emptyDir.sizeLimit", "sizeLimit: 32Gi", "sizeLimit: 96Gi", Level.WARNING),
    # NICs.
    Broken("ipc-lock", f"{C}.securityContext.capabilities.add", "add: [IPC_LOCK]", "add: [SYS_PTRACE]", Level.WARNING),
    Broken("nic-count", NETWORKS, '[{"name": "rdma"}, ', "[", Level.WARNING),
    # torchrun.
    Broken("torchrun-size", f"{C}.command", "--nnodes=2", "--nnodes=4"),
    Broken("torchrun-size", f"{C}.command", "--nproc-per-node=4", "--nproc_per_node=8"),
    Broken("job-indexed", "$.spec.completionMode", "  completionMode: Indexed\n", ""),
    # Names of other objects.
    Broken("reference", f"{W}.volumes[0].configMap", "{name: settings} # volume", "{name: setings} # volume"),
    Broken(
        "reference",
        f"{C}.envFrom[0].configMapRef",
        "{name: settings} # envFrom",
        "{name: cluster} # envFrom",
        Level.HINT,
    ),
    Broken("reference", f"{J}.serviceAccountName", "serviceAccountName: runner", "serviceAccountName: runners"),
    Broken(
        "reference",
        f"{J}.resourceClaims[0].resourceClaimTemplateName",
        "resourceClaimTemplateName: channel",
        "resourceClaimTemplateName: channels",
    ),
    Broken("service", f"{J}.subdomain", "subdomain: ranks", "subdomain: rank"),
    Broken("service", "$.spec.clusterIP", "clusterIP: None # of ranks", "ports: [{port: 29500}]"),
    Broken("service", "$.spec.selector", "{app: ranks} # of ranks", "{app: rank}"),
    Broken("service", "$.spec.selector", "{app: server} # of server", "{app: serve}", Level.WARNING),
    Broken(
        "pod-affinity",
        f"{J}.affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].labelSelector",
        "{app: ranks} # affinity",
        "{app: rank}",
        Level.WARNING,
    ),
    Broken("compute-domain", "$.spec.numNodes", "numNodes: 2 # of domain", "numNodes: 4"),
    Broken("mpijob-ssh", f"{W}.containers[0].readinessProbe.tcpSocket.port", "{port: 2222} # of sshd", "{port: 22}"),
    Broken("mpijob-ssh", f"{W}.containers[0].readinessProbe.tcpSocket.port", "    Port 2222\n", ""),
    Broken(
        "mpijob-ssh", "$.spec.sshAuthMountPath", "sshAuthMountPath: /home/user/.ssh", "sshAuthMountPath: /home/hep/.ssh"
    ),
]


def problems_of(text: str, folder: Path) -> list[Problem]:
    file = folder / "manifests.yaml"
    file.write_text(text)
    return check([file]).problems


def test_sound_build_passes(tmp_path: Path) -> None:
    assert problems_of(SOUND, tmp_path) == []


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_mistake_is_found_by_its_rule_alone(case: Broken, tmp_path: Path) -> None:
    assert SOUND.count(case.old) == 1
    problems = problems_of(SOUND.replace(case.old, case.new), tmp_path)
    assert {(problem.rule, problem.level) for problem in problems} == {(case.rule, case.level)}
    assert case.path in [problem.path for problem in problems]
    (line,) = {problem.line for problem in problems if problem.path == case.path}
    assert line is not None


def test_every_rule_has_a_failing_example() -> None:
    assert {rule.id for rule in RULES} <= OF_SITES | {case.rule for case in (*BREAKS, *CASES, *EXAMPLES, *OF_RANKS)}


def template(kind: str, pod: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """A manifest of `kind` with that Pod, and the JSON path to the Pod's spec."""
    labels = {"metadata": {"labels": {"app": "a"}}, "spec": pod}
    never = {"metadata": {"labels": {"app": "a"}}, "spec": {**pod, "restartPolicy": "Never"}}
    selector = {"selector": {"matchLabels": {"app": "a"}}}
    workers = {"replicas": 1, "template": labels}
    specs: dict[str, tuple[str, Any, str]] = {
        "Pod": ("v1", pod, "$.spec"),
        "Job": ("batch/v1", {"template": never}, "$.spec.template.spec"),
        "CronJob": (
            "batch/v1",
            {"schedule": "0 * * * *", "jobTemplate": {"spec": {"template": never}}},
            "$.spec.jobTemplate.spec.template.spec",
        ),
        "Deployment": ("apps/v1", {**selector, "template": labels}, "$.spec.template.spec"),
        "DaemonSet": ("apps/v1", {**selector, "template": labels}, "$.spec.template.spec"),
        "StatefulSet": ("apps/v1", {**selector, "template": labels}, "$.spec.template.spec"),
        "MPIJob": (
            "kubeflow.org/v2beta1",
            {
                "runPolicy": {"cleanPodPolicy": "All", "backoffLimit": 0, "activeDeadlineSeconds": 9},
                "launcherCreationPolicy": "WaitForWorkersReady",
                "mpiReplicaSpecs": {"Launcher": {"template": {"spec": SOUND_POD}}, "Worker": workers},
            },
            "$.spec.mpiReplicaSpecs.Worker.template.spec",
        ),
        "JobSet": (
            "jobset.x-k8s.io/v1alpha2",
            {"replicatedJobs": [{"name": "a", "template": {"spec": {"template": never}}}]},
            "$.spec.replicatedJobs[0].template.spec.template.spec",
        ),
        "LeaderWorkerSet": (
            "leaderworkerset.x-k8s.io/v1",
            {"leaderWorkerTemplate": {"size": 2, "workerTemplate": labels}},
            "$.spec.leaderWorkerTemplate.workerTemplate.spec",
        ),
    }
    api_version, spec, path = specs[kind]
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": "a"}, "spec": spec}, path


SOUND_POD: dict[str, Any] = {
    "containers": [
        {
            "name": "a",
            "image": "a:1",
            "readinessProbe": {"tcpSocket": {"port": 22}},
            "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
        }
    ],
    "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}],
}
KINDS = ("Pod", "Job", "CronJob", "Deployment", "DaemonSet", "StatefulSet", "MPIJob", "JobSet", "LeaderWorkerSet")


@pytest.mark.parametrize("kind", KINDS)
def test_pods_are_checked_in_every_workload(kind: str, tmp_path: Path) -> None:
    manifest, _ = template(kind, SOUND_POD)
    assert problems_of(yaml.safe_dump(manifest), tmp_path) == []
    container = {**SOUND_POD["containers"][0], "resources": {"limits": {"memory": "64GB"}}}
    manifest, path = template(kind, {**SOUND_POD, "containers": [container]})
    (problem,) = problems_of(yaml.safe_dump(manifest), tmp_path)
    assert (problem.rule, problem.path) == ("schema", f"{path}.containers[0].resources.limits.memory")
    assert problem.message == (
        "'64GB' is no quantity; allowed: a number with m, k, M, G, T, Ki, Mi, Gi, Ti or nothing, "
        "and no space, e.g. 64Gi"
    )
    manifest, path = template(kind, {**SOUND_POD, "volumes": []})
    (problem,) = (each for each in problems_of(yaml.safe_dump(manifest), tmp_path) if each.level is Level.ERROR)
    assert (problem.rule, problem.path) == ("volume-mount", f"{path}.containers[0].volumeMounts[0].name")


@pytest.mark.parametrize(
    ("text", "value"),
    [("64Gi", 64 * 2**30), ("500m", 0.5), ("1e3", 1000), ("1E", 1e18), (".5k", 500), (8, 8), ("1Ei", 2**60)],
)
def test_amounts(text: object, value: float) -> None:
    assert amount(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["64GB", "64 Gi", "", "Gi", "1e", "0x10"])
def test_what_is_no_amount_is_more_than_nothing(text: str) -> None:
    assert not amount(text) > 0
    assert not amount(text) < 0


def test_command_prints_levels_and_exits_by_the_worst(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(SOUND.replace("ranks:1.0", "ranks"))

    def run(*options: str) -> Result:
        return CliRunner().invoke(main, ["k8s", "check", *options, str(file)])

    plain = run()
    line = SOUND.splitlines().index("        image: registry.example/ranks:1.0") + 1
    assert f"warning {file}:{line} Job/ranks {J}.containers[0].image\n    image-pinned: " in plain.output
    assert plain.output.endswith("1 source, 8 objects: 0 errors, 1 warning, 0 hints\n")
    assert (plain.exit_code, run("--fail-on", "warning").exit_code, run("--fail-on", "hint").exit_code) == (0, 1, 1)
    assert run("--fail-on", "warning", "--ignore", "image-pinned").exit_code == 0
    assert run("--rule", "image-pined").exit_code == 2
    piped = CliRunner().invoke(main, ["k8s", "check", "-"], input=SOUND.replace("kind: Pod", "kind: Pods"))
    assert (piped.exit_code, piped.output) == (0, "1 source, 8 objects: 0 errors, 0 warnings, 0 hints\n")


def test_sarif_places_and_suppresses(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    metadata = "kind: Deployment\nmetadata: {name: server}"
    annotated = "kind: Deployment\nmetadata:\n  name: server\n  annotations: {ignore.hybrid-ep/image-pinned: a test}"
    file.write_text(SOUND.replace(metadata, annotated).replace("server:1.0", "server").replace("ranks:1.0", "ranks"))
    sarif = json.loads(CliRunner().invoke(main, ["k8s", "check", "--format", "sarif", str(file)]).output)
    (run,) = sarif["runs"]
    assert {rule["id"] for rule in run["tool"]["driver"]["rules"]} == set(known_rules())
    ranks, server = run["results"]
    place = ranks["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": file.as_posix()}
    assert "image: registry.example/ranks" in file.read_text().splitlines()[place["region"]["startLine"] - 1]
    assert (ranks["ruleId"], ranks["level"], "suppressions" in ranks) == ("image-pinned", "warning", False)
    assert server["suppressions"] == [{"kind": "inSource", "justification": "a test"}]


def test_junit_has_a_case_for_each_object(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(SOUND.replace("ranks:1.0", "ranks").replace("{name: settings} # envFrom", "{name: cluster}"))
    output = CliRunner().invoke(main, ["k8s", "check", "--format", "junit", str(file)]).output
    (suite,) = ElementTree.fromstring(output.partition("\n")[2])
    assert (suite.get("name"), suite.get("tests"), suite.get("failures")) == (str(file), "8", "1")
    (failed,) = (case for case in suite if case.find("failure") is not None)
    assert failed.get("name") == "Job/ranks"
    assert len((failed.findtext("failure") or "").splitlines()) == 2


def test_list_is_opened_and_lines_are_those_of_the_file(tmp_path: Path) -> None:
    text = "apiVersion: v1\nkind: List\nitems:\n" + "".join(
        f"- apiVersion: v1\n  kind: Pod\n  metadata: {{name: {name}}}\n  spec:\n    containers:\n"
        f"    - {{name: a, image: a{tag}}}\n"
        for name, tag in (("one", ":1"), ("two", ""))
    )
    (problem,) = problems_of(text, tmp_path)
    assert (problem.name, problem.rule, problem.line) == ("Pod/two", "image-pinned", 15)


@pytest.mark.parametrize("text", ["", "---\n---\n", "# nothing\n", "apiVersion: v1\nkind: List\nitems: []\n"])
def test_file_without_objects_is_a_problem(text: str, tmp_path: Path) -> None:
    (problem,) = problems_of(text, tmp_path)
    assert (problem.rule, problem.level) == ("build", Level.ERROR)
    assert "holds no object" in problem.message


def test_kind_of_others_is_named_as_not_checked(tmp_path: Path) -> None:
    queue = "apiVersion: kueue.x-k8s.io/v1beta1\nkind: LocalQueue\nmetadata: {name: a}\nspec: {clusterQueue: b}\n"
    (problem,) = problems_of(queue, tmp_path)
    assert (problem.rule, problem.level) == ("unknown-kind", Level.HINT)
    assert "is not checked" in problem.message


@pytest.mark.parametrize(
    ("api_version", "kind", "close"),
    [("apps/v1", "Deployments", "Deployment"), ("kubeflow.org/v2beta1", "MPIjob", "MPIJob"), ("v1", "Pods", "Pod")],
)
def test_misspelt_kind_of_a_known_group_is_wrong(api_version: str, kind: str, close: str, tmp_path: Path) -> None:
    (problem,) = problems_of(f"apiVersion: {api_version}\nkind: {kind}\nmetadata: {{name: a}}\n", tmp_path)
    assert (problem.rule, problem.level) == ("schema", Level.ERROR)
    assert problem.message.endswith(f"allowed: {close}")


def test_unknown_field_comes_with_the_one_that_was_meant(tmp_path: Path) -> None:
    (problem,) = problems_of(SOUND.replace("activeDeadlineSeconds: 600\n", "activeDeadlineSecond: 600\n"), tmp_path)
    assert problem.message.startswith("unknown field 'activeDeadlineSecond', like 'activeDeadlineSeconds'; allowed: ")


def test_annotation_with_a_reason_silences_a_rule_there_alone(tmp_path: Path) -> None:
    unpinned = SOUND.replace("image: registry.example/server:1.0", "image: server").replace("ranks:1.0", "ranks")
    assert [problem.name for problem in problems_of(unpinned, tmp_path)] == ["Job/ranks", "Deployment/server"]
    metadata = "kind: Deployment\nmetadata: {name: server}"
    assert unpinned.count(metadata) == 1
    for value, silenced in (("a test", ["", "a test"]), ("", ["", ""])):
        annotated = (
            f"kind: Deployment\nmetadata:\n  name: server\n  annotations: {{ignore.hybrid-ep/image-pinned: {value!r}}}"
        )
        found = problems_of(unpinned.replace(metadata, annotated), tmp_path)
        assert [problem.silenced for problem in found if problem.rule == "image-pinned"] == silenced
        assert [problem.rule for problem in found if problem.rule != "image-pinned"] == [] if value else ["silence"]
    annotated = "kind: Deployment\nmetadata:\n  name: server\n  annotations: {ignore.hybrid-ep/image-pined: a}"
    found = problems_of(SOUND.replace(metadata, annotated), tmp_path)
    assert [(problem.rule, problem.level) for problem in found] == [("silence", Level.ERROR)]


def test_rules_can_be_chosen_and_left_out(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(SOUND.replace("ranks:1.0", "ranks").replace("name: SECOND", "name: FIRST"))
    assert {problem.rule for problem in check([file]).problems} == {"image-pinned", "environment-twice"}
    assert {problem.rule for problem in check([file], rules=["image-pinned"]).problems} == {"image-pinned"}
    assert {problem.rule for problem in check([file], ignore=["image-pinned"]).problems} == {"environment-twice"}
    with pytest.raises(ConfigError, match=r"rule 'image-pined' is unknown; allowed: build, schema, "):
        check([file], ignore=["image-pined"])


def test_newest_schemas_find_nothing_wrong_with_a_sound_build(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(SOUND)
    versions = kubernetes_versions()
    assert "1.37" in versions
    for version in versions[versions.index("1.34") :]:
        assert check([file], kubernetes=version).problems == []
    with pytest.raises(ConfigError, match=r"Kubernetes version is '1\.2'; allowed: 1\.25, "):
        check([file], kubernetes="1.2")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_newest_schemas_find_nothing_wrong_with_an_overlay(overlay: str, tmp_path: Path) -> None:
    file = tmp_path / "built.yaml"
    file.write_text(yaml.safe_dump_all(built(overlay)))
    assert check([file], kubernetes=kubernetes_versions()[-1]).open == []


def test_objects_are_counted_by_what_they_make() -> None:
    pods = {}
    for manifest in load(Path(__file__).resolve().parents[1] / "data" / "manifests" / "sound.yaml"):
        pods |= {f"{manifest.name} {each.role}": each.num_pods for each in manifest.pod_templates()}
    assert pods == {
        "Job/ranks Job": 2,
        "Deployment/server Deployment": 2,
        "MPIJob/mpi Launcher": 1,
        "MPIJob/mpi Worker": 2,
    }
