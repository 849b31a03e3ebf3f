"""Finds tensors of hybrid_ep that are made without a device: under `torch.set_default_device` they are made elsewhere.

ci/devices.py [FILE …]      exit 1 and name each of them; without files, of the package
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from torch.utils._device import _device_constructors

ROOT = Path(__file__).resolve().parents[1]

# What the default device of torch changes.
CREATIONS = {function.__name__ for function in _device_constructors()}


def without_device(source: str) -> list[tuple[int, str]]:
    """(line, function) of each call of `torch.zeros` and the like that has no argument `device`."""
    return [
        (node.lineno, node.func.attr)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in CREATIONS
        and ast.unparse(node.func.value).rpartition(".")[2] in ("torch", "_torch")
        and not any(keyword.arg == "device" for keyword in node.keywords)
    ]


def main() -> int:
    files = [Path(name) for name in sys.argv[1:]] or sorted((ROOT / "hybrid_ep").rglob("*.py"))
    found = [
        f"{path}:{line}: torch.{name} without a device"
        for path in files
        for line, name in without_device(path.read_text())
    ]
    print("\n".join(found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
