"""The results folder, judging by a profile, fit hosts, exit codes and every form of the report."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest
from click.testing import CliRunner, Result

from hybrid_ep.bench.link import LinkFigures, LinkReport
from hybrid_ep.cli import main
from hybrid_ep.cluster.doctor import Profile, Severity, Status, load_profile
from hybrid_ep.cluster.doctor import Result as CheckResult
from hybrid_ep.cluster.doctor.model import clean
from hybrid_ep.cluster.validation.cluster import REPORTED, Cluster, load_cluster
from hybrid_ep.cluster.validation.formats import to_junit, to_markdown
from hybrid_ep.cluster.validation.judge import Job, Profiles, judge
from hybrid_ep.cluster.validation.page import to_html
from hybrid_ep.cluster.validation.record import judge_output
from hybrid_ep.cluster.validation.results import JobFile, Metric, read_inventory, read_log_tail, schema
from hybrid_ep.errors import ConfigError
from tests.sim.cluster import make_report, make_result, names, write, write_inventory, write_job, write_sound_results

HOSTS = ["a", "b", "c"]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Three hosts on which everything passed, and what compare says of them."""
    write_sound_results(tmp_path, HOSTS)
    return tmp_path


def _put(results: Path, host: str, *found: CheckResult) -> None:
    write(results / "nodes" / f"{host}.json", make_report(host, *found).to_json())


def _run(*words: object) -> Result:
    return CliRunner().invoke(main, ["validation", *map(str, words)])


def _node(cluster: Cluster, name: str) -> CheckResult:
    """The first thing that is wrong with a node."""
    return next(node for node in cluster.nodes if node.name == name).problems[0]


# ---- the results folder ----


def test_everything_passed(results: Path) -> None:
    cluster = load_cluster(results)
    assert (cluster.status, cluster.headline) == (Status.PASS, "3 of 3 nodes are fit")
    assert (cluster.unfit, cluster.to_dos(), cluster.jobs) == ([], [], ())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree.pop("hosts"), "inventory.json: the document: 'hosts' is a required property"),
        (lambda tree: tree["hosts"].clear(), r"inventory.json: hosts: \[\] should be non-empty"),
        (lambda tree: tree["hosts"][1].update(platform=7), r"inventory.json: hosts.1.platform: 7 is not of type"),
        (lambda tree: tree["hosts"][1].update(name="../x"), r"inventory.json: hosts.1.name: '../x' does not match"),
        (lambda tree: tree["hosts"][1].update(name="a"), "hosts.1.name: 'a' is given twice"),
    ],
)
def test_bad_inventory_names_path_and_field(results: Path, change: Callable[[Any], Any], message: str) -> None:
    tree = json.loads((results / "inventory.json").read_text())
    change(tree)
    write(results / "inventory.json", tree)
    with pytest.raises(ConfigError, match=message):
        read_inventory(results)
    for command in ("report", "healthy"):
        done = _run(command, results)
        assert (done.exit_code, "inventory.json" in done.stderr) == (2, True)


def test_missing_inventory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"inventory\.json cannot be read: No such file"):
        read_inventory(tmp_path)


def test_host_without_a_file_failed(results: Path) -> None:
    (results / "nodes" / "b.json").unlink()
    cluster = load_cluster(results)
    assert (_node(cluster, "b").id, _node(cluster, "b").seen) == (REPORTED, "no result")
    assert cluster.status is Status.FAIL
    assert cluster.headline.startswith("2 of 3 nodes are fit; b is not: node.report: Run hybrid-ep doctor on it")


