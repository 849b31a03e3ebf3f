"""The peers' name, imported from the source tree; that it can be installed is asserted in `tests/deploy`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import hybrid_ep

COMPAT = Path(__file__).resolve().parents[2] / "compat" / "deep_ep"


@pytest.fixture
def deep_ep(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(COMPAT)
    yield importlib.import_module("deep_ep")
    for name in [name for name in sys.modules if name.split(".")[0].startswith("deep_ep")]:
        del sys.modules[name]


def test_its_names_are_ours(deep_ep: ModuleType) -> None:
    for name in deep_ep.__all__:
        assert getattr(deep_ep, name) is getattr(hybrid_ep, name)


MODULES = [
    *(f"deep_ep.{name}" for name in ("buffer", "utils", "utils.event", "hybrid_ep_buffer")),
    *(f"deep_ep.buffers.{name}" for name in ("legacy", "elastic", "ep", "allocator")),
    "deep_ep_cpp",
    "deep_ep_v25",
]


@pytest.mark.usefixtures("deep_ep")
@pytest.mark.parametrize("module", MODULES)
def test_its_modules_have_our_names(module: str) -> None:
    found = importlib.import_module(module)
    home = importlib.import_module("hybrid_ep.core.layout")
    for name in found.__all__:
        assert getattr(found, name) is getattr(hybrid_ep, name, getattr(home, name, None))


@pytest.mark.parametrize("name", ["ElasticBuffer", "EPBuffer", "EPHandle", "BufferAllocator"])
def test_classes_of_the_second_version_are_there_when_asked_for(
    deep_ep: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("HYBRID_EP_ELASTIC_BUFFER", "on")
    assert getattr(deep_ep, name) is getattr(hybrid_ep, name)
    exec(f"from deep_ep import {name}")
    monkeypatch.setenv("HYBRID_EP_ELASTIC_BUFFER", "off")
    assert not hasattr(deep_ep, name)


@pytest.mark.parametrize("name", ["ElasticBuffer", "EPHandle"])
def test_classes_of_the_second_version_are_known_to_be_missing(deep_ep: ModuleType, name: str) -> None:
    """Callers look for them with `hasattr`, or import them where an ImportError leads to another way."""
    assert not hasattr(deep_ep, name)
    with pytest.raises(ImportError, match=name):
        exec(f"from deep_ep import {name}")
    there = "Buffer, Config, EventHandle, EventOverlap, HybridEPBuffer"
    with pytest.raises(AttributeError, match=f"deep_ep, which is hybrid_ep here, has no {name}; there are {there}"):
        getattr(deep_ep, name)
    with pytest.raises(AttributeError, match=f"HYBRID_EP_ELASTIC_BUFFER=on offers {name}$"):
        getattr(deep_ep, name)


def test_it_takes_the_version_that_it_was_made_for() -> None:
    source = (Path(__file__).resolve().parents[2] / "compat" / "deep_ep" / "pyproject.toml").read_text()
    assert f'version = "{hybrid_ep.__version__}"' in source
    assert f'dependencies = ["hybrid-ep=={hybrid_ep.__version__}"]' in source
