"""Hooks of the documentation site: pages from elsewhere in the repository, and pages made from the code.

Markdown files outside docs/ join the site under repo/, the README as its first page. Links between pages stay links;
links to files that are not pages become plain text, because the site does not hold them.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# mkdocs loads this file by its path.
from ci.pages import PICTURES, pages  # noqa: E402

OUTSIDE = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "ansible/*.md",
    "benchmarks/results/**/*.*",
    "tests/emulation/*.md",
)
# Pages that mention everything: in a search they come after the guides.
LISTS = {
    "CHANGELOG.md",
    "docs/bad_calls.md",
    "docs/doctor_reference.md",
    "docs/reference/environment.md",
    "docs/reasons.md",
}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def site_path(source: str) -> str:
    """Where a file of the repository stands on the site."""
    if source == "README.md":
        return "index.md"
    return source.removeprefix("docs/") if source.startswith("docs/") else f"repo/{source}"


def repo_path(page: str) -> str:
    """The file of the repository that a page of the site comes from."""
    if page == "index.md":
        return "README.md"
    return page.removeprefix("repo/") if page.startswith("repo/") else f"docs/{page}"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            source = str(path.relative_to(ROOT))
            files.append(File.generated(config, site_path(source), abs_src_path=str(path)))
    for name, text in pages().items():
        files.append(File.generated(config, name, content=text))
    for name, draw in PICTURES.items():
        files.append(File.generated(config, name, content=draw()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = repo_path(page.file.src_uri)
    if source in LISTS or source.startswith("benchmarks/"):
        page.meta["search"] = {"boost": 0.2}

    def relink(found: re.Match[str]) -> str:
        mark, text, target = found.groups()
        file, hash_mark, anchor = target.partition("#")
        if re.match(r"\w+:", target) or not file:
            return found[0]
        linked = os.path.normpath(os.path.join(os.path.dirname(source), file))
        if (ROOT / linked).is_dir() and files.get_file_from_path(site_path(f"{linked}/README.md")):
            linked = f"{linked}/README.md"
        there = site_path(linked)
        if files.get_file_from_path(there) is None:
            return found[0] if mark else text
        relative = os.path.relpath(there, os.path.dirname(page.file.src_uri) or ".")
        return f"{mark}[{text}]({relative}{hash_mark}{anchor})"

    return _LINK.sub(relink, markdown)
