"""The network settings of each overlay: they fit the overlay's GPUs, NICs and profile, and name their source.

The rule `fabric-settings` checks the same for all manifests. Tests break each of its demands in a shipped overlay.
"""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid_ep.cluster.doctor.profile import load_profile
from hybrid_ep.cluster.kubernetes.check import check
from hybrid_ep.cluster.kubernetes.problem import Level
from hybrid_ep.env import VARIABLES
from tests.unit.k8s_overlays import K8S, OVERLAYS, built, launcher, worker

WITH_NICS = ("infiniband", "roce-sriov", "eks-efa", "gke", "aks-infiniband", "oke-roce")
OWN = (*WITH_NICS, "gb200-mnnvl")
MOUNT = "/etc/hybrid-ep/fabric"


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


@dataclass(frozen=True)
class Broken:
    """A fabric.sh that is wrong in one place.

    Attributes:
        overlay: whose it is.
        old: stands there once.
        new: takes its place.
        words: what the finding must say.
        level: how bad it must be.
    """

    overlay: str
    old: str
    new: str
    words: str
    level: Level = Level.WARNING

    def __str__(self) -> str:
        return f"{self.overlay} {self.new[:40]}"


BROKEN = [
    Broken("oke-roce", "NCCL_IB_TC=41", "NCCL_IB_TC=411", "NCCL_IB_TC=411; allowed: 0 to 255"),
    Broken("oke-roce", "NCCL_IB_TC=41", "NCCL_IB_TC=106", "NVSHMEM_IB_TRAFFIC_CLASS=41"),
    Broken("roce-sriov", "HYBRID_EP_GID_INDEX=3", "HYBRID_EP_GID_INDEX=1", "allowed: one value"),
    Broken("oke-roce", "NVSHMEM_IB_SL=0", "NVSHMEM_IB_SL=3", "HYBRID_EP_SERVICE_LEVEL=0"),
    Broken("roce-sriov", "NCCL_CROSS_NIC=0", "NCCL_CROSS_NIC=no", "allowed: 0, 1 or 2"),
    Broken("oke-roce", "HYBRID_EP_NICS=mlx5_0+", "HYBRID_EP_NICS=mlx5_2+", "has mlx5_2; allowed: NICs of NCCL_IB_HCA"),
    Broken("oke-roce", "mlx5_16,mlx5_17", "mlx5_16,mlx5_17,mlx5_18", "17 NICs; allowed: as many for each of 8 GPUs"),
    Broken("aks-infiniband", "NVSHMEM_ENABLE_NIC_PE_MAPPING=1\n", "", "has no effect"),
    Broken("aks-infiniband", "HYBRID_EP_NICS=", "HYBRID_EP_NIC=", "a variable that `hybrid-ep env` lists", Level.ERROR),
    Broken("eks-efa", "HYBRID_EP_TRANSPORT=tcp", "HYBRID_EP_TRANSPORT=efa", "tcp, loopback or nvshmem", Level.ERROR),
]


@pytest.mark.parametrize("case", BROKEN, ids=str)
def test_wrong_setting_is_found_where_it_stands(case: Broken, tmp_path: Path) -> None:
    shutil.copytree(K8S, tmp_path / "k8s")
    file = tmp_path / "k8s" / "overlays" / case.overlay / "fabric.sh"
    assert file.read_text().count(case.old) == 1
    file.write_text(file.read_text().replace(case.old, case.new))
    problems = check([file.parent]).open
    assert {problem.rule for problem in problems} == {"fabric-settings"}
    (problem,) = (each for each in problems if case.words in each.message)
    assert (problem.level, problem.path) == (case.level, "$.data['fabric.sh']")


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
