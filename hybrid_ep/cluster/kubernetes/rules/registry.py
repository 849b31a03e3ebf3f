"""The list of rules, and how a function becomes one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from hybrid_ep.cluster.kubernetes.manifest import Manifest
from hybrid_ep.cluster.kubernetes.problem import Level, Problem

__all__ = ["RULES", "BuildFound", "Finding", "Found", "Rule", "build_rule", "check_rules", "rule"]


class Finding(NamedTuple):
    """A breach of a rule.

    Attributes:
        path: JSON path to what is wrong.
        message: what is there, what is allowed, and what would happen.
        level: where it is not the rule's own.
    """

    path: str
    message: str
    level: Level | None = None


Build = Sequence[Manifest]
Found = Iterator[Finding]
BuildFound = Iterator[tuple[Manifest, Finding]]


class Rule(NamedTuple):
    """One rule.

    Attributes:
        id: what reports call it.
        level: how bad a breach is, where the rule does not say otherwise for one.
        text: what it demands and why.
        check: yields every breach in one build.
        is_of_build: whether it compares objects, so that all of them must be sound.
    """

    id: str
    level: Level
    text: str
    check: Callable[[Build], BuildFound]
    is_of_build: bool


RULES: list[Rule] = []


def check_rules(build: Build, *, is_whole: bool = True) -> Iterator[Problem]:
    """Yields every breach of every rule in the manifests of one source, in the order of the manifests.

    Args:
        build: objects that fit their schemas.
        is_whole: whether these are all; otherwise none are compared with each other.
    """
    rules = [rule for rule in RULES if is_whole or not rule.is_of_build]
    found = [(manifest, rule, finding) for rule in rules for manifest, finding in rule.check(build)]
    place = {id(manifest): index for index, manifest in enumerate(build)}
    for manifest, rule, (path, message, level) in sorted(found, key=lambda item: place[id(item[0])]):
        path = manifest.written(path)
        where = (str(manifest.source), manifest.name, path)
        yield Problem(*where, rule.id, message, level or rule.level, manifest.line(path))


def rule(id: str, level: Level) -> Callable[[Callable[[Manifest], Found]], Callable[[Manifest], Found]]:
    """Makes a rule of a function over one manifest."""

    def register(check: Callable[[Manifest], Found]) -> Callable[[Manifest], Found]:
        def check_all(build: Build) -> BuildFound:
            for manifest in build:
                for finding in check(manifest):
                    yield manifest, finding

        RULES.append(Rule(id, level, _text(check), check_all, is_of_build=False))
        return check

    return register


def build_rule(id: str, level: Level) -> Callable[[Callable[[Build], BuildFound]], Callable[[Build], BuildFound]]:
    """Makes a rule of a function over all manifests of one source."""

    def register(check: Callable[[Build], BuildFound]) -> Callable[[Build], BuildFound]:
        RULES.append(Rule(id, level, _text(check), check, is_of_build=True))
        return check

    return register


def _text(check: object) -> str:
    return " ".join((check.__doc__ or "").split())
