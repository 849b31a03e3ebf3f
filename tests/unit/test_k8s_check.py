"""`hybrid-ep k8s check`: the command, its formats, silencing, schemas, and how sources are read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from click.testing import CliRunner, Result

from hybrid_ep.cli import main
from hybrid_ep.cluster.kubernetes.check import check, known_rules
from hybrid_ep.cluster.kubernetes.manifest import Level, Problem, find_sources
from hybrid_ep.cluster.kubernetes.rules import RULES
from hybrid_ep.cluster.kubernetes.schema import kubernetes_versions
from hybrid_ep.errors import ConfigError
from tests.prerequisites import require_programs
from tests.unit.k8s_overlays import K8S

PAGE = (K8S.parent / "docs" / "kubernetes_check.md").read_text()
SOUND = (Path(__file__).resolve().parents[1] / "data" / "manifests" / "sound.yaml").read_text()
POD = "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec:\n  containers:\n  - {name: a, image: 'a:1', args: [x]}\n"
# A Job whose GPUs are not whole, and an MPIJob with too many ranks.
WRONG = SOUND.replace("nvidia.com/gpu: 4", "nvidia.com/gpu: 4.5").replace("slotsPerWorker: 8", "slotsPerWorker: 4")
JOB = "$.spec.template.spec.containers[0].resources.limits['nvidia.com/gpu']"


def problems_of(text: str, folder: Path) -> list[Problem]:
    (folder / "a.yaml").write_text(text)
    return check([folder / "a.yaml"]).problems


def run(*words: str, text: str | None = None) -> Result:
    return CliRunner().invoke(main, ["k8s", "check", *words], input=text)


def test_command_prints_levels_and_exits_by_the_worst(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(WRONG)
    plain = run(str(file))
    (line,) = (i for i, each in enumerate(WRONG.splitlines(), 1) if "gpu: 4.5" in each)
    assert f"error {file}:{line} Job/ranks {JOB}\n    gpu-limit: 4.5; allowed: whole numbers\n" in plain.output
    *_, counts, last = plain.output.splitlines()
    assert counts == "1 source, 7 objects: 1 error, 1 warning, 0 hints"
    assert last.startswith("left to the API server: ")
    assert last.partition(": ")[2] in " ".join(PAGE.split())
    assert "kubectl apply --dry-run=server" in last
    file.write_text(SOUND.replace("slotsPerWorker: 8", "slotsPerWorker: 4"))
    codes = [run(str(file), *options).exit_code for options in ((), ("--fail-on", "warning"), ("--fail-on", "hint"))]
    assert (plain.exit_code, codes) == (1, [0, 1, 1])
    assert run(str(file), "--fail-on", "warning", "--ignore", "mpijob-slots").exit_code == 0
    assert run(str(file), "--rule", "mpijob-slot").exit_code == 2
    piped = run("-", text=SOUND)
    assert (piped.exit_code, piped.output.splitlines()[0]) == (0, "1 source, 7 objects: 0 errors, 0 warnings, 0 hints")


def test_json_has_the_place(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(SOUND.replace("backoffLimit: 1,", "backoffLimit: '6',"))
    document = json.loads(run("--json", str(file)).output)
    (problem,) = document["problems"]
    assert not document["ok"]
    (line,) = (i for i, each in enumerate(file.read_text().splitlines(), 1) if "'6'" in each)
    assert problem == {
        "source": str(file),
        "name": "MPIJob/mpi",
        "path": "$.spec.runPolicy.backoffLimit",
        "rule": "schema",
        "message": "'6' is not of type 'integer'",
        "level": "error",
        "line": line,
        "silenced": "",
    }


def test_sarif_places_and_suppresses(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    annotated = "metadata: {name: mpi, annotations: {ignore.hybrid-ep/mpijob-slots: a test}}"
    file.write_text(WRONG.replace("metadata: {name: mpi}", annotated))
    (document,) = json.loads(run("--format", "sarif", str(file)).output)["runs"]
    assert {rule["id"] for rule in document["tool"]["driver"]["rules"]} == set(known_rules())
    ranks, mpi = document["results"]
    place = ranks["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": file.as_posix()}
    assert "gpu: 4.5" in file.read_text().splitlines()[place["region"]["startLine"] - 1]
    assert (ranks["ruleId"], ranks["level"], "suppressions" in ranks) == ("gpu-limit", "error", False)
    assert (mpi["level"], mpi["suppressions"]) == ("warning", [{"kind": "inSource", "justification": "a test"}])


def test_junit_has_a_case_for_each_object(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(WRONG)
    output = run("--format", "junit", str(file)).output
    (suite,) = ElementTree.fromstring(output.partition("\n")[2])
    assert (suite.get("name"), suite.get("tests"), suite.get("failures")) == (str(file), "7", "2")
    failed = [case.get("name") for case in suite if case.find("failure") is not None]
    assert failed == ["Job/ranks", "MPIJob/mpi"]


def test_annotation_with_a_reason_silences_a_rule_there_alone(tmp_path: Path) -> None:
    def found(annotation: str) -> list[tuple[str, str]]:
        annotated = f"metadata: {{name: mpi, annotations: {{ignore.hybrid-ep/{annotation}}}}}"
        problems = problems_of(WRONG.replace("metadata: {name: mpi}", annotated), tmp_path)
        return sorted((problem.rule, problem.silenced) for problem in problems)

    wrong = [("gpu-limit", ""), ("mpijob-slots", "")]
    assert found("mpijob-slots: a test") == [("gpu-limit", ""), ("mpijob-slots", "a test")]
    assert found("gpu-limit: a test") == wrong
    assert found("mpijob-slots: ''") == [*wrong, ("silence", "")]
    assert found("mpijob-slot: a") == [*wrong, ("silence", "")]


def test_rules_can_be_chosen_and_left_out(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(WRONG)
    assert {problem.rule for problem in check([file], rules=["gpu-limit"]).problems} == {"gpu-limit"}
    assert {problem.rule for problem in check([file], ignore=["gpu-limit"]).problems} == {"mpijob-slots"}
    with pytest.raises(ConfigError, match=r"rule 'gpu-limits' is unknown; allowed: build, schema, "):
        check([file], ignore=["gpu-limits"])


def test_schemas_of_each_version_find_nothing_wrong_with_a_sound_build(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(SOUND)
    versions = kubernetes_versions()
    assert "1.37" in versions
    for version in versions[versions.index("1.34") :]:
        assert check([file], kubernetes=version).problems == []
    with pytest.raises(ConfigError, match=r"Kubernetes version is '1\.2'; allowed: 1\.25, "):
        check([file], kubernetes="1.2")


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


def test_kind_of_others_is_named_as_not_checked(tmp_path: Path) -> None:
    queue = "apiVersion: kueue.x-k8s.io/v1beta1\nkind: LocalQueue\nmetadata: {name: a}\nspec: {clusterQueue: b}\n"
    (problem,) = problems_of(queue, tmp_path)
    assert (problem.rule, problem.level) == ("unknown-kind", Level.HINT)
    assert "is not checked" in problem.message


SPEC = "{containers: [{name: a, image: 'a:1', MORE}]}"
OTHERS = {
    "ray.io/v1 RayCluster": f"headGroupSpec: {{template: {{spec: {SPEC}}}}}",
    "serving.knative.dev/v1 Service": f"template: {{spec: {SPEC}}}",
    "batch.volcano.sh/v1alpha1 Job": f"tasks: [{{name: w, template: {{spec: {SPEC}}}}}]",
    "kubeflow.org/v1 PyTorchJob": f"pytorchReplicaSpecs: {{Worker: {{template: {{spec: {SPEC}}}}}}}",
}


@pytest.mark.parametrize("name", OTHERS)
def test_pods_of_other_kinds_are_checked(name: str, tmp_path: Path) -> None:
    """Volcano has a Job and Knative a Service, which Kubernetes' schemas for these names do not fit."""
    version, kind = name.split()
    text = f"apiVersion: {version}\nkind: {kind}\nmetadata: {{name: a}}\nspec: {{{OTHERS[name]}}}\n"
    rules = {problem.rule for problem in problems_of(text.replace(", MORE", ""), tmp_path)}
    assert rules <= {"unknown-kind", "shared-memory"}
    (error,) = (p for p in problems_of(text.replace("MORE", "arg: [x]"), tmp_path) if p.level is Level.ERROR)
    assert (error.rule, error.path.endswith(".spec.containers[0]")) == ("schema", True)
    wrong = text.replace("MORE", "resources: {limits: {nvidia.com/gpu: 1.5}}")
    (error,) = (p for p in problems_of(wrong, tmp_path) if p.level is Level.ERROR)
    assert error.rule == "gpu-limit"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("{name: a}\nspec", "{name: a, annotations: {built: 2026-01-02}}\nspec"),
        ("[x]", "[--time, 1:30:00]"),
        (
            "args: [x]}",
            "volumeMounts: [{name: c, mountPath: /c}]}\n"
            "  volumes: [{name: c, configMap: {name: c, optional: true, defaultMode: 0o400}}]",
        ),
    ],
)
def test_words_are_read_as_kubectl_does(old: str, new: str, tmp_path: Path) -> None:
    assert old in POD
    assert problems_of(POD.replace(old, new), tmp_path) == []


