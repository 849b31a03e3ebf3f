"""Long lists of names for people."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["shorten_names"]


def shorten_names(names: Sequence[str], most: int = 4) -> str:
    """The first names, and how many more there are: ``a, b and 3 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
