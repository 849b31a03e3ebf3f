"""The commands as a user calls them, on simulated nodes: `hybrid-ep doctor`, `doctor compare`, `topology`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from hybrid_ep.cli import main
from hybrid_ep.cluster.doctor import Profile, load_profile
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


def _hybrid_ep(
    stub: Path, node: Path, *words: str, given: str = "", columns: int = 160
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from hybrid_ep.cli import main; main()", *words]
    environment = {**stub_environment(stub, node / "hybrid_ep" / "nvml.conf"), "COLUMNS": str(columns)}
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


def test_recording_is_judged_without_the_node(stub: Path, node: Path, tmp_path: Path) -> None:
    record = tmp_path / "node.json"
    live = _hybrid_ep(stub, node, "doctor", "--sysroot", str(node), "--json", "--record", str(record))
    nowhere = stub_environment(tmp_path)  # no NVML at all
    command = [sys.executable, "-c", "from hybrid_ep.cli import main; main()", "doctor", "--replay", str(record)]
    done = subprocess.run([*command, "--json"], env=nowhere, capture_output=True, text=True, cwd=ROOT, check=False)
    there, again = (
        {each["id"]: each["seen"] for each in json.loads(text)["results"]} for text in (live.stdout, done.stdout)
    )
    assert again.pop("host.acs") != there.pop("host.acs")  # a recording has no configuration space
    assert again.pop("nic.pcie_settings") != there.pop("nic.pcie_settings")
    assert again == there
    broken = json.loads(record.read_text())
    broken["nvml"]["gpu.3.link.7.state"] = "0"
    record.write_text(json.dumps(broken))
    words = [*command, "--profile", "hgx-h200", "--check", "nvlink.links"]
    done = subprocess.run(words, env=nowhere, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, "17 of 18 links up" in done.stdout) == (1, True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"files": {"/../outside": "x"}}, "an absolute path without '..'"),
        ({"files": {"relative": "x"}}, "an absolute path without '..'"),
        ({"links": {"/sys/a": "/etc"}}, "one that stays in the recording"),
        ({"links": {"/sys/a": "../../etc"}}, "one that stays in the recording"),
        ({"files": {"/sys/a": 1}}, "files is no table of texts"),
        ({"files": {"/sys/a": "x", "/sys/a/b": "y"}}, "is not a recording of a node"),
        ({"more": {}}, "is not a recording of a node"),
    ],
    ids=str,
)
def test_damaged_recording_is_refused(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    file = tmp_path / "node.json"
    file.write_text(json.dumps(change))
    done = CliRunner().invoke(main, ["doctor", "--replay", str(file)])
    assert done.exit_code == 2
    assert says in str(done.exception) + done.output


@pytest.mark.parametrize("words", [["--active"], ["--record", "x"], ["--state", "x"], ["--sysroot", "/tmp"]], ids=str)
def test_replay_refuses_what_needs_a_live_node(words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "node.json"
    file.write_text("{}")
    done = CliRunner().invoke(main, ["doctor", "--replay", str(file), *words])
    assert (done.exit_code, f"--replay with {words[0]}" in done.output) == (2, True)


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


@pytest.mark.parametrize(
    "words",
    [
        ["--quick", "--profile", "hgx-h200"],
        ["--group", "gpu", "--group", "nvlink", "--profile", "hgx-h200", "--record", "node.json"],
        ["--quick", "--record", "node.json"],
    ],
)
def test_driver_that_hangs_is_unknown(stub: Path, tmp_path: Path, words: list[str]) -> None:
    recording = healthy("hgx-h200")
    recording.nvml["hang"] = "1"
    recording.write(tmp_path)
    words = [str(tmp_path / word) if word == "node.json" else word for word in words]
    done = _hybrid_ep(stub, tmp_path, "doctor", "--sysroot", str(tmp_path), "--json", *words)
    assert done.returncode == 2, done.stderr
    silent = [result for result in json.loads(done.stdout)["results"] if result["status"] == "unknown"]
    assert {"gpu.count", "nvlink.links"} <= {result["id"] for result in silent}
    assert {"NVML: no answer in 5 s"} == {result["seen"] for result in silent if result["group"] == "nvlink"}


def test_driver_that_hangs_while_recording_is_left_out(stub: Path, tmp_path: Path) -> None:
    """The check alone does not ask NVML."""
    recording = healthy("hgx-h200")
    recording.nvml["hang"] = "1"
    recording.write(tmp_path)
    words = ["--sysroot", str(tmp_path), "--profile", "hgx-h200", "--check", "host.memlock"]
    done = _hybrid_ep(stub, tmp_path, "doctor", *words, "--record", str(tmp_path / "node.json"))
    assert (done.returncode, done.stderr) == (0, "")
    recorded = json.loads((tmp_path / "node.json").read_text())
    assert (recorded["nvml"], "/proc/self/limits" in recorded["files"]) == ({}, True)


def test_output_that_cannot_be_written_is_no_fault(stub: Path, node: Path, tmp_path: Path) -> None:
    words = ["doctor", "--sysroot", str(node), "--check", "gpu.count", "--json"]
    for option in ("--junit", "--record"):
        done = _hybrid_ep(stub, node, *words, option, str(tmp_path / "missing" / "file"))
        assert (done.returncode, done.stdout) == (2, "")  # refused before the node is read
        assert "cannot be written: there is no folder" in done.stderr


@pytest.mark.parametrize("buffered", [True, False], ids=["buffered", "unbuffered"])
def test_internal_error_is_no_verdict(stub: Path, node: Path, buffered: bool) -> None:
    """Standard output that is full stands for whatever goes wrong in the command itself."""
    command = [sys.executable, "-c", "from hybrid_ep.cli import main; main()", "doctor", "--check", "host.memlock"]
    environment = stub_environment(stub, node / "hybrid_ep" / "nvml.conf")
    environment["PYTHONUNBUFFERED"] = "" if buffered else "1"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*command, "--sysroot", str(node)],
            env=environment,
            stdout=full,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            check=False,
        )
    assert done.returncode == 2
    assert b"internal error: OSError" in done.stderr


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
    assert "0008:01:00.0, module 1, Gen5 x16, NVLink 18/18" in text
    page = (ROOT / "docs" / "topology.md").read_text()
    assert [line for line in page.split("```")[3].splitlines() if line.rstrip() not in text] == []


def test_topology_names_no_rack_where_there_is_none(stub: Path, tmp_path: Path) -> None:
    healthy("hgx-b200").write(tmp_path)
    text = _hybrid_ep(stub, tmp_path, "topology", "--sysroot", str(tmp_path)).stdout
    assert "rack" not in text
    assert "0000:13:00.0, module 1, Gen5 x16, NVLink 18/18" in text


def test_topology(stub: Path, node: Path, tmp_path: Path) -> None:
    done = _hybrid_ep(stub, node, "topology", "--sysroot", str(node), "--json", "--svg", str(tmp_path / "node.svg"))
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["missing"] == {}
    assert [row[idx] for idx, row in enumerate(shown["nic_distances"])] == ["PIX"] * 8
    assert [sum(link["active"] for link in gpu["links"]) for gpu in shown["gpus"]] == [18] * 8
    assert shown["gpus"][3]["nvlink_peers"] == [0, 1, 2, 4, 5, 6, 7]
    assert "GPU 7" in (tmp_path / "node.svg").read_text()


def test_topology_of_a_driver_that_hangs(stub: Path, tmp_path: Path) -> None:
    """The rest of the node is shown."""
    recording = healthy("hgx-h200")
    recording.nvml["hang"] = "1"
    recording.write(tmp_path)
    done = _hybrid_ep(stub, tmp_path, "topology", "--sysroot", str(tmp_path), "--json")
    shown = json.loads(done.stdout)
    assert shown["missing"] == {"nvml": "NVML: no answer in 5 s"}
    assert (len(shown["gpus"]), len(shown["nics"])) == (8, 8)


def test_topology_of_a_large_node_fits_80_columns(stub: Path, tmp_path: Path) -> None:
    healthy("hgx-h100 with storage").write(tmp_path)
    done = _hybrid_ep(stub, tmp_path, "topology", "--sysroot", str(tmp_path), columns=80)
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    (header,) = [number for number, line in enumerate(lines) if line.startswith("NIC–GPU")]
    assert lines[header].split() == ["NIC–GPU", *(f"GPU{i}" for i in range(8))]
    rows = [line.split() for line in lines[header + 1 : header + 11]]
    assert [row[0] for row in rows] == [f"mlx5_{i}" for i in range(10)]
    assert {len(row) for row in rows} == {9}
    assert [row[1 + i] for i, row in enumerate(rows[:8])] == ["PIX*"] * 8
    nics = ",".join(f"mlx5_{i}" for i in range(8))
    assert f"NCCL_IB_HCA=={nics}" in lines
    assert f"HYBRID_EP_NICS={nics}" in lines
    assert "NUMA node 1  CPUs 56-111,168-223" in done.stdout


def test_topology_writes_a_file_for_nccl(stub: Path, node: Path, tmp_path: Path) -> None:
    file = tmp_path / "topo.xml"
    assert _hybrid_ep(stub, node, "topology", "--sysroot", str(node), "--nccl", str(file)).returncode == 0
    assert " />" not in file.read_text()  # NCCL takes the space for an attribute without a name
    system = ElementTree.parse(file).getroot()
    assert [cpu.attrib["numaid"] for cpu in system] == ["0", "1"]
    # CPUs 0-55 and 112-167, as the kernel writes masks.
    assert system[0].attrib["affinity"] == "000000ff,ffffffff,ffff0000,00000000,00ffffff,ffffffff"
    path = [system[0]]
    while len(path[-1]):
        path.append(path[-1][0])
    assert [part.attrib["busid"] for part in path[1:]] == [
        "0000:10:01.0",
        "0000:11:00.0",
        "0000:12:00.0",
        "0000:13:00.0",
    ]
    assert path[-1].attrib["class"] == "0x030200"
    assert (path[-1].attrib["link_speed"], path[-1].attrib["link_width"]) == ("32.0 GT/s PCIe", "16")
    devices = [part.attrib["busid"] for part in system.iter("pci") if not len(part)]
    assert len(devices) == 16
    refused = _hybrid_ep(stub, node, "topology", "--sysroot", str(node), "--nccl", str(tmp_path / "no" / "x"))
    assert (refused.returncode, "cannot be written" in refused.stderr) == (2, True)


def test_memory_between_runs(stub: Path, node: Path, tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    words = ["doctor", "--sysroot", str(node), "--check", "nic.errors", "--json", "--state", str(state)]
    assert _hybrid_ep(stub, node, *words).returncode == 0
    tree = json.loads(state.read_text())
    tree["unix_time_s"] -= 7200
    for row in tree["counters"]["nic.errors"]:
        row[2] -= 2 if row[:2] == ["mlx5_3/1", "link_downed"] else 0
    state.write_text(json.dumps(tree))
    done = _hybrid_ep(stub, node, *words)
    assert done.returncode == 1
    assert "mlx5_3/1 link_downed rose by 2 in 2.0 h since the last run" in done.stdout
    assert _hybrid_ep(stub, node, *words).returncode == 0  # told once
    state.write_text("damaged")
    done = _hybrid_ep(stub, node, *words)
    assert (done.returncode, "is not used" in done.stderr) == (0, True)


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
    assert "is not a report of" in done.stderr