def test_unreachable_host_failed_with_its_reason(results: Path) -> None:
    write(results / "nodes" / "b.json", {"unreachable": "no route to host"})
    cluster = load_cluster(results)
    assert _node(cluster, "b").seen == "unreachable: no route to host"
    assert cluster.status is Status.FAIL


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("{", "nodes/b.json is not JSON"),
        ("[" * 100_000, "nodes/b.json is not JSON"),
        ('{"duration_s": NaN}', "nodes/b.json is not JSON: NaN is not a number"),
        ("[]", "nodes/b.json: the document: [] is not of type 'object'"),
        ('{"unreachable": 7}', "nodes/b.json: unreachable: 7 is not of type 'string'"),
        ('{"results": []}', "nodes/b.json: the document: "),
        (json.dumps(make_report("b").to_json()), "a report without any result"),
    ],
)
def test_bad_node_file_is_that_nodes_result_alone(results: Path, text: str, seen: str) -> None:
    (results / "nodes" / "b.json").write_text(text)
    cluster = load_cluster(results)
    assert _node(cluster, "b").status is Status.UNKNOWN
    assert _node(cluster, "b").seen.startswith(seen)
    assert [node.name for node in cluster.fit] == ["a", "c"]
    assert cluster.status is Status.UNKNOWN


def test_bad_field_of_a_node_is_named(results: Path) -> None:
    tree = make_report("b", make_result(Status.PASS)).to_json()
    tree["results"][0]["status"] = "passed"
    write(results / "nodes" / "b.json", tree)
    assert "nodes/b.json: results.0.status: 'passed' is not one of" in _node(load_cluster(results), "b").seen


def test_control_characters_reach_no_output(results: Path) -> None:
    write(results / "nodes" / "b.json", {"unreachable": "\x1b[31m\ud800 lost"})
    cluster = load_cluster(results)
    assert _node(cluster, "b").seen == "unreachable: \ufffd[31m\ufffd lost"
    ElementTree.fromstring(to_junit(cluster))
    to_html(cluster, results).encode()


def test_other_things_wrong_with_the_folder(results: Path) -> None:
    write(results / "nodes" / "d.json", {"unreachable": "gone"})
    (results / "compare.json").unlink()
    found = {result.id: result for result in load_cluster(results).findings.results}
    assert found["results.inventory"].seen == "in nodes/, but not in the inventory: d"
    assert found["results.compare"].seen == "no compare.json, though 3 nodes gave a report"
    assert {result.status for result in found.values()} == {Status.UNKNOWN}
    (results / "compare.json").write_text("{}")
    found = {result.id: result for result in load_cluster(results).findings.results}
    assert "compare.json: the document: " in found["results.compare"].seen


def test_one_node_alone_needs_no_comparison(tmp_path: Path) -> None:
    write_inventory(tmp_path, ["a"])
    _put(tmp_path, "a", make_result(Status.PASS))
    cluster = load_cluster(tmp_path)
    assert (cluster.headline, cluster.status) == ("1 of 1 node is fit", Status.PASS)


# ---- which hosts are fit ----


def test_healthy(results: Path) -> None:
    _put(results, "a", make_result(Status.FAIL))
    _put(results, "b", make_result(Status.UNKNOWN), make_result(Status.FAIL, Severity.WARNING))
    write(results / "nodes" / "c.json", {"unreachable": "down"})
    done = _run("healthy", results, "--json")
    assert done.exit_code == 0
    tree = json.loads(done.stdout)
    assert tree["healthy"] == ["b"]
    assert tree["excluded"][0] == {
        "host": "a",
        "check": "gpu.count",
        "reason": "gpu.count: 7",
        "remedy": "reseat it",
    }
    assert [item["host"] for item in tree["excluded"]] == ["a", "c"]
    done = _run("healthy", results)
    assert done.stdout == "b\n"
    assert "excluded a: gpu.count: 7: reseat it" in done.stderr


def test_same_fault_on_several_nodes_is_one_thing_to_do(results: Path) -> None:
    _put(results, "a", make_result(Status.FAIL))
    _put(results, "c", make_result(Status.FAIL, seen="6"))
    _put(results, "b", make_result(Status.UNKNOWN))
    to_dos = load_cluster(results).to_dos()
    assert [(item.hosts, item.result.shown_as, len(item.all_seen)) for item in to_dos] == [
        (("a", "c"), "fail", 2),
        (("b",), "unknown", 1),
    ]


