"""The Helm chart makes what kustomize makes, puts a site's values there, and refuses wrong ones."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid_ep import __version__
from hybrid_ep.cluster.kubernetes.check import check
from hybrid_ep.cluster.kubernetes.manifest import Level, load
from tests.prerequisites import require_programs

ROOT = Path(__file__).resolve().parents[2]
OVERLAYS = sorted({path.name for path in (ROOT / "k8s" / "overlays").iterdir()} - {"node-doctor"})
Tree = Any
Rendered = Callable[..., list[Tree]]


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart as `make chart` builds it."""
    require_programs("kubectl")
    folder = tmp_path_factory.mktemp("chart") / "hybrid-ep"
    subprocess.run([sys.executable, "ci/chart.py", str(folder)], cwd=ROOT, check=True)
    return folder


@pytest.fixture
def rendered(chart: Path, tmp_path: Path) -> Rendered:
    """Renders values into the objects of a release."""
    return lambda values, namespace="default": render(chart, tmp_path, values, namespace)


def helm(*words: str) -> subprocess.CompletedProcess[str]:
    require_programs("helm")
    return subprocess.run(["helm", *words], capture_output=True, text=True, timeout=60, check=False)


def render(chart: Path, tmp_path: Path, values: Tree, namespace: str) -> list[Tree]:
    """The objects of a release; `hybrid-ep k8s check` says of them no more than what the cluster must have besides."""
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    done = helm("template", "release", str(chart), "--namespace", namespace, "--values", str(file))
    assert done.returncode == 0, done.stderr
    (tmp_path / "out.yaml").write_text(done.stdout)
    found = check([tmp_path / "out.yaml"]).open
    assert [problem for problem in found if problem.level is not Level.HINT] == []
    return [manifest.content for manifest in load(tmp_path / "out.yaml")]


def kustomized(overlay: str) -> list[Tree]:
    require_programs("kubectl")
    return [manifest.content for manifest in load(ROOT / "k8s" / "overlays" / overlay)]


def by_name(objects: list[Tree], namespace: str | None = None) -> dict[tuple[str, str], Tree]:
    """What is compared: the chart writes the namespace that kustomize leaves to kubectl."""
    found = {}
    for each in objects:
        metadata = {key: value for key, value in each["metadata"].items() if key != "namespace"}
        assert namespace is None or each["metadata"].get("namespace", namespace) == namespace
        found[each["kind"], metadata["name"]] = {**each, "metadata": metadata}
    return found


def test_helm_finds_nothing_to_complain_about(chart: Path) -> None:
    done = helm("lint", "--strict", str(chart))
    assert done.returncode == 0, done.stdout + done.stderr


def test_chart_is_of_this_version_and_knows_every_overlay(chart: Path) -> None:
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    assert (about["version"], about["appVersion"]) == (__version__, __version__)
    schema = json.loads((chart / "values.schema.json").read_text())
    jobs = yaml.safe_load((chart / "files" / "jobs.yaml").read_text())
    assert sorted(schema["properties"]["testJob"]["properties"]["overlay"]["enum"]) == sorted(jobs) == OVERLAYS


def test_chart_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    require_programs("kubectl")
    old = tmp_path / "hybrid-ep" / "files" / "jobs" / "old.yaml"
    old.parent.mkdir(parents=True)
    old.touch()
    subprocess.run([sys.executable, "ci/chart.py", str(tmp_path / "hybrid-ep")], cwd=ROOT, check=True)
    assert not old.exists()
    assert (old.parent / "infiniband.yaml").exists()


def test_node_doctor_equals_the_overlay(rendered: Rendered) -> None:
    assert by_name(rendered({}), "default") == by_name(kustomized("node-doctor"))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_job_equals_its_overlay(overlay: str, rendered: Rendered) -> None:
    values = {"nodeDoctor": {"enabled": False}, "testJob": {"enabled": True, "overlay": overlay}}
    assert by_name(rendered(values), "default") == by_name(kustomized(overlay))


@pytest.mark.parametrize(
    ("components", "settings", "asked"),
    [
        (
            ["gpu-product", "fit-nodes"],
            {"product": "NVIDIA-H200"},
            {"fitNodesOnly": True, "gpuProduct": "NVIDIA-H200"},
        ),
        (
            ["node-affinity"],
            {"gpuProducts": ["NVIDIA-H100-80GB-HBM3", "NVIDIA-H200"]},
            {"nodeAffinity": {"gpuProducts": ["NVIDIA-H100-80GB-HBM3", "NVIDIA-H200"]}},
        ),
    ],
    ids=["selectors", "affinity"],
)
@pytest.mark.parametrize(
    "overlay", ["gb200-mnnvl", "infiniband", "single-node-torchrun", "jobset-kueue", "lws-serving"]
)
def test_nodes_are_asked_for_as_by_the_components(
    overlay: str, components: list[str], settings: Tree, asked: Tree, rendered: Rendered, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "k8s", tmp_path / "site" / "k8s")
    tree = {
        "apiVersion": "hybrid-ep.local/v1",
        "kind": "Settings",
        "metadata": {"name": components[0], "annotations": {"config.kubernetes.io/local-config": "true"}},
        "spec": settings,
    }
    kustomization = {
        "resources": [f"k8s/overlays/{overlay}", "settings.yaml"],
        "components": [f"k8s/components/{name}" for name in components],
    }
    for name, content in {"settings": tree, "kustomization": kustomization}.items():
        (tmp_path / "site" / f"{name}.yaml").write_text(yaml.safe_dump(content))
    job = {"enabled": True, "overlay": overlay, **asked}
    made = by_name(rendered({"nodeDoctor": {"enabled": False}, "testJob": job}), "default")
    assert made == by_name([manifest.content for manifest in load(tmp_path / "site")])


