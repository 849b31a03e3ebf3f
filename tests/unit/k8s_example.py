"""An example of a rule of `hybrid-ep k8s check`: manifests that the rule refuses, and the same without the mistake."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from hybrid_ep.cluster.kubernetes.check import check
from hybrid_ep.cluster.kubernetes.problem import Level


@dataclass(frozen=True)
class Example:
    """A mistake and the same without it.

    Attributes:
        rule: that must find the mistake, and no other.
        path: the JSON path that must be named.
        wrong: fields of a Pod's spec, of its container (beginning with ``- ``), or whole objects (with a kind).
        right: the same, in which nothing may be found.
        level: how bad the mistake must be.
    """

    rule: str
    path: str
    wrong: str
    right: str
    level: Level = Level.ERROR

    def __str__(self) -> str:
        return f"{self.rule} {self.wrong.strip()[:50]}"


def examine(example: Example, folder: Path) -> None:
    """Fails unless the rule finds the mistake, and nothing is found without it."""
    file = folder / "a.yaml"
    file.write_text(_build(example.right))
    assert check([file]).problems == []
    file.write_text(_build(example.wrong))
    problems = check([file]).problems
    assert [(problem.rule, problem.level) for problem in problems] == [(example.rule, example.level)]
    assert problems[0].path == example.path
    assert problems[0].line is not None


def _build(text: str) -> str:
    """Whole objects of an example's text."""
    if "kind:" in text:
        return text
    container = {"name": "a", "image": "a:1"}
    spec = {"containers": [container]}
    fields, _, more = text.removeprefix("- ").partition("\n")
    if text.startswith("- "):
        container |= yaml.safe_load(fields)
        spec |= yaml.safe_load(more) or {}
    else:
        spec |= yaml.safe_load(text)
    mounts = [{"name": each["name"], "mountPath": f"/mounted/{each['name']}"} for each in spec.get("volumes") or []]
    if mounts:
        container.setdefault("volumeMounts", mounts)
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": spec}
    return yaml.safe_dump(pod)
