"""What the playbooks call: the start of a validation, cross-node checks, how a job ended, NIC bandwidth."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from torch.distributed import HashStore

from hybrid_ep.cli import main
from hybrid_ep.cluster.doctor import Report
from hybrid_ep.cluster.validation import nic_meeting
from hybrid_ep.cluster.validation.nic_meeting import measure_between
from hybrid_ep.cluster.validation.perftest import listen, write_to
from hybrid_ep.cluster.validation.record import (
    Inventory,
    begin_validation,
    check_domains,
    compare_nodes,
    judge_output,
    record,
)
from hybrid_ep.cluster.validation.results import read_inventory, read_job
from hybrid_ep.errors import ConfigError, TimeoutError
from hybrid_ep.topology import Distance, Topology, probe
from tests.sim.gpu_direct import Ends, Native
from tests.sim.platforms import healthy

TRAYS = ("a", "b", "c", "d")


def inventory(**changes: Any) -> Inventory:
    given: dict[str, Any] = {
        "title": "t",
        "hosts": list(TRAYS),
        "groups": {"all": [*TRAYS], "ungrouped": [], "gb200": [*TRAYS], "domain_1": ["a", "b"], "domain_2": ["c", "d"]},
        "platforms": dict.fromkeys(TRAYS, "gb200-nvl72"),
    }
    groups = given["groups"] | changes.pop("groups", {})
    return Inventory.from_json(json.dumps({**given, **changes, "groups": groups}))


def test_inventory_is_written_with_domains(tmp_path: Path) -> None:
    begin_validation(tmp_path, inventory())
    found = read_inventory(tmp_path)
    assert [(host.name, host.domain) for host in found.hosts] == [("a", "1"), ("b", "1"), ("c", "2"), ("d", "2")]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"groups": {"domain_3": []}}, "group 'domain_3' is empty"),
        ({"groups": {"domain_2": ["c", "a"]}}, "host 'a' is in the NVLink domains domain_1, domain_2"),
        ({"groups": {"domain_2": ["c"]}}, "host 'd' is in no group domain_NAME"),
        ({"platforms": {"a": "gb200-nvl72"}}, "host 'b' has no platform"),
        ({"platforms": dict.fromkeys(TRAYS, "gb300")}, "profile 'gb300' is not known; allowed: "),
        ({"platforms": dict.fromkeys(TRAYS, "/site/gone.yaml")}, "host 'd': profile /site/gone.yaml cannot be read"),
        ({"hosts": [], "groups": {}}, "it has no host"),
        ({"hosts": ["a", "a"]}, "host 'a' is given twice; allowed: each host once"),
        ({"hosts": ["a b"]}, "host is 'a b'; allowed: 1 to 250 letters, digits"),
        ({"hosts": ["../a"]}, "host is '../a'; allowed: 1 to 250 letters, digits"),
        ({"hosts": [["a"]]}, "host is ['a']; allowed: 1 to 250 letters, digits"),
    ],
)
def test_unusable_inventory_is_refused_and_leaves_nothing(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match="not usable") as error:
        begin_validation(tmp_path / "results", inventory(**changes))
    assert said in str(error.value)
    assert not (tmp_path / "results").exists()


def test_all_faults_of_an_inventory_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        begin_validation(tmp_path, inventory(platforms={"a": "gb200-nvl72"}, groups={"empty": []}))
    assert [f"host {host!r}" in str(error.value) for host in TRAYS[1:]] == [True] * 3
    assert "group 'empty'" in str(error.value)


@pytest.mark.parametrize("name", ["", "a b", "a,b", "a\n", "../a", ".a", "-a", "a/b", "é", "a" * 251])
@pytest.mark.parametrize("what", ["host", "host of a job", "job"])
def test_a_name_that_is_none_is_refused_and_leaves_nothing(tmp_path: Path, what: str, name: str) -> None:
    job, host = (name, "a") if what == "job" else ("pair", name)
    words = ["record", "--kind", "pair", "--host", host, "--exit-code", "0", "--", str(tmp_path / "results"), job]
    if what == "host":
        words = ["record-node", "--", str(tmp_path / "results"), name]
    (tmp_path / "results").mkdir()
    done = CliRunner().invoke(main, ["validation", *words], input="")
    assert done.exit_code == 2, done.output
    assert f"{what.split()[0]} is {name!r}; allowed: 1 to 250 letters, digits" in done.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["results"]


@pytest.mark.parametrize("host", ["a", "gpu_01", "gpu-a01.site.example", "2001:db8::1", "a" * 250])
def test_names_of_hosts_are_taken(tmp_path: Path, host: str) -> None:
    done = CliRunner().invoke(main, ["validation", "record-node", str(tmp_path), host], input="")
    assert done.exit_code == 0, done.output
    assert [path.name for path in (tmp_path / "nodes").iterdir()] == [f"{host}.json"]


@pytest.mark.parametrize("seconds", ["nan", "inf", "0"])
def test_a_limit_of_time_is_a_number_of_seconds(seconds: str) -> None:
    done = CliRunner().invoke(main, ["validation", "nic-bandwidth", "--limit-s", seconds])
    assert done.exit_code == 2
    assert "'--limit-s'" in done.stderr
    assert "1<=x<=3600" in done.stderr


JOB = ("record", "--kind", "pair", "--host", "a", "--host", "b", "--exit-code", "0", "pair_a_b")


@pytest.mark.parametrize("command", [("compare",), ("domains",), JOB], ids=lambda command: command[0])
def test_a_folder_of_results_that_is_not_there_is_wrong_usage(tmp_path: Path, command: tuple[str, ...]) -> None:
    name, *options = command
    done = CliRunner().invoke(main, ["validation", name, str(tmp_path / "results"), *options], input="")
    assert done.exit_code == 2
    assert "results' does not exist" in done.output


def test_begin_removes_earlier_results_and_nothing_else(tmp_path: Path) -> None:
    begin_validation(tmp_path, inventory())
    for path in (tmp_path / "nodes" / "gone.json", tmp_path / "jobs" / "all.json", tmp_path / "compare.json"):
        path.write_text("{}")
    begin_validation(tmp_path, inventory())
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["inventory.json", "jobs", "nodes"]
    (tmp_path / "inventory.json").unlink()
    with pytest.raises(ConfigError, match="neither empty nor a results folder"):
        begin_validation(tmp_path, inventory())


def test_what_is_no_inventory_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a JSON object"):
        Inventory.from_json('{"title": "t"}')


def write_node(folder: Path, host: str, cluster: str = "f" * 32, clique: int = 1) -> None:
    gpus = [{"name": "", "uuid": "", "cluster_uuid": cluster, "clique": clique}] * 4
    facts = {"driver": "1", "packages": {}, "gpus": gpus, "nic_firmware": [], "nic_guids": {}, "domain_gpus": 8}
    facts |= {"clock": {"synchronized": True, "max_error_us": 1}, "clock_error_ms": 500}
    report = Report("0.1.0", host, "gb200-nvl72", "given", 0.0, (), (), facts)
    (folder / "nodes" / f"{host}.json").write_text(json.dumps(report.to_json()))


def domains(folder: Path, placed: dict[str, tuple[str, int]]) -> dict[str, tuple[str, str]]:
    begin_validation(folder, inventory())
    for host, (cluster, clique) in placed.items():
        write_node(folder, host, cluster * 32, clique)
    check_domains(folder)
    jobs = [read_job(folder, f"domain-{name}-cliques") for name in ("1", "2")]
    return {job.name.split("-")[1]: (job.status, job.reason) for job in jobs}


def test_domains_that_are_cliques_pass(tmp_path: Path) -> None:
    found = domains(tmp_path, {"a": ("e", 1), "b": ("e", 1), "c": ("f", 1), "d": ("f", 1)})
    assert found == {"1": ("pass", ""), "2": ("pass", "")}


def test_domain_of_two_cliques_is_named(tmp_path: Path) -> None:
    found = domains(tmp_path, {"a": ("e", 1), "b": ("e", 2), "c": ("f", 1), "d": ("0", 0)})
    assert found["1"][0] == found["2"][0] == "fail"
    assert "2 in the fabric" in found["1"][1]
    assert "clique 2 on b" in found["1"][1]
    assert found["2"][1] == "in no multi-node domain: d"


def test_clique_that_reaches_into_another_domain_is_named(tmp_path: Path) -> None:
    found = domains(tmp_path, {"a": ("e", 1), "b": ("e", 1), "c": ("e", 1), "d": ("e", 1)})
    assert found["1"] == ("fail", "its clique also holds nodes that the inventory puts into 2")


def test_domain_without_a_report_is_unknown(tmp_path: Path) -> None:
    found = domains(tmp_path, {"a": ("e", 1), "c": ("f", 1), "d": ("f", 1)})
    assert found["1"] == ("unknown", "no report of b")


def test_compare_takes_only_nodes_with_a_report(tmp_path: Path) -> None:
    begin_validation(tmp_path, inventory())
    write_node(tmp_path, "a")
    (tmp_path / "nodes" / "b.json").write_text('{"unreachable": "off"}')
    (tmp_path / "nodes" / "c.json").write_text("{")
    assert compare_nodes(tmp_path) is None
    assert not (tmp_path / "compare.json").exists()
    write_node(tmp_path, "d")
    compare_nodes(tmp_path)
    assert json.loads((tmp_path / "compare.json").read_text())["host"] == "2 nodes"


def bench_output(problems: list[str]) -> str:
    operations = [{"name": name, "gbps": 1.5, "median_us": 2.0} for name in ("dispatch", "combine", "layout")]
    outcome = {"problems": problems, "operations": [] if problems else operations}
    document = json.dumps({"ok": not problems, "outcomes": [outcome]}, indent=2)
    return f"WARNING {{once}}\n{document}\nmpirun says goodbye\n"


def test_job_that_ended_well_has_its_figures() -> None:
    job = judge_output("n", "pair", ("a", "b"), 0, bench_output([]))
    assert (job.status, job.reason, job.log) == ("pass", "", "jobs/n.log")
    figures = [(metric.name, metric.value, metric.unit) for metric in job.metrics]
    assert figures[:2] == [("dispatch", 1.5, "GB/s"), ("dispatch time", 2.0, "µs")]
    assert len(figures) == 4  # the two operations, not their other forms


@pytest.mark.parametrize(
    ("exit_code", "output", "status", "reason"),
    [
        (1, bench_output(["rank 1 lost rows"]), "fail", "rank 1 lost rows"),
        (1, bench_output([]), "fail", "ended with 1: mpirun says goodbye"),
        (255, "ssh: no route\n-----\nORTE was unable\nto start\n-----\n", "fail", "ended with 255: ssh: no route"),
        (1, "-----\nNo slots\nthis helps\n-----\n", "fail", "ended with 1: No slots"),
        (124, "rank 3 waits", "fail", "did not end in time; last said: rank 3 waits"),
        (0, "fine", "unknown", "ended with 0 and left no result; last said: fine"),
        (0, "", "unknown", "ended with 0 and left no result; last said: nothing"),
        (0, '{"ok": true, "status": "skipped", "reason": "no NIC"}', "skipped", "no NIC"),
    ],
)
def test_job_that_did_not_says_why(exit_code: int, output: str, status: str, reason: str) -> None:
    job = judge_output("n", "group", ("a",), exit_code, output)
    assert (job.status, job.reason) == (status, reason)
    assert job.log == ("jobs/n.log" if output else "")


def test_record_leaves_result_and_log(tmp_path: Path) -> None:
    record(tmp_path, "pair-a-b", "pair", ("a", "b"), 0, bench_output([]))
    assert read_job(tmp_path, "pair-a-b").status == "pass"
    assert "goodbye" in (tmp_path / "jobs" / "pair-a-b.log").read_text()


# As perftest prints it; a server has no address among its words.
_PERFTEST = """#!/bin/sh
echo "$@" >>"$0.log"
[ "$1" != --help ] || { echo "$USAGE"; exit; }
for word; do last=$word; done
case "$*" in *mlx5_1*) echo "Couldn't connect to $last" >&2; exit 1 ;; esac
case $0 in *lat)
  echo ' #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]'
  echo ' 8       1000          1.91           9.55         2.05               2.07'; exit ;;
