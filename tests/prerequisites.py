"""What a test needs beyond Python: without it the test is skipped, with the reason; with CI=true it fails."""

from __future__ import annotations

import os

import pytest


def require(there: object, what: str) -> None:
    """Goes on if `there` is true; otherwise skips, or fails where CI=true says that everything ought to be there."""
    if there:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI=true, but this is missing: {what}")
    pytest.skip(f"needs {what}")