def test_line_ends_of_windows_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(b"\xef\xbb\xbf" + POD.replace("\n", "\r\n").encode())
    assert check([file]).problems == []


def test_lists_of_lists_are_opened_and_lines_are_those_of_the_file(tmp_path: Path) -> None:
    inner = {"apiVersion": "v1", "kind": "List", "items": [yaml.safe_load(POD.replace("args", "arg"))]}
    text = yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": [inner]})
    (problem,) = problems_of(text, tmp_path)
    assert (problem.name, problem.rule, problem.path) == ("Pod/a", "schema", "$.spec.containers[0]")
    assert text.splitlines()[(problem.line or 0) - 1].strip().startswith("- arg:")


def test_list_that_holds_itself_is_nested_too_deeply(tmp_path: Path) -> None:
    (problem,) = problems_of("&a {apiVersion: v1, kind: List, items: [*a]}\n", tmp_path)
    assert (problem.rule, problem.message.partition(": ")[2]) == ("build", "it is nested too deeply")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "cannot be read"),
        ("- 1\n", "holds list"),
        ("---\n# nothing\n", "holds no object"),
        ("apiVersion: v1\nkind: List\nitems: []\n", "holds no object"),
        (
            "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n",
            "kustomize's own Kustomization; allowed",
        ),
    ],
)
def test_what_is_no_manifest_is_a_problem(text: str, says: str, tmp_path: Path) -> None:
    (problem,) = problems_of(text, tmp_path)
    assert (problem.rule, problem.level) == ("build", Level.ERROR)
    assert says in problem.message