esac
case "$*" in *bidirectional*) set -- 700.25 ;; *) set -- 393.40 ;; esac
echo ' #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]'
echo " 1048576    93800            0.00               $1             0.046897"
"""


@pytest.fixture
def perftest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("ib_write_lat", "ib_write_bw"):
        program = tmp_path / name
        program.write_text(_PERFTEST)
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return program


def node(tmp_path: Path, num_nics: int = 2) -> Path:
    recording = healthy("hgx-h200")
    for path in [path for path in recording.links if "/infiniband/mlx5_" in path]:
        if int(path.split("mlx5_")[1].split("/")[0]) >= num_nics:
            for table in (recording.files, recording.links):
                for gone in [name for name in table if name.startswith(path.removesuffix("/device") + "/")]:
                    del table[gone]
    recording.write(tmp_path / "node")
    return tmp_path / "node"


def calls(program: Path) -> list[list[str]]:
    """How a program was called, without what only asks for its options."""
    lines = program.with_suffix(".log").read_text().splitlines()
    return [line.split() for line in lines if line != "--help"]


def test_nic_bandwidth_is_each_nics_own(tmp_path: Path, perftest: Path) -> None:
    result = write_to("peer", probe(node(tmp_path, num_nics=1)), gid_index=3, limit_s=5)
    assert (result["ok"], result["status"]) == (True, "pass")
    assert {metric["name"]: (metric["value"], metric["unit"]) for metric in result["metrics"]} == {
        "write": (393.4, "Gb/s"),
        "write both ways": (700.25, "Gb/s"),
        "latency": (2.05, "µs"),
        "write at once": (393.4, "Gb/s"),
        "write mlx5_0": (393.4, "Gb/s"),
    }
    first, both, _ = calls(perftest)
    assert (first[0], first[-1]) == ("--ib-dev=mlx5_0", "peer")
    assert "--gid-index=3" in first  # the port is Ethernet
    assert "--bidirectional" in both


def write_at_once(topology: Topology) -> float:
    result = write_to("peer", topology, gid_index=None, limit_s=5)
    return next(metric["value"] for metric in result["metrics"] if metric["name"] == "write at once")


def test_nics_at_once_are_summed_and_have_ports_of_their_own(tmp_path: Path, perftest: Path) -> None:
    for program in (perftest, perftest.with_name("ib_write_lat")):
        program.write_text(program.read_text().replace("*mlx5_1*", "*nothing*"))
    assert write_at_once(probe(node(tmp_path))) == pytest.approx(2 * 393.4)
    ports = [word for words in calls(perftest) for word in words if word.startswith("--port")]
    assert len(ports) == len(set(ports)) == 6


@pytest.mark.parametrize(
    ("usage", "words", "said"),
    [
        ("--use_cuda --use_cuda_dmabuf", {"--use_cuda=0", "--use_cuda_dmabuf"}, "GPU memory"),
        ("--use_cuda", {"--use_cuda=0"}, "GPU memory"),
        ("--size", set(), "host memory: ib_write_bw was built without CUDA"),
    ],
)
def test_memory_is_the_gpus_or_named(
    usage: str, words: set[str], said: str, tmp_path: Path, perftest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nearest GPU's, where there are GPUs, which a stub of NVML tells here."""
    monkeypatch.setenv("USAGE", usage)
    topology = replace(probe(node(tmp_path, num_nics=1)), gpus=(None,), nic_distances=((Distance.PXB,),))
    result = write_to("peer", topology, gid_index=None, limit_s=5)
    assert result["reason"] == said
    assert {word for word in calls(perftest)[0] if "cuda" in word} == words
    assert not any("cuda" in word for word in calls(perftest.with_name("ib_write_lat"))[0])


