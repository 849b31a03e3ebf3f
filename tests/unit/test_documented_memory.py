"""The bytes that docs/cuda_engine.md and docs/low_latency.md give are those of the extension."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("hybrid_ep._cuda")
from hybrid_ep import _cuda
from hybrid_ep.engine.cuda_plan import DispatchShape, plan_dispatch

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
    ranks, tokens, topk, num_experts = 4, 4096, 8, 256
    shape = DispatchShape(
        shape=torch.Size((tokens, 7168)),
        dtype=torch.bfloat16,
        scales=None,
        num_topk=topk,
        num_experts=num_experts,
        has_topk=True,
        has_weights=True,
        expert_range=(0, num_experts // ranks),
        pad_multiple=pad_multiple,
        bound=None,
        common_bound=None,
        num_sms=None,
        max_tokens=None,
    )
    used = 4 * plan_dispatch(0, ranks, shape).native.route_ints
    formula = given("cuda_engine.md", rf"\| {row} \| (4 × \(.*?²[^)]*\))")
    for words, python in (("×", "*"), ("²", "**2"), ("top-k", "topk"), ("local experts", "num_experts // ranks")):
        formula = formula.replace(words, python)
    documented = eval(formula, {"ranks": ranks, "tokens": tokens, "topk": topk, "num_experts": num_experts})
    assert 0 <= used - documented < 1024  # parts begin at lines
