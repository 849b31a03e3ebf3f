"""`hybrid-ep balance`: a table, JSON, a placement, pictures and a page from a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from hybrid_ep.balance import ExpertPlacement, save_trace
from hybrid_ep.cli import main


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(3, 32, generator=generator, dtype=torch.float64)
    windows = [first + 0.2 * torch.randn(3, 32, generator=generator, dtype=torch.float64) for _ in range(4)]
    path = tmp_path / "trace.json"
    save_trace(path, [window.exp() for window in windows])
    return path


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["balance", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_every_policy_is_more_balanced_than_none(trace: Path) -> None:
    code, stdout, _ = run(trace, "--ranks", 8, "--ranks-per-domain", 4, "--groups", 4, "--replicas", 48, "--json")
    assert code == 0
    outcomes = {item["policy"]: item for item in json.loads(stdout)["outcomes"]}
    assert list(outcomes) == ["none", "global", "hierarchical", "≤ 8 moves"]
    none = outcomes.pop("none")
    assert none["moves_per_layer_and_window"] == 0
    for item in outcomes.values():
        assert item["balancedness_mean"] > none["balancedness_mean"] + 0.1
    assert outcomes["≤ 8 moves"]["moves_per_layer_and_window"] <= 8
    assert outcomes["global"]["moves_per_layer_and_window"] > 8
    assert torch.tensor(none["rank_loads"]).shape == (4, 3, 8)


def test_a_window_is_judged_with_the_placement_of_the_one_before(tmp_path: Path) -> None:
    before, after = torch.ones(1, 4), torch.ones(1, 4)
    before[0, 0], after[0, 3] = 7, 7
    save_trace(tmp_path / "trace.json", [before, after])
    _, stdout, _ = run(tmp_path / "trace.json", "--ranks", 2, "--replicas", 6, "--max-moves", 0, "--json")
    first, second = json.loads(stdout)["outcomes"][1]["balancedness"]
    assert first[0] > 0.99
    assert second[0] < 0.75


def test_table_placement_and_pictures(trace: Path, tmp_path: Path) -> None:
    out, saved = tmp_path / "out", tmp_path / "placement.json"
    code, stdout, stderr = run(trace, "--ranks", 8, "--out", out, "--save", saved)
    assert code == 0, stderr
    for word in ("none", "global", "moves"):
        assert word in stdout
    assert ExpertPlacement.load(saved).num_replicas == 40
    for name in ("load.png", "windows.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert "Balance of experts" in (out / "index.html").read_text()
    assert json.loads((out / "result.json").read_text())["outcomes"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", 5], "experts of the trace is 32"),
        (["--ranks", 8, "--ranks-per-domain", 3], "ranks per domain is 3"),
        (["--ranks", 8, "--replicas", 33], "num_replicas is 33"),
        (["--ranks", 8, "--max-moves", -1], "max_moves is -1"),
        (["--ranks", 0], "ranks is 0"),
    ],
)
def test_wrong_usage(trace: Path, options: list[object], message: str) -> None:
    code, _, stderr = run(trace, *options)
    assert code == 2
    assert message in stderr
