"""The doctor's own logic: statuses, exit codes, profiles, selection, comparison; nodes are simulated in tests/sim."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pynvml
import pytest

from hybrid_ep.cluster.doctor import (
    Finding,
    Node,
    Profile,
    Report,
    Result,
    Selection,
    Severity,
    Status,
    Unreadable,
    examine,
    load_profile,
    propose_profile,
)
from hybrid_ep.cluster.doctor.compare import COMPARISONS, compare
from hybrid_ep.cluster.doctor.document import document
from hybrid_ep.cluster.doctor.model import to_junit
from hybrid_ep.cluster.doctor.nvml import P2P_NVLINK
from hybrid_ep.cluster.doctor.profile import shipped_profiles
from hybrid_ep.cluster.doctor.registry import GROUPS, all_checks, survey
from hybrid_ep.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
_CLUSTER = "0123456789abcdef0123456789abcdef"


_GPU = {
    "name": "NVIDIA GB200",
    "uuid": "",
    "cluster_uuid": _CLUSTER,
    "clique": 1,
    "memory_bytes": 185 << 30,
    "power_limit": 1200000,
    "vbios": "97.00.b9",
}
_PORT = {
    "nic": "mlx5_0",
    "port": 1,
    "link_layer": "InfiniBand",
    "rate_gbps": 400.0,
    "mtu": 4096,
    "gid": None,
    "pkey": "0xffff",
}


def _result(status: Status, severity: Severity = Severity.ERROR) -> Result:
    return Result("gpu.count", "gpu", "number of GPUs", status, severity, "7", "8", "NVML", "reseat it")


def _report(host: str, *results: Result, **facts: Any) -> Report:
    known: dict[str, Any] = {
        "driver": "580.95.05",
        "cuda": 13000,
        "packages": {"torch": "2.11.0"},
        "gpus": [{**_GPU, "uuid": f"{host}-{i}"} for i in range(4)],
        "nic_firmware": ["28.43.2026"],
        "nic_guids": {"mlx5_0": f"guid of {host}"},
        "ports": [
            _PORT,
        ],
        "kernel": "6.8.0",
        "memory_gib": 944.6,
        "boot_id": f"boot of {host}",
        "tree": ["GPU 0 0008:01:00.0 NUMA 0", "mlx5_0 0000:03:00.0 NUMA 0", "GPU 0 → mlx5_0 NODE"],
        "clock": {"synchronized": True, "max_error_us": 2000},
        "domain_gpus": 8,
        "clock_error_ms": 500,
    }
    return Report("0.1.0", host, "gb200-nvl72", "given", 0.1, results, facts={**known, **facts})


# ---- results, exit codes, output ----


@pytest.mark.parametrize(
    ("results", "status", "exit_code"),
    [
        ([_result(Status.PASS)], Status.PASS, 0),
        ([_result(Status.PASS), _result(Status.FAIL)], Status.FAIL, 1),
        ([_result(Status.UNKNOWN), _result(Status.FAIL)], Status.FAIL, 1),
        ([_result(Status.PASS), _result(Status.UNKNOWN)], Status.UNKNOWN, 2),
        ([_result(Status.FAIL, Severity.WARNING)], Status.PASS, 0),
        ([_result(Status.UNKNOWN, Severity.WARNING)], Status.PASS, 0),
    ],
)
def test_exit_code(results: list[Result], status: Status, exit_code: int) -> None:
    report = _report("a", *results)
    assert (report.status, report.exit_code) == (status, exit_code)


def test_report_survives_json() -> None:
    report = _report("a", _result(Status.FAIL), _result(Status.UNKNOWN, Severity.WARNING))
    assert Report.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_junit_never_shows_a_fault_as_passed() -> None:
    statuses = (Status.PASS, Status.FAIL, Status.UNKNOWN)
    results = [_result(status, severity) for status in statuses for severity in Severity]
    suite = ElementTree.fromstring(to_junit(_report("a", *results)))
    assert suite.attrib["tests"] == "6"
    assert suite.attrib["failures"] == "1"
    assert suite.attrib["errors"] == "1"
    inside = [[child.tag for child in case] for case in suite]
    assert inside == [[], [], ["failure"], ["system-out"], ["error"], ["system-out"]]


def test_texts_of_a_report_are_fit_for_terminals_and_xml() -> None:
    odd = "\x1b[31mred\x00\ud800\u202e" + "x" * 5000
    report = _report("a\x07", replace(_result(Status.FAIL), seen=odd))
    assert report.host == r"a\x07"
    assert report.results[0].seen.startswith(r"\x1b[31mred\x00\ud800\u202e")
    assert report.results[0].seen.endswith(f"({len(odd)} characters)")
    assert ElementTree.fromstring(to_junit(report)).attrib["failures"] == "1"


def test_check_that_breaks_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(node: Node) -> dict[str, str]:
        raise ZeroDivisionError("by\nzero")

    monkeypatch.setattr(Node, "packages", broken)
    report = examine(Node(tmp_path), load_profile("cpu"), "given", Selection(ids=("software.packages",)))
    assert report.results[0].status is Status.UNKNOWN
    assert report.results[0].seen == r"internal error: ZeroDivisionError: by\nzero"
    assert report.exit_code == 2


def test_survey_keeps_faults_and_what_could_not_be_read_apart() -> None:
    def fault(number: int) -> str | None:
        if number == 2:
            raise Unreadable("closed")
        return "odd" if number % 2 else None

    assert survey([2, 3], str, fault, "even") == Finding(Status.FAIL, "3: odd")
    assert survey([2, 4], str, fault, "even") == Finding(Status.UNKNOWN, "2: closed")
    assert survey([4, 6], str, fault, "even") == Finding(Status.PASS, "even")
    assert survey([], str, fault, "even").status is Status.UNKNOWN
    assert survey([], str, fault, "even", if_none="no number") == Finding(Status.PASS, "no number")


# ---- checks ----


def test_every_check_says_where_it_reads_what_it_expects_and_what_to_do() -> None:
    checks = all_checks()
    assert len({check.id for check in checks}) == len(checks)
    for check in checks:
        assert check.group in GROUPS
        assert check.title
        assert check.source
        assert check.remedy.endswith(".")
        assert (check.examine is None) != (check.sample is None)
        for name in shipped_profiles():
            filled = load_profile(name).fill(check.expectation)
            assert "{" not in filled


def test_constants_of_nvml_are_numbers() -> None:
    """Some of nvidia-ml-py's constants are tuples by a stray comma; a tuple reaches C as garbage or not at all."""
    assert pynvml.NVML_P2P_CAPS_INDEX_READ == (0,)
    assert P2P_NVLINK == 2
    assert type(P2P_NVLINK) is int


