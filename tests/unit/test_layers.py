"""`ci/layers.py --check`: the package has two halves, and what would join them is named."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def layers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("layers", ROOT / "ci" / "layers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nothing_is_wrong_with_this_tree(layers: ModuleType) -> None:
    assert layers.all_wrong() == []


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        (
            "info.py",
            "def show():\n    from hybrid_ep.cluster.doctor import Node\n",
            "hybrid_ep/info.py:2: info is of the library, which never imports hybrid_ep.cluster",
        ),
        (
            "bench/rails.py",
            'NAME = "hybrid_ep.cluster.doctor"\n',
            "hybrid_ep/bench/rails.py:1: bench is of the library, which never imports hybrid_ep.cluster",
        ),
        (
            "cluster/validation/a.py",
            "\nfrom hybrid_ep.transport import choose_transport\n",
            "hybrid_ep/cluster/validation/a.py:2: cluster.validation must not import transport; "
            "it starts the library as a command only",
        ),
        (
            "cluster/doctor/a.py",
            "import hybrid_ep\n",
            "hybrid_ep/cluster/doctor/a.py:1: cluster.doctor must not import buffers; "
            "it starts the library as a command only",
        ),
        (
            "cluster/model/a.py",
            "from torch import Tensor\n",
            "hybrid_ep/cluster/model/a.py:1: cluster.model must start without torch",
        ),
        ("watched.py", "import torch\n", "hybrid_ep/watched.py:1: watched must start without torch"),
        (
            "cluster/doctor/a.py",
            "from hybrid_ep.cluster.validation import b\n",
            "hybrid_ep/cluster/doctor/a.py:1: cluster.doctor must not know cluster.validation",
        ),
    ],
)
def test_an_import_that_joins_the_halves_is_named(
    layers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, text: str, complaint: str
) -> None:
    (tmp_path / "hybrid_ep").mkdir()
    for room in layers.CLUSTER_IMPORTS | {"info", "transport"}:
        (tmp_path / "hybrid_ep" / f"{room}.py").touch()
    path = tmp_path / "hybrid_ep" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    monkeypatch.setattr(layers, "ROOT", tmp_path)
    assert complaint in layers.all_wrong()


def test_a_circle_in_the_operators_half_is_named(
    layers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that an import of types closes, as it does between two files that need each other."""
    folder = tmp_path / "hybrid_ep" / "cluster" / "validation"
    folder.mkdir(parents=True)
    (folder / "cluster.py").write_text("from hybrid_ep.cluster.validation.todo import ToDo\n")
    (folder / "todo.py").write_text(
        "if TYPE_CHECKING:\n    from hybrid_ep.cluster.validation.cluster import Node\nclass ToDo: ...\n"
    )
    monkeypatch.setattr(layers, "ROOT", tmp_path)
    (complaint,) = layers.all_wrong()
    assert complaint.startswith("a circle of imports: ")
    assert {"hybrid_ep.cluster.validation.todo", "hybrid_ep.cluster.validation.cluster"} <= set(complaint.split())
