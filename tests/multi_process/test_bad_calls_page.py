"""docs/bad_calls.md says what bad calls raise today, and every one of them raises a typed error."""

from __future__ import annotations

from pathlib import Path

from tests.multi_process.bad_calls import page
from tests.rank_pool import RankPool

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "bad_calls.md"


def test_the_page_is_current_and_no_call_passes() -> None:
    pool = RankPool(variables={"HYBRID_EP_TIMEOUT_S": "20"})
    try:
        made = page(pool)
    finally:
        pool.close()
    assert "**nothing**" not in made
    assert made == _PAGE.read_text(encoding="utf-8"), "python -m tests.multi_process.bad_calls > docs/bad_calls.md"
