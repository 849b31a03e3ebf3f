#!/usr/bin/env python3
"""Sentences of the documentation that are too long: `python ci/prose.py [PAGE…]` names them, and exits 1 if any.

Code, tables, headings and comments are left out. A piece of inline code is one word; a link counts by its text.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_WORDS = 30
PAGES = ("*.md", "docs/**/*.md", "ansible/*.md", "benchmarks/results/README.md", "tests/**/*.md")
_NOT_PROSE = re.compile(r"^```.*?^```|<!--.*?-->|^---\n.*?^---$", re.S | re.M)
_OWN_BLOCK = re.compile(r"^\s*(\||#|!\[|:::)")
_ITEM = re.compile(r"^\s*([-*]|\d+\.)\s+")
_END = re.compile(r"(?<=[.!?])[\")*_]*\s+(?=[\"(*_`\[]*[^a-z\s])")


def sentences(markdown: str) -> Iterator[str]:
    """Each sentence of a page's paragraphs and list items, on one line, without the targets of links."""
    block: list[str] = []
    for line in [*_NOT_PROSE.sub("", markdown).splitlines(), ""]:
        if not line.strip() or _OWN_BLOCK.match(line) or _ITEM.match(line):
            yield from _split(" ".join(block))
            block = []
        if line.strip() and not _OWN_BLOCK.match(line):
            block.append(_ITEM.sub("", line).strip())


def _split(text: str) -> Iterator[str]:
    code: list[str] = []

    def hide(found: re.Match[str]) -> str:
        code.append(found[0])
        return f"`{len(code) - 1}`"

    text = re.sub(r"\]\([^)\s]+\)", "", re.sub(r"`[^`]+`", hide, text)).replace("[", "")
    for sentence in _END.split(text):
        if sentence:
            yield re.sub(r"`(\d+)`", lambda found: code[int(found[1])], sentence)


def words(sentence: str) -> int:
    """The words of a sentence; a piece of inline code is one."""
    return len(re.findall(r"\w[\w'./%×+-]*", re.sub(r"`[^`]+`", "code", sentence)))


def main() -> int:
    pages = [Path(page) for page in sys.argv[1:]] or sorted({p for glob in PAGES for p in ROOT.glob(glob)})
    found = 0
    for page in pages:
        for sentence in sentences(page.read_text()):
            if words(sentence) > MOST_WORDS:
                found += 1
                print(f"{page}: {words(sentence)} words: {sentence}")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
