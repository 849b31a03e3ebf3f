"""A missing prerequisite is a skip on a developer's machine, and a failure in CI."""

from __future__ import annotations

import pytest

from tests.prerequisites import require


def test_missing_prerequisite_is_skipped_here_and_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    require(True, "nothing")
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="needs sshd"):
        require(False, "sshd")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="CI=true, but this is missing: sshd"):
        require(False, "sshd")
