"""`hybrid-ep k8s check`: the shipped overlays pass, and broken in one way each is caught by the one rule for it."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from hybrid_ep.cli import main
from hybrid_ep.cluster.doctor.command import doctor as cli_doctor
from hybrid_ep.cluster.kubernetes.check import check
from hybrid_ep.cluster.kubernetes.command import k8s
from hybrid_ep.cluster.kubernetes.manifest import find_sources, load
from hybrid_ep.cluster.kubernetes.rules import RULES
from hybrid_ep.errors import ConfigError
from tests.prerequisites import require_programs
from tests.unit.k8s_overlays import K8S, OVERLAYS, Tree, built, launcher, worker

PAGE = (K8S.parent / "docs" / "kubernetes.md").read_text()
PAGE_OF_RULES = (K8S.parent / "docs" / "kubernetes_check.md").read_text()
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def pod(job: Tree) -> Tree:
    return job["spec"]["template"]["spec"]


def _before_hostfile(job: Tree, *arguments: str) -> None:
    said: list[str] = launcher(job)["containers"][0]["args"]
    place = said.index("--hostfile")
    said[place:place] = arguments


@dataclass(frozen=True)
class Break:
    """One way to break an overlay.

    Attributes:
        rule: that must find it, and no other.
        path: the JSON path that must be named.
        change: breaks the job in place.
        overlay: what is broken.
    """

    rule: str
    path: str
    change: Callable[[Tree], object]
    overlay: str = "cpu"

    def __str__(self) -> str:
        return f"{self.rule} {self.path.rpartition('.spec.')[2]}"


def rename(tree: Tree, old: str, new: str) -> None:
    tree[new] = tree.pop(old)


W = "$.spec.mpiReplicaSpecs.Worker.template.spec"
L = "$.spec.mpiReplicaSpecs.Launcher.template.spec"
BREAKS = [
    # Accepted by the operator's own CRD without a word.
    Break("schema", "$.spec.mpiReplicaSpecs", lambda job: rename(job["spec"]["mpiReplicaSpecs"], "Worker", "Workers")),
    Break(
        "schema",
        "$.spec.runPolicy.cleanPodPolicy",
        lambda job: job["spec"]["runPolicy"].update(cleanPodPolicy="running"),
    ),
    Break(
        "schema",
        "$.spec.mpiReplicaSpecs.Worker.restartPolicy",
        lambda job: job["spec"]["mpiReplicaSpecs"]["Worker"].update(restartPolicy="never"),
    ),
    Break(
        "schema",
        "$.spec.launcherCreationPolicy",
        lambda job: job["spec"].update(launcherCreationPolicy="WaitForWorkers"),
    ),
    Break("schema", "$.spec", lambda job: rename(job["spec"], "slotsPerWorker", "slots")),
    Break(
        "schema",
        "$.spec.mpiReplicaSpecs.Launcher.replicas",
        lambda job: job["spec"]["mpiReplicaSpecs"]["Launcher"].update(replicas=2),
    ),
    # Inside the Pod template, where the CRD does not look.
    Break(
        "schema",
        f"{W}.containers[0]",
        lambda job: rename(worker(job)["containers"][0], "readinessProbe", "readynessProbe"),
    ),
    Break("schema", f"{W}.containers[0].command", lambda job: worker(job)["containers"][0].update(command="sshd")),
    Break("schema", "$.spec", lambda job: rename(job["spec"], "completionMode", "mode"), "cpu-torchrun"),
    Break("schema", "$.spec", lambda job: rename(job["spec"], "numNodes", "nodes"), "gb200-mnnvl"),
    Break("schema", "$.kind", lambda job: job.update(kind="MPIJobs")),
    Break(
        "image-pinned",
        f"{W}.containers[0].image",
        lambda job: worker(job)["containers"][0].update(image="registry:5000/hybrid-ep"),
    ),
    Break(
        "image-pinned",
        f"{L}.containers[0].image",
        lambda job: launcher(job)["containers"][0].update(image="hybrid-ep:latest"),
    ),
    Break(
        "gpu-limit",
        f"{W}.containers[0].resources.requests['nvidia.com/gpu']",
        lambda job: worker(job)["containers"][0]["resources"]["requests"].update({"nvidia.com/gpu": 4}),
        "single-node",
    ),
    *(
        Break(
            "ipc-lock",
            f"{W}.containers[0].securityContext.capabilities.add",
            lambda job: worker(job)["containers"][0]["securityContext"]["capabilities"].pop("add"),
            overlay,
        )
        for overlay in ("infiniband", "roce-sriov", "eks-efa", "gke", "aks-infiniband")
    ),
    Break(
        "hugepages",
        f"{W}.containers[0].resources",
        lambda job: worker(job)["containers"][0]["resources"].update(
            requests={}, limits={"vpc.amazonaws.com/efa": 32, "hugepages-2Mi": "5120Mi", "nvidia.com/gpu": 8}
        ),
        "eks-efa",
    ),
    Break(
        "shared-memory",
        f"{W}.containers[0].volumeMounts",
        lambda job: worker(job)["containers"][0]["volumeMounts"].pop(),
    ),
    Break(
        "shared-memory",
        f"{W}.containers[0].volumeMounts",
        lambda job: worker(job)["volumes"][1]["emptyDir"].pop("medium"),
        "single-node",
    ),
    Break(
        "shared-memory",
        "$.spec.template.spec.volumes[0].emptyDir",
        lambda job: pod(job)["volumes"][0]["emptyDir"].pop("sizeLimit"),
        "cpu-torchrun",
    ),
    Break(
        "claims",
        f"{W}.resourceClaims",
        lambda job: worker(job)["containers"][0]["resources"].pop("claims"),
        "gb200-mnnvl",
    ),
    Break(
        "claims", f"{W}.containers[0].resources.claims[0]", lambda job: worker(job).pop("resourceClaims"), "gb200-mnnvl"
    ),
    Break(
        "mpijob-probe",
        f"{W}.containers[0].readinessProbe",
        lambda job: worker(job)["containers"][0].pop("readinessProbe"),
    ),
    Break("mpijob-probe", "$.spec.launcherCreationPolicy", lambda job: job["spec"].pop("launcherCreationPolicy")),
    *(
        Break("mpijob-limits", f"$.spec.runPolicy.{name}", lambda job, name=name: job["spec"]["runPolicy"].pop(name))
        for name in ("activeDeadlineSeconds", "backoffLimit", "cleanPodPolicy")
    ),
    Break(
        "mpijob-init",
        f"{W}.initContainers[0]",
        lambda job: worker(job).update(initContainers=[{"name": "doctor", "image": "hybrid-ep:0.1.0"}]),
    ),
    Break(
        "image-pinned",
        "$.spec.template.spec.initContainers[0].image",
        lambda job: pod(job).update(
            initContainers=[{**pod(job)["containers"][0], "name": "before", "image": "hybrid-ep", "command": ["true"]}]
        ),
        "cpu-torchrun",
    ),
    Break(
        "mpijob-first-container",
        f"{L}.containers[1]",
        lambda job: launcher(job)["containers"].insert(0, {"name": "log", "image": "log-agent:1"}),
    ),
    Break(
        "mpijob-hostfile",
        f"{L}.containers[0].args",
        lambda job: launcher(job)["containers"][0]["args"].remove("--hostfile"),
    ),
    Break(
        "mpijob-environment",
        f"{L}.containers[0].env[6]",
        lambda job: launcher(job)["containers"][0]["env"].append({"name": "NCCL_DEBUG", "value": "INFO"}),
    ),
    *(
        # A name that only begins like one that is handed on, or used.
        Break(
            "mpijob-environment",
            f"{L}.containers[0].env[6]",
            lambda job, longer=longer: (
                launcher(job)["containers"][0]["env"].append({"name": "NCCL_DEBUG", "value": "INFO"}),
                _before_hostfile(job, "-x", longer),
            ),
        )
        for longer in ("NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE=$NCCL_DEBUG_PATH")
    ),
    Break(
        "mpijob-environment",
        f"{W}.containers[0].env[0]",
        lambda job: worker(job)["containers"][0].update(env=[{"name": "NCCL_DEBUG", "value": "INFO"}]),
    ),
    Break("mpijob-ssh-path", "$.spec.sshAuthMountPath", lambda job: job["spec"].pop("sshAuthMountPath")),
    Break(
        "mpijob-launcher-gpus",
        f"{L}.containers[0].resources.limits['nvidia.com/gpu']",
        lambda job: launcher(job)["containers"][0]["resources"]["limits"].update({"nvidia.com/gpu": 8}),
        "single-node",
    ),
    Break("mpijob-slots", "$.spec.slotsPerWorker", lambda job: job["spec"].update(slotsPerWorker=1), "single-node"),
    Break("job-indexed", "$.spec.completionMode", lambda job: job["spec"].pop("completionMode"), "cpu-torchrun"),
    Break("job-indexed", "$.spec.parallelism", lambda job: job["spec"].update(parallelism=1), "cpu-torchrun"),
    Break("job-indexed", "$.spec.backoffLimit", lambda job: job["spec"].pop("backoffLimit"), "cpu-torchrun"),
    Break(
        "job-indexed",
        "$.spec.activeDeadlineSeconds",
        lambda job: job["spec"].pop("activeDeadlineSeconds"),
        "cpu-torchrun",
    ),
    Break(
        "job-indexed",
        "$.spec.template.spec.restartPolicy",
        lambda job: pod(job).update(restartPolicy="OnFailure"),
        "cpu-torchrun",
    ),
    Break(
        "fabric-settings",
        f"{L}.containers[0].args",
        lambda job: _before_hostfile(job, "-x", "HYBRID_EP_TRAFFIC_CLASS=300"),
    ),
    Break("job-indexed", "$.spec.template.spec.subdomain", lambda job: pod(job).pop("subdomain"), "cpu-torchrun"),
]


@pytest.mark.parametrize("case", BREAKS, ids=str)
def test_each_mistake_is_found_by_its_rule_alone(case: Break, tmp_path: Path) -> None:
    manifests = copy.deepcopy(built(case.overlay))
    kind = "ComputeDomain" if case.path == "$.spec" and case.overlay == "gb200-mnnvl" else ("MPIJob", "Job")
    case.change(next(manifest for manifest in manifests if manifest["kind"] in kind))
    file = tmp_path / "broken.yaml"
    file.write_text(yaml.safe_dump_all(manifests))
    problems = check([file]).open
    assert {problem.rule for problem in problems} == {case.rule}
    assert case.path in [problem.path for problem in problems]
    assert {problem.source for problem in problems} == {str(file)}


def test_all_overlays_are_there_and_pass() -> None:
    require_programs("kubectl")
    result = check([K8S])
    assert {Path(source).name for source in result.checked} == set(OVERLAYS)
    assert (result.open, result.unchecked) == ([], [])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_one_setting_reaches_every_place(overlay: str, tmp_path: Path) -> None:
    """Image, nodes and ranks per node are written once and arrive wherever they are needed."""
    require_programs("kubectl")
    shutil.copytree(K8S, tmp_path / "k8s")
    settings = tmp_path / "k8s" / "overlays" / overlay / "settings.yaml"
    tree = yaml.safe_load(settings.read_text())
    setting = "doctorImage" if overlay == "node-doctor" else "image"
    tree["spec"] |= {setting: "registry.example/site/hybrid-ep:9.8.7"}
    tree["spec"] |= {name: number for name, number in (("nodes", 5), ("ranksPerNode", 4)) if name in tree["spec"]}
    settings.write_text(yaml.safe_dump(tree))
    manifests = load(settings.parent)
    containers = [
        container
        for manifest in manifests
        for template in manifest.pod_templates()
        for key in ("initContainers", "containers")
        for container in template.content["spec"].get(key, [])
    ]
    assert {container["image"] for container in containers} == {"registry.example/site/hybrid-ep:9.8.7"}
    gpus = [container["resources"]["limits"].get("nvidia.com/gpu", 4) for container in containers]
    assert set(gpus) == {4}
    by_kind = {manifest.kind: manifest.content["spec"] for manifest in manifests if "spec" in manifest.content}
    if job := by_kind.get("MPIJob"):
        assert (job["mpiReplicaSpecs"]["Worker"]["replicas"], job["slotsPerWorker"]) == (5, 4)
    if job := by_kind.get("Job"):
        assert (job["completions"], job["parallelism"]) == (5, 5)
        assert {"--nnodes=5", "--nproc-per-node=4"} <= set(job["template"]["spec"]["containers"][0]["command"])
    if job_set := by_kind.get("JobSet"):
        job = job_set["replicatedJobs"][0]["template"]["spec"]
        assert (job["completions"], job["parallelism"]) == (5, 5)
        assert {"--nnodes=5", "--nproc-per-node=4"} <= set(job["template"]["spec"]["containers"][0]["command"])
    if domain := by_kind.get("ComputeDomain"):
        assert domain["numNodes"] == 5
    assert check([settings.parent]).open == []


def test_strategic_merge_that_drops_half_a_container_is_found(tmp_path: Path) -> None:
    """Lists of containers are merged only in kinds that kustomize knows; in an MPIJob such a patch replaces them."""
    require_programs("kubectl")
    shutil.copytree(K8S, tmp_path / "k8s")
    container = {"name": "worker", "image": "hybrid-ep:0.1.0", "resources": {"limits": {"memory": "16Gi"}}}
    patch = copy.deepcopy(next(manifest for manifest in built("cpu") if manifest["kind"] == "MPIJob"))
    patch["spec"] = {"mpiReplicaSpecs": {"Worker": {"template": {"spec": {"containers": [container]}}}}}
    overlay = {"resources": ["k8s/overlays/cpu"], "patches": [{"patch": yaml.safe_dump(patch)}]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    found = {problem.rule for problem in check([tmp_path]).problems}
    assert found == {"mpijob-probe", "shared-memory", "volume-unused"}


def test_name_of_the_nic_resource_is_written_once(tmp_path: Path) -> None:
    require_programs("kubectl")
    shutil.copytree(K8S, tmp_path / "k8s")
    overlay = tmp_path / "k8s" / "overlays" / "infiniband"
    patch = (overlay / "nics.yaml").read_text()
    assert patch.count("rdma~1ib\n") == 1
    (overlay / "nics.yaml").write_text(patch.replace("rdma~1ib\n", "nvidia.com~1hostdev\n"))
    job = next(manifest.content for manifest in load(overlay) if manifest.kind == "MPIJob")
    limits = worker(job)["containers"][0]["resources"]["limits"]
    assert (limits["nvidia.com/hostdev"], "rdma/ib" in limits) == (8, False)
    assert check([overlay]).problems == []


def site_build(folder: Path, overlay: str, *components: str, **more: Any) -> dict[str, Tree]:
    """What a site's own overlay makes of a shipped one and components, by kind; nothing is wrong with it."""
    require_programs("kubectl")
    shutil.copytree(K8S, folder / "k8s")
    kustomization = {
        "resources": [f"k8s/overlays/{overlay}"],
        "components": [f"k8s/components/{name}" for name in components],
        **more,
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    assert check([folder]).open == []
    return {manifest.kind: manifest.content for manifest in load(folder)}


def documented_files() -> dict[str, Tree]:
    """The files that the page shows of a site's own overlay; addresses of this repository become its folders."""
    texts = [text.partition("```")[0] for text in PAGE.split("```yaml")[1:]]
    trees = [yaml.safe_load(re.sub(r"github\.com/\S+?/(k8s/\S+)\?ref=\S+", r"\1", text)) for text in texts]
    kustomization: Tree = {}
    for tree in trees:
        for key, entries in tree.items() if "kind" not in tree else ():
            kustomization.setdefault(key, []).extend(entries)
    settings = {f"{tree['metadata']['name']}.yaml": tree for tree in trees if "kind" in tree}
    return {"kustomization.yaml": kustomization, "site.yaml": {"extends": "hgx-h100"}, **settings}


def test_overlay_that_the_page_shows_can_be_built(tmp_path: Path) -> None:
    require_programs("kubectl")
    shutil.copytree(K8S, tmp_path / "k8s")
    for name, tree in documented_files().items():
        (tmp_path / name).write_text(yaml.safe_dump(tree))
    (tmp_path / "fabric.sh").write_text("NCCL_IB_SL=1\n")
    assert check([tmp_path]).problems == []
    assert {"fabric.sh": "NCCL_IB_SL=1\n"} in [each.content.get("data") for each in load(tmp_path)]
    (job,) = (manifest.content for manifest in load(tmp_path) if manifest.kind == "MPIJob")
    given = {each["name"]: each["value"] for each in launcher(job)["containers"][0]["env"]}
    assert given["BENCH_OPTIONS"].endswith(" --tokens 8192")
    assert given["DOCTOR_PROFILE"].endswith("/site.yaml")
    assert worker(job)["nodeSelector"] == {
        "hybrid-ep/doctor": "pass",
        "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
    }


def pod_of_ranks(built: dict[str, Tree]) -> Tree:
    """The Pod that needs GPUs: the worker, torchrun's, or the node doctor's."""
    if "LeaderWorkerSet" in built:
        found: Tree = built["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
        return found
    if "JobSet" in built:
        return pod(built["JobSet"]["spec"]["replicatedJobs"][0]["template"])
    return worker(built["MPIJob"]) if "MPIJob" in built else pod(built.get("Job") or built["DaemonSet"])


@pytest.mark.parametrize("overlay", [name for name in OVERLAYS if name != "node-doctor"])
def test_ranks_ask_for_nodes_by_verdict_and_product(overlay: str, tmp_path: Path) -> None:
    settings = documented_files()["gpu-product.yaml"]
    (tmp_path / "gpu-product.yaml").write_text(yaml.safe_dump(settings))
    own = pod_of_ranks({each["kind"]: each for each in built(overlay)}).get("nodeSelector") or {}
    resources = [f"k8s/overlays/{overlay}", "gpu-product.yaml"]
    site = site_build(tmp_path, overlay, "fit-nodes", "gpu-product", resources=resources)
    asked = {"hybrid-ep/doctor": "pass", "nvidia.com/gpu.product": settings["spec"]["product"]}
    assert pod_of_ranks(site)["nodeSelector"] == own | asked
    if "MPIJob" in site:
        assert not asked.items() & launcher(site["MPIJob"]).get("nodeSelector", {}).items()


@pytest.mark.parametrize("overlay", [name for name in OVERLAYS if name != "node-doctor"])
def test_ranks_have_an_affinity_to_verdict_and_products(overlay: str, tmp_path: Path) -> None:
    settings = documented_files()["node-affinity.yaml"]
    (tmp_path / "node-affinity.yaml").write_text(yaml.safe_dump(settings))
    own = pod_of_ranks({each["kind"]: each for each in built(overlay)})
    resources = [f"k8s/overlays/{overlay}", "node-affinity.yaml"]
    site = site_build(tmp_path, overlay, "node-affinity", resources=resources)
    (term,) = pod_of_ranks(site)["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    doctor, product = term["matchExpressions"]
    assert doctor == {"key": "hybrid-ep/doctor", "operator": "In", "values": ["pass"]}
    assert product == {"key": "nvidia.com/gpu.product", "operator": "In", "values": settings["spec"]["gpuProducts"]}
    kept = {name: value for name, value in pod_of_ranks(site)["affinity"].items() if name != "nodeAffinity"}
    assert (kept, pod_of_ranks(site)["nodeSelector"]) == (own["affinity"], own["nodeSelector"])
    if "MPIJob" in site:
        assert "affinity" not in launcher(site["MPIJob"])


@pytest.mark.parametrize("component", ["gpu-product", "node-affinity"])
def test_product_must_be_named(component: str, tmp_path: Path) -> None:
    require_programs("kubectl")
    shutil.copytree(K8S, tmp_path / "k8s")
    kustomization = {"resources": ["k8s/overlays/infiniband"], "components": [f"k8s/components/{component}"]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    with pytest.raises(ConfigError, match=rf"nothing selected by Settings\S+/{component}"):
        load(tmp_path)


def test_gang_is_scheduled_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    job = site_build(tmp_path, "infiniband", "gang")["MPIJob"]
    assert job["spec"]["runPolicy"]["schedulingPolicy"] == {"scheduleTimeoutSeconds": 600}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_profile_of_a_site_reaches_every_doctor(overlay: str, tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("extends: hgx-h100\n")
    entries = documented_files()["kustomization.yaml"]["configMapGenerator"]
    generator = [entry for entry in entries if entry["name"] == "hybrid-ep-doctor-profile"]
    built = site_build(tmp_path, overlay, "doctor-profile", configMapGenerator=generator)
    maps = [manifest.content for manifest in load(tmp_path) if manifest.kind == "ConfigMap"]
    (data,) = [each["data"] for each in maps if each["metadata"]["name"] == "hybrid-ep-doctor-profile"]
    assert data == {"site.yaml": "extends: hgx-h100\n"}
    spec = pod_of_ranks(built)
    container = (spec.get("initContainers") or spec["containers"])[0]
    (mount,) = (each for each in container["volumeMounts"] if each["name"] == "doctor-profile")
    assert {"name": "doctor-profile", "configMap": {"name": "hybrid-ep-doctor-profile"}} in spec["volumes"]
    if "MPIJob" in built:
        (asked,) = (
            each["value"]
            for each in launcher(built["MPIJob"])["containers"][0]["env"]
            if each["name"] == "DOCTOR_PROFILE"
        )
    else:
        asked = container["args"][-1]  # of several profiles the last one holds
    assert asked == f"--profile={mount['mountPath']}/site.yaml"


@pytest.mark.parametrize(
    "overlay", ["single-node", "single-node-torchrun", "jobset-kueue", "lws-serving", "node-doctor"]
)
def test_runtime_class_reaches_every_pod_that_sees_gpus(overlay: str, tmp_path: Path) -> None:
    built = site_build(tmp_path, overlay, "nvidia-runtime")
    assert pod_of_ranks(built)["runtimeClassName"] == "nvidia"
    asked = pod_of_ranks(built).get("nodeSelector") == {"nvidia.com/gpu.present": "true"}
    assert asked == (overlay == "node-doctor")


def test_components_of_the_node_doctor_fit_together(tmp_path: Path) -> None:
    components = ["node-doctor-taint", "node-doctor-kernel-log", "node-doctor-pairs"]
    built = site_build(tmp_path, "node-doctor", *components)
    reporter, sidecar = pod(built["DaemonSet"])["containers"]
    assert sidecar["image"] == reporter["image"]
    assert reporter["image"].endswith("-doctor")
    mark = k8s.commands["mark-node"].make_context("mark-node", list(reporter["args"]))
    assert mark.params["taint"] == "NoSchedule"
    doctor = cli_doctor.make_context("doctor", list(mark.params["doctor_options"]))
    keeps = k8s.commands["kernel-log"].make_context("kernel-log", sidecar["command"][3:])
    assert doctor.params["kernel_log"] == keeps.params["place"]
    assert {"gpu.xid", "host.kernel_log"} <= set(doctor.params["ids"])
    pairs = pod(built["CronJob"]["spec"]["jobTemplate"])
    assert pairs["priorityClassName"] == built["PriorityClass"]["metadata"]["name"]
    assert built["PriorityClass"]["value"] < -10
    (active,), (bench,) = pairs["initContainers"], pairs["containers"]
    assert k8s.commands["mark-node"].make_context("mark-node", list(active["args"])).params["under_load"]
    assert reporter["image"] == f"{bench['image']}-doctor"
    assert active["image"] == bench["image"]  # both need torch
    assert bench["command"][2] == "--nproc-per-node=8"
    assert active["resources"]["limits"]["nvidia.com/gpu"] == bench["resources"]["limits"]["nvidia.com/gpu"] == 8


def test_both_kinds_of_job_fit_into_one_namespace() -> None:
    """The operator's own Service has the MPIJob's name and labels."""
    (mpi,) = (each for each in built("cpu") if each["kind"] == "MPIJob")
    job, service = (next(each for each in built("cpu-torchrun") if each["kind"] == kind) for kind in ("Job", "Service"))
    assert mpi["metadata"]["name"] not in (job["metadata"]["name"], service["metadata"]["name"])
    selector = service["spec"]["selector"].items()
    assert selector <= job["spec"]["template"]["metadata"]["labels"].items()
    for replica in mpi["spec"]["mpiReplicaSpecs"].values():
        assert not selector & replica["template"]["metadata"]["labels"].items()
    meet = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert f"--master-addr={meet}" in pod(job)["containers"][0]["command"]
    assert pod(job)["subdomain"] == service["metadata"]["name"]


def test_command_prints_where_and_exits_with_1(tmp_path: Path) -> None:
    job = copy.deepcopy(next(manifest for manifest in built("cpu") if manifest["kind"] == "MPIJob"))
    job["spec"]["runPolicy"]["backoffLimit"] = "6"
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    plain = CliRunner().invoke(main, ["k8s", "check", str(file)])
    assert plain.exit_code == 1
    line = file.read_text().splitlines().index("    backoffLimit: '6'") + 1
    assert f"error {file}:{line} MPIJob/hybrid-ep $.spec.runPolicy.backoffLimit" in plain.output
    document = json.loads(CliRunner().invoke(main, ["k8s", "check", "--json", str(file)]).output)
    assert not document["ok"]
    assert document["problems"][0] == {
        "source": str(file),
        "name": "MPIJob/hybrid-ep",
        "path": "$.spec.runPolicy.backoffLimit",
        "rule": "schema",
        "message": "'6' is not of type 'integer'",
        "level": "error",
        "line": line,
        "silenced": "",
    }


def test_what_cannot_be_built_is_a_problem(tmp_path: Path) -> None:
    require_programs("kubectl")
    (tmp_path / "kustomization.yaml").write_text("resources: [missing.yaml]\n")
    (problem,) = check([tmp_path]).problems
    assert problem.rule == "build"
    assert "missing.yaml" in problem.message


@pytest.mark.parametrize(("text", "says"), [("a: [", "cannot be read"), ("- 1\n", "holds list")])
def test_what_is_no_manifest_is_a_problem(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    (problem,) = check([file]).problems
    assert says in problem.message


def test_without_kubectl_nothing_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(main, ["k8s", "check", str(K8S / "overlays" / "cpu")])
    assert result.exit_code == 2
    assert "kubectl is not installed" in result.output


def test_without_schemas_nothing_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes_validate", None)
    file = tmp_path / "x.yaml"
    file.write_text("apiVersion: v1\nkind: Service\nmetadata: {name: a}\n")
    result = CliRunner().invoke(main, ["k8s", "check", str(file)])
    assert result.exit_code == 2
    assert "pip install kubernetes-validate" in result.output


def test_empty_folder_is_wrong_usage(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["k8s", "check", str(tmp_path)])
    assert result.exit_code == 2
    assert "holds no manifest" in result.output


def test_tree_without_overlays_is_searched(tmp_path: Path) -> None:
    for name, kind in (("a", "Kustomization"), ("b", "Component")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kustomization.yaml").write_text(f"kind: {kind}\n")
    assert find_sources(tmp_path) == [tmp_path / "a"]


def test_page_lists_every_rule() -> None:
    for rule in RULES:
        row = f"| `{rule.id}` | {rule.level.value} | {rule.text} |"
        assert row in PAGE_OF_RULES, f"docs/kubernetes_check.md is stale; it wants: {row}"


def test_command_starts_without_schemas_and_torch() -> None:
    code = "from hybrid_ep.cluster.kubernetes import command"
    code += "; import sys; print({'kubernetes_validate', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
