"""`benchmarks/host_time.py` on CPU ranks: every call is made and timed, beside a trivial one."""

from __future__ import annotations

from click.testing import CliRunner

from benchmarks.host_time import main

TINY = ["--device", "cpu", "--rows", "1", "--low-latency-tokens", "4", "--low-latency-experts", "8", "--tokens", "8"]
TRIVIAL = "tensor.add_(1)"
CALLS = [
    "low-latency dispatch",
    "low-latency combine",
    TRIVIAL,
    "low-latency dispatch with a hook, send",
    "low-latency dispatch with a hook, receive",
    "low-latency combine with a hook, send",
    "low-latency combine with a hook, receive",
    TRIVIAL,
    "low-latency dispatch, enable_shrink",
    "low-latency combine, enable_shrink",
    TRIVIAL,
    "dispatch with a bound",
    "combine",
    TRIVIAL,
    "low-latency dispatch and combine, until done",
    TRIVIAL,
]


def test_every_call_is_timed_beside_a_trivial_one() -> None:
    result = CliRunner().invoke(main, [*TINY, "--experts", "8", "--hidden", "256", "--topk", "2"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert [line[:45].rstrip() for line in lines] == CALLS
    assert all(float(line[45:].split()[0]) > 0 for line in lines)
    trivial = [line for line in lines if line.startswith(TRIVIAL)]
    assert all(line.endswith(" 1.0 of the trivial call beside it") for line in trivial)
