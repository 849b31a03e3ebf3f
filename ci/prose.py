#!/usr/bin/env python3
"""Prose of the documentation that a reader stumbles over: `python ci/prose.py [PAGE…]` names it, and exits 1 if any.

Three things are found: a sentence that begins with its verb and has no subject, a word of ours on a page that neither
defines it nor links to where it is defined, and phrases of a list, which are English word for word from elsewhere. How
long a sentence should be, its author decides. Code, tables, headings and comments are left out.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# A sentence that begins like this has no subject, unless it asks.
_NO_SUBJECT = re.compile(
    r"(Is|Are|Was|Were|Has|Have|Had|Does|Needs|Takes|Gives|Returns|Sends|Makes|Shows|Means|Computed|Measured|Tested|"
    r"Written|Read by|Told|Made|Also (?:is|are|has))\b(?!.*\?$)"
)
# Phrases of a list, and what to write.
PHRASES = {
    r"\b(?:is|are|was|were) told to (?:all|the other|every)": "is reported to",
    r"\bin turns\b": "alternating",
    r"\b(?:results?|rows?|sums?|values?) (?:is|are) right\b": "correct",
    r"\btakes? the (?:torch|cuda) engine\b": "uses",
    r"\blies? in\b(?! wait)": "is in",
    r"\bstands? (?:in|on|beside)\b(?! a light)": "is in, is beside",
    r"\bin words\b": "as text",
    r"\bof its own accord\b": "by itself",
    r"\bequally often\b": "the same number of times",
    r"\bhas gone\b": "is lost",
    r"\bof today\b": "current",
    r"\bby and by\b": "gradually",
    r"\bin the same words\b": "with the same text",
}
# Words of ours: a page that uses one defines it, in italics, or links to the page that does.
TERMS = ("push", "domain rank", "work index", "control block", "row offset", "epoch", "until done", "home")
DEFINED_AT = re.compile(r"architecture\.md#terms|figures_h200\.md|bench\.md")
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


def problems(page: Path | str, markdown: str) -> Iterator[str]:
    """Yields what a reader stumbles over, each with its sentence."""
    prose = " ".join(sentences(markdown))
    for term in TERMS:
        used = re.search(rf"(?<![\w`/-]){term}(?:es|s)?(?![\w`/-])", prose)
        if (
            used
            and not re.search(rf"\*{term}|^\| {term} \|", markdown, re.I | re.M)
            and not DEFINED_AT.search(markdown)
        ):
            around = prose[max(0, used.start() - 60) : used.end() + 20]
            yield f"{page}: {term!r} is neither defined nor linked: …{around}…"
    for sentence in sentences(markdown):
        if _NO_SUBJECT.match(sentence):
            yield f"{page}: no subject: {sentence}"
        for phrase, better in PHRASES.items():
            if re.search(phrase, sentence):
                yield f"{page}: better {better!r}: {sentence}"


def main() -> int:
    pages = [Path(page) for page in sys.argv[1:]] or sorted({p for glob in PAGES for p in ROOT.glob(glob)})
    found = [problem for page in pages for problem in problems(page, page.read_text())]
    print("\n".join(found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
