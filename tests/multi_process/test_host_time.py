"""`benchmarks/host_time.py` on CPU ranks: every call is made and timed, beside a trivial one."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.host_time import main

TINY = ["--device", "cpu", "--rows", "1", "--runs", "9", "--low-latency-tokens", "4", "--tokens", "8"]
COMPAT = Path(__file__).parents[2] / "compat" / "deep_ep"  # packages that import this library by its peers' names
TRIVIAL = "tensor.add_(1)"
LOOP = "loop that reads the clock for 200 µs"
LOW_LATENCY = ["low-latency dispatch{}", "low-latency combine{}"]
HOOKS = [
    f"low-latency {call} with a hook, {half}{{}}" for call in ("dispatch", "combine") for half in ("send", "receive")
]
NORMAL = ["dispatch with a bound{}", "combine{}"]
DONE = [
    "layout{}",
    "layout and dispatch{}",
    "layout and dispatch, FP8{}",
    "combine{}",
    "layout, dispatch and combine{}",
]
OWN_DONE = ["HybridEPBuffer.dispatch{}", "HybridEPBuffer.combine with probs{}"]
PAIR = "low-latency dispatch and combine{}"
OWN = [
    ["low-latency dispatch, enable_shrink{}", "low-latency combine, enable_shrink{}"],
    ["HybridEPBuffer.dispatch with a bound{}", "HybridEPBuffer.combine with probs{}"],
    ["dispatch_with_permute with a bound{}", "combine_with_unpermute{}"],
    ["dispatch_with_permute along a handle{}"],
    ["ElasticBuffer.dispatch without a sync{}", "ElasticBuffer.combine{}"],
    ["ElasticBuffer.dispatch along a handle{}"],
]


def _lines(*options: str) -> list[str]:
    sizes = ["--experts", "8", "--low-latency-experts", "8", "--hidden", "256", "--topk", "2"]
    result = CliRunner().invoke(main, [*TINY, *sizes, *options])
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def _check(lines: list[str], ends: tuple[str, ...], own_end: str) -> None:
    """Each group has all calls of all implementations; the figures are times."""

    def named(calls: list[str], of: tuple[str, ...] = ends) -> list[str]:
        return [TRIVIAL, *(call.format(end) for end in of for call in calls)]

    groups = [named(calls) for calls in (LOW_LATENCY, HOOKS, NORMAL)]
    groups += [named(calls, (own_end,)) for calls in OWN]
    in_a_row = [call for group in groups for call in group]
    begin = lines.index(
        "After a barrier: until it returned and p99, until done and p99, of the slower rank in each run"
    )
    done = [[*DONE, *(OWN_DONE if end == own_end else ()), PAIR] for end in ends]
    assert [line[:52].rstrip() for line in lines[1:begin]] == in_a_row
    assert [line[:52].rstrip() for line in lines[begin + 1 :]] == [
        LOOP,
        TRIVIAL,
        *(call.format(end) for calls, end in zip(done, ends, strict=True) for call in calls),
    ]
    assert all(float(line[52:].split()[0]) > 0 for line in lines[1:begin])
    trivial = [line for line in lines[1:begin] if line.startswith(TRIVIAL)]
    assert all(line.endswith(" 1.0 of the trivial call beside it") for line in trivial)
    for line in lines[begin + 1 :]:
        host, host_p99, until_done, p99 = (float(value) for value in line[52:].split()[::2])
        assert 0 < host <= until_done <= p99
        assert host <= host_p99 <= p99
    assert float(lines[begin + 1][52:].split()[0]) >= 200


def test_every_call_is_timed_beside_a_trivial_one() -> None:
    _check(_lines(), ("",), "")


def test_implementations_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of DeepEP's interface stands beside this library; here it is the library by its other name."""
    monkeypatch.syspath_prepend(str(COMPAT))
    _check(_lines("--impl", "hybrid_ep", "--impl", "deep_ep"), (", hybrid_ep", ", deep_ep"), ", hybrid_ep")