def test_selection_names_what_exists() -> None:
    with pytest.raises(ConfigError, match=r"group 'gpus' does not exist; allowed: driver, gpu"):
        Selection(groups=("gpus",))
    with pytest.raises(ConfigError, match=r"check 'gpu.counts' does not exist"):
        Selection(ids=("gpu.counts",))


def test_selection_takes() -> None:
    def taken(selection: Selection) -> set[str]:
        return {check.id for check in all_checks() if selection.takes(check)}

    everything: set[str] = {check.id for check in all_checks()}
    assert taken(Selection()) == everything
    assert taken(Selection(groups=("gdr",))) == {"gdr.peer_memory", "gdr.ibgda", "gdr.gdrcopy"}
    assert taken(Selection(ids=("gpu.xid",), quick=True)) == {"gpu.xid"}
    both = Selection(groups=("gdr",), ids=("gpu.xid",))
    assert taken(both) == taken(Selection(groups=("gdr",))) | {"gpu.xid"}
    slow: set[str] = everything - taken(Selection(quick=True))
    counters = {"gpu.errors", "gpu.stalled", "nvlink.errors", "nvlink.outlier", "nic.errors", "host.aer"}
    programs = {"driver.cuda_start", "nvlink.fabric_version", "mnnvl.imex_daemon", "nic.cable"}
    assert slow == counters | programs | {"gpu.xid", "host.kernel_log", "host.kernel_stalls"}


def test_reference_has_every_check_and_every_key_of_a_profile() -> None:
    page = document()
    for check in all_checks():
        assert f"\n### {check.id}\n" in page
        assert check.remedy in page
    for name in shipped_profiles():
        assert f" {name} |" in page
        sections = load_profile(name).values
        keys = [(section, key) for section, keys in sections.items() if isinstance(keys, dict) for key in keys]
        assert [f"{s}.{k}" for s, k in keys if s not in ("severity", "match") and f"| {s}.{k} | " not in page] == []