# ---- jobs ----


def _profile(name: str, **figures: Any) -> Profile:
    values = load_profile("hgx-h200").values
    return Profile(name, {**values, "bandwidth": {**values["bandwidth"], "figures": figures}})


_FIGURE = {"value": 400, "unit": "Gb/s", "hosts": 2, "source": "measured"}
_PLATFORM_OF = {"a": "fast", "b": "fast", "c": "slow", "d": "none"}
_PROFILES = {
    "fast": _profile("fast", **{"nic.write": _FIGURE}),
    "slow": _profile("slow", **{"nic.write": {**_FIGURE, "value": 200}}),
    "none": _profile("none", **{"nic.write": None}),
}


def _judged(*hosts: str, value: float = 390, unit: str = "Gb/s", status: str = "pass", kind: str = "nic") -> Job:
    metrics = (Metric("write", value, unit),)
    job = JobFile("j", kind, hosts, status, "" if status == "pass" else "it broke", metrics, "jobs/j.log")
    return judge(job, _PLATFORM_OF, Profiles(_PROFILES.__getitem__))


@pytest.mark.parametrize(
    ("job", "status", "reason"),
    [
        (_judged("a", "b", value=360), "pass", ""),
        (_judged("a", "b", value=359.9), "fail", "write 359.9 Gb/s, expected ≥ 360"),
        (_judged("a", "c", value=180), "pass", ""),
        (_judged("a", "c", value=179), "fail", "write 179 Gb/s, expected ≥ 180"),
        (_judged("a", "d", value=1), "pass", "passed on correctness alone: profile fast, none has no figure"),
        (_judged("a", "b", value=1, kind="pair"), "pass", "profile fast has no figure for a pair job of 2 hosts"),
        (_judged("a", "b", "c", value=1), "pass", "no figure for a nic job of 3 hosts"),
        (_judged("a", "b", unit="GB/s"), "unknown", "write is in GB/s, but profile fast has its figure in Gb/s"),
        (_judged("a", "x"), "unknown", "host 'x' is not in the inventory"),
        (_judged("a", "b", value=999, status="fail"), "fail", "it broke"),
        (_judged("a", "b", value=1, status="unknown"), "unknown", "it broke"),
        (_judged("a", "b", value=1, status="skipped"), "skipped", "it broke"),
    ],
)
def test_judge(job: Job, status: str, reason: str) -> None:
    assert job.status == status
    assert reason in job.reason
    assert bool(job.remedy) == (status in ("fail", "unknown"))


def test_job_that_measured_nothing_says_nothing_of_figures() -> None:
    job = judge(
        JobFile("j", "group", ("a", "b"), "pass", "one clique", (), ""), _PLATFORM_OF, Profiles(_PROFILES.__getitem__)
    )
    assert (job.status, job.reason, job.expected) == ("pass", "one clique", "it ends well")


def test_a_floor_comes_with_its_source() -> None:
    metric = _judged("a", "b").metrics[0]
    assert (metric.least, metric.source) == (360, "0.9 of 400 Gb/s, profile fast: measured")


def test_a_link_between_domains_is_a_job() -> None:
    """`hybrid-ep bench --mode link --json`: its slowest rank, and the slowest of each rail, which two domains share."""
    ranks = [LinkFigures("verbs", "mlx5_0", 1, seconds, 0, 100.0, 2) for seconds in (1.0, 2.0, 1.0, 1.0)]
    output = json.dumps(LinkReport(10**9, 40, ranks).to_json(), indent=2)
    job = judge_output("link-a-b", "link", ("a", "b"), 0, output)
    assert (job.status, job.reason) == ("pass", "by verbs")
    assert [(m.name, m.value, m.unit) for m in job.metrics] == [
        ("write", 20.0, "GB/s"),
        ("write rail0", 40.0, "GB/s"),
        ("write rail1", 20.0, "GB/s"),
    ]
    # Its rings lie in host memory, so the NICs' rate is no floor; a figure of the site is.
    assert judge(job, _PLATFORM_OF, Profiles(_PROFILES.__getitem__)).status == "pass"
    figure = {"link.write": {**_FIGURE, "unit": "GB/s", "value": 40}}
    judged = judge(job, _PLATFORM_OF, Profiles({"fast": _profile("fast", **figure)}.__getitem__))
    assert (judged.status, judged.reason) == ("fail", "by verbs; write rail1 20 GB/s, expected ≥ 36")
    wrong = LinkReport(10**9, 40, [ranks[0], replace(ranks[1], num_wrong=3)])
    job = judge_output("link-a-b", "link", ("a", "b"), 1, json.dumps(wrong.to_json()))
    assert (job.status, job.reason) == ("fail", "rank 1: 3 chunks missing or wrong")


