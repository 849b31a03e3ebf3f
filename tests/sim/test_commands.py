"""The commands as a user calls them, on simulated nodes: `hybrid-ep doctor`, `doctor compare`, `topology`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from hybrid_ep.doctor import Profile, load_profile
from tests.sim.platforms import healthy
from tests.sim.scenario import ROOT, build_stub, stub_environment


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the NVML stub."""
    return build_stub(tmp_path_factory.mktemp("stub"))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A healthy HGX H200."""
    root = tmp_path_factory.mktemp("node")
    healthy("hgx-h200").write(root)
    return root


def _hybrid_ep(stub: Path, node: Path, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from hybrid_ep.cli import main; main()", *words]
    environment = {**stub_environment(stub, node / "hybrid_ep" / "nvml.conf"), "COLUMNS": "160"}
    return subprocess.run(command, env=environment, input=given, capture_output=True, text=True, cwd=ROOT, check=False)


def test_doctor_on_a_healthy_node(stub: Path, node: Path, tmp_path: Path) -> None:
    junit, record = tmp_path / "doctor.xml", tmp_path / "node.json"
    words = ["doctor", "--sysroot", str(node), "--json", "--junit", str(junit), "--record", str(record)]
    done = _hybrid_ep(stub, node, *words)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["status"], report["profile"]) == ("pass", "hgx-h200")
    assert ElementTree.parse(junit).getroot().attrib["failures"] == "0"
    assert json.loads(record.read_text())["nvml"]["gpu_count"] == "8"


def test_doctor_names_fault_and_remedy(stub: Path, node: Path) -> None:
    done = _hybrid_ep(stub, node, "doctor", "--sysroot", str(node), "--profile", "hgx-b200", "--check", "nvlink.speed")
    assert done.returncode == 1
    assert "26562 MB/s" in done.stdout
    assert "nvlink.speed: Reset the GPUs" in done.stdout


@pytest.mark.parametrize("profile", [[], ["--profile", "hgx-h200"]], ids=["proposed", "given"])
def test_gpus_without_a_driver_are_a_fault(stub: Path, node: Path, tmp_path: Path, profile: list[str]) -> None:
    done = _hybrid_ep(stub, tmp_path, "doctor", "--sysroot", str(node), "--group", "gpu", "--json", *profile)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    (count,) = [result for result in report["results"] if result["status"] == "fail"]
    assert (count["id"], "0 by NVML, 8 by PCI; NVML: Driver Not Loaded" in count["seen"]) == ("gpu.count", True)
    assert report["profile"] == (profile[-1] if profile else "gpu-server")


def test_container_that_was_given_no_gpu_is_no_fault_of_the_cpu_profile(stub: Path, node: Path, tmp_path: Path) -> None:
    """It sees the node's GPUs on PCI all the same."""
    done = _hybrid_ep(stub, tmp_path, "doctor", "--sysroot", str(node), "--profile", "cpu")
    assert done.returncode == 0, done.stdout


def test_doctor_takes_a_profile_from_standard_input(stub: Path, node: Path) -> None:
    site = Profile("site", load_profile("hgx-h200").values | {"severity": {"gpu.count": "warning"}})
    words = ["doctor", "--sysroot", str(node), "--check", "gpu.count", "--json", "--profile", "-"]
    report = json.loads(_hybrid_ep(stub, node, *words, given=site.to_text()).stdout)
    assert (report["profile"], report["results"][0]["severity"]) == ("site", "warning")
    refused = _hybrid_ep(stub, node, *words, given="[]")
    assert (refused.returncode, "on standard input holds a list" in refused.stderr) == (2, True)


def test_doctor_refuses_what_it_does_not_know(stub: Path, node: Path) -> None:
    done = _hybrid_ep(stub, node, "doctor", "--check", "gpu.speed")
    assert done.returncode == 2
    assert "check 'gpu.speed' does not exist" in done.stderr


