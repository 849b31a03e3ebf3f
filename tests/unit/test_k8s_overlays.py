"""The shipped overlays and components of `k8s/`: nothing is wrong with them, one setting reaches every place, and an
overlay that is broken in one way is caught by the one rule for it. Network settings fit the overlay's GPUs, NICs and
profile, and name their source.
"""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid_ep.cluster.doctor.command import doctor as cli_doctor
from hybrid_ep.cluster.doctor.profile import load_profile
from hybrid_ep.cluster.kubernetes.check import check
from hybrid_ep.cluster.kubernetes.command import k8s
from hybrid_ep.cluster.kubernetes.manifest import Level, load
from hybrid_ep.cluster.kubernetes.schema import kubernetes_versions
from hybrid_ep.cluster.preflight import preflight
from hybrid_ep.env import VARIABLES
from hybrid_ep.errors import ConfigError
from tests.prerequisites import require_programs
from tests.unit.k8s_overlays import K8S, OVERLAYS, Tree, built, launcher, worker

PAGE = (K8S.parent / "docs" / "kubernetes.md").read_text()
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
WITH_NICS = ("infiniband", "roce-sriov", "eks-efa", "gke", "aks-infiniband", "oke-roce")
OWN = (*WITH_NICS, "gb200-mnnvl")
MOUNT = "/etc/hybrid-ep/fabric"


def pod(job: Tree) -> Tree:
    return job["spec"]["template"]["spec"]


W = "$.spec.mpiReplicaSpecs.Worker.template.spec"
L = "$.spec.mpiReplicaSpecs.Launcher.template.spec"
W0, L0, J = f"{W}.containers[0]", f"{L}.containers[0]", "$.spec.template.spec"
DEBUG, GPUS = {"name": "NCCL_DEBUG", "value": "INFO"}, "nvidia.com/gpu"
DOCTOR, LOG = {"name": "doctor", "image": "hybrid-ep:0.1.0"}, {"name": "log", "image": "log-agent:1"}
# Rule, JSON path that it names, overlay, and the part of its job that is set to a value. A part is taken away where
# there is no value; a value in a list is put into a list.
BREAKS: list[tuple[str, str, str, str, Any]] = [
    ("gpu-limit", f"{W0}.resources.requests['{GPUS}']", "single-node", f"{W0}.resources.requests", {GPUS: 4}),
    *(
        ("ipc-lock", f"{W0}.securityContext.capabilities.add", each, f"{W0}.securityContext.capabilities.add", None)
        for each in ("infiniband", "roce-sriov", "gke", "aks-infiniband")
    ),
    ("shared-memory", f"{W0}.volumeMounts", "cpu", f"{W0}.volumeMounts[-1]", None),
    ("shared-memory", f"{W0}.volumeMounts", "single-node", f"{W}.volumes[1].emptyDir.medium", None),
    ("shared-memory", f"{J}.volumes[0].emptyDir", "cpu-torchrun", f"{J}.volumes[0].emptyDir.sizeLimit", None),
    ("claims", f"{W}.resourceClaims", "gb200-mnnvl", f"{W0}.resources.claims", None),
    ("mpijob-probe", f"{W0}.readinessProbe", "cpu", f"{W0}.readinessProbe", None),
    ("mpijob-probe", "$.spec.launcherCreationPolicy", "cpu", "$.spec.launcherCreationPolicy", None),
    ("mpijob-init", f"{W}.initContainers[0]", "cpu", f"{W}.initContainers", [DOCTOR]),
    ("mpijob-first-container", f"{L}.containers[1]", "cpu", L0, [LOG]),
    ("mpijob-hostfile", f"{L0}.args", "cpu", f"{L0}.args[1]", None),
    ("mpijob-environment", f"{L0}.env[0]", "cpu", f"{L0}.env[0]", [DEBUG]),
    ("mpijob-environment", f"{W0}.env[0]", "cpu", f"{W0}.env", [DEBUG]),
    ("mpijob-ssh", "$.spec.sshAuthMountPath", "cpu", "$.spec.sshAuthMountPath", None),
    ("mpijob-slots", f"{L0}.resources", "single-node", f"{L0}.resources.limits", {GPUS: 8}),
    ("mpijob-slots", "$.spec.slotsPerWorker", "single-node", "$.spec.slotsPerWorker", 1),
    ("job-indexed", "$.spec.completionMode", "cpu-torchrun", "$.spec.completionMode", None),
    ("job-indexed", "$.spec.parallelism", "cpu-torchrun", "$.spec.parallelism", 1),
    ("job-indexed", "$.spec.backoffLimit", "cpu-torchrun", "$.spec.backoffLimit", None),
    ("job-indexed", "$.spec.activeDeadlineSeconds", "cpu-torchrun", "$.spec.activeDeadlineSeconds", None),
    ("job-indexed", f"{J}.restartPolicy", "cpu-torchrun", f"{J}.restartPolicy", "OnFailure"),
    ("job-indexed", f"{J}.subdomain", "cpu-torchrun", f"{J}.subdomain", None),
    ("fabric-settings", f"{L0}.args", "cpu", f"{L0}.args[0]", ["-x", "HYBRID_EP_TRAFFIC_CLASS=300"]),
    # Accepted by the operator's own CRD without a word.
    ("schema", "$.spec.mpiReplicaSpecs", "cpu", "$.spec.mpiReplicaSpecs.Workers", {}),
    ("schema", "$.spec.runPolicy.cleanPodPolicy", "cpu", "$.spec.runPolicy.cleanPodPolicy", "running"),
    ("schema", W0, "cpu", f"{W0}.readynessProbe", {}),
]