_FABRIC = {
    "dispatch": (120, "GB/s"),
    "fabric dispatch": (31, "GB/s"),
    "link": (22, "GB/s"),
    "link rail0": (46, "GB/s"),
    "link rail3": (22, "GB/s"),
}


def _judged_fabric(kind: str, hosts: tuple[str, ...], profile: Profile) -> Job:
    metrics = tuple(Metric(name, value, unit) for name, (value, unit) in _FABRIC.items())
    job = JobFile("j", kind, hosts, "pass", "", metrics, "")
    return judge(job, dict.fromkeys(hosts, "p"), Profiles({"p": profile}.__getitem__))


@pytest.mark.parametrize(("kind", "hosts"), [("pair", ("a", "b")), ("group", ("a", "b", "c"))])
def test_the_rate_of_the_nics_is_the_floor_between_domains(kind: str, hosts: tuple[str, ...]) -> None:
    """Eight GPUs and eight NICs of 400 Gb/s: 50 GB/s each. One rail is slow; the calls reach half of the rate."""
    judged = _judged_fabric(kind, hosts, load_profile("hgx-h200"))
    assert (judged.status, judged.reason) == ("fail", "link rail3 22 GB/s, expected ≥ 40")
    floors = {metric.name: metric.least for metric in judged.metrics}
    assert floors == {"dispatch": None, "fabric dispatch": 25, "link": 40, "link rail0": 40, "link rail3": 40}
    assert "link ≥ 40 GB/s (0.8 of the 50 GB/s of a GPU's NICs, profile hgx-h200)" in judged.expected


def test_two_nics_of_a_gpu_make_one_rate() -> None:
    judged = _judged_fabric("pair", ("a", "b"), load_profile("oci-h100"))
    assert {metric.least for metric in judged.metrics} == {None, 25, 40}  # sixteen ports of 200 Gb/s


@pytest.mark.parametrize(
    ("change", "floor"),
    [
        ({"gpu": {"count": None}}, None),
        ({"gpu": {"count": "any"}}, None),
        ({"nic": {"rate_gbps": None}}, None),
        ({"nic": {"count": 0}}, None),
        ({"bandwidth": {"of_nics": {"link": None}}}, None),
        ({"bandwidth": {"of_nics": {"link": 0.4}}}, 20),
        ({"bandwidth": {"figures": {"pair.link": {**_FIGURE, "unit": "GB/s", "value": 24}}}}, 21.6),
        ({"bandwidth": {"figures": {"pair.link": {**_FIGURE, "unit": "GB/s", "hosts": 3}}}}, 40),
    ],
)
def test_a_site_says_what_holds_between_domains(change: dict[str, Any], floor: float | None) -> None:
    values = load_profile("hgx-h200").values
    for key, over in change.items():
        values = {**values, key: {**values[key], **over}}
    judged = _judged_fabric("pair", ("a", "b"), Profile("site", values))
    (link,) = (metric for metric in judged.metrics if metric.name == "link")
    assert link.least == (None if floor is None else pytest.approx(floor))


