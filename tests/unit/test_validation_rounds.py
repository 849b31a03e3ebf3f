"""Rounds of pairs: which hosts test each other, and when."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from itertools import combinations

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_ep.cli import main
from hybrid_ep.cluster.validation.rounds import num_rounds, rounds
from hybrid_ep.errors import ConfigError
from tests.sim.cluster import names


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