def broken(job: Tree, part: str, value: Any) -> None:
    """Changes the job in place."""
    *path, last = [int(each) if each.lstrip("-").isdigit() else each for each in re.findall(r"[-\w]+", part)]
    for each in path:
        job = job[each]
    if value is None:
        job.pop(last)
    elif isinstance(job, list):
        job[last:last] = value
    else:
        job[last] = value


@pytest.mark.parametrize(("rule", "path", "overlay", "part", "value"), BREAKS)
def test_each_mistake_is_found_by_its_rule_alone(
    rule: str, path: str, overlay: str, part: str, value: object, tmp_path: Path
) -> None:
    manifests = copy.deepcopy(built(overlay))
    broken(next(manifest for manifest in manifests if manifest["kind"] in ("MPIJob", "Job")), part, value)
    file = tmp_path / "broken.yaml"
    file.write_text(yaml.safe_dump_all(manifests))
    problems = check([file]).open
    assert {problem.rule for problem in problems} == {rule}
    assert path in [problem.path for problem in problems]


@pytest.mark.parametrize("version", ["1.34", kubernetes_versions()[-1]])
def test_all_overlays_are_there_and_pass(version: str) -> None:
    require_programs("kubectl")
    result = check([K8S], kubernetes=version)
    assert {Path(source).name for source in result.checked} == set(OVERLAYS)
    assert (result.open, result.unchecked) == ([], [])


def named_in(tree: Any) -> set[tuple[str, str]]:
    """Kind and name of the ConfigMaps, Secrets and service accounts that a Pod cannot start without."""
    if isinstance(tree, list):
        return set().union(*map(named_in, tree)) if tree else set()
    if not isinstance(tree, dict):
        return set()
    fields = {"configMap": "ConfigMap", "configMapRef": "ConfigMap", "configMapKeyRef": "ConfigMap"}
    fields |= {"secret": "Secret", "secretRef": "Secret", "secretKeyRef": "Secret"}
    found = set().union(*map(named_in, tree.values()))
    for field, kind in fields.items():
        source = tree.get(field)
        if isinstance(source, dict) and not source.get("optional"):
            found.add((kind, str(source.get("name") or source.get("secretName"))))
    return found | ({("ServiceAccount", tree["serviceAccountName"])} if "serviceAccountName" in tree else set())


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_name_objects_of_their_overlay(overlay: str) -> None:
    """Neither the check nor the API server finds a name that no object has."""
    made = {(each["kind"], each["metadata"]["name"]) for each in built(overlay)}
    made |= {("ConfigMap", "nccl-topology")} if overlay == "aks-infiniband" else set()  # made by hand, see nics.yaml
    assert named_in([each for each in built(overlay) if "spec" in each]) <= made


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
    assert found == {"mpijob-probe", "shared-memory"}


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
    components = ["node-doctor-taint", "node-doctor-changes", "node-doctor-kernel-log", "node-doctor-pairs"]
    built = site_build(tmp_path, "node-doctor", *components)
    reporter, sidecar = pod(built["DaemonSet"])["containers"]
    assert sidecar["image"] == reporter["image"]
    assert reporter["image"].endswith("-doctor")
    mark = k8s.commands["mark-node"].make_context("mark-node", list(reporter["args"]))
    assert (mark.params["taint"], mark.params["changes"]) == ("NoSchedule", True)
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