def test_rows_between_domains_without_the_kernels_are_said() -> None:
    outcome = {"engine": "torch", "num_ranks_per_domain": 8, "problems": [], "operations": []}
    for engine, said in (("torch", "between domains by engine torch"), ("cuda", "")):
        output = json.dumps({"ok": True, "outcomes": [{**outcome, "engine": engine}]})
        assert judge_output("pair-a-b", "pair", ("a", "b"), 0, output).reason == said


def test_a_slow_rail_is_named() -> None:
    """The figure of the slowest NIC holds for each; a time beside it is no NIC, and is not held to it."""
    values = {
        "write": (210, "Gb/s"),
        "write time": (1, "µs"),
        "write mlx5_0": (395, "Gb/s"),
        "write mlx5_3": (210, "Gb/s"),
    }
    metrics = tuple(Metric(name, value, unit) for name, (value, unit) in values.items())
    job = judge(JobFile("j", "nic", ("a", "b"), "pass", "", metrics, ""), _PLATFORM_OF, Profiles(_PROFILES.__getitem__))
    assert (job.status, job.reason) == ("fail", "write mlx5_3 210 Gb/s, expected ≥ 360")
    assert job.expected == "it ends well; write ≥ 360 Gb/s (0.9 of 400 Gb/s, profile fast: measured)"
    assert [metric.least for metric in job.metrics] == [360, None, 360, 360]


@pytest.mark.parametrize(
    ("platform", "said"),
    [("abacus", "profile 'abacus' is not known"), ("/site/gone.yaml", "profile /site/gone.yaml cannot be read")],
)
def test_bandwidth_is_not_passed_over_where_the_profile_is_missing(results: Path, platform: str, said: str) -> None:
    tree = json.loads((results / "inventory.json").read_text())
    tree["hosts"][0]["platform"] = platform
    write(results / "inventory.json", tree)
    write_job(results, "bad", "pair", ["a", "b"], status="fail")
    write_job(results, "mute", "group", ["a", "b"])
    write_job(results, "pair", "pair", ["a", "b"], metrics=[{"name": "dispatch", "value": 40, "unit": "GB/s"}])
    jobs = {job.name: job for job in load_cluster(results).jobs}
    assert {name: job.status for name, job in jobs.items()} == {"bad": "fail", "mute": "pass", "pair": "unknown"}
    assert f"whether that is enough is not known: {said}" in jobs["pair"].reason


def test_shipped_profile_and_a_sites_own(results: Path, tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    figure = "{value: 80, unit: GB/s, hosts: 2, source: rack 3}"
    site.write_text(f"extends: hgx-h200\nbandwidth: {{fraction: 0.5, figures: {{pair.dispatch: {figure}}}}}\n")
    tree = json.loads((results / "inventory.json").read_text())
    for host in tree["hosts"]:
        host["platform"] = str(site)
    write(results / "inventory.json", tree)
    for name, value in (("slow", 39.9), ("good", 40.1)):
        metrics = [{"name": "dispatch", "value": value, "unit": "GB/s"}]
        write_job(results, name, "pair", ["a", "b"], metrics=metrics)
    write_job(results, "nic", "nic", ["a", "b"], metrics=[{"name": "write", "value": 199, "unit": "Gb/s"}])
    assert {job.name: job.status for job in load_cluster(results).jobs} == {
        "slow": "fail",
        "good": "pass",
        "nic": "fail",
    }


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"status": "passed"}, "jobs/j.json: status: 'passed' is not one of"),
        ({"log": "../secret"}, "jobs/j.json: log: '../secret' does not match"),
        ({"hosts": []}, "jobs/j.json: hosts: [] should be non-empty"),
        ({"name": "k"}, "jobs/j.json: name: is 'k'; allowed: 'j'"),
    ],
)
def test_bad_job_file_is_that_jobs_result_alone(results: Path, fields: dict[str, Any], reason: str) -> None:
    write_job(results, "good", "pair", ["a", "b"])
    write(
        results / "jobs" / "j.json", {**json.loads((results / "jobs" / "good.json").read_text()), "name": "j", **fields}
    )
    jobs = {job.name: job for job in load_cluster(results).jobs}
    assert (jobs["good"].status, jobs["j"].status) == ("pass", "unknown")
    assert jobs["j"].reason.startswith(reason)