def _fabric(stub: Path, node: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the doctor says of the fabric's state, and what the topology says of GPU 0."""
    done = _hybrid_ep(stub, node, "doctor", "--sysroot", str(node), "--check", "nvlink.fabric_state", "--json")
    shown = json.loads(_hybrid_ep(stub, node, "topology", "--sysroot", str(node), "--json").stdout)
    assert shown["missing"] == {}
    return json.loads(done.stdout)["results"][0], shown["gpus"][0]


def test_driver_with_only_the_older_function(tmp_path: Path, node: Path) -> None:
    result, gpu = _fabric(build_stub(tmp_path, without=("nvmlDeviceGetGpuFabricInfoV",)), node)
    assert result["status"] == "pass"
    assert (gpu["fabric"]["state"], gpu["fabric"]["status"]) == (3, 0)


def test_driver_without_a_function(tmp_path: Path, node: Path) -> None:
    """What an old driver lacks is not known; the rest of NVML answers all the same."""
    names = ("nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetGpuFabricInfo", "nvmlDeviceGetPlatformInfo")
    result, gpu = _fabric(build_stub(tmp_path, without=names), node)
    assert result["status"] == "unknown"
    assert "Function Not Found" in result["seen"]
    assert (gpu["fabric"], gpu["platform"]) == (None, None)
    assert (gpu["pci_address"], len(gpu["links"])) == ("0000:13:00.0", 18)


def test_topology_says_where_a_rack_holds_the_tray(stub: Path, tmp_path: Path) -> None:
    healthy("gb200-nvl72").write(tmp_path)
    text = _hybrid_ep(stub, tmp_path, "topology", "--sysroot", str(tmp_path)).stdout
    assert "rack 1820000000001 slot 14 compute tray 4" in text
    assert "0008:01:00.0, module 1, NVLink 18/18 up" in text
    page = (ROOT / "docs" / "topology.md").read_text()
    assert [line for line in page.split("```")[3].splitlines() if line.rstrip() not in text] == []


def test_topology_names_no_rack_where_there_is_none(stub: Path, tmp_path: Path) -> None:
    healthy("hgx-b200").write(tmp_path)
    text = _hybrid_ep(stub, tmp_path, "topology", "--sysroot", str(tmp_path)).stdout
    assert "rack" not in text
    assert "0000:13:00.0, module 1, NVLink 18/18 up" in text


def test_topology(stub: Path, node: Path, tmp_path: Path) -> None:
    done = _hybrid_ep(stub, node, "topology", "--sysroot", str(node), "--json", "--svg", str(tmp_path / "node.svg"))
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["missing"] == {}
    assert [row[idx] for idx, row in enumerate(shown["nic_distances"])] == ["PIX"] * 8
    assert [sum(link["active"] for link in gpu["links"]) for gpu in shown["gpus"]] == [18] * 8
    assert shown["gpus"][3]["nvlink_peers"] == [0, 1, 2, 4, 5, 6, 7]
    assert "GPU 7" in (tmp_path / "node.svg").read_text()


def test_compare(stub: Path, node: Path, tmp_path: Path) -> None:
    report = json.loads(_hybrid_ep(stub, node, "doctor", "--sysroot", str(node), "--quick", "--json").stdout)
    files = []
    for host, driver in (("a", "580.95.05"), ("b", "570.86.15")):
        changed = {**report, "host": host, "facts": {**report["facts"], "driver": driver}}
        files.append(tmp_path / f"{host}.json")
        files[-1].write_text(json.dumps(changed))
    done = _hybrid_ep(stub, node, "doctor", "compare", *map(str, files))
    assert done.returncode == 1
    assert "compare.driver" in done.stdout
    (tmp_path / "c.json").write_text("{}")
    done = _hybrid_ep(stub, node, "doctor", "compare", str(files[0]), str(tmp_path / "c.json"))
    assert done.returncode == 2
    assert "is no report of" in done.stderr
