"""The admission policies refuse what they name and nothing that we ship; their expressions are evaluated as CEL."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid_ep.cluster.kubernetes.check import check, known_rules
from hybrid_ep.cluster.kubernetes.manifest import load
from hybrid_ep.cluster.kubernetes.schema import kubernetes_versions
from tests.prerequisites import require_programs

cel = pytest.importorskip("cel", reason="common-expression-language")
K8S = Path(__file__).resolve().parents[2] / "k8s"
COMPONENT = K8S / "components" / "admission"
Tree = Any


def objects(kind: str) -> dict[str, Tree]:
    """Those of the component, by the rule that they enforce."""
    found = [each for path in COMPONENT.glob("*-*.yaml") for each in yaml.safe_load_all(path.read_text())]
    return {each["metadata"]["name"].partition(".")[0]: each for each in found if each["kind"] == kind}


POLICIES = objects("ValidatingAdmissionPolicy")
GROUPS = {"Job": ("batch", "jobs"), "MPIJob": ("kubeflow.org", "mpijobs")}


def refusals(subject: Tree) -> list[str]:
    """The rules by which the API server refuses to make the object."""
    found = []
    for name, policy in POLICIES.items():
        (rule,) = policy["spec"]["matchConstraints"]["resourceRules"]
        group, resource = GROUPS.get(subject["kind"], ("", ""))
        if group not in rule["apiGroups"] or resource not in rule["resources"]:
            continue
        given: dict[str, Any] = {"object": subject, "variables": {}}
        for variable in policy["spec"]["variables"]:
            given["variables"][variable["name"]] = cel.evaluate(variable["expression"], given)
        for validation in policy["spec"]["validations"]:
            answer = cel.evaluate(validation["expression"], given)
            assert isinstance(answer, bool), validation
            if not answer:
                assert validation["message"].startswith(f"{name}: ")
                found.append(name)
    return found


def shipped(overlay: str, kind: str) -> Tree:
    require_programs("kubectl")
    (found,) = (each.content for each in load(K8S / "overlays" / overlay) if each.kind == kind)
    return copy.deepcopy(found)


@pytest.mark.parametrize(("overlay", "kind"), [("cpu", "MPIJob"), ("infiniband", "MPIJob"), ("cpu-torchrun", "Job")])
def test_shipped_jobs_are_let_in(overlay: str, kind: str) -> None:
    assert refusals(shipped(overlay, kind)) == []


@pytest.mark.parametrize(
    ("rule", "kind", "change"),
    [
        ("job-indexed", "Job", lambda spec: spec.update(parallelism=1)),
        ("job-indexed", "Job", lambda spec: spec.pop("completionMode")),
        ("job-indexed", "Job", lambda spec: spec.pop("activeDeadlineSeconds")),
        ("torchrun-size", "Job", lambda spec: spec.update(completions=3, parallelism=3)),
        (
            "mpijob-init",
            "MPIJob",
            lambda spec: spec["mpiReplicaSpecs"]["Worker"]["template"]["spec"].update(
                initContainers=[{"name": "wait", "image": "a:1"}]
            ),
        ),
    ],
)
def test_mistake_is_refused_by_its_rule_and_by_the_check(
    rule: str, kind: str, change: Callable[[Tree], object], tmp_path: Path
) -> None:
    job = shipped("cpu" if kind == "MPIJob" else "cpu-torchrun", kind)
    change(job["spec"])
    assert refusals(job) == [rule]
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    assert rule in {problem.rule for problem in check([tmp_path / "job.yaml"]).open}


def test_jobs_of_others_are_let_in() -> None:
    """Without torchrun, a Job may be anything; torchrun on one Pod, or with a rendezvous of its own, too."""
    pod = {"containers": [{"name": "a", "image": "a:1"}]}
    assert refusals({"kind": "Job", "spec": {"completions": 9, "template": {"spec": pod}}}) == []
    job = shipped("cpu-torchrun", "Job")
    job["spec"].pop("completionMode")
    job["spec"]["template"]["spec"]["containers"][0]["command"].append("--rdzv-backend=c10d")
    assert refusals(job) == []
    words = job["spec"]["template"]["spec"]["containers"][0]["command"]
    words[words.index("--nnodes=2")] = "--nnodes=1:4"
    assert refusals(job) == []


def test_policies_are_rules_of_the_check_and_only_for_chosen_namespaces() -> None:
    bindings = objects("ValidatingAdmissionPolicyBinding")
    assert POLICIES.keys() == bindings.keys() <= known_rules().keys()
    for binding in bindings.values():
        assert binding["spec"]["policyName"] == binding["metadata"]["name"]
        assert binding["spec"]["matchResources"]["namespaceSelector"] == {
            "matchLabels": {"hybrid-ep/admission": "enforce"}
        }


def test_component_and_overlays_fit_the_newest_schemas(tmp_path: Path) -> None:
    require_programs("kubectl")
    newest = kubernetes_versions()[-1]
    paths = [*COMPONENT.glob("*-*.yaml"), K8S / "overlays"]
    assert check(paths, kubernetes=newest).open == []