def test_domains_by_topograph_and_imex_of_the_host(tmp_path: Path) -> None:
    built = site_build(tmp_path, "gb200-mnnvl", "topograph", "host-imex")
    (term,) = worker(built["MPIJob"])["affinity"]["podAffinity"][REQUIRED]
    assert term["topologyKey"] == "accelerator.topograph.run/domain"
    assert "ComputeDomain" not in built
    assert {"name": "NVIDIA_IMEX_CHANNELS", "value": "0"} in worker(built["MPIJob"])["containers"][0]["env"]


def containers_in(tree: Tree) -> Iterator[Tree]:
    """Whatever has a command or arguments, at any depth."""
    if isinstance(tree, dict) and {"command", "args"} & tree.keys():
        yield tree
    for below in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from containers_in(below)


@pytest.mark.parametrize("file", sorted((K8S / "preflight").iterdir()), ids=lambda file: file.stem)
def test_examples_start_the_preflight_with_options_that_it_has(file: Path) -> None:
    found = []
    for tree in yaml.safe_load_all(file.read_text()):
        for each in containers_in(tree):
            words = [*each.get("command", []), *each.get("args", [])]
            if words[:2] == ["hybrid-ep", "preflight"]:
                found.append(preflight.make_context("preflight", words[2:]).params)
            elif words[0] == "/bin/bash":
                (options,) = (entry["value"] for entry in each["env"] if entry["name"] == "PREFLIGHT_OPTIONS")
                found.append(preflight.make_context("preflight", options.split()).params)
    assert [params["bench_options"] for params in found] == ["--device=cuda"]
    if file.name != "nvsentinel-values.yaml":  # values of a chart, and no objects
        assert {problem.rule for problem in check([file]).problems} <= {"unknown-kind"}


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


def script(overlay: str) -> str:
    """The overlay's fabric.sh, as the cluster gets it."""
    (held,) = (each for each in built(overlay) if each["metadata"]["name"] == "hybrid-ep-fabric")
    text: str = held["data"]["fabric.sh"]
    return text


def environment(overlay: str) -> dict[str, str]:
    """What a rank finds, where the node has no script of its own: bash reads the file as the launcher has it read."""
    done = subprocess.run(
        ["env", "-i", "bash", "-ac", '. "$0"; env -0', "/dev/stdin"],
        input=script(overlay),
        capture_output=True,
        text=True,
        check=True,
    )
    found = dict(entry.split("=", 1) for entry in done.stdout.split("\0") if entry)
    return {name: value for name, value in found.items() if re.match(r"(NCCL|NVSHMEM|HYBRID_EP|FI)_", name)}


def nics_of(name: str, value: str) -> list[str]:
    if name == "NCCL_IB_HCA":
        assert value[0] == "=", "prefixes would take mlx5_1 for mlx5_10"
        value = value[1:]
    return [re.sub(r":\d+$", "", nic) for nic in re.split(r"[,+]", value)]


def job_of(overlay: str) -> Any:
    (job,) = (each for each in built(overlay) if each["kind"] == "MPIJob")
    return job


def test_overlays_with_a_network_have_settings_and_others_none() -> None:
    having = {name for name in OVERLAYS if any(each["metadata"]["name"] == "hybrid-ep-fabric" for each in built(name))}
    assert having == set(OWN) == {path.parent.name for path in K8S.glob("overlays/*/fabric.sh")}


