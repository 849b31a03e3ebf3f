"""The order of checks: build → schemas → rules. A manifest that fails one step is not checked by the next."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybrid_ep.cluster.kubernetes.manifest import (
    Level,
    Manifest,
    MissingToolError,
    Problem,
    find_sources,
    joined,
    json_path,
    load,
)
from hybrid_ep.cluster.kubernetes.rules import RULES, check_rules
from hybrid_ep.cluster.kubernetes.schema import KUBERNETES_VERSION, check_schema
from hybrid_ep.errors import ConfigError

SILENCE = "ignore.hybrid-ep/"  # an annotation of an object: this, the rule's id, and the reason as its value
# What the command says when it ends.
LEFT_TO_THE_SERVER = "values of fields, names and objects that others refer to (kubectl apply --dry-run=server)"
_PLACEHOLDER = re.compile(r"'[^']*\$\{\w+[^']*\}[^']*' ")  # begins the message of a field with one
_LADDER = {
    "build": "The source can be read or built, and holds an object.",
    "schema": "The object fits its schema, with unknown fields closed.",
    "unknown-kind": "There is a schema for the object's kind; without one only its Pods are checked.",
    "placeholders": "Fields hold values, and no placeholders of a template such as ${NODES}.",
    "silence": "An annotation that silences a rule names one and gives a reason.",
}


def known_rules() -> dict[str, str]:
    """Id → what it demands, of everything that a check can find."""
    return {**_LADDER, **{rule.id: rule.text for rule in RULES}}


@dataclass(frozen=True)
class CheckResult:
    """What the checks found.

    Attributes:
        checked: for each source, the names of its objects.
        problems: in the order of sources, those that an annotation silences included.
        unchecked: what could not be done here, and why; empty if everything was.
        kubernetes: version of the schemas.
    """

    checked: dict[str, list[str]]
    problems: list[Problem]
    unchecked: list[str]
    kubernetes: str = KUBERNETES_VERSION

    @property
    def open(self) -> list[Problem]:
        """Problems that no annotation silences."""
        return [problem for problem in self.problems if not problem.silenced]

    @property
    def counts(self) -> Counter[Level]:
        """Open problems by level."""
        return Counter(problem.level for problem in self.open)

    def exit_code(self, fail_on: Level = Level.ERROR) -> int:
        """0 = good, 1 = an open problem of that level or a worse one, 2 = something could not be checked."""
        levels = list(Level)
        failing = levels[: levels.index(fail_on) + 1]
        return 1 if any(problem.level in failing for problem in self.open) else 2 if self.unchecked else 0

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return {
            "ok": self.exit_code() == 0,
            "kubernetes": self.kubernetes,
            "rules": list(known_rules()),
            "checked": self.checked,
            "unchecked": self.unchecked,
            "problems": [problem.to_json() for problem in self.problems],
        }


def check(
    paths: Iterable[Path],
    *,
    rules: Collection[str] = (),
    ignore: Collection[str] = (),
    kubernetes: str = KUBERNETES_VERSION,
) -> CheckResult:
    """Checks files, folders that kustomize builds, and trees of them.

    Args:
        paths: ``-`` is standard input.
        rules: only these are reported; empty means all.
        ignore: these are not.
        kubernetes: version of the schemas.

    Raises:
        ConfigError: a path holds nothing to check, a rule is unknown, or there are no schemas of that version.
    """
    for name in (*rules, *ignore):
        if name not in known_rules():
            raise ConfigError(f"rule {name!r} is unknown; allowed: {', '.join(known_rules())}")
    result = CheckResult({}, [], [], kubernetes)
    for source in [source for path in paths for source in find_sources(path)]:
        try:
            build = load(source)
        except ConfigError as error:
            result.problems.append(Problem(str(source), "", "", "build", str(error)))
            continue
        except MissingToolError as error:
            result.unchecked.append(f"{source}: {error}")
            continue
        for manifest in build:  # of a folder of files, each file is a source
            result.checked.setdefault(str(manifest.source), []).append(manifest.name)
        try:
            result.problems.extend(_check_build(build, kubernetes))
        except MissingToolError as error:
            result.unchecked.append(f"{source}: {error}")
    chosen = [p for p in result.problems if (not rules or p.rule in rules) and p.rule not in ignore]
    return replace(result, problems=chosen)


def _check_build(build: list[Manifest], kubernetes: str) -> Iterator[Problem]:
    """Schemas of every object, then the rules over those that fit; they are compared with each other if all fit."""
    problems: list[Problem] = []
    sound, unfilled = [], []
    for manifest in build:
        found = list(check_schema(manifest, kubernetes))
        if all(problem.level is not Level.ERROR for problem in found):
            sound.append(manifest)
        unfilled += [problem for problem in found if _PLACEHOLDER.match(problem.message)]
        problems += [problem for problem in found if not _PLACEHOLDER.match(problem.message)]
    if unfilled:
        more = f" and {len(unfilled) - 1} more" if len(unfilled) > 1 else ""
        what = unfilled[0].message.partition(" is not ")[0]
        message = f"{what}{more}: only the schema of these objects is checked; allowed: values, as envsubst writes them"
        problems.append(replace(unfilled[0], rule="placeholders", message=message, level=Level.HINT))
    for manifest in joined(sound) if len(sound) == len(build) else sound:
        problems += check_rules(manifest)
    known, reasons = known_rules(), {manifest.name: _reasons(manifest) for manifest in build}
    for manifest in build:
        for rule, reason in reasons[manifest.name].items():
            path = json_path("$.metadata.annotations", [SILENCE + rule])
            if rule not in known:
                message = f"rule {rule!r} is unknown; allowed: {', '.join(known)}"
                yield manifest.problem(path, "silence", message, Level.ERROR)
            elif not reason:
                message = f"no reason for silencing {rule!r}; allowed: a text that says why"
                yield manifest.problem(path, "silence", message, Level.ERROR)
    for problem in problems:
        yield replace(problem, silenced=reasons[problem.name].get(problem.rule, ""))


def _reasons(manifest: Manifest) -> dict[str, str]:
    """Rule → reason, of the object's annotations."""
    annotations: Any = manifest.metadata.get("annotations")
    found = annotations.items() if isinstance(annotations, dict) else ()
    return {
        str(name).removeprefix(SILENCE): str(reason or "").strip()
        for name, reason in found
        if str(name).startswith(SILENCE)
    }
