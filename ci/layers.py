"""Components of the project and which may import which: checks it, and draws it from the imports and includes.

ci/layers.py --check                  exit 1 and name every import or include that points upwards, that joins the two
                                      halves of the package, or that closes a circle in hybrid_ep/cluster
ci/layers.py --draw FILE              the picture of docs/architecture.md, as SVG
"""

from __future__ import annotations

import argparse
import ast
import graphlib
import io
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# A component is a folder or a file at the top of the tree, or one that is named here below its folder. It may import
# from lower levels only.
PYTHON: list[list[str]] = [
    ["cli"],
    ["cluster.preflight"],
    ["cluster.kubernetes", "cluster.validation", "cluster.model"],
    ["cluster.doctor"],
    ["cluster"],
    ["info"],
    ["demo", "bench"],
    ["integrations"],
    ["nn", "elastic"],
    ["balance"],
    ["report"],
    ["buffers"],
    ["engine.select"],
    ["engine.cuda"],
    ["engine.torch"],
    ["engine"],
    ["transport"],
    ["topology"],
    ["testing"],
    ["agree"],
    ["quantize"],
    ["core"],
    ["workload"],
    ["inputs", "launcher", "outputs", "packages"],
    ["agree.rendezvous"],
    ["agree.board"],
    ["agree.within"],
    ["checks", "watched"],
    ["env"],
    ["errors", "_version"],
    ["_C", "_cuda", "_nvml", "_nvshmem", "_verbs"],
]
# The operator's half, hybrid_ep/cluster, may import these rooms of the library; only `cli` may name a module of it.
CLUSTER_IMPORTS = {
    *("topology", "report", "workload"),
    *("agree.board", "agree.rendezvous", "agree.within"),
    *("checks", "inputs", "launcher", "outputs", "packages", "watched"),
    *("env", "errors", "_version"),
    *("_C", "_cuda", "_nvml", "_verbs"),
}
CXX: list[list[str]] = [
    ["modules"],
    ["calls"],
    ["bindings"],
    ["runtime"],
    ["kernels", "topology"],
    ["transport"],
    ["device"],
    ["layout"],
    ["common"],
]
COLOURS = ["#332288", "#0072B2", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#56B4E9", "#999999"]


def room_of_module(name: str) -> str:
    """`hybrid_ep.engine.torch.hop` → `engine.torch`; `hybrid_ep.errors` → `errors`; a public name → `buffers`."""
    below = ".".join(name.split(".")[1:3])
    if any(below in level for level in PYTHON):
        return below
    top = (*name.split("."), "")[1]
    package = ROOT / "hybrid_ep"
    is_component = top.startswith("_") or (package / top).is_dir() or (package / f"{top}.py").is_file()
    return top if top and is_component else "buffers"


def modules() -> dict[str, Path]:
    """Every module of the package, by its name; a package's own is called ``….__init__``."""
    paths = sorted((ROOT / "hybrid_ep").rglob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}


def targets_of(node: ast.AST) -> list[str]:
    """What a node of a module imports; a string that names a module of the operator's half counts, too."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.findall(r"^hybrid_ep\.cluster(?:\.\w+)*$", node.value)
    return []


def python_edges() -> list[tuple[str, str, str]]:
    """(component, component it imports, where) of every import inside the package, also those inside functions."""
    edges = []
    for name, path in modules().items():
        if name in ("hybrid_ep.__init__", "hybrid_ep.__main__"):
            continue  # they hand out public names lazily, or call the CLI, and belong to no level
        for node in ast.walk(ast.parse(path.read_text())):
            for target in targets_of(node):
                if target.split(".")[0] == "hybrid_ep":
                    where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
                    edges.append((room_of_module(name), room_of_module(target), where))
    return edges


def is_of_cluster(room: str) -> bool:
    """Whether a room belongs to the operator's half."""
    return room.split(".")[0] == "cluster"


def mixed_halves(edges: list[tuple[str, str, str]]) -> list[str]:
    """Imports between the library and the operator's half that are not allowed."""
    wrong = []
    for source, target, where in edges:
        if is_of_cluster(target) and not is_of_cluster(source) and source != "cli":
            wrong.append(f"{where}: {source} is of the library, which never imports hybrid_ep.cluster")
        if is_of_cluster(source) and not is_of_cluster(target) and target not in CLUSTER_IMPORTS:
            wrong.append(f"{where}: {source} must not import {target}; it starts the library as a command only")
    return wrong


def torch_imports() -> list[str]:
    """Imports of torch that the operator's half would make when it starts; those inside functions are allowed."""
    wrong = []
    for name, path in modules().items():
        room = room_of_module(name)
        if is_of_cluster(room) or room in CLUSTER_IMPORTS:
            for node in ast.parse(path.read_text()).body:
                if any(target.split(".")[0] == "torch" for target in targets_of(node)):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {room} must start without torch")
    return wrong


def circles() -> list[str]:
    """A circle of imports in the operator's half, if there is one; imports inside functions and of types count."""
    paths = modules()
    known = {name.removesuffix(".__init__") for name in paths if is_of_cluster(room_of_module(name))}
    imports: dict[str, set[str]] = {}
    for name in known:
        tree = ast.parse(paths.get(name, paths.get(f"{name}.__init__")).read_text())  # type: ignore[union-attr]
        targets = {target for node in ast.walk(tree) for target in targets_of(node)}
        targets |= {target.rpartition(".")[0] for target in targets - known}  # names of a module
        imports[name] = (targets & known) - {name}
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return ["a circle of imports: " + " → ".join(reversed(error.args[1]))]
    return []


def cxx_edges() -> list[tuple[str, str, str]]:
    """(component, component it includes, where) of every include inside csrc."""
    edges = []
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.suffix not in {".h", ".cpp", ".cu", ".cuh", ".c"}:
            continue
        component = path.relative_to(ROOT / "csrc").parts[0]
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if found := re.match(r'#include "(\w+)/', line):
                edges.append((component, found[1], f"{path.relative_to(ROOT)}:{number}"))
    return edges


def violations(levels: list[list[str]], edges: list[tuple[str, str, str]]) -> list[str]:
    """Edges that do not point downwards, and components that stand on no level."""
    level = {component: depth for depth, components in enumerate(levels) for component in components}
    wrong = []
    for source, target, where in edges:
        for component in (source, target):
            if component not in level:
                wrong.append(f"{where}: {component} stands on no level of ci/layers.py")
        if source in level and target in level and source != target and level[target] <= level[source]:
            wrong.append(f"{where}: {source} must not know {target}")
    return sorted(set(wrong))


def asm_outside_ptx() -> list[str]:
    """`asm` belongs to csrc/device/ptx."""
    return [
        f"{path.relative_to(ROOT)}:{number}: asm outside csrc/device/ptx"
        for path in sorted((ROOT / "csrc").rglob("*.*"))
        if "ptx" not in path.parts and path.suffix in {".h", ".cpp", ".cu", ".cuh"}
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"\basm\b\s*(volatile)?\s*\(", line)
    ]