@pytest.mark.parametrize("overlay", OWN)
def test_settings_reach_the_ranks(overlay: str) -> None:
    job = job_of(overlay)
    (mount,) = (each for each in worker(job)["containers"][0]["volumeMounts"] if each["name"] == "fabric")
    assert mount["mountPath"] == MOUNT
    (volume,) = (each for each in worker(job)["volumes"] if each["name"] == "fabric")
    assert volume["configMap"] == {"name": "hybrid-ep-fabric"}
    container = launcher(job)["containers"][0]
    assert {"name": "RANK_SETTINGS", "value": f"{MOUNT}/fabric.sh"} in container["env"]
    assert "-x RANK_SETTINGS" in " ".join(container["args"])
    assert "bash -ac" in container["command"][2], "without -a a setting is no variable of the rank"


@pytest.mark.parametrize("overlay", OWN)
def test_each_setting_names_its_source_or_is_marked_as_assumed(overlay: str) -> None:
    for part in script(overlay).split("\n\n"):
        if any(not line.startswith("#") for line in part.splitlines()):
            assert re.search(r"# (.*[.] )?(Source|Assumed): [^.]", part), part


@pytest.mark.parametrize("overlay", OWN)
def test_values_are_taken(overlay: str) -> None:
    ours = {variable.name: variable for variable in VARIABLES}
    found = environment(overlay)
    assert set(re.findall(r"(?m)^(\w+)=", script(overlay))) == found.keys()
    for name, value in found.items():
        if name.startswith("HYBRID_EP_"):
            ours[name].parse(value)
    assert any(name.startswith("NVSHMEM_") for name in found) == (overlay in WITH_NICS)


@pytest.mark.parametrize("overlay", WITH_NICS)
def test_nics_fit_gpus_resources_networks_and_profile(overlay: str) -> None:
    job = job_of(overlay)
    limits = worker(job)["containers"][0]["resources"]["limits"]
    num_gpus = limits["nvidia.com/gpu"]
    assert num_gpus == job["spec"]["slotsPerWorker"]
    given = {
        name: nics_of(name, value)
        for name, value in environment(overlay).items()
        if name in ("NCCL_IB_HCA", "NVSHMEM_HCA_LIST", "HYBRID_EP_NICS")
    }
    counts = {len(nics) for nics in given.values()}
    assert all(len(set(nics)) == len(nics) for nics in given.values())
    assert len({frozenset(nics) for nics in given.values()}) <= 1
    counts |= {number for name, number in limits.items() if re.search(r"^rdma/|roce_vf$|efa$", name)}
    annotations = job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["metadata"].get("annotations", {})
    if networks := annotations.get("k8s.v1.cni.cncf.io/networks"):
        counts.add(len(networks.split(",")))
    if interfaces := annotations.get("networking.gke.io/interfaces"):
        counts.add(sum(each["network"].startswith("rdma-") for each in yaml.safe_load(interfaces)))
    (profile,) = (each["value"] for each in launcher(job)["containers"][0]["env"] if each["name"] == "DOCTOR_PROFILE")
    if profile:
        counts.add(load_profile(profile.removeprefix("--profile="))["nic.count"])
    (count,) = counts
    assert count % num_gpus == 0
    for entry in environment(overlay).get("HYBRID_EP_NICS", "").split(","):
        assert not entry or len(entry.split("+")) == count // num_gpus


