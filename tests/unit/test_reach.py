"""Public names: their examples run, their types hold in a user's program, and a buffer has a `repr`."""

from __future__ import annotations

import doctest
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomllib
import torch

import hybrid_ep
from hybrid_ep import Buffer, HybridEPBuffer

ROOT = Path(__file__).resolve().parents[2]
# Records that calls return, and types of errors, have no example of their own.
RECORDS = (tuple, BaseException)
METHODS = {
    Buffer: ("get_dispatch_layout", "dispatch", "combine", "low_latency_dispatch", "low_latency_combine"),
    hybrid_ep.HybridEPBuffer: ("dispatch", "dispatch_with_permute"),
    hybrid_ep.ElasticBuffer: ("dispatch",),
}


def _public() -> Iterator[tuple[str, Any]]:
    for module in (hybrid_ep, hybrid_ep.nn, hybrid_ep.quantize):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isfunction(value) or (inspect.isclass(value) and not issubclass(value, RECORDS)):
                yield name, value
    for owner, names in METHODS.items():
        for name in names:
            yield f"{owner.__name__}.{name}", getattr(owner, name)


PUBLIC = dict(_public())


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_an_example_that_runs(name: str) -> None:
    names = {"hybrid_ep": hybrid_ep, "torch": torch}
    text = inspect.getdoc(PUBLIC[name]) or ""
    test = doctest.DocTestParser().get_doctest(text, names, name, None, None)
    assert test.examples, f"{name} has no example"
    told: list[str] = []
    outcome = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=told.append)
    assert outcome.failed == 0, "".join(told)


TYPED = """
from typing import assert_type
import hybrid_ep
from hybrid_ep import BufferHandle, EventOverlap, LowLatencyHandle, PermuteHandle
from torch import Tensor

def calls(buffer: hybrid_ep.Buffer, x: Tensor, handle: BufferHandle, some: Tensor | None) -> None:
    rows = buffer.dispatch(x, topk_idx=x, topk_weights=x, num_worst_tokens=4)
    assert_type(rows, tuple[Tensor, Tensor, Tensor, list[int], BufferHandle, EventOverlap])
    pair = buffer.dispatch((x, x), topk_idx=x)
    assert_type(pair[0], tuple[Tensor, Tensor])
    assert_type(pair[2], None)
    assert_type(buffer.dispatch((x, x), handle)[0], tuple[Tensor, Tensor])
    assert_type(buffer.dispatch(x, handle)[4], None)
    assert_type(buffer.dispatch((x, x, x), handle)[0], tuple[Tensor, Tensor, Tensor])
    assert_type(buffer.dispatch(x, topk_idx=some)[1], Tensor | None)
    assert_type(buffer.combine(x, handle)[1], None)
    assert_type(buffer.combine(x, handle, x)[1], Tensor)
    assert_type(hybrid_ep.quantize.cast_to_fp8(x), tuple[Tensor, Tensor])
    assert_type(hybrid_ep.nn.MoECombine(buffer).buffer, hybrid_ep.Buffer)
"""


def test_programs_of_users_pass_mypy_strict(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    (tmp_path / "readme_example.py").write_text(example)
    (tmp_path / "typed_calls.py").write_text(TYPED.replace("from typing import", "from typing_extensions import"))
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert settings["strict"] is True
    # With the project's settings its cache serves.
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", *map(str, tmp_path.glob("*.py"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_buffer_says_what_it_is() -> None:
    where = "rank 0 of 1 in 1 domains of 1, engine torch, transport none, 0 bytes of symmetric memory"
    with Buffer(None, engine="torch") as buffer, HybridEPBuffer(None, 128, 4, 2, engine="torch") as other:
        assert repr(buffer) == f"<Buffer: {where}>"
        assert repr(other) == f"<HybridEPBuffer: {where}>"
    assert repr(buffer) == "<Buffer: rank 0 of 1, closed>"


def test_packages_say_that_they_are_typed() -> None:
    for package, project in (("hybrid_ep", "."), ("deep_ep", "compat/deep_ep")):
        assert (ROOT / project / package / "py.typed").is_file()
        settings = tomllib.loads((ROOT / project / "pyproject.toml").read_text())
        assert "py.typed" in settings["tool"]["setuptools"]["package-data"][package]
