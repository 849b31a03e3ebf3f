"""Rounds of pairs of hosts, and what their jobs find: which host they blame, why, and what the report begins with."""

from __future__ import annotations

import json
import math
import random
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_ep.cli import main
from hybrid_ep.cluster.doctor import Status
from hybrid_ep.cluster.doctor.compare import compare
from hybrid_ep.cluster.validation.bisection import Bisection, Run, bisect
from hybrid_ep.cluster.validation.causes import OTHER, cause_of
from hybrid_ep.cluster.validation.cluster import Cluster, load_cluster
from hybrid_ep.cluster.validation.formats import to_markdown
from hybrid_ep.cluster.validation.page import to_html
from hybrid_ep.cluster.validation.record import judge_output
from hybrid_ep.cluster.validation.rounds import num_rounds, rounds
from hybrid_ep.errors import ConfigError
from tests.sim.cluster import make_report, make_result, names, write, write_job, write_sound_results

HOSTS = ["a", "b", "c", "d", "e"]
CRASH = "ended with 139: worker: Segmentation fault (core dumped)"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Five hosts on which everything passed."""
    write_sound_results(tmp_path, HOSTS)
    return tmp_path


def pairs(results: Path, *, kind: str = "pair", **bad: dict[str, Any]) -> None:
    """A job for each pair; those of a host in `bad` have its fields, and figures of about 80 GB/s if they passed."""
    for number, (a, b) in enumerate(combinations(HOSTS, 2)):
        metrics = [{"name": "dispatch", "value": 80.0 + number / 10, "unit": "GB/s"}]
        fields = bad.get(a) or bad.get(b) or {"metrics": metrics}
        write_job(results, f"{kind}-{a}-{b}", kind, [a, b], **fields)


def failed(reason: str = CRASH) -> dict[str, Any]:
    return {"status": "fail", "reason": reason}


def unfit(cluster: Cluster) -> dict[str, list[str]]:
    return {node.name: [problem.id for problem in node.problems] for node in cluster.unfit}


def test_host_that_all_failed_jobs_share_is_unfit_and_at_the_top(results: Path) -> None:
    pairs(results, c=failed())
    write_job(results, "all", "group", HOSTS, status="fail", reason="rank 2: no answer")
    cluster = load_cluster(results)
    assert unfit(cluster) == {"c": ["jobs.failed"]}
    (top,) = cluster.to_dos()
    assert (top.result.id, top.hosts) == ("jobs.failed", ("c",))
    assert top.seen == f"all 4 pair jobs with others failed, and 6 jobs of those others passed: {CRASH}"
    assert top.result.remedy.startswith("Keep the log and the core file.")
    assert cluster.headline.startswith("4 of 5 nodes are fit; c is not: jobs.failed: ")
    done = CliRunner().invoke(main, ["validation", "healthy", str(results), "--json"])
    tree = json.loads(done.stdout)
    assert (tree["healthy"], [item["host"] for item in tree["excluded"]]) == (["a", "b", "d", "e"], ["c"])


def test_two_hosts_can_be_to_blame(results: Path) -> None:
    pairs(results, b=failed(), d=failed("ended with 255: ssh: connect to host d port 22: No route to host"))
    assert unfit(load_cluster(results)) == {"b": ["jobs.failed"], "d": ["jobs.failed"]}


def test_host_that_died_in_the_middle_is_unfit_though_its_first_job_passed(results: Path) -> None:
    pairs(results, c=failed("ssh: connect to host c port 22: No route to host"))
    write_job(results, "pair-a-c", "pair", ["a", "c"])
    cluster = load_cluster(results)
    assert unfit(cluster) == {"c": ["jobs.failed"]}
    assert cluster.to_dos()[0].seen.startswith("3 of 4 pair jobs with others failed, and 6 jobs of those others passed")
    write_job(results, "pair-b-c", "pair", ["b", "c"])
    assert unfit(load_cluster(results)) == {}  # two failed jobs beside two that passed may have other causes


def test_switch_that_joins_no_halves_blames_no_host(results: Path) -> None:
    pairs(results)
    for a, b in (("a", "c"), ("a", "d"), ("a", "e"), ("b", "c"), ("b", "d"), ("b", "e")):
        write_job(results, f"pair-{a}-{b}", "pair", [a, b], **failed())
    assert unfit(load_cluster(results)) == {}


def test_one_failed_pair_blames_neither_and_is_itself_to_do(results: Path) -> None:
    pairs(results)
    write_job(results, "pair-a-b", "pair", ["a", "b"], **failed())
    cluster = load_cluster(results)
    assert unfit(cluster) == {}
    assert [(item.result.id, item.hosts, item.seen) for item in cluster.to_dos()] == [
        ("jobs.segfault", ("a", "b"), CRASH)
    ]


def test_cause_that_all_hosts_share_blames_none(results: Path) -> None:
    reason = "ended with 1: ModuleNotFoundError: No module named 'torch'"
    pairs(results, **dict.fromkeys(HOSTS, failed(reason)))
    cluster = load_cluster(results)
    assert unfit(cluster) == {}
    (only,) = cluster.to_dos()
    assert (only.result.id, only.hosts) == ("jobs.python", tuple(HOSTS))


def test_nic_jobs_speak_for_themselves(results: Path) -> None:
    """A host can run pair jobs by TCP and have a NIC that reaches nobody."""
    pairs(results)
    pairs(results, kind="nic", e=failed("no connection within 30 s: Couldn't connect to e:18515"))
    assert unfit(load_cluster(results)) == {"e": ["jobs.failed"]}


def test_job_of_one_host_alone_blames_it(results: Path) -> None:
    pairs(results)
    write_job(results, "answers-d", "group", ["d"], **failed("ended with 255: Connection timed out"))
    cluster = load_cluster(results)
    assert unfit(cluster) == {"d": ["jobs.alone"]}
    assert cluster.to_dos()[0].seen == "answers-d: ended with 255: Connection timed out"


def test_host_that_is_slow_with_everybody_is_unfit(results: Path) -> None:
    slow = {"metrics": [{"name": "dispatch", "value": 50.0, "unit": "GB/s"}]}
    pairs(results, b=slow)
    cluster = load_cluster(results)
    assert unfit(cluster) == {"b": ["jobs.slow"]}
    assert "dispatch is at most 50 GB/s on all 4 pairs, 62% of the others'" in cluster.to_dos()[0].seen
    metrics = [{"name": "dispatch", "value": 79.0, "unit": "GB/s"}]
    write_job(results, "pair-a-b", "pair", ["a", "b"], metrics=metrics)  # fast with one: it is the others' path
    assert unfit(load_cluster(results)) == {}


def test_pair_that_does_not_end_in_time_counts_as_a_slow_one(results: Path) -> None:
    pairs(results, b={"metrics": [{"name": "dispatch", "value": 5.0, "unit": "GB/s"}]})

    def end(reason: str) -> None:
        for name, hosts in (("pair-a-b", ["a", "b"]), ("pair-b-c", ["b", "c"])):
            write_job(results, name, "pair", hosts, **failed(reason))

    end("did not end in time")
    assert unfit(load_cluster(results)) == {"b": ["jobs.slow"]}
    end(CRASH)  # two figures are too few
    assert "jobs.slow" not in unfit(load_cluster(results)).get("b", [])


def test_pair_below_half_of_the_run_fails_where_no_profile_has_a_figure(results: Path) -> None:
    pairs(results)
    metrics = [{"name": "dispatch", "value": 30.0, "unit": "GB/s"}]
    write_job(results, "pair-a-b", "pair", ["a", "b"], metrics=metrics)
    job = next(job for job in load_cluster(results).jobs if job.name == "pair-a-b")
    assert (job.status, job.reason) == ("fail", "dispatch 30 GB/s, expected ≥ 40.23")
    assert "0.5 of the median of this run" in job.expected
    for a, b in list(combinations(HOSTS, 2))[5:]:
        (results / "jobs" / f"pair-{a}-{b}.json").unlink()
    job = next(job for job in load_cluster(results).jobs if job.name == "pair-a-b")
    assert job.status == "pass"  # five jobs have no median to speak of


def test_four_causes_are_four_things_to_do(results: Path) -> None:
    for host, reason in zip(
        HOSTS,
        (
            "MODULE FAILURE: Segmentation fault",
            "the doctor took more than 120 s",
            "no connection: Failed to connect to the host via ssh: No route to host",
            "/usr/bin/python3: not found",
            "ssh: connect to host e port 22: No route to host",
        ),
        strict=True,
    ):
        write(results / "nodes" / f"{host}.json", {"unreachable": reason})
    to_dos = load_cluster(results).to_dos()
    assert [item.hosts for item in to_dos] == [("c", "e"), ("a",), ("b",), ("d",)]
    assert len({item.result.remedy for item in to_dos}) == 4
    assert "via ssh: No route to host; or unreachable: ssh: connect to host e" in to_dos[0].seen


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("worker[4]: signal 11 (Segmentation fault)", "segfault"),
        ("torch.OutOfMemoryError: CUDA out of memory", "memory"),
        ("b: Permission denied (publickey).", "login"),
        ("ssh: connect to host b port 22: Connection refused", "no-route"),
        ("/bin/sh: 1: python3: not found", "python"),
        ("bash: hybrid-ep: command not found", "program"),
        ("did not end in time; last said: rank 3 waits", "timeout"),
        ("ncclRemoteError: A call failed possibly due to a network error", "network"),
        ("write 212 Gb/s, expected ≥ 360", "bandwidth"),
        ("it broke", "other"),
    ],
)
def test_causes(text: str, cause: str) -> None:
    assert cause_of(text).id == cause


def test_reason_names_every_cause_that_the_output_has() -> None:
    output = (
        "starting\nssh: connect to host b port 22: No route to host\nssh: connect to host c port 22: No route to host\n"
        "bash: hybrid-ep: command not found\nmpirun: 2 processes ended\n"
    )
    job = judge_output("j", "pair", ("a", "b"), 1, output)
    assert job.reason == (
        "ended with 1: ssh: connect to host b port 22: No route to host; bash: hybrid-ep: command not found"
    )
    assert judge_output("j", "pair", ("a", "b"), 1, "odd\nends\n").reason == "ended with 1: ends"
    # mpirun lost a race with its own child; that is no login that failed.
    harmless = "[a:1] plm:rsh: Warning: setpgid(9,9) failed in parent with errno=Permission denied(13)\n"
    assert judge_output("j", "pair", ("a", "b"), 1, harmless + "odd\nends\n").reason == "ended with 1: ends"
    assert cause_of("ends") is OTHER


def test_finding_between_nodes_is_to_do(results: Path) -> None:
    reports = [make_report(host, make_result(Status.PASS)) for host in HOSTS]
    reports[0].facts["driver"] = "570.1"
    write(results / "compare.json", compare(reports).to_json())
    cluster = load_cluster(results)
    top = cluster.to_dos()[0]
    assert (top.result.status, top.hosts) == (Status.FAIL, ())
    assert "| between nodes |" in to_markdown(cluster)
    assert "<td>between nodes</td>" in to_html(cluster, results)


def test_new_run_forgets_jobs_of_the_last_but_not_cliques(results: Path) -> None:
    pairs(results, c=failed())
    (results / "jobs" / "pair-a-b.log").write_text("said")
    write_job(results, "domain-x-cliques", "group", ["a", "b"])
    done = CliRunner().invoke(main, ["validation", "begin-jobs", str(results)])
    assert done.output == "removed 10 earlier jobs\n"
    assert [path.name for path in (results / "jobs").iterdir()] == ["domain-x-cliques.json"]
    assert unfit(load_cluster(results)) == {}


def test_node_is_recorded_with_its_report_or_why_there_is_none(results: Path) -> None:
    report = json.dumps(make_report("b", make_result(Status.FAIL)).to_json(), indent=2)

    def record(said: str) -> str:
        return CliRunner().invoke(main, ["validation", "record-node", str(results), "b"], input=said).output

    assert record(f"srun: warning: nothing\n{report}\nsrun: error: task 0 exited with 1\n") == "b: fail\n"
    assert unfit(load_cluster(results)) == {"b": ["gpu.count"]}
    record("slurmstepd: error: execve(): /opt/hybrid-ep: No such file or directory\n")
    (problem,) = load_cluster(results).unfit[0].problems
    assert problem.seen.endswith("execve(): /opt/hybrid-ep: No such file or directory")
    assert problem.remedy.startswith("Install the program that the line names")


def test_times_are_for_people(results: Path) -> None:
    metrics = [{"name": "dispatch time", "value": 812_400.0, "unit": "µs"}]
    write_job(results, "all", "group", HOSTS, metrics=metrics)
    cluster = load_cluster(results)
    page = to_html(cluster, results)
    assert "Validated 21 November 2026, 09:00 UTC with" in page
    assert "dispatch time 812.4 ms" in page


def _run(*words: str) -> Result:
    return CliRunner().invoke(main, ["validation", "rounds", *words])


@given(st.integers(0, 41))
@settings(deadline=None)
def test_every_pair_meets_once_and_no_host_twice_in_a_round(num_hosts: int) -> None:
    hosts = names(num_hosts)
    met: Counter[frozenset[str]] = Counter()
    found = list(rounds(hosts))
    for item in found:
        busy = [host for pair in item.pairs for host in pair] + ([item.bye] if item.bye else [])
        assert sorted(busy) == hosts
        met.update(frozenset(pair) for pair in item.pairs)
    assert met == Counter(frozenset(pair) for pair in combinations(hosts, 2))
    assert len(found) == num_rounds(num_hosts)
    assert all((item.bye is None) == (num_hosts % 2 == 0) for item in found)


@given(st.integers(2, 60), st.integers(1, 80))
@settings(deadline=None)
def test_limited_rounds_test_every_host_in_each(num_hosts: int, limit: int) -> None:
    found = list(rounds(names(num_hosts), limit))
    assert len(found) == min(limit, num_rounds(num_hosts))
    pairs = [frozenset(pair) for item in found for pair in item.pairs]
    assert len(set(pairs)) == len(pairs)
    tested = Counter(host for pair in pairs for host in pair)
    byes = Counter(item.bye for item in found)
    assert all(tested[host] + byes[host] == len(found) for host in names(num_hosts))
    assert all(count <= 1 for host, count in byes.items() if host)


def test_limited_rounds_are_spread() -> None:
    everything = list(rounds(names(100)))
    assert [everything.index(item) for item in rounds(names(100), 4)] == [0, 24, 49, 74]


def test_a_thousand_hosts_need_no_quadratic_memory() -> None:
    hosts = names(1000)
    tracemalloc.start()
    num_pairs = sum(len(item.pairs) for item in rounds(hosts))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert num_pairs == 499_500
    assert peak_bytes < 1_000_000


def test_rounds_command() -> None:
    assert _run("a", "b", "c").stdout == "b c  (a rests)\nc a  (b rests)\na b  (c rests)\n"
    tree = json.loads(_run("--json", *names(4)).stdout)
    assert [len(item["pairs"]) for item in tree["rounds"]] == [2, 2, 2]
    assert json.loads(_run("--json", "a").stdout) == {"rounds": []}
    assert json.loads(_run("--json", "--rounds", "2", *names(9)).stdout)["rounds"][1]["bye"] == "worker-5"


@pytest.mark.parametrize("host", ["", "a b", "a,b", "(a", "../a"])
def test_rounds_refuse_what_is_no_host(host: str) -> None:
    done = _run("b", host)
    assert done.exit_code == 2
    assert f"host is {host!r}; allowed: 1 to 250 letters, digits" in done.stderr


def test_rounds_refuse_a_host_given_twice_and_no_rounds() -> None:
    done = _run("a", "b", "a")
    assert (done.exit_code, "host 'a' is given twice" in done.stderr) == (2, True)
    with pytest.raises(ConfigError, match="rounds is 0; allowed: 1 or more"):
        rounds(names(3), 0)


def halve(hosts: list[str], domain_of: dict[str, str], fails: Callable[[Iterable[str]], bool]) -> tuple[int, Bisection]:
    """Runs rounds until there is no next one; returns how many, and what was found."""
    runs, num_rounds = [Run(frozenset(hosts), not fails(hosts))], 0
    while (found := bisect(hosts, domain_of, runs)).next_round:
        busy = [host for part in found.next_round for host in part]
        assert len(busy) == len(set(busy))  # no host is in two jobs at once
        assert min(map(len, found.next_round)) > 1
        runs += [Run(frozenset(part), not fails(part)) for part in found.next_round]
        num_rounds += 1
    return num_rounds, found


@pytest.mark.parametrize("fault", ["one host", "two hosts", "three hosts", "pair"])
@pytest.mark.parametrize(("num_hosts", "of_domain"), [(8, 1), (64, 1), (64, 8), (512, 1), (512, 16)])
def test_halves_find_the_hosts_or_the_pair(num_hosts: int, of_domain: int, fault: str) -> None:
    """Faulty hosts fail only with traffic that leaves the domain, so that a job inside it tells nothing."""
    draw = random.Random(f"{num_hosts} {of_domain} {fault}")
    hosts = names(num_hosts)
    domain_of = {host: f"domain {place // of_domain}" for place, host in enumerate(hosts)}
    for _ in range(3 if num_hosts == 512 else 20):
        bad = set(draw.sample(hosts, {"one host": 1, "three hosts": 3}.get(fault, 2)))

        def fails(part: Iterable[str], bad: set[str] = bad) -> bool:
            if fault == "pair":
                return bad <= {*part}
            return bool(bad & {*part}) and len({domain_of[host] for host in part}) > 1

        num_rounds, found = halve(hosts, domain_of, fails)
        assert num_rounds <= 2 * math.log2(num_hosts)
        assert {*found.blamed} == (set() if fault == "pair" else bad)
        assert [{*some} for some in found.together] == ([bad] if fault == "pair" else [])
        assert found.undecided == []


def test_halves_that_all_fail_blame_no_host() -> None:
    hosts = names(8)
    assert halve(hosts, {}, lambda part: True)[1] == Bisection([], [], [], hosts)
    # A fault that only large jobs show is none of a pair.
    assert halve(hosts, {}, lambda part: len({*part}) > 6)[1].blamed == []


@pytest.mark.parametrize("bad", [["c"], ["b", "e"]], ids=["a host", "a pair"])
def test_rounds_of_halves_end_in_the_report(results: Path, bad: list[str]) -> None:
    """All pairs pass, and all hosts together fail: the commands that playbooks and Slurm call find out why."""
    pairs(results)

    def run(name: str, hosts: list[str]) -> None:
        write_job(results, name, "group", hosts, **(failed() if {*bad} <= {*hosts} else {}))

    run("all", HOSTS)
    for _ in range(9):
        done = CliRunner().invoke(main, ["validation", "bisect", str(results)])
        assert done.exit_code == 0, done.output
        for name, *hosts in map(str.split, done.stdout.splitlines()):
            run(name, hosts)
    assert done.stdout == ""
    cluster = load_cluster(results)
    assert unfit(cluster) == ({"c": ["jobs.bisected"]} if bad == ["c"] else {})
    found = [result.seen for result in cluster.findings.results if result.status is Status.FAIL]
    assert found == ([] if bad == ["c"] else [f"b, e: they fail together, and pass with others: {CRASH}"])
    assert "without it: ended with 139" in cluster.to_dos()[0].seen or cluster.to_dos()[0].result.id == "jobs.together"
    assert ("jobs.bisected" if bad == ["c"] else "jobs.together") in to_html(cluster, results)