def test_settings_of_a_node_come_first_and_are_handed_on(tmp_path: Path) -> None:
    """GKE's own script decides for NCCL, and its class holds for the other libraries."""
    google = tmp_path / "set_nccl_env.sh"
    google.write_text("export NCCL_NET=gIB NCCL_IB_TC=56\n")
    text = script("gke").replace("/usr/local/gib/scripts/set_nccl_env.sh", str(google))
    done = subprocess.run(["bash", "-ac", '. "$0"; env', "/dev/stdin"], input=text, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert {"NCCL_NET=gIB", "NVSHMEM_IB_TRAFFIC_CLASS=56", "HYBRID_EP_TRAFFIC_CLASS=56"} <= set(lines)
    assert environment("gke")["HYBRID_EP_TRAFFIC_CLASS"] == "52"


# Overlay, a text that stands once in its fabric.sh, what takes its place, and what the finding must say.
BROKEN = [
    ("oke-roce", "NCCL_IB_TC=41", "NCCL_IB_TC=411", "NCCL_IB_TC=411; allowed: 0 to 255"),
    ("oke-roce", "NCCL_IB_TC=41", "NCCL_IB_TC=106", "NVSHMEM_IB_TRAFFIC_CLASS=41"),
    ("roce-sriov", "HYBRID_EP_GID_INDEX=3", "HYBRID_EP_GID_INDEX=1", "allowed: one value"),
    ("oke-roce", "NVSHMEM_IB_SL=0", "NVSHMEM_IB_SL=3", "HYBRID_EP_SERVICE_LEVEL=0"),
    ("roce-sriov", "NCCL_CROSS_NIC=0", "NCCL_CROSS_NIC=no", "allowed: 0, 1 or 2"),
    ("oke-roce", "HYBRID_EP_NICS=mlx5_0+", "HYBRID_EP_NICS=mlx5_2+", "has mlx5_2; allowed: NICs of NCCL_IB_HCA"),
    ("oke-roce", "mlx5_16,mlx5_17", "mlx5_16,mlx5_17,mlx5_18", "17 NICs; allowed: as many for each of 8 GPUs"),
    ("aks-infiniband", "NVSHMEM_ENABLE_NIC_PE_MAPPING=1\n", "", "has no effect"),
    ("aks-infiniband", "HYBRID_EP_NICS=", "HYBRID_EP_NIC=", "a variable that `hybrid-ep env` lists"),
    ("eks-efa", "HYBRID_EP_FABRIC_PROVIDER=", "HYBRID_EP_TRANSPORT=", "tcp, loopback or nvshmem"),
]


@pytest.mark.parametrize(("overlay", "old", "new", "says"), BROKEN)
def test_wrong_setting_is_found_where_it_stands(overlay: str, old: str, new: str, says: str, tmp_path: Path) -> None:
    shutil.copytree(K8S, tmp_path / "k8s")
    file = tmp_path / "k8s" / "overlays" / overlay / "fabric.sh"
    assert file.read_text().count(old) == 1
    file.write_text(file.read_text().replace(old, new))
    problems = check([file.parent]).open
    assert {problem.rule for problem in problems} == {"fabric-settings"}
    (problem,) = (each for each in problems if says in each.message)
    wrong_name = old.startswith("HYBRID_EP_") and "GID" not in old and "mlx5" not in old
    assert problem.level is (Level.ERROR if wrong_name else Level.WARNING)
    assert problem.path == "$.data['fabric.sh']"


def test_more_nics_than_the_pod_has(tmp_path: Path) -> None:
    manifests = copy.deepcopy(built("aks-infiniband"))
    (job,) = (each for each in manifests if each["kind"] == "MPIJob")
    worker(job)["containers"][0]["resources"]["limits"]["rdma/ib"] = 4
    (tmp_path / "job.yaml").write_text(yaml.safe_dump_all(manifests))
    found = [problem.message for problem in check([tmp_path / "job.yaml"]).open]
    assert "NCCL_IB_HCA names 8 NICs; allowed: the Pod's 4" in found


@pytest.mark.parametrize("key", ["args", "command"])
def test_settings_that_mpirun_is_given(key: str, tmp_path: Path) -> None:
    """As NAME=VALUE after -x, each an argument or all in a script: how public manifests have them."""
    manifests = copy.deepcopy(built("cpu"))
    (job,) = (each for each in manifests if each["kind"] == "MPIJob")
    container = launcher(job)["containers"][0]
    if key == "args":
        container["args"] += ["-x", "NCCL_IB_TC=41", "-x", "HYBRID_EP_TRAFFIC_CLASS=40"]
    else:
        container["command"][2] += '"$@" -x NCCL_IB_TC=41 \\\n  -x HYBRID_EP_TRAFFIC_CLASS=40 true\n'
    (tmp_path / "job.yaml").write_text(yaml.safe_dump_all(manifests))
    (problem,) = check([tmp_path / "job.yaml"]).open
    assert (problem.rule, problem.path.rpartition(".")[2]) == ("fabric-settings", key)
    assert problem.message == "NCCL_IB_TC=41, HYBRID_EP_TRAFFIC_CLASS=40; allowed: one value"