def test_namespace_reaches_every_object(rendered: Rendered) -> None:
    values = {"nodeDoctor": {"pairs": {"enabled": True}}, "testJob": {"enabled": True}}
    objects = by_name(rendered(values, "gpu-tests"), "gpu-tests")
    assert objects["ClusterRoleBinding", "hybrid-ep-doctor"]["subjects"][0]["namespace"] == "gpu-tests"


def test_values_of_the_node_doctor(rendered: Rendered) -> None:
    profile = "extends: hgx-h100\ngpu:\n  count: 4\n"
    values = {
        "image": {"repository": "registry/hybrid-ep", "digest": f"sha256:{'a' * 64}"},
        "imagePullSecrets": [{"name": "pull"}],
        "nodeDoctor": {
            "everySeconds": 60,
            "siteProfile": profile,
            "taint": "NoSchedule",
            "kernelLog": True,
            "nodeSelector": {"pool": "gpu"},
            "runtimeClassName": "nvidia",
            "pairs": {"enabled": True, "schedule": "30 4 * * 0", "gpusPerNode": 4},
        },
    }
    objects = by_name(rendered(values))
    pod = objects["DaemonSet", "hybrid-ep-doctor"]["spec"]["template"]["spec"]
    assert (pod["nodeSelector"], pod["runtimeClassName"]) == ({"pool": "gpu"}, "nvidia")
    assert pod["imagePullSecrets"] == [{"name": "pull"}]
    assert {container["image"] for container in pod["containers"]} == {f"registry/hybrid-ep@sha256:{'a' * 64}"}
    args = pod["containers"][0]["args"]
    assert args[:2] == ["--every", "60"]
    assert args[-2:] == ["--taint=NoSchedule", "--profile=/etc/hybrid-ep/profile/site.yaml"]
    assert "--kernel-log=/run/hybrid-ep/kernel.log" in args
    assert objects["ConfigMap", "hybrid-ep-doctor-profile"]["data"] == {"site.yaml": profile}
    cron = objects["CronJob", "hybrid-ep-pairs"]["spec"]
    bench = cron["jobTemplate"]["spec"]["template"]["spec"]["containers"][0]
    assert (cron["schedule"], bench["resources"]["limits"]["nvidia.com/gpu"]) == ("30 4 * * 0", 4)
    assert "--nproc-per-node=4" in bench["command"]


def test_values_of_the_test_job(rendered: Rendered) -> None:
    job = {"enabled": True, "nodes": 3, "ranksPerNode": 4, "fitNodesOnly": True, "helmTest": True}
    job["tolerations"] = [{"key": "reserved", "operator": "Exists"}]
    objects = by_name(rendered({"image": {"tag": "1.2.3"}, "testJob": job}))
    made = objects["Job", "hybrid-ep-torchrun"]
    assert made["metadata"]["annotations"]["helm.sh/hook"] == "test"
    pod = made["spec"]["template"]["spec"]
    assert (made["spec"]["completions"], pod["nodeSelector"]["hybrid-ep/doctor"]) == (3, "pass")
    assert {"key": "reserved", "operator": "Exists"} in pod["tolerations"]
    assert {"--nnodes=3", "--nproc-per-node=4"} <= set(pod["containers"][0]["command"])
    assert pod["containers"][0]["image"] == "hybrid-ep:1.2.3"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"nodeDoctor": {"taint": "Never"}}, "/nodeDoctor/taint"),
        ({"nodeDoctor": {"everySeconds": 0}}, "/nodeDoctor/everySeconds"),
        ({"nodeDoctor": {"evrySeconds": 60}}, "evrySeconds"),
        ({"testJob": {"overlay": "ethernet"}}, "/testJob/overlay"),
        ({"testJob": {"nodes": "two"}}, "/testJob/nodes"),
        ({"testJob": {"gpuProduct": "NVIDIA H200"}}, "/testJob/gpuProduct"),
        ({"testJob": {"nodeAffinity": {"gpuProducts": ["NVIDIA H200"]}}}, "/testJob/nodeAffinity/gpuProducts/0"),
        ({"image": {"digest": "latest"}}, "/image/digest"),
    ],
)
def test_wrong_values_are_named(values: Tree, says: str, chart: Path, tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    done = helm("template", "release", str(chart), "--values", str(tmp_path / "values.yaml"))
    assert done.returncode != 0
    assert says in done.stderr