def test_page_of_other_validators_names_checks_that_exist() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text()
    named = set(re.findall(r"`((?:driver|gpu|nvlink|mnnvl|nic|affinity|gdr|host|software|active|compare)\.\w+)`", page))
    active = "".join(
        path.read_text() for path in sorted((ROOT / "hybrid_ep" / "cluster" / "doctor" / "active").glob("*.py"))
    )
    between = (ROOT / "hybrid_ep" / "cluster" / "doctor" / "compare.py").read_text()
    known = {check.id for check in all_checks()} | set(re.findall(r'"((?:active|compare)\.\w+)"', active + between))
    assert len(named) > 40
    assert named <= known


# ---- profiles ----


@pytest.mark.parametrize("name", shipped_profiles())
def test_shipped_profile_follows_the_schema(name: str, tmp_path: Path) -> None:
    """By name it is loaded without a check, which a file gets."""
    (tmp_path / "site.yaml").write_text(f"extends: {name}\n")
    assert load_profile(str(tmp_path / "site.yaml")).values == load_profile(name).values


def test_packages_of_jobs_are_not_judged_where_no_job_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = load_profile("gpu-server")
    selection = Selection(ids=("software.packages", "driver.torch", "driver.cuda"))
    monkeypatch.setenv("HYBRID_EP_CHECKS_ONLY", "on")
    report = examine(Node(tmp_path), profile, "given", selection)
    assert [result.id for result in report.results] == ["driver.cuda"]
    assert set(report.not_applicable) == {"software.packages", "driver.torch"}
    monkeypatch.delenv("HYBRID_EP_CHECKS_ONLY")
    assert len(examine(Node(tmp_path), profile, "given", selection).results) == 3


