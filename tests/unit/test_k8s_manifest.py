"""How `hybrid-ep k8s check` reads YAML files, Lists and folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from hybrid_ep.cluster.kubernetes.check import check
from hybrid_ep.cluster.kubernetes.problem import Level

POD = "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec:\n  containers:\n  - {name: a, image: 'a:1', args: [x]}\n"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("{name: a}\nspec", "{name: a, annotations: {built: 2026-01-02}}\nspec"),
        ("{name: a}\nspec", "{name: a, labels: {built: 2026-01-02}}\nspec"),
        ("[x]", "[--time, 1:30:00]"),
        (
            "args: [x]}",
            "volumeMounts: [{name: c, mountPath: /c}]}\n"
            "  volumes: [{name: c, configMap: {name: c, optional: true, defaultMode: 0o400}}]",
        ),
    ],
)
def test_words_are_read_as_kubectl_does(old: str, new: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(POD.replace(old, new))
    assert check([file]).problems == []


def test_line_ends_of_windows_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(b"\xef\xbb\xbf" + POD.replace("\n", "\r\n").encode())
    assert check([file]).problems == []


V1_MPIJOB = """apiVersion: kubeflow.org/v1
kind: MPIJob
metadata: {name: a}
spec:
  slotsPerWorker: 1
  mpiReplicaSpecs:
    Launcher: {replicas: 1, template: {spec: {containers: [{name: mpi, image: 'a:1', command: [mpirun, -np, '2', x]}]}}}
    Worker: {replicas: 2, template: {spec: {containers: [{name: mpi, image: 'a:1'}]}}}
"""


def test_rules_for_ssh_are_not_those_of_the_older_mpijob(tmp_path: Path) -> None:
    """The training operator's MPIJob starts its ranks without sshd."""
    file = tmp_path / "a.yaml"
    file.write_text(V1_MPIJOB)
    assert {problem.rule for problem in check([file]).problems} == {"unknown-kind", "shared-memory"}


def test_lists_of_lists_and_lists_of_a_kind_are_opened(tmp_path: Path) -> None:
    pod = yaml.safe_load(POD.replace("a:1", "a"))
    inner = {"apiVersion": "v1", "kind": "PodList", "items": [{key: pod[key] for key in ("metadata", "spec")}]}
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": [inner]}))
    (problem,) = check([file]).problems
    assert (problem.name, problem.rule, problem.path) == ("Pod/a", "image-pinned", "$.spec.containers[0].image")


def test_list_that_holds_itself_is_nested_too_deeply(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("&a {apiVersion: v1, kind: List, items: [*a]}\n")
    (problem,) = check([file]).problems
    assert (problem.rule, problem.message) == ("build", f"{file} cannot be read: it is nested too deeply")


def test_folder_of_files_is_one_build_and_problems_name_their_file(tmp_path: Path) -> None:
    service = {"metadata": {"name": "ranks"}, "spec": {"clusterIP": "None", "selector": {"app": "other"}}}
    (tmp_path / "names.json").write_text(json.dumps({"apiVersion": "v1", "kind": "Service", **service}))
    (tmp_path / "pod.yml").write_text(POD.replace("spec:\n", "spec:\n  subdomain: ranks\n"))
    (tmp_path / "readme.md").write_text("no manifest")
    result = check([tmp_path])
    assert result.checked == {str(tmp_path / "names.json"): ["Service/ranks"], str(tmp_path / "pod.yml"): ["Pod/a"]}
    (problem,) = result.problems
    assert (problem.source, problem.rule) == (str(tmp_path / "names.json"), "service")


def test_kustomization_given_as_a_file_names_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "kustomization.yaml"
    file.write_text("apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [a.yaml]\n")
    (problem,) = check([file]).problems
    assert (problem.rule, problem.level) == ("build", Level.ERROR)
    assert problem.message == f"{file} is kustomize's own Kustomization; allowed: its folder, {tmp_path}"


VOLCANO = """apiVersion: batch.volcano.sh/v1alpha1
kind: Job
metadata: {name: a}
spec:
  tasks:
  - {name: w, replicas: 2, template: {spec: {containers: [{name: a, image: IMAGE, command: [torchrun, x.py]}]}}}
"""
KNATIVE = """apiVersion: serving.knative.dev/v1
kind: Service
metadata: {name: a}
spec: {template: {spec: {containers: [{name: a, image: IMAGE}]}}}
"""
RAY = """apiVersion: ray.io/v1
kind: RayCluster
metadata: {name: a}
spec: {headGroupSpec: {template: {spec: {containers: [{name: a, image: IMAGE}]}}}}
"""


@pytest.mark.parametrize("text", [VOLCANO, KNATIVE, RAY], ids=["volcano", "knative", "ray"])
def test_pods_of_other_kinds_are_checked_and_their_names_are_no_rule_of_ours(text: str, tmp_path: Path) -> None:
    """Volcano has a Job and Knative a Service, which Kubernetes' rules for these names do not fit."""
    file = tmp_path / "a.yaml"
    file.write_text(text.replace("IMAGE", "'a:1'"))
    assert {problem.rule for problem in check([file]).problems} <= {"unknown-kind", "shared-memory"}
    file.write_text(text.replace("IMAGE", "a"))
    assert "image-pinned" in {problem.rule for problem in check([file]).problems}
    file.write_text(text.replace("IMAGE", "'a:1', imagePullPolicy: Alway"))
    (error,) = (problem for problem in check([file]).problems if problem.level is Level.ERROR)
    assert error.rule == "schema"
    assert error.path.endswith(".spec.containers[0].imagePullPolicy")