def test_nic_that_does_not_connect_is_named_beside_the_others(tmp_path: Path, perftest: Path) -> None:
    result = write_to("peer", probe(node(tmp_path)), gid_index=None, limit_s=1)
    assert (result["ok"], result["status"]) == (False, "fail")
    assert result["reason"].startswith("mlx5_1: no connection within 1 s: Couldn't connect to peer; ")
    names = ["write", "write both ways", "latency", "write at once", "write mlx5_0"]
    assert [metric["name"] for metric in result["metrics"]] == names
    tried = [words for words in calls(perftest) if words[0] == "--ib-dev=mlx5_1"]
    assert {word for words in tried for word in words if word.startswith("--port")} == {"--port=18516"}


def test_only_the_nics_of_gpus_are_measured(tmp_path: Path, perftest: Path) -> None:
    recording = healthy("hgx-h100 with storage")
    recording.files["/sys/class/infiniband/mlx5_9/ports/1/state"] = "4: ACTIVE\n"
    recording.write(tmp_path / "node")
    write_to("peer", probe(tmp_path / "node"), gid_index=None, limit_s=0.2)
    asked = {words[0] for words in calls(perftest)}
    assert asked == {f"--ib-dev=mlx5_{idx}" for idx in range(8)}


def test_listener_goes_through_its_nics_and_gives_up_in_time(tmp_path: Path, perftest: Path) -> None:
    perftest.write_text(_PERFTEST + "exec sleep 600\n")
    listen(probe(node(tmp_path)), gid_index=None, limit_s=0.5)
    assert [words[:2] for words in calls(perftest)] == [
        ["--ib-dev=mlx5_0", "--port=18515"],
        ["--ib-dev=mlx5_1", "--port=18516"],
    ]
    assert not any("peer" in words for words in calls(perftest))


