"""The ladder: build → schemas → rules. A manifest that falls off a rung is not asked for the next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hybrid_ep.errors import ConfigError
from hybrid_ep.k8s.manifest import MissingToolError, find_sources, load
from hybrid_ep.k8s.problem import Problem
from hybrid_ep.k8s.rules import RULES, check_rules
from hybrid_ep.k8s.schema import KUBERNETES_VERSION, check_schema

__all__ = ["CheckResult", "check"]


@dataclass(frozen=True)
class CheckResult:
    """What the ladder found.

    Attributes:
        checked: for each source, the names of its objects.
        problems: in the order of sources.
        unchecked: what could not be done here, and why; empty if everything was.
    """

    checked: dict[str, list[str]]
    problems: list[Problem]
    unchecked: list[str]

    @property
    def exit_code(self) -> int:
        """0 = good, 1 = a problem was found, 2 = something could not be checked."""
        return 1 if self.problems else 2 if self.unchecked else 0

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return {
            "ok": self.exit_code == 0,
            "kubernetes": KUBERNETES_VERSION,
            "rules": [rule.id for rule in RULES],
            "checked": self.checked,
            "unchecked": self.unchecked,
            "problems": [problem.to_json() for problem in self.problems],
        }


def check(paths: Iterable[Path]) -> CheckResult:
    """Checks files, folders that kustomize builds, and trees of them.

    Raises:
        ConfigError: a path holds nothing to check.
    """
    result = CheckResult({}, [], [])
    for source in [source for path in paths for source in find_sources(path)]:
        try:
            manifests = load(source)
        except ConfigError as error:
            result.problems.append(Problem(str(source), "", "", "build", str(error)))
            continue
        except MissingToolError as error:
            result.unchecked.append(f"{source}: {error}")
            continue
        result.checked[str(source)] = [manifest.name for manifest in manifests]
        for manifest in manifests:
            try:
                problems = list(check_schema(manifest))
            except MissingToolError as error:
                result.unchecked.append(f"{source} {manifest.name}: {error}")
                problems = []
            result.problems.extend(problems or check_rules(manifest))
    return result
