"""`ci/layers.py --check` names what would join the two halves of the package; `make` runs its targets in order."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
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


def dry_run(*arguments: str) -> str:
    """What make would run."""
    command = ["make", "--dry-run", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("target", ["test", "test-cluster", "test-all"])
def test_system_packages_come_before_the_build_and_the_build_before_the_tests(target: str) -> None:
    """The build leaves out a module whose library is not there yet, so a package that comes later needs a build."""
    ran = dry_run(target)
    steps = ["ci/system_packages.sh", "ci/build_inplace.sh", "ci/test.sh"]
    places = [ran.index(step) for step in steps]
    assert places == sorted(places), ran


@pytest.mark.parametrize("ci", ["true", "false"])
def test_kernels_are_built_in_ci_also_where_the_machine_has_no_nvcc(ci: str) -> None:
    ran = [line for line in dry_run("setup", f"CI={ci}").splitlines() if "nvcc.sh" in line or "build_inplace" in line]
    condition, _, command = ran[0].partition(" || ")
    assert (condition, command) == (f'[ "{ci}" != true ]', "ci/nvcc.sh .venv")
    assert "build_inplace.sh" in ran[1]


def test_an_nvcc_outside_path_is_put_into_the_environment_and_one_in_path_serves(tmp_path: Path) -> None:
    home, venv = tmp_path / "cuda", tmp_path / "venv"
    for folder in (home, venv):
        (folder / "bin").mkdir(parents=True)
    (home / "bin" / "nvcc").write_text("#!/bin/sh\necho nvcc was given $1\n")
    (home / "bin" / "nvcc").chmod(0o755)
    for path in (f"{home}/bin:/usr/bin:/bin", "/usr/bin:/bin"):
        command = ["env", f"PATH={path}", f"CUDA_HOME={home}", str(ROOT / "ci" / "nvcc.sh"), str(venv)]
        subprocess.run(command, check=True)
        assert (venv / "bin" / "nvcc").exists() == (path == "/usr/bin:/bin")
    said = subprocess.run([venv / "bin" / "nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    assert said == "nvcc was given --version\n"


def test_the_empty_debian_is_root_s_unless_asked_otherwise() -> None:
    """Variables of make's own, such as AS, are never empty."""
    assert dry_run("test-bare") == "ci/bare_root_test.sh short root\n"
    assert dry_run("test-bare", "MODE=full", "WHO=user") == "ci/bare_root_test.sh full user\n"


def test_scripts_keep_their_line_ends_in_any_clone() -> None:
    """With core.autocrlf a clone would have scripts that no shell runs."""
    if not (ROOT / ".git").exists():
        pytest.skip("no clone")
    command = ["git", "-c", f"safe.directory={ROOT}", "check-attr", "eol", "--", "ci/setup.sh", "Makefile", "setup.py"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.rpartition(": ")[2] for line in told] == ["lf"] * 3


def test_a_class_has_at_most_two_bases_of_the_package() -> None:
    """A call is read from its class upwards: an interface, what its kind shares, what all share."""
    bases: dict[str, list[str]] = {}
    for path in (ROOT / "hybrid_ep").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]

    def above(name: str) -> set[str]:
        return {base for own in bases.get(name, []) if own in bases for base in (own, *above(own))}

    assert above("EPBuffer") == {"ElasticCalls", "BaseBuffer"}
    too_many = {name: sorted(above(name)) for name in bases if len(above(name)) > 2}
    assert too_many == {}
