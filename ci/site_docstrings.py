"""Docstrings as the site's parser takes them: its section of code has the title `Examples:`, ours is `Example:`."""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["Docstrings"]

_EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Changes each docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub("Examples:", obj.docstring.value)
