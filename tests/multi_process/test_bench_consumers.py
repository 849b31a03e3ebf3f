"""`benchmarks/consumers.py` on CPU ranks: every path is right and timed, and a wrong or absent module is named."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from benchmarks.consumers import BASELINE, main, ways_of

TINY = ["--device", "cpu", "--ranks", "2", "--runs", "1", "--warmups", "0", "--tokens", "12", "--decode-tokens", "3"]
BROKEN = "tests.multi_process.broken_implementation"


def test_every_way_is_right_and_timed(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, [*TINY, "--layers", "2", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "consumers.json").read_text())["rows"]
    assert [(row["path"], row["name"]) for row in rows] == [
        ("megatron", BASELINE),
        ("megatron", "deepep"),
        ("megatron", "hybridep"),
        ("megatron", "fused"),
        ("decode", BASELINE),
        ("decode", "low latency"),
        ("prefill", BASELINE),
        ("prefill", "normal"),
    ]
    calls = {"megatron": {"forward", "forward, backward"}, "decode": {"step of 2 layers"}}
    for row in rows:
        assert row["problem"] == ""
        assert set(row["median_us"]) == calls.get(row["path"], {"dispatch, combine"})
        assert all(value > 0 for value in row["median_us"].values())


def test_wrong_rows_fail_and_absent_modules_are_named() -> None:
    asked = [*TINY, "--path", "megatron", "--impl", BROKEN, "--impl", "no_such_module", "--json"]
    result = CliRunner().invoke(main, asked)
    assert result.exit_code == 1, result.output
    baseline, *rows = json.loads(result.stdout)["rows"]
    assert (baseline["problem"], baseline["is_wrong"]) == ("", False)
    for broken in rows[:3]:
        assert broken["is_wrong"]
        assert "rms error" in broken["problem"]
        assert broken["median_us"] == {}
    for absent in rows[3:]:
        assert absent["problem"] == "rank 0: ModuleNotFoundError: No module named 'no_such_module'"
        assert not absent["is_wrong"]


def test_experts_must_divide() -> None:
    result = CliRunner().invoke(main, [*TINY, "--experts", "7"])
    assert result.exit_code == 2
    assert "experts is 7; allowed: multiples of the 2 ranks" in result.output
    assert len(ways_of(("decode",), ("a", "b"))) == 3
