"""What the pages name exists: linked files and headings, commands and their options, make targets, variables, paths."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from benchmarks import tables
from ci.pages import PICTURES, pages
from ci.prose import problems, sentences
from hybrid_ep import env
from hybrid_ep.cli import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]
MADE = {ROOT / "docs" / name: text for name, text in pages().items()}
PAGES = sorted(
    [
        *MADE,
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("ansible/*.md"),
        *ROOT.glob("tests/**/*.md"),
        ROOT / "benchmarks/results/README.md",
    ]
)
MAKEFILE = (ROOT / "Makefile").read_text()
EMULATOR = (ROOT / "tests/emulation/emulator.cpp").read_text()
VARIABLES = {variable.name for variable in env.VARIABLES} | set(re.findall(r'getenv\("(\w+)"\)', EMULATOR))
ROOMS = (
    "ansible/",
    "benchmarks/",
    "examples/",
    "ci/",
    "compat/",
    "csrc/",
    "docker/",
    "docs/",
    "hybrid_ep/",
    "k8s/",
    "tests/",
)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def text_of(page: Path) -> str:
    return MADE[page] if page in MADE else page.read_text()


def exists(path: Path) -> bool:
    """In the repository, or made from the code."""
    return path.exists() or path in MADE or path in {ROOT / "docs" / name for name in PICTURES}


def blocks(page: Path) -> str:
    return "\n".join(re.findall(r"^```.*?\n(.*?)^```", text_of(page), re.S | re.M))


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", text_of(page), flags=re.S | re.M)


def quoted(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(page))


def anchors(page: Path) -> set[str]:
    """The headings as GitHub names them."""
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in re.findall(r"^#+ (.*)$", prose(page), re.M))
    return {text.replace(" ", "-") for text in plain}


def commands(page: Path) -> Iterator[str]:
    """Every call of `hybrid-ep` that stands in a block or in quotes, from its subcommand on, without a comment."""
    for line in [*blocks(page).splitlines(), *quoted(page)]:
        found = re.search(r"(?:^| )hybrid-ep ([a-z0-9-].*)", line.partition(" #")[0])
        if found and "│" not in line and not line.lstrip().startswith("helm "):  # a release has the same name
            yield found[1]


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert exists(linked), target
        assert not anchor or anchor in anchors(linked), target


@each_page
def test_commands_and_their_options_exist(page: Path) -> None:
    for text in commands(page):
        words = shlex.split(re.sub(r"[<|].*|\[\w+\](\.\.\.)?|\bCOMMAND\b|[^\x00-\x7f]", " ", text))
        command: click.Command = main
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            found = command.get_command(click.Context(command), words.pop(0))
            assert found is not None, text
            command = found
        if not command.context_settings.get("ignore_unknown_options"):
            options = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
            for word in words:
                assert not word.startswith("--") or word.partition("=")[0] in options, text


def test_the_command_line_page_has_every_command_and_no_internal_default() -> None:
    page = MADE[ROOT / "docs/reference/cli.md"]
    assert [f"## hybrid-ep {name}" for name in COMMANDS] == re.findall(r"^## .*", page, re.M)
    assert not re.findall(r"\bSentinel|UNSET|N/A|env-table", page)
    assert "| `--ranks` | `INTEGER` | `8` | Ranks, each a process. |" in page


@each_page
def test_make_targets_exist(page: Path) -> None:
    for text in [*blocks(page).splitlines(), *quoted(page)]:
        for target in re.findall(r"(?:^|[ (])make ([a-z][a-z-]+)(?= |$)", text):
            assert re.search(rf"^{target}:", MAKEFILE, re.M), text


@each_page
def test_variables_exist(page: Path) -> None:
    assert set(re.findall(r"HYBRID_EP_[A-Z_]+", text_of(page))) <= VARIABLES


@each_page
def test_paths_exist(page: Path) -> None:
    for text in quoted(page):
        for word in text.split():
            if word.startswith(ROOMS):
                assert list(ROOT.glob(word.rstrip("/,"))) or exists(ROOT / word), text
    for module in re.findall(r"python -m (tests\.[\w.]+|hybrid_ep\.[\w.]+)", text_of(page)):
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists(), module


def test_messages_are_those_of_the_code() -> None:
    """Each part of a message between two values is in a string of the sources."""
    files = [*ROOT.glob("hybrid_ep/**/*.py"), *ROOT.glob("csrc/**/*.cpp")]
    sources = re.sub(r'"\s*f?"', "", "\n".join(file.read_text() for file in files))
    page = (ROOT / "docs/troubleshooting.md").read_text()
    messages = [
        message
        for table in re.findall(r"^\| message \|.*\n((?:\|.*\n)+)", page, re.M)
        for row in table.splitlines()[1:]
        for message in re.findall(r"`([^`]+)`", row.split(" | ")[0])
    ]
    assert len(messages) > 15
    parts = [part.strip(" :;,()") for message in messages for part in re.split(r"…|\b[ABN]\b|\b\d+\b", message)]
    assert [part for part in parts if part not in sources] == []


@each_page
def test_prose_names_no_commit(page: Path) -> None:
    words = re.findall(r"\b[0-9a-f]{7,40}\b", re.sub(r"`[^`]*`", "", prose(page)))
    assert [word for word in words if re.search("[a-f]", word) and re.search("[0-9]", word)] == []


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@each_page
def test_blocks_have_lines_of_their_own(page: Path) -> None:
    assert not re.findall(r"^\s*```.*```", text_of(page), re.M)


@each_page
def test_nobody_stumbles_over_the_prose(page: Path) -> None:
    assert list(problems(page.name, text_of(page))) == []


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_measured_tables_are_those_of_the_results(page: Path) -> None:
    text = text_of(page)
    assert "<!-- table: " in text
    assert tables.with_tables(text) == text, "write them again: python -m benchmarks.tables"


def test_a_figure_that_is_missing_or_there_twice_is_refused() -> None:
    with pytest.raises(KeyError, match="h200_2gpu: 2 times 'combine'"):
        tables.measured("h200_2gpu", "combine", num_sms=None, num_tokens=8)
    with pytest.raises(KeyError, match="0 times 'dispatch' with 9 SMs"):
        tables.measured("h200_2gpu", "dispatch", num_sms=9)


def test_every_extra_is_documented() -> None:
    extras = re.search(
        r"^\[project.optional-dependencies\]\n((?:[\w-]+ = .*\n)+)", (ROOT / "pyproject.toml").read_text(), re.M
    )
    assert extras
    page = (ROOT / "docs/building.md").read_text()
    for name in re.findall(r"^([\w-]+) =", extras[1], re.M):
        assert f"`.[{name}]`" in page, name


def test_sentences_are_those_of_paragraphs_and_items() -> None:
    page = "# Title\n\nShort. It `runs. this`:\n\n- an item\n  [more](there)\n\n| a cell. |\n\n```\ncode.\n```\n"
    assert list(sentences(page)) == ["Short.", "It `runs. this`:", "an item more"]


@pytest.mark.parametrize(
    ("prose", "found"),
    [
        ("It is on the GPU. Is it? A *push* moves rows, and a push is fast.", []),
        ("Needs a driver.", ["no subject"]),
        ("The push moves rows.", ["'push' is neither defined nor linked"]),
        ("The push moves rows ([terms](architecture.md#terms)).", []),
        ("The next rows are right.", ["better 'correct'"]),
    ],
)
def test_prose_is_judged_by_subjects_terms_and_phrases(prose: str, found: list[str]) -> None:
    said = list(problems("page", f"# Title\n\n{prose}\n"))
    assert len(said) == len(found)
    assert all(part in text for part, text in zip(found, said, strict=True))
