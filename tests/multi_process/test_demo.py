"""`hybrid-ep demo` at small sizes: passes, writes what it promises, and fails when a result is wrong."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from hybrid_ep.agree.fields import FIELDS
from hybrid_ep.cli import main
from hybrid_ep.demo import run as demo_run
from hybrid_ep.demo.lose_rank import LossResult
from hybrid_ep.demo.results import DemoResult
from hybrid_ep.demo.settings import PATHS, Settings
from hybrid_ep.demo.skew import run_skewed
from hybrid_ep.demo.verify import RankCheck, allowed_fraction, check_path
from hybrid_ep.engine.calls import MIN_TOKENS_TO_SUM
from hybrid_ep.testing.batch import make_routing
from tests.conftest import RunRanks

SMALL = ["--ranks", "4", "--tokens", "32", "--hidden", "128", "--topk", "3", "--experts", "8", "--steps", "10"]
SETTINGS = Settings(num_ranks=4, num_domains=2, num_tokens=32, hidden=128, num_topk=3, num_experts=8, num_steps=10)


def test_demo_passes_and_writes_pictures_and_a_page(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["demo", *SMALL, "--json", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["ok"]
    assert found["problems"] == []
    assert len(found["paths"]) == 2 * len(PATHS)
    assert all(0 < path["worst_of_allowed"] <= 1 for path in found["paths"])
    assert found["losses"][-1] < 0.8 * found["losses"][0]
    assert sum(found["load"]["skewed"]) == sum(found["load"]["uniform"]) == 4 * 32 * 3

    page = (tmp_path / "index.html").read_text()
    assert page.count("data:image/png;base64,") == 4
    assert 'src="http' not in page
    for name in ("wire", "load", "time", "loss"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_skewed_router_is_balanced(run_ranks: RunRanks) -> None:
    settings = Settings(4, 2, 64, 128, 2, 16, 2, 0, skew=True)
    for results in run_ranks(4, run_skewed, settings):
        none, placement, online = results
        assert not any(item.problems for item in results)
        assert [sum(item.copies) for item in results] == [4 * 64 * 2] * 3
        assert none.fullest > 1.5
        assert placement.fullest < 1.2
        assert online.fullest < 1.05


def test_a_lost_rank_is_gone_on_without(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["demo", *SMALL, "--lose-rank", "--json", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    loss = json.loads(result.stdout)["loss"]
    assert loss["victim"] == 2
    assert loss["named"] == [2] * 3
    assert loss["num_ranks"] == 3
    assert loss["num_loaded"] >= 1
    assert 0 < loss["rms_after"] < 0.01
    assert "rank 2 was killed" in (tmp_path / "index.html").read_text().lower()
    wrong = dataclasses.replace(LossResult(**{**loss, "named": (2, 1, 2)}), rms_after=float("nan"), num_unserved=1)
    assert len(wrong.problems) == 3


def test_measured_bytes_are_the_rows_that_must_cross_and_little_more(run_ranks: RunRanks) -> None:
    checks: list[RankCheck] = run_ranks(4, check_path, PATHS[0], "skewed", SETTINGS)
    workload = SETTINGS.workload("skewed", "bf16")
    between = within = 0
    for rank in range(4):
        owner = make_routing(workload, rank)[0] // 2
        for domain in range(2):
            goes = (owner // 2 == domain).any(1)
            between += int(goes.sum()) if domain != rank // 2 else 0
            # The rank of that domain that holds the token spreads it to the other one.
            other = 2 * domain + (1 - rank % 2)
            within += int((owner == other).any(1).sum())
    sent = torch.tensor([check.sent_bytes["dispatch"] for check in checks]).sum(0).tolist()
    metadata = 3 * (4 + 4) + 8  # experts and weights of a token, and where it comes from
    headers = 4 * 3 * 8 * (len(FIELDS) + 4)  # of each rank to each other, with its counts
    counts = 4 * 4 * 4 * 8 + headers  # at most: counts of all ranks to all ranks
    for measured, rows in zip(sent, (within, between), strict=True):
        assert rows * workload.row_bytes < measured <= rows * (workload.row_bytes + metadata) + counts


def broken_check(path: object, routing: str, settings: Settings) -> RankCheck:
    """As `check_path`, with the error that a wrong row of one rank would make."""
    found = check_path(PATHS[0], routing, settings)
    return dataclasses.replace(found, worst_of_allowed=1.5, num_tokens_per_expert=[0])


def test_demo_exits_with_1_and_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_run, "check_path", broken_check)
    monkeypatch.setattr(demo_run, "PATHS", PATHS[:1])
    result = CliRunner().invoke(main, ["demo", *SMALL], env={"COLUMNS": "60"})
    assert result.exit_code == 1
    text = " ".join(result.stdout.split())
    assert "Buffer, bf16, skewed routing: an error is 1.5 × what is allowed" in text
    assert "an expert received other tokens than were routed to it" in text
    # 60 columns are few, and still show verdicts and units.
    assert "…" not in text
    assert text.count(" wrong ") >= 2
    assert {"kB", "ms"} <= set(text.split())


@pytest.mark.parametrize("losses", [[1.0, 1.0], [1.0, 2.0], [1.0, float("nan")]])
def test_a_loss_that_does_not_fall_is_a_problem(losses: list[float]) -> None:
    result = DemoResult(SETTINGS, "torch", (), (), {}, losses, 0.0)
    assert not result.ok


def test_the_allowed_error_grows_with_the_roundings_on_the_way() -> None:
    one_domain = dataclasses.replace(SETTINGS, num_domains=1)
    assert allowed_fraction("buffer", one_domain) == pytest.approx(2 * 2**-8, rel=0.01)
    assert allowed_fraction("buffer", SETTINGS) == pytest.approx(3 * 2**-8, rel=0.01)
    assert allowed_fraction("permuted", SETTINGS) == pytest.approx(4 * 2**-8, rel=0.01)
    assert allowed_fraction("low-latency", SETTINGS) == pytest.approx(3 * 2**-8, rel=0.01)
    few_tokens = dataclasses.replace(SETTINGS, num_tokens=MIN_TOKENS_TO_SUM - 1)
    assert allowed_fraction("low-latency", few_tokens) == pytest.approx(2 * 2**-8, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--domains", "3"], "ranks is 8; allowed: multiples of domains = 3"),
        (["--experts", "30"], "experts is 30"),
        (["--hidden", "100"], "hidden is 100"),
        (["--topk", "40"], "topk is 40"),
        (["--steps", "1"], "steps is 1"),
    ],
)
def test_wrong_usage_exits_with_2_and_names_the_value(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["demo", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr.replace("\n", " ")