def test_small_share_survives_the_way_to_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON writes 1e-07, which YAML takes for a word."""
    values = load_profile("hgx-h100").values
    site = Profile("site", {**values, "bandwidth": {**values["bandwidth"], "of_nics": {"link": 1e-7}}})
    assert site.to_text().startswith("{")  # by which the playbooks' module knows it from a name
    monkeypatch.setattr("sys.stdin", io.StringIO(site.to_text()))
    assert load_profile("-") == site


@pytest.mark.parametrize(
    ("gpu_name", "profile"),
    [
        ("NVIDIA A100-SXM4-80GB", "dgx-a100"),
        ("NVIDIA H100 80GB HBM3", "hgx-h100"),
        ("NVIDIA H200", "hgx-h200"),
        ("NVIDIA B200", "hgx-b200"),
        ("NVIDIA GB200", "gb200-nvl72"),
        ("NVIDIA GB300", "gb300-nvl72"),
        ("NVIDIA H20", "hgx-h20"),
        ("NVIDIA H20-3e", "hgx-h20"),
        ("NVIDIA H800", "hgx-h800"),
        ("NVIDIA B300 SXM6 AC", "hgx-b300"),
    ],
)
def test_profile_is_proposed_by_gpu_model(gpu_name: str, profile: str) -> None:
    assert propose_profile([gpu_name] * 8, 8)[0] == profile


@pytest.mark.parametrize(
    ("gpu_names", "profile", "source"),
    [
        ([], "gpu-server", "8 GPUs on PCI, and NVML names none"),
        (["NVIDIA L40S"], "gpu-server", "no other profile is for NVIDIA L40S"),
        (["NVIDIA H100 PCIe"], "gpu-server", "no other profile is for NVIDIA H100 PCIe"),
        (["NVIDIA H200 NVL"], "gpu-server", "no other profile is for NVIDIA H200 NVL"),
        (["NVIDIA GH200 480GB"], "gpu-server", "no other profile is for NVIDIA GH200 480GB"),
        (["NVIDIA L4", "NVIDIA H200"], "gpu-server", "no other profile is for NVIDIA H200, NVIDIA L4"),
        (["NVIDIA L4"] + ["NVIDIA H200"] * 7, "hgx-h200", "proposed by GPU model 'NVIDIA H200'"),
    ],
)
def test_other_gpus_are_held_to_what_any_gpu_must_do(gpu_names: list[str], profile: str, source: str) -> None:
    assert propose_profile(gpu_names, 8) == (profile, source)


_AZURE = "Microsoft Corporation; Virtual Machine; 7783-7084-3265-9085-8269-3286-77; 15b3"


@pytest.mark.parametrize(
    ("gpu_name", "machine", "profile"),
    [
        ("NVIDIA H100 80GB HBM3", "Supermicro; SYS-821GE-TNHR; Default string; 15b3", "hgx-h100"),
        ("NVIDIA H100 80GB HBM3", _AZURE, "azure-nd-h100"),
        ("NVIDIA H100 NVL", _AZURE, "azure-nc"),
        ("NVIDIA H100 NVL", "Dell Inc.; PowerEdge R760xa", "h100-nvl"),
        ("NVIDIA H100 80GB HBM3", "Google; Google Compute Engine; Google", "gcp-a3"),
        ("NVIDIA H100 80GB HBM3", "1d0f", "p5-efa"),  # whose firmware cannot be seen
        ("NVIDIA H100 80GB HBM3", "Amazon EC2; p5.4xlarge; Amazon EC2; 1d0f", "p5-4xlarge"),
        ("NVIDIA H200", "Amazon EC2; p5e.48xlarge; Amazon EC2; 1d0f", "p5e-efa"),
        ("NVIDIA H200", "Amazon EC2; p5en.48xlarge; Amazon EC2; 1d0f", "p5en-efa"),
        ("NVIDIA L40S", _AZURE, "gpu-server"),
    ],
)
def test_profile_is_proposed_by_the_machine_too(gpu_name: str, machine: str, profile: str) -> None:
    assert propose_profile([gpu_name] * 8, 8, machine=machine)[0] == profile


def test_machine_without_gpus_gets_the_cpu_profile_unless_it_had_some() -> None:
    assert propose_profile([], 0)[0] == "cpu"
    assert propose_profile([], 0, had_gpus="the last run saw 8 GPUs")[0] == "gpu-server"
    assert propose_profile([], 0, machine="NVIDIA; DGXH100", product="DGXH100")[0] == "hgx-h100"
    assert propose_profile([], 0, machine=_AZURE, product="Virtual Machine")[0] == "cpu"  # any machine of Azure


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: hgx-h100\nnic: {counts: 8}", "nic: .*'counts' was unexpected"),
        ("extends: hgx-h100\nnic: {count: many}", "nic.count: 'many' is not of type"),
        ("extends: hgx-h100\nnic: {mtu: 9000}", "nic.mtu: 9000 is not one of"),
        ("extends: no-such\n", "cannot be read"),
        ("- a list\n", "holds a list"),
        ("gpu: [", "cannot be read"),
    ],
)
def test_wrong_profile_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_profile(str(path))


def test_profiles_that_extend_each_other_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b\n")
    (tmp_path / "b.yaml").write_text("extends: a\n")
    with pytest.raises(ConfigError, match="extends itself"):
        load_profile(str(tmp_path / "a.yaml"))
    with pytest.raises(ConfigError, match=r"profile 'nope' is not known; allowed: azure-nc, azure-nd-a100"):
        load_profile("nope")


def test_site_changes_only_what_it_names(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("extends: hgx-h100\nnic: {count: 16, rate_gbps: 200}\nseverity: {host.acs: 'off'}\n")
    site, base = load_profile(str(path)), load_profile("hgx-h100")
    assert (site["nic.count"], site["nic.rate_gbps"], site["nic.mtu"]) == (16, 200, base["nic.mtu"])
    assert site["nvlink.links"] == 18
    assert site.severity_of("host.acs") == "off"


# ---- reading ----


def test_missing_is_a_fact_only_where_the_folder_can_be_seen(tmp_path: Path) -> None:
    (tmp_path / "sys/module").mkdir(parents=True)
    node = Node(tmp_path)
    assert not node.exists("/sys/module/nvidia_peermem")
    with pytest.raises(Unreadable, match="/sys/class: No such file"):
        node.exists("/sys/class/infiniband")


def test_regular_file_is_no_device_on_a_live_node() -> None:
    node = Node()
    assert node.char_device("/dev/null") == (1, 3)
    assert node.char_device("/proc/version") is None


def test_program_that_is_missing_or_fails_is_unreadable() -> None:
    node = Node()
    assert node.command("echo", "here") == "here\n"
    with pytest.raises(Unreadable, match="no-such-program is not installed"):
        node.command("no-such-program")
    with pytest.raises(Unreadable, match="exit status 1"):
        node.command("false")


def test_clock_of_this_machine_can_be_read() -> None:
    clock = Node().clock()
    assert isinstance(clock.synchronized, bool)
    assert clock.max_error_us >= 0


def test_cuda_of_torch_is_what_torch_says() -> None:
    torch = pytest.importorskip("torch")
    assert Node().torch_cuda() == torch.version.cuda


class _Torch:
    """An installed distribution whose files lie in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def locate_file(self, path: str) -> Path:
        return self._folder / path