def test_log_tail(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "j.log").write_bytes(b"".join(b"line %d\n" % i for i in range(2000)) + b"\xff\x00end\n")
    tail = read_log_tail(tmp_path, "jobs/j.log")
    assert tail.startswith("…\nline ")
    assert tail.endswith("line 1999\n\ufffd\ufffdend\n")
    assert len(tail) <= 4100
    assert read_log_tail(tmp_path, "jobs/k.log") == "jobs/k.log cannot be read: No such file or directory"


def test_pairs_and_hosts_by_bandwidth(results: Path) -> None:
    for (a, b), value in {("a", "b"): 80.0, ("b", "c"): 40.0, ("a", "c"): 79.0}.items():
        latency = {"name": "latency", "value": 30.0, "unit": "µs"}
        metrics = [{"name": "dispatch", "value": value, "unit": "GB/s"}, latency]
        write_job(results, f"pair-{a}-{b}", "pair", [a, b], metrics=metrics)
    metrics = [{"name": "write", "value": 380.0, "unit": "Gb/s"}]
    write_job(results, "nic", "nic", ["a", "b"], metrics=metrics)
    dispatch, write_table = load_cluster(results).pair_tables
    assert (dispatch.metric, dispatch.median, dispatch.hosts) == ("dispatch", 79.0, ())
    assert [figure.value for figure in dispatch.figures] == [40.0, 79.0, 80.0]
    assert dispatch.share(40.0) == "51%"
    assert (write_table.metric, write_table.figures[0].least) == ("nic write", 360.0)


def test_a_host_that_is_slow_with_everyone_stands_out(tmp_path: Path) -> None:
    hosts = names(6)
    write_inventory(tmp_path, hosts)
    for a, b in combinations(hosts, 2):
        metrics = [{"name": "dispatch", "value": 40.0 if "worker-4" in (a, b) else 80.0, "unit": "GB/s"}]
        write_job(tmp_path, f"{a}-{b}", "pair", [a, b], metrics=metrics)
    table = load_cluster(tmp_path).pair_tables[0]
    assert [(host.name, host.median) for host in table.hosts][:2] == [("worker-4", 40.0), ("worker-1", 80.0)]


# ---- exit codes and forms ----


def _fail_a_node(results: Path) -> None:
    _put(results, "a", make_result(Status.FAIL), make_result(Status.UNKNOWN))


def _warn_on_a_node(results: Path) -> None:
    _put(results, "a", make_result(Status.FAIL, Severity.WARNING))


def _leave_a_node_unknown(results: Path) -> None:
    _put(results, "a", make_result(Status.UNKNOWN))


def _disagree(results: Path) -> None:
    tree = json.loads((results / "compare.json").read_text())
    tree["results"][0]["status"] = "fail"
    write(results / "compare.json", tree)


def _fail_a_job(results: Path) -> None:
    write_job(results, "j", "pair", ["a", "b"], status="fail", reason="rank 3 left", log="jobs/j.log")


def _skip_a_job(results: Path) -> None:
    write_job(results, "j", "nic", ["a", "b"], status="skipped", reason="no NIC")


@pytest.mark.parametrize(
    ("change", "exit_code"),
    [
        (lambda results: None, 0),
        (_warn_on_a_node, 0),
        (_skip_a_job, 0),
        (_fail_a_node, 1),
        (_disagree, 1),
        (_fail_a_job, 1),
        (_leave_a_node_unknown, 2),
    ],
)
def test_report_command(results: Path, tmp_path: Path, change: Callable[[Path], None], exit_code: int) -> None:
    change(results)
    out = tmp_path / "out" / "report"
    done = _run("report", results, "--out", out)
    assert done.exit_code == exit_code, done.output
    tree = json.loads((out / "report.json").read_text())
    jsonschema.Draft202012Validator(schema("report")).validate(tree)
    assert tree["exit_code"] == exit_code
    suites = ElementTree.parse(out / "junit.xml").getroot()
    assert any(suite.attrib["failures"] != "0" for suite in suites) == (exit_code == 1)
    assert any(suite.attrib["errors"] != "0" for suite in suites) == (exit_code == 2 or change is _fail_a_node)
    assert tree["headline"] in done.stdout.replace("\n", " ")
    assert (out / "report.md").read_text().startswith("# Simulated cluster\n")
    assert (out / "report.html").read_text().startswith("<!doctype html>")


