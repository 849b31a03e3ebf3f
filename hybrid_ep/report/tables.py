"""One table for every report: the same rows in a terminal, in Markdown and on a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

NOTHING = "–"  # a cell without a value


@dataclass(frozen=True)
class Cell:
    """A table cell or a figure of merit.

    Attributes:
        text: its content.
        good: True and False colour it; None leaves it plain.
        style: of rich in a terminal, where it is neither.
    """

    text: str
    good: bool | None = None
    style: str = ""

    @property
    def css(self) -> str:
        """Its CSS class."""
        return {True: "good", False: "bad", None: ""}[self.good]

    def to_rich(self) -> Text:
        return Text(self.text, style={True: "bold green", False: "bold red", None: self.style}[self.good])


@dataclass(frozen=True)
class DataTable:
    """Rows of texts, in which nothing is markup.

    Attributes:
        columns: headings.
        rows: a cell for each column.
        num_text_columns: so many columns hold text; those behind them hold numbers and are aligned to the right.
        title, caption: above and below the table in a terminal.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    num_text_columns: int = 1
    title: str = ""
    caption: str = ""

    def cells(self) -> list[list[Cell]]:
        """The rows, every cell of which is one."""
        return [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in self.rows]

    def to_rich(self, *, no_wrap: bool = False) -> Table:
        """For a terminal. In a narrow one cells take more lines, and lose nothing."""
        title = Text(self.title, style="italic") if self.title else None
        caption = Text(self.caption, style="dim italic") if self.caption else None
        table = Table(title=title, caption=caption, title_justify="left", caption_justify="left", box=SIMPLE_HEAD)
        table.pad_edge = False
        for place, name in enumerate(self.columns):
            side = "left" if place < self.num_text_columns else "right"
            table.add_column(Text(name), justify=side, no_wrap=no_wrap, overflow="fold")  # type: ignore[arg-type]
        for row in self.cells():
            table.add_row(*(cell.to_rich() for cell in row))
        return table

    def to_markdown(self) -> list[str]:
        """Its lines."""
        num_numbers = len(self.columns) - self.num_text_columns
        rules = ["---"] * self.num_text_columns + ["---:"] * num_numbers
        texts = [[cell.text for cell in row] for row in self.cells()]
        return [f"| {' | '.join(cells)} |" for cells in (self.columns, rules, *texts)]
