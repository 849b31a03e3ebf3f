"""The doctor in containers, on sound nodes: as each overlay with GPUs asks it, as the DaemonSet does, and `docker run`.

A container shows less than its node: its own /dev/shm and locked memory, the RDMA devices and the IMEX channel only
where it asks for them, and neither systemd nor kernel log. None of that is a fault of the node.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hybrid_ep.cluster.doctor.registry import all_checks
from hybrid_ep.cluster.kubernetes.command import k8s
from hybrid_ep.cluster.kubernetes.manifest import load
from hybrid_ep.topology.recording import Recording
from tests.prerequisites import require_programs
from tests.sim.platforms import healthy
from tests.sim.scenario import ROOT, build_stub, stub_environment

OVERLAYS = ROOT / "k8s" / "overlays"
_HYBRID_EP = [sys.executable, "-c", "from hybrid_ep.cli import main; main()"]
_DEFAULT_SHM_MIB = 64
_DEFAULT_MEMLOCK = "8388608"  # of a systemd unit that does not set it
_UNITS = {"Mi": 1, "Gi": 1024}


def _remove(node: Recording, *folders: str) -> None:
    for table in (node.files, node.links, node.devices):
        for path in [path for path in table if any(f"{path}/".startswith(f"{folder}/") for folder in folders)]:
            del table[path]


def azure_node() -> Recording:
    """AKS ND H100 v5: every GPU and every NIC on a bus of its own."""
    node = healthy("hgx-h100")
    for link, target in list(node.links.items()):
        address = link.rpartition("/")[2]
        old = target.removeprefix("../../..")
        if not link.startswith("/sys/bus/pci/") or "0x0604" in node.files[f"/sys{old}/class"]:
            continue
        new = f"/devices/pci{int(address[5:7], 16):04x}:00/{address}"
        node.links = {name: f"../../..{new}" if to == target else to for name, to in node.links.items()}
        node.files = {name.replace(f"/sys{old}/", f"/sys{new}/"): content for name, content in node.files.items()}
    return node


NODES: dict[str, Callable[[], Recording]] = {
    "single-node": lambda: healthy("hgx-h200"),
    "single-node-torchrun": lambda: healthy("hgx-h200"),
    "infiniband": lambda: healthy("hgx-h100"),
    "roce-sriov": lambda: healthy("hgx-h200"),
    "eks-efa": lambda: healthy("p5-efa"),
    "gke": lambda: healthy("hgx-h200"),
    "aks-infiniband": azure_node,
    "gb200-mnnvl": lambda: healthy("gb200-nvl72"),
    "oke-roce": lambda: healthy("oci-h100"),
    "jobset-kueue": lambda: healthy("hgx-h200"),
    "lws-serving": lambda: healthy("hgx-h200"),
}


@dataclass(frozen=True)
class Container:
    """What a container shows of its node."""

    shm_mib: int = _DEFAULT_SHM_MIB
    unlimited_memlock: bool = False
    rdma_devices: bool = False
    opens_rdma_devices: bool = False
    imex_channel: bool = False

    @classmethod
    def of_pod(cls, spec: dict[str, Any]) -> Container:
        """Of a Pod's spec, on a node whose runtime leaves locked memory unlimited for jobs with RDMA."""
        container = spec["containers"][0]
        volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container.get("volumeMounts", [])}
        size = mounts["/dev/shm"]["emptyDir"]["sizeLimit"] if "/dev/shm" in mounts else f"{_DEFAULT_SHM_MIB}Mi"
        security = container["securityContext"]
        rdma = security.get("privileged") or "IPC_LOCK" in security["capabilities"].get("add", [])
        return cls(
            shm_mib=int(size[:-2]) * _UNITS[size[-2:]],
            unlimited_memlock=rdma,
            rdma_devices=rdma or "/dev/infiniband" in mounts,
            opens_rdma_devices=rdma,
            imex_channel=bool(container["resources"].get("claims")),
        )

    def show(self, node: Recording) -> Recording:
        """The node as it looks from inside, without root."""
        _remove(node, "/sys/fs/cgroup/system.slice", "/dev/kmsg")
        _remove(node, *([] if self.rdma_devices else ["/dev/infiniband"]))
        _remove(node, *([] if self.imex_channel else ["/dev/nvidia-caps-imex-channels"]))
        limit = "unlimited" if self.unlimited_memlock else _DEFAULT_MEMLOCK
        node.files["/proc/self/limits"] = f"Max locked memory         {limit}            {limit}            bytes\n"
        node.files["/proc/self/mounts"] = f"tmpfs /dev/shm tmpfs rw,nosuid,nodev,size={self.shm_mib * 1024}k 0 0\n"
        node.files |= {path: "base64:AAAA" for path in node.files if path.endswith("/config")}
        if not self.opens_rdma_devices:
            node.facts["verbs"] = []
        if not self.imex_channel:
            node.facts["cuda"]["fabric_handles"] = False
        node.facts["commands"] = {}
        return node


