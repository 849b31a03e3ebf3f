"""The list of rules, and how a function becomes one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from hybrid_ep.cluster.kubernetes.manifest import Level, Manifest, Problem


class Finding(NamedTuple):
    """A breach of a rule: the JSON path to it, what is there and what is allowed, a level if it is not the rule's, and
    the manifest if it is not the one that was checked.
    """

    path: str
    message: str
    level: Level | None = None
    manifest: Manifest | None = None


Found = Iterator[Finding]
Check = Callable[[Manifest], Found]


class Rule(NamedTuple):
    """What it is called, how bad a breach is, what it demands and why, and what finds breaches in one manifest."""

    id: str
    level: Level
    text: str
    check: Check


RULES: list[Rule] = []


def check_rules(manifest: Manifest) -> Iterator[Problem]:
    """Yields every breach of every rule in one object, which fits its schema."""
    for rule in RULES:
        for path, message, level, other in rule.check(manifest):
            yield (other or manifest).problem(path, rule.id, message, level or rule.level)


def rule(id: str, level: Level) -> Callable[[Check], Check]:
    """Makes a rule of a function, whose docstring is the rule's text."""

    def register(check: Check) -> Check:
        RULES.append(Rule(id, level, " ".join((check.__doc__ or "").split()), check))
        return check

    return register
