"""Units and pages: what people read."""

from io import StringIO

import pytest
from rich.console import Console

from hybrid_ep.report.page import Page
from hybrid_ep.report.tables import Cell, DataTable
from hybrid_ep.report.units import format_bytes, format_ratio, unit_of_microseconds


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (1234567, "1.23 MB"), (99.96e6, "100 MB"), (5.8e12, "5800 GB")],
)
def test_bytes(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_ratios_and_times() -> None:
    assert (format_ratio(1, 2), format_ratio(1, 0)) == ("0.50×", "–")
    assert (unit_of_microseconds(9999), unit_of_microseconds(10000)) == ((1.0, "µs"), (1e3, "ms"))


def test_page_is_self_contained_and_escapes_what_it_shows() -> None:
    page = Page("a < b", "see `x < y`")
    page.cards([(Cell("1 < 2", True), "good")])
    page.table(DataTable(["name", "value"], [["<script>", Cell("bad & worse", False)]]))
    page.picture(b"png", "a picture")
    html = page.render("the end")
    assert "<h1>a &lt; b</h1>" in html
    assert "<code>x &lt; y</code>" in html
    assert "&lt;script&gt;" in html
    assert '<td class="num bad">bad &amp; worse</td>' in html
    assert 'src="data:image/png;base64,cG5n"' in html
    assert "http" not in html


def test_table_is_the_same_in_a_terminal_in_markdown_and_on_a_page() -> None:
    table = DataTable(["name", "value"], [["[bold]a", Cell("1.5", good=True)], ["b", "–"]], title="[red]t")
    assert table.to_markdown() == ["| name | value |", "| --- | ---: |", "| [bold]a | 1.5 |", "| b | – |"]
    console = Console(width=40, record=True, file=StringIO())
    console.print(table.to_rich())
    title, *_, last = [line.split() for line in console.export_text(clear=False).splitlines() if line.strip()]
    assert (title, last) == (["[red]t"], ["b", "–"])
    assert ["[bold]a", "1.5"] in [line.split() for line in console.export_text().splitlines()]
    page = Page("title", "lead")
    page.table(table)
    assert '<td class=" ">[bold]a</td><td class="num good">1.5</td>' in page.render("end")