def test_folder_of_files_is_one_build_and_problems_name_their_file(tmp_path: Path) -> None:
    service = {"metadata": {"name": "ranks"}, "spec": {"clusterIP": "None", "selector": {"app": "other"}}}
    (tmp_path / "names.json").write_text(json.dumps({"apiVersion": "v1", "kind": "Service", **service}))
    (tmp_path / "pod.yml").write_text(POD.replace("spec:\n", "spec:\n  subdomain: ranks\n"))
    (tmp_path / "readme.md").write_text("no manifest")
    result = check([tmp_path])
    assert result.checked == {str(tmp_path / "names.json"): ["Service/ranks"], str(tmp_path / "pod.yml"): ["Pod/a"]}
    (problem,) = result.problems
    assert (problem.source, problem.rule) == (str(tmp_path / "names.json"), "service")


def test_objects_are_compared_only_if_all_fit_their_schemas(tmp_path: Path) -> None:
    domain = SOUND.replace("numNodes: 2 # of domain", "numNodes: 4")
    assert [problem.rule for problem in problems_of(domain, tmp_path)] == ["compute-domain"]
    broken = domain.replace("kind: Deployment", "kind: Deploymnt").replace("nvidia.com/gpu: 4,", "nvidia.com/gpu: 4.5,")
    assert [problem.rule for problem in problems_of(broken, tmp_path)] == ["schema", "gpu-limit"]


def test_what_cannot_be_built_is_a_problem(tmp_path: Path) -> None:
    require_programs("kubectl")
    (tmp_path / "kustomization.yaml").write_text("resources: [missing.yaml]\n")
    (problem,) = check([tmp_path]).problems
    assert problem.rule == "build"
    assert "missing.yaml" in problem.message


def test_without_kubectl_nothing_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = run(str(K8S / "overlays" / "cpu"))
    assert (result.exit_code, "kubectl is not installed" in result.output) == (2, True)


def test_without_schemas_nothing_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes_validate", None)
    result = run("-", text=POD)
    assert (result.exit_code, "pip install kubernetes-validate" in result.output) == (2, True)


def test_empty_folder_is_wrong_usage(tmp_path: Path) -> None:
    result = run(str(tmp_path))
    assert (result.exit_code, "holds no manifest" in result.output) == (2, True)


def test_tree_without_overlays_is_searched(tmp_path: Path) -> None:
    for name, kind in (("a", "Kustomization"), ("b", "Component")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kustomization.yaml").write_text(f"kind: {kind}\n")
    assert find_sources(tmp_path) == [tmp_path / "a"]


def test_page_lists_every_rule_and_no_other() -> None:
    rows = [f"| `{rule.id}` | {rule.level.value} | {rule.text} |" for rule in RULES]
    stale = "docs/kubernetes_check.md is stale; it wants:\n"
    assert [row for row in PAGE.splitlines() if row.startswith("| `")] == rows, stale + "\n".join(rows)


def test_command_starts_without_schemas_and_torch() -> None:
    code = "from hybrid_ep.cluster.kubernetes import command"
    code += "; import sys; print({'kubernetes_validate', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_placeholders_are_one_note(tmp_path: Path) -> None:
    text = (
        "apiVersion: batch/v1\nkind: Job\nmetadata: {name: a}\nspec: {completions: '${N}', parallelism: '${N}', TAIL}\n"
    )
    (tmp_path / "a.yaml").write_text(text.replace("TAIL", "template: {spec: {containers: [], restartPolicy: Never}}"))
    (only,) = check([tmp_path / "a.yaml"]).problems
    assert (only.rule, only.level, only.line) == ("placeholders", Level.HINT, 4)
    assert only.message.startswith("'${N}' and 1 more: ")