@pytest.mark.parametrize(
    ("line", "cuda"),
    [("cuda: Optional[str] = '13.0'", "13.0"), ("cuda = '12.8'", "12.8"), ("cuda: Optional[str] = None", None)],
)
def test_cuda_of_torch_is_read_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, cuda: str | None
) -> None:
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: _Torch(tmp_path))
    with pytest.raises(Unreadable, match=r"torch/version\.py: No such file"):
        Node().torch_cuda()
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(f"__all__ = ['cuda']\n{line}\nhip = None\n")
    assert Node().torch_cuda() == cuda
    (tmp_path / "torch" / "version.py").write_text("hip = None\n")
    with pytest.raises(Unreadable, match="names no CUDA version"):
        Node().torch_cuda()


def test_a_quick_doctor_imports_only_what_it_needs() -> None:
    """The doctor must run where torch is broken, and start fast: also a DaemonSet's, which reads its JSON."""
    code = """
import sys
from click.testing import CliRunner
from hybrid_ep.cli import main
result = CliRunner().invoke(main, ["doctor", "--quick", "--json", "--profile=cpu"])
assert '"results"' in result.stdout, result
heavy = {"torch", "numpy", "matplotlib", "jsonschema", "jinja2", "rich"} & set(sys.modules)
sys.exit(f"the doctor imports {sorted(heavy)}" if heavy else 0)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr


# ---- several nodes ----


def _outcomes(*reports: Report) -> dict[str, str]:
    return {result.id: result.status.value for result in compare(reports).results}


def test_equal_nodes_agree() -> None:
    assert set(_outcomes(_report("a"), _report("b", memory_gib=943.0)).values()) == {"pass"}
    limited = [{**_PORT, "pkey": "0x7fff"}]  # of the same partition; nic.pkey names the limited member
    assert _outcomes(_report("a"), _report("b", ports=limited))["compare.pkeys"] == "pass"
    assert _outcomes(_report("a"), _report("b", ports=[{**_PORT, "pkey": None}]))["compare.pkeys"] == "unknown"


@pytest.mark.parametrize(
    ("change", "check_id", "seen"),
    [
        ({"driver": "570.86.15"}, "compare.driver", "570.86.15: b; 580.95.05: a"),
        ({"packages": {"torch": "2.10.0"}}, "compare.packages", "torch: 2.10.0 on b, 2.11.0 on a"),
        ({"packages": {}}, "compare.packages", "torch: 2.11.0 on a, missing on b"),
        ({"nic_firmware": ["28.39.1002"]}, "compare.nic_firmware", "28.39.1002: b"),
        ({"clock": {"synchronized": False, "max_error_us": 16000000}}, "compare.clock", "not synchronised: b"),
        (
            {"clock": {"synchronized": True, "max_error_us": 600000}},
            "compare.clock",
            "at most 602.0 ms, between b and a",
        ),
        ({"kernel": "5.15.0"}, "compare.kernel", "5.15.0: b; 6.8.0: a"),
        ({"boot_id": "boot of a"}, "compare.boot", "one node under several names: a, b"),
        ({"nic_guids": {"mlx5_3": "guid of a"}}, "compare.guids", "guid of a: a mlx5_0, b mlx5_3"),
        (
            {"tree": ["GPU 0 0008:01:00.0 NUMA 0", "mlx5_0 0000:03:00.0 NUMA 1", "GPU 0 → mlx5_0 SYS"]},
            "compare.tree",
            "b has mlx5_0 0000:03:00.0 NUMA 1, lacks mlx5_0 0000:03:00.0 NUMA 0",
        ),
        ({"ports": [{**_PORT, "link_layer": "Ethernet"}]}, "compare.network", "1× Ethernet 400 Gb/s MTU 4096: b"),
        ({"ports": [{**_PORT, "mtu": 1024}]}, "compare.network", "1× InfiniBand 400 Gb/s MTU 1024: b"),
        ({"ports": [{**_PORT, "gid": "IB/RoCE v1"}]}, "compare.network", "MTU 4096 IB/RoCE v1: b"),
        ({"ports": [{**_PORT, "pkey": "0x8001"}]}, "compare.pkeys", "0x0001: b; 0x7fff: a"),
        ({"memory_gib": 886.1}, "compare.memory", "886 GiB: b; 945 GiB: a"),
        ({"gpus": [{**_GPU, "vbios": "97.00.a1"}] * 4}, "compare.vbios", "97.00.a1: b; 97.00.b9: a"),
        ({"gpus": [{**_GPU, "power_limit": 900000}] * 4}, "compare.gpus", "4× NVIDIA GB200 185 GiB 900 W: b"),
        ({"gpus": [{**_GPU, "memory_bytes": 92 << 30}] * 4}, "compare.gpus", "4× NVIDIA GB200 92 GiB 1200 W: b"),
    ],
)
def test_difference_is_found_by_its_check_alone(change: dict[str, Any], check_id: str, seen: str) -> None:
    report = compare([_report("a"), _report("b", **change)])
    failed = [result for result in report.results if result.status is not Status.PASS]
    assert [(result.id, result.status) for result in failed] == [(check_id, Status.FAIL)]
    assert seen in failed[0].seen
    assert failed[0].remedy
    assert report.exit_code == (0 if failed[0].severity is Severity.WARNING else 1)


def test_clocks_are_measured_by_an_exchange() -> None:
    """The caller asked at 1000 and had the answer at 1004; the node's clock showed its start and its report."""

    def report(host: str, ahead_s: float) -> Report:
        exchange = {"asked_s": 1000.0, "received_s": 1004.0}
        return _report(host, **exchange, started_s=1001.0 + ahead_s, unix_time_s=1003.0 + ahead_s)

    def clock(*reports: Report) -> Result:
        return {result.id: result for result in compare(reports).results}["compare.clock"]

    assert clock(report("a", 0), report("b", 1.5)).status is Status.PASS  # within what the exchanges took
    found = clock(report("a", 0), report("b", 60))
    assert (found.status, found.shown_as) == (Status.FAIL, "warn")
    assert found.seen == "at least 58000.0 ms apart, b ahead of a"


