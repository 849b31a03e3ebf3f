"""What a check of manifests finds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum

__all__ = ["Level", "Problem"]


class Level(str, Enum):
    """How bad it is.

    ``error``: the API server refuses it, or it cannot work. ``warning``: it works on some clusters, or until something
    goes wrong. ``hint``: it may be intended, or only the cluster can tell.
    """

    ERROR = "error"
    WARNING = "warning"
    HINT = "hint"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a manifest.

    Attributes:
        source: the file, or the folder that was built.
        name: ``kind/name`` of the object; empty where there is none.
        path: JSON path to what is wrong.
        rule: id of the rule, or ``build``, ``schema``.
        message: what is there, what is allowed, and what would happen.
        level: how bad it is.
        line: of `path` in the file, counted from 1; None for what kustomize built.
        silenced: the reason that an annotation gives for leaving it so; empty where it counts.
    """

    source: str
    name: str
    path: str
    rule: str
    message: str
    level: Level = Level.ERROR
    line: int | None = None
    silenced: str = ""

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return {**asdict(self), "level": self.level.value}