def test_listener_takes_every_measurement_that_the_writer_makes(tmp_path: Path, perftest: Path) -> None:
    topology = probe(node(tmp_path, num_nics=1))
    both: list[list[list[str]]] = []
    for side in (lambda: listen(topology, None, 5), lambda: write_to("peer", topology, None, 5)):
        side()
        both.append([calls(perftest), calls(perftest.with_name("ib_write_lat"))])
        for program in (perftest, perftest.with_name("ib_write_lat")):
            program.with_suffix(".log").unlink()
    listened, written = both
    assert listened == [[words[:-1] for words in program] for program in written]


def test_node_without_a_nic_or_without_perftest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert write_to("peer", probe(tmp_path), None, 1)["status"] == "skipped"
    missing = write_to("peer", probe(node(tmp_path)), None, 1)
    assert (missing["status"], missing["reason"]) == ("unknown", "ib_write_bw is not installed (package perftest)")


def both_ranks(topologies: Sequence[Topology], open_ends: Sequence[Ends], limit_s: float = 5.0) -> list[dict[str, Any]]:
    """What `measure_between` says at rank 0 and at rank 1."""
    store = HashStore()

    def measure(rank: int) -> dict[str, Any]:
        return measure_between(rank, store, "peer", topologies[rank], 3, limit_s, open_ends[rank])

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(measure, range(2)))


