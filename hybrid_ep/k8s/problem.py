"""What a check of manifests finds."""

from __future__ import annotations

from dataclasses import asdict, dataclass

__all__ = ["Problem"]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a manifest.

    Attributes:
        source: the file, or the folder that was built.
        name: ``kind/name`` of the object; empty where there is none.
        path: JSON path to what is wrong.
        rule: id of the rule, or ``build``, ``schema``.
        message: what is there, what is allowed, and what would happen.
    """

    source: str
    name: str
    path: str
    rule: str
    message: str

    def to_json(self) -> dict[str, str]:
        """Plain values."""
        return asdict(self)