def test_default_place_of_the_report(results: Path) -> None:
    assert _run("report", results).exit_code == 0
    assert (results / "report" / "report.html").exists()
    assert _run("report", results).exit_code == 0  # and it does not read itself


def test_place_that_cannot_be_written(results: Path) -> None:
    (results / "report").write_text("")
    done = _run("report", results)
    assert (done.exit_code, "cannot be written: File exists; --out chooses" in done.stderr) == (2, True)


def test_summary_names_node_check_and_remedy(results: Path) -> None:
    _put(results, "b", make_result(Status.FAIL))
    assert load_cluster(results).headline == "2 of 3 nodes are fit; b is not: gpu.count: reseat it"
    done = CliRunner(env={"COLUMNS": "150"}).invoke(main, ["validation", "report", str(results)])
    assert "2 of 3 nodes are fit; b is not: gpu.count: reseat it." in done.stdout
    markdown = (results / "report" / "report.md").read_text()
    assert "| b | gpu.count | 7 | reseat it |" in markdown


def test_many_broken_nodes_stay_readable(tmp_path: Path) -> None:
    write_inventory(tmp_path, names(300))
    done = CliRunner(env={"COLUMNS": "120"}).invoke(main, ["validation", "report", str(tmp_path)])
    assert "0 of 300 nodes are fit; 300 are not: worker-001, " in done.stdout
    assert "worker-008 and 292 more." in done.stdout.replace("\n", " ")
    assert len(done.stdout.splitlines()) < 60


def test_junit_of_jobs(results: Path) -> None:
    _fail_a_job(results)
    write_job(results, "k", "nic", ["a", "b"], status="skipped", reason="no NIC")
    suite = ElementTree.fromstring(to_junit(load_cluster(results)))[-1]
    assert (suite.attrib["tests"], suite.attrib["failures"], suite.attrib["skipped"]) == ("2", "1", "1")
    assert {case.attrib["name"]: case[0].tag for case in suite} == {"j": "failure", "k": "skipped"}
    assert "Read jobs/j.log." in (suite[0][0].text or "")


_HOSTILE = "</script><script>alert(1)</script> | `x` <b> & [y](http://z) \u2028"


def test_hostile_text_is_only_text(results: Path) -> None:
    _put(results, "b", make_result(Status.FAIL, seen=_HOSTILE, remedy=_HOSTILE))
    write_job(results, "j", "pair", ["a", "c"], status="fail", reason=_HOSTILE, log="jobs/j.log")
    (results / "jobs" / "j.log").write_text(_HOSTILE)
    cluster = load_cluster(results)
    page = to_html(cluster, results)
    assert page.count("</script>") == 2  # ours: the data and the program
    assert "<script>alert" not in page
    assert "<b>" not in page.replace('<b class="', "")
    data = page.split('id="data">')[1].split("</script>")[0]
    assert clean(_HOSTILE) in json.loads(data)["texts"]
    row = next(line for line in to_markdown(cluster).splitlines() if line.startswith("| b |"))
    assert row.count("|") == 5
    assert "<" not in row
    assert "\\[y\\]" in row
    ElementTree.fromstring(to_junit(cluster))


def test_page_needs_nobody(results: Path) -> None:
    page = to_html(load_cluster(results), results)
    assert "default-src 'none'" in page
    assert "http" not in page.replace("http-equiv", "")
    assert " src=" not in page