# Kinds whose Pods ask the doctor in an init container: the way from the object's spec to the Pods'.
_JOBS: dict[str, tuple[str | int, ...]] = {
    "Job": ("template", "spec"),
    "JobSet": ("replicatedJobs", 0, "template", "spec", "template", "spec"),
    "LeaderWorkerSet": ("leaderWorkerTemplate", "workerTemplate", "spec"),
}


@cache
def objects(overlay: str) -> dict[str, dict[str, Any]]:
    """What kustomize makes of an overlay, by kind."""
    require_programs("kubectl")
    return {manifest.kind: manifest.content for manifest in load(OVERLAYS / overlay)}


def doctor_of(overlay: str) -> tuple[list[str], dict[str, Any]]:
    """The doctor's options in an overlay, and the spec of the Pod in which it runs."""
    built = objects(overlay)
    if "DaemonSet" in built:
        spec = built["DaemonSet"]["spec"]["template"]["spec"]
        mark = k8s.commands["mark-node"].make_context("mark-node", list(spec["containers"][0]["args"]))
        assert mark.params["every"] == 600
        return list(mark.params["doctor_options"]), spec
    for kind, path in _JOBS.items():
        if kind not in built:
            continue
        spec = built[kind]["spec"]
        for key in path:
            spec = spec[key]
        return spec["initContainers"][0]["args"], {**spec, "containers": spec["initContainers"]}
    replicas = built["MPIJob"]["spec"]["mpiReplicaSpecs"]
    launcher = replicas["Launcher"]["template"]["spec"]["containers"][0]
    given = {entry["name"]: entry["value"] for entry in launcher["env"]}
    return shlex.split(f"{given['DOCTOR_PROFILE']} {given['DOCTOR_OPTIONS']}"), replicas["Worker"]["template"]["spec"]


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the NVML stub."""
    return build_stub(tmp_path_factory.mktemp("stub"))


def examine(stub: Path, root: Path, node: Recording, options: list[str]) -> subprocess.CompletedProcess[str]:
    node.write(root)
    environment = {**stub_environment(stub, root / "hybrid_ep" / "nvml.conf"), "COLUMNS": "200"}
    words = [*_HYBRID_EP, "doctor", "--sysroot", str(root), *options]
    return subprocess.run(words, env=environment, capture_output=True, text=True, cwd=ROOT, check=False)


def test_every_overlay_with_gpus_has_a_sound_node() -> None:
    named = {path.name for path in OVERLAYS.iterdir()}
    assert named == NODES.keys() | {"cpu", "cpu-torchrun", "node-doctor"}


@pytest.mark.parametrize("overlay", NODES)
def test_doctor_of_an_overlay_lets_its_sound_node_pass(stub: Path, tmp_path: Path, overlay: str) -> None:
    options, spec = doctor_of(overlay)
    done = examine(stub, tmp_path, Container.of_pod(spec).show(NODES[overlay]()), options)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("overlay", NODES)
def test_doctor_of_an_overlay_names_a_fault_that_its_job_meets(stub: Path, tmp_path: Path, overlay: str) -> None:
    options, spec = doctor_of(overlay)
    node = Container.of_pod(spec).show(NODES[overlay]())
    node.nvml["gpu.3.link.7.state"] = "0"
    node.files["/proc/self/mounts"] = "tmpfs /dev/shm tmpfs rw,size=65536k 0 0\n"
    wanted = ["nvlink.links", "host.shm"]
    if "IPC_LOCK" in str(spec) or "privileged': True" in str(spec):
        (port, *_) = sorted(path for path in node.files if path.endswith("/ports/1/state"))
        node.files |= {port: "1: DOWN\n", "/proc/self/limits": "Max locked memory 65536 65536 bytes\n"}
        wanted += ["nic.state", "host.memlock"]
    done = examine(stub, tmp_path, node, options)
    assert done.returncode == 1, done.stdout + done.stderr
    assert [check for check in wanted if f"{check}:" not in done.stdout] == []


@pytest.mark.parametrize("overlay", ["cpu", "cpu-torchrun"])
def test_overlay_without_gpus_passes_on_a_node_with_gpus(stub: Path, tmp_path: Path, overlay: str) -> None:
    """Its Pods see the node's GPUs in /sys, and no NVML."""
    options, spec = doctor_of(overlay)
    node = Container.of_pod(spec).show(healthy("hgx-h200"))
    node.nvml = {}
    done = examine(stub, tmp_path, node, options)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("platform", ["hgx-h100", "hgx-h200", "gb200-nvl72", "cpu"])