def all_wrong() -> list[str]:
    """Everything that `--check` complains about."""
    edges = python_edges()
    halves = mixed_halves(edges) + torch_imports() + circles()
    return violations(PYTHON, edges) + halves + violations(CXX, cxx_edges()) + asm_outside_ptx()


def draw() -> bytes:
    """Both graphs as SVG, a column each; an arrow is an import or include that exists, its width how many."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(14, 12), width_ratios=[1.6, 1])
    graphs = [("Python: hybrid_ep", PYTHON, python_edges()), ("C++ and CUDA: csrc", CXX, cxx_edges())]
    for axis, (title, levels, edges) in zip(axes, graphs, strict=True):
        used = {component for edge in edges for component in edge[:2]}
        place = {}
        for depth, components in enumerate(levels):
            shown = [component for component in components if component in used]
            for i, component in enumerate(shown):
                place[component] = ((i + 1) / (len(shown) + 1), -depth)
        counts: dict[tuple[str, str], int] = {}
        for source, target, _ in edges:
            if source != target and source in place and target in place:
                counts[source, target] = counts.get((source, target), 0) + 1
        for (source, target), number in counts.items():
            (x, y), (u, v) = place[source], place[target]
            bend = 0.0 if abs(y - v) == 1 else 0.18 * (1 if x <= 0.5 else -1)
            arrow = {
                "arrowstyle": "-|>",
                "color": COLOURS[int(-y) % len(COLOURS)],
                "alpha": 0.8 if abs(y - v) == 1 else 0.35,
                "shrinkA": 16,
                "shrinkB": 16,
                "linewidth": 0.7 + 0.25 * min(number, 12),
                "connectionstyle": f"arc3,rad={bend}",
            }
            axis.annotate("", xy=(u, v), xytext=(x, y), arrowprops=arrow)
        for component, (x, y) in place.items():
            box = {"boxstyle": "round,pad=0.4", "facecolor": "white", "edgecolor": COLOURS[int(-y) % len(COLOURS)]}
            # Arrows pass behind the boxes.
            axis.text(x, y, component, ha="center", va="center", bbox=box | {"linewidth": 2}, fontsize=12, zorder=5)
        axis.set_title(title, fontsize=18)
        axis.set_xlim(0, 1)
        axis.set_ylim(-len(levels) + 0.4, 0.6)
        axis.axis("off")
    figure.tight_layout()
    picture = io.BytesIO()
    figure.savefig(picture, format="svg", metadata={"Date": None})
    return picture.getvalue()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--draw", type=Path)
    arguments = parser.parse_args()
    if arguments.draw:
        arguments.draw.write_bytes(draw())
    wrong = all_wrong()
    if arguments.check and wrong:
        print("\n".join(wrong))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
