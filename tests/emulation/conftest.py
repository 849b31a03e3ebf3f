"""The module that every test here runs is built once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.emulation.build import build
from tests.prerequisites import require_programs


@pytest.fixture(scope="session")
def emulated_module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of `_cuda` for the CPU."""
    require_programs("g++")
    return build(tmp_path_factory.mktemp("emulation"))