def test_daemonset_finds_a_sound_node_fit(stub: Path, tmp_path: Path, platform: str) -> None:
    """Not only without a fault: a job that asks for the label `pass` must find nodes."""
    options, spec = doctor_of("node-doctor")
    done = examine(stub, tmp_path, Container.of_pod(spec).show(healthy(platform)), options)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("path", "content", "check"),
    [
        ("/sys/class/infiniband/mlx5_5/ports/1/state", "1: DOWN", "nic.state"),
        ("/dev/infiniband/uverbs6", None, "nic.uverbs"),
        ("/sys/kernel/iommu_groups/0/type", "DMA-FQ", "host.iommu"),
    ],
)
def test_daemonset_finds_the_nodes_faults(
    stub: Path, tmp_path: Path, path: str, content: str | None, check: str
) -> None:
    options, spec = doctor_of("node-doctor")
    node = Container.of_pod(spec).show(healthy("hgx-h200"))
    _remove(node, path)
    node.files |= {} if content is None else {path: content}
    if check == "host.iommu":  # a group that a GPU is in
        gpu = "/sys/devices/pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:01.0/0000:14:00.0"
        node.links[f"{gpu}/iommu_group"] = "/sys/kernel/iommu_groups/0"
    done = examine(stub, tmp_path, node, options)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{check}:" in done.stdout


# Of the Pod and not of the node, of processes in other Pods, of files that the Pod does not have, or for root alone.
NOT_OF_THE_NODE_DOCTOR = {
    *("driver.torch", "software.packages", "host.memlock", "host.nofile", "host.shm"),
    *("mnnvl.imex_daemon", "mnnvl.imex_channel", "mnnvl.fabric_handle", "gpu.memory_use", "host.container_toolkit"),
    *("host.acs", "nic.mtu", "nic.pcie_settings"),
    # A context takes memory of GPUs that jobs use; a stall needs several runs, a cable mlxlink of the node,
    # and NCCL's variables are those of a job.
    *("driver.cuda_start", "gpu.stalled", "nic.cable", "software.nccl"),
}


def test_daemonset_asks_for_every_check_that_it_can_answer() -> None:
    options, _ = doctor_of("node-doctor")
    groups = {option.removeprefix("--group=") for option in options if option.startswith("--group=")}
    asked = {option.removeprefix("--check=") for option in options if option.startswith("--check=")}
    sidecar = (ROOT / "k8s" / "components" / "node-doctor-kernel-log" / "sidecar.yaml").read_text()
    asked |= set(re.findall(r"--check=(\S+)", sidecar))
    left_out = {check.id for check in all_checks() if check.id.partition(".")[0] not in groups} - asked
    assert left_out == NOT_OF_THE_NODE_DOCTOR