@pytest.fixture
def with_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Topology:
    """Two NICs, and a GPU near both."""
    monkeypatch.setattr(nic_meeting, "_SECONDS", 0.05)
    return replace(probe(node(tmp_path)), gpus=(None,), nic_distances=((Distance.PXB, Distance.PXB),))


def test_gpu_memory_is_measured_by_the_verbs_transport_where_one_perftest_has_no_cuda(
    with_gpu: Topology, perftest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usages = iter(["ib_write_bw was built without CUDA", ""])
    monkeypatch.setattr(nic_meeting, "perftest_obstacle", lambda: next(usages))
    ends = Ends(Native())
    _, result = both_ranks([with_gpu] * 2, [ends] * 2)
    assert (result["ok"], result["status"]) == (False, "fail")  # the stub of ib_write_lat refuses mlx5_1
    assert result["reason"].startswith("mlx5_1: latency: no connection within 5 s: Couldn't connect to peer; ")
    assert result["reason"].endswith("; GPU memory, by the verbs transport: ib_write_bw was built without CUDA")
    found = {metric["name"]: metric["value"] for metric in result["metrics"]}
    assert list(found) == ["write", "write both ways", "latency", "write at once", "write mlx5_0", "write mlx5_1"]
    assert min(found.values()) > 0
    assert {(asked["window_only"], asked["gid_index"]) for asked in ends.native.asked} == {(True, 3)}
    assert not perftest.exists() or not perftest.with_suffix(".log").exists()  # no bandwidth by perftest


@pytest.mark.parametrize("refusing", [0, 1])
def test_gpu_memory_that_a_nic_does_not_take_is_unknown_at_both_nodes(
    refusing: int, with_gpu: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nic_meeting, "perftest_obstacle", lambda: "ib_write_bw was built without CUDA")
    why = "mlx5_0 port 1 takes no GPU memory: nvidia-peermem: Bad address"
    ends = [Ends(Native(refuses=why if rank == refusing else "")) for rank in range(2)]
    results = both_ranks([with_gpu] * 2, ends)
    for rank, result in enumerate(results):
        whose = "" if rank == refusing else "the other node: "
        assert (result["status"], result["metrics"]) == ("unknown", [])
        assert result["reason"] == f"ib_write_bw was built without CUDA; {whose}{why}"


def test_bytes_that_arrive_otherwise_are_a_fault_of_the_nic(
    with_gpu: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nic_meeting, "perftest_obstacle", lambda: "ib_write_bw was built without CUDA")
    monkeypatch.setenv("PATH", "/nowhere")
    _, result = both_ranks([with_gpu] * 2, [Ends(Native(), num_wrong=2)] * 2)
    assert (result["ok"], result["status"]) == (False, "fail")
    assert result["reason"].startswith("mlx5_0: write: 2 chunks with other bytes; mlx5_1: write: 2 chunks")


def test_node_without_gpus_makes_both_write_host_memory(
    with_gpu: Topology, perftest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USAGE", "--use_cuda")
    without = replace(with_gpu, gpus=(), nic_distances=())
    for topologies in ([with_gpu, without], [without, with_gpu]):
        _, result = both_ranks(topologies, [Ends(Native())] * 2, limit_s=1.0)
        assert result["reason"].endswith("; host memory")
    assert not [words for words in calls(perftest) if any("cuda" in word for word in words)]


def test_node_whose_peer_does_not_come_says_so_in_time(with_gpu: Topology) -> None:
    with pytest.raises(TimeoutError, match="rank 1"):
        measure_between(0, HashStore(), "peer", with_gpu, None, 0.2)


_FABRIC = {"ok": True, "outcomes": [], "metrics": [{"name": "link", "value": 12.0, "unit": "GB/s"}]}


@pytest.mark.parametrize(
    ("printed", "options", "code", "said"),
    [
        (_FABRIC, ["--profile=hgx-h100"], 1, "fail: link 12 GB/s, expected ≥ 40"),
        (_FABRIC, ["--profile=hgx-h100", "--hosts=9"], 1, "fail: link 12 GB/s, expected ≥ 40"),
        (
            _FABRIC,
            ["--profile=hgx-h100", "--profile=gpu-server"],
            0,
            "pass: passed on correctness alone: profile gpu-server",
        ),
        (_FABRIC, [], 0, "pass: passed on correctness alone: profile cpu"),  # what fits this machine
        ({**_FABRIC, "ok": False, "reason": "rows are wrong"}, ["--profile=cpu"], 1, "fail: rows are wrong"),
        ({**_FABRIC, "status": "skipped"}, ["--profile=cpu"], 0, "skipped: "),
        (_FABRIC, ["--profile=none"], 2, "unknown: whether that is enough is not known: profile 'none' is not known"),
        ("no document", ["--profile=cpu"], 2, "unknown: ended with 0 and left no result"),
    ],
)
def test_one_job_is_judged_without_a_folder(
    tmp_path: Path, printed: Any, options: list[str], code: int, said: str
) -> None:
    """The last of several --profile counts, so that an overlay can say another one."""
    result = tmp_path / "result"
    result.write_text("a line before it\n" + (printed if isinstance(printed, str) else json.dumps(printed)))
    done = CliRunner().invoke(main, ["validation", "judge", "--result", str(result), "--hosts=2", *options])
    assert (done.exit_code, said in done.output) == (code, True), done.output


def test_result_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["validation", "judge", "--result", str(tmp_path / "none"), "--hosts=2"])
    assert (done.exit_code, f"result {tmp_path}/none cannot be read" in done.output) == (2, True), done.output


def test_nic_bandwidth_wants_two_ranks_of_mpirun() -> None:
    command = [sys.executable, "-c", "from hybrid_ep.cli import main; main()", "validation", "nic-bandwidth"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "there are no ranks of mpirun or srun; allowed: 2" in done.stderr


def test_nic_bandwidth_whose_first_rank_does_not_come_names_the_place() -> None:
    command = [sys.executable, "-c", "from hybrid_ep.cli import main; main()", "validation", "nic-bandwidth"]
    rank = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    command.append("--limit-s=1")
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **rank, **meet})
    assert done.returncode == 1
    assert "NIC to NIC: rank 1 lost rank 0: no rendezvous at 127.0.0.1 port 9: " in done.stderr
