"""Hooks of the documentation site: pages from elsewhere in the repository, and pages made from the code.

Markdown files outside docs/ join the site under repo/, the README as its first page. Links between pages stay links;
links to files that are not pages become plain text, because the site does not hold them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from hybrid_ep import env

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "ansible/*.md",
    "benchmarks/results/**/*.*",
    "tests/emulation/*.md",
)
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
    files.append(File.generated(config, "reference/environment.md", content=_environment()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = repo_path(page.file.src_uri)

    def relink(found: re.Match[str]) -> str:
        mark, text, target = found.groups()
        file, hash_mark, anchor = target.partition("#")
        if re.match(r"\w+:", target) or not file or page.file.src_uri == "reference/environment.md":
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


def _environment() -> str:
    """The table of environment variables, from the one that the code reads."""
    lines = ["# Environment variables", "", "`hybrid-ep env` prints this table with the values in force.", ""]
    for phase, title in (("run", "Read by the package"), ("build", "Read by the build")):
        rows: list[list[Any]] = [
            [f"`{v.name}`", "unset" if v.default is None else f"`{v.default}`", v.allowed, v.effect]
            for v in env.VARIABLES
            if v.phase == phase
        ]
        lines += [f"## {title}", "", "| variable | default | takes | effect |", "|---|---|---|---|"]
        lines += [f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in row)} |" for row in rows] + [""]
    return "\n".join(lines)
