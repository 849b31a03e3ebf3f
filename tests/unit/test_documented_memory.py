"""The bytes that docs/cuda_engine.md and docs/low_latency.md give are those of the extension."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("hybrid_ep._cuda")
from hybrid_ep import _cuda
from tests.unit.test_cuda_plan import NUM_RANKS, E, K, plan

DOCS = Path(__file__).resolve().parents[2] / "docs"


def given(page: str, pattern: str) -> str:
    """Returns what a page gives in place of the group of the pattern."""
    found = re.search(pattern, (DOCS / page).read_text())
    assert found, pattern
    return found[1]


def test_control_block() -> None:
    assert given("cuda_engine.md", r"\| control block \| ([\d,]+):") == f"{_cuda.control_bytes:,}"


@pytest.mark.parametrize(("num_ranks", "max_tokens", "topk", "hidden"), [(4, 128, 8, 7168), (2, 64, 10, 4096)])
def test_low_latency_region(num_ranks: int, max_tokens: int, topk: int, hidden: int) -> None:
    used = _cuda.low_latency_region_bytes(
        num_ranks=num_ranks, num_experts=256, num_topk=topk, hidden=hidden, max_tokens=max_tokens
    )
    slots = num_ranks * max_tokens * (2 * hidden + 16 * -(-topk // 8) + 4)
    rows = 2 * max_tokens * topk * hidden + 4 * num_ranks * max_tokens * topk
    control = used - 2 * slots - 2 * rows
    assert given("low_latency.md", r"a control block of (\d+ KiB)") == f"{round(control / 1024)} KiB"


@pytest.mark.parametrize(("row", "pad_multiple"), [("handle", 0), ("handle, sorted by expert", 1)])
def test_handle(row: str, pad_multiple: int) -> None:
    sizes = {"tokens": 4096, "ranks": NUM_RANKS, "topk": K, "local_experts": E // NUM_RANKS}
    used = 4 * plan(num_tokens=sizes["tokens"], rank=0, pad_multiple=pad_multiple).route_ints
    formula = given("cuda_engine.md", rf"\| {row} \| (4 × \(.*?²[^)]*\))")
    for words, python in (("×", "*"), ("²", "**2"), ("top-k", "topk"), ("local experts", "local_experts")):
        formula = formula.replace(words, python)
    assert 0 <= used - eval(formula, sizes) < 1024  # parts begin at lines