@pytest.mark.parametrize(
    ("key", "value", "check"),
    [
        ("gpu.2.name", "NVIDIA H100 PCIe", "gpu.model"),
        ("gpu.3.mig_mode", "1", "gpu.mig"),
        ("gpu.3.compute_mode", "3", "gpu.compute_mode"),
        ("gpu.2.bar1_bytes", "268435456", "gpu.bar1"),
    ],
)
def test_daemonset_finds_the_faults_of_gpus(stub: Path, tmp_path: Path, key: str, value: str, check: str) -> None:
    options, spec = doctor_of("node-doctor")
    node = Container.of_pod(spec).show(healthy("hgx-h200"))
    node.nvml[key] = value
    done = examine(stub, tmp_path, node, options)
    assert f"{check}:" in done.stdout, done.stdout + done.stderr


def docker_run(
    stub: Path, folder: Path, node: Recording, bench: int = 0, gpus: int = 8
) -> subprocess.CompletedProcess[str]:
    """docker/entrypoint without a command, where torch sees so many GPUs and the test ends with `bench`."""
    node.write(folder / "node")
    programs = {
        "python3": f"echo {gpus}",
        "hybrid-ep": f'[ "$1" = doctor ] || {{ echo "ran $*"; exit {bench}; }}\n'
        f'exec {shlex.join(_HYBRID_EP)} doctor --sysroot {folder}/node "${{@:2}}"',
    }
    (folder / "bin").mkdir()
    for name, script in programs.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / "bin" / name).chmod(0o755)
    environment = stub_environment(stub, folder / "node" / "hybrid_ep" / "nvml.conf")
    environment |= {"PATH": f"{folder / 'bin'}:{environment['PATH']}", "COLUMNS": "200"}
    words = [str(ROOT / "docker" / "entrypoint")]
    return subprocess.run(words, env=environment, capture_output=True, text=True, cwd=ROOT, check=False)


def test_docker_run_passes_on_a_sound_machine_and_says_what_several_nodes_need(stub: Path, tmp_path: Path) -> None:
    done = docker_run(stub, tmp_path, Container().show(healthy("hgx-h200")))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ran bench --device cuda" in done.stdout
    assert "--ipc host --network host --ulimit memlock=-1 --device /dev/infiniband" in done.stdout


def test_docker_run_without_gpus_is_not_held_to_those_of_the_machine(stub: Path, tmp_path: Path) -> None:
    done = docker_run(stub, tmp_path, Container().show(healthy("hgx-h200")), gpus=0)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ran demo" in done.stdout


def test_docker_run_fails_on_a_machine_with_a_fault(stub: Path, tmp_path: Path) -> None:
    node = Container().show(healthy("hgx-h200"))
    node.nvml["gpu.3.link.7.state"] = "0"
    done = docker_run(stub, tmp_path, node)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "GPU 3: 17 of 18 links up" in done.stdout


def test_docker_run_says_what_may_have_failed_the_benchmark(stub: Path, tmp_path: Path) -> None:
    done = docker_run(stub, tmp_path, Container().show(healthy("hgx-h200")), bench=3)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED (exit status 3)" in done.stdout
    assert re.search(r"^next: .*--ipc host IMAGE, if shared memory ran out \(\S+ here\)", done.stdout, re.MULTILINE)


def test_health_check_is_no_complaint_about_the_container(stub: Path, tmp_path: Path) -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text().replace("\\\n", "")
    lines = [line for line in dockerfile.splitlines() if line.startswith("HEALTHCHECK")]
    assert len(lines) == 3  # of the doctor's image, of those for GPUs, and of the one for CPUs
    for i, line in enumerate(lines):
        command = shlex.split(line.partition(" CMD ")[2].strip("[]").replace(",", " "))
        assert command[:2] == ["hybrid-ep", "doctor"]
        done = examine(stub, tmp_path / str(i), Container().show(healthy("hgx-h200")), command[2:])
        assert done.returncode == 0, done.stdout + done.stderr