def test_another_clique_in_the_cluster() -> None:
    gpus = [{**_GPU, "uuid": str(i), "clique": 2} for i in range(4)]
    outcomes = _outcomes(_report("a"), _report("b", gpus=gpus))
    assert outcomes["compare.clique"] == outcomes["compare.domain_complete"] == "fail"


def test_incomplete_domain() -> None:
    report = compare([_report("a", domain_gpus=72), _report("b", domain_gpus=72)])
    found = {result.id: result for result in report.results}["compare.domain_complete"]
    assert found.status is Status.FAIL
    assert found.seen == f"cluster {_CLUSTER} clique 1: 8 of 72 GPUs on 2 nodes"


def test_domain_with_too_many_gpus() -> None:
    report = compare([_report("a", domain_gpus=4), _report("b", domain_gpus=4)])
    found = {result.id: result for result in report.results}["compare.domain_complete"]
    assert (found.status, found.seen) == (Status.FAIL, f"cluster {_CLUSTER} clique 1: 8 of 4 GPUs on 2 nodes")


def test_node_outside_every_domain() -> None:
    report = compare([_report("a", domain_gpus=4), _report("b", gpus=[], domain_gpus=4)])
    found = {result.id: result for result in report.results}["compare.clique"]
    assert (found.status, found.seen) == (Status.FAIL, "in no domain: b")


def test_other_platform() -> None:
    outcomes = _outcomes(_report("a"), replace(_report("b"), profile="hgx-h200"))
    assert outcomes["compare.profile"] == "fail"


def test_unknown_stays_unknown() -> None:
    report = compare([_report("a", clock=None, driver=None), _report("b")])
    unknown = {result.id for result in report.results if result.status is Status.UNKNOWN}
    assert unknown == {"compare.clock", "compare.driver"}
    assert report.exit_code == 2  # by the driver; clocks only warn


def test_comparison_needs_two_nodes() -> None:
    with pytest.raises(ConfigError, match="got 1 report; allowed: two or more"):
        compare([_report("a")])
    with pytest.raises(ConfigError, match="two reports of one node"):
        compare([_report("a"), _report("a")])
    assert len({item.id for item in COMPARISONS}) == len(COMPARISONS)
