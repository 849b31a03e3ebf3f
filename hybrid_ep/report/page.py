"""One self-contained HTML page: text, tables and pictures in a single file that opens anywhere, light or dark."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from hybrid_ep.report.tables import Cell, DataTable

# The look of every page.
CSS = """
:root{color-scheme:light dark;--ink:#1b2430;--muted:#5a6675;--paper:#fff;--panel:#f5f7fa;--line:#dfe5ec;
--good:#00785a;--bad:#b3400b;--accent:#0072b2}
@media screen and (prefers-color-scheme:dark){:root{--ink:#e6ebf1;--muted:#9aa7b6;--paper:#12171e;--panel:#1b222c;
--line:#2c3643;--good:#3ecf9f;--bad:#ff9259;--accent:#63b8ee}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.6 Inter,system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1060px;margin:0 auto;padding:48px 24px 80px}
h1{font-size:34px;line-height:1.2;margin:0 0 8px;letter-spacing:-.02em}
h2{font-size:22px;margin:56px 0 8px;letter-spacing:-.01em}
p{margin:0 0 16px;max-width:74ch} .lead{font-size:18px;color:var(--muted)}
code{font:.9em ui-monospace,SFMono-Regular,Menlo,monospace;background:var(--panel);padding:.1em .35em;border-radius:4px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(176px,1fr));gap:14px;margin:28px 0 8px}
.card{background:var(--panel);border:1px solid var(--line);border-radius:12px;padding:16px 18px}
.card b{display:block;font-size:23px;white-space:nowrap;line-height:1.3;letter-spacing:-.01em}
.card span{color:var(--muted);font-size:14px}
.good{color:var(--good)} .bad{color:var(--bad)}
.scroll{overflow-x:auto;margin:16px 0 8px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:14.5px}
th{color:var(--muted);font-weight:600;text-align:left;border-bottom:2px solid var(--line);padding:8px 12px 8px 0;
vertical-align:bottom}
td{border-bottom:1px solid var(--line);padding:7px 12px 7px 0} .num{text-align:right}
figure{margin:20px 0 0;background:#fff;border:1px solid var(--line);border-radius:12px;padding:14px;overflow:hidden}
figure img{display:block;width:100%;height:auto}
footer{margin-top:64px;padding-top:16px;border-top:1px solid var(--line);color:var(--muted);font-size:14px}
"""


@dataclass
class Page:
    """Grows from top to bottom.

    Attributes:
        title: heading, and name of the window.
        lead: one paragraph under it.
    """

    title: str
    lead: str
    _parts: list[str] = field(default_factory=list)

    def cards(self, cards: Sequence[tuple[Cell, str]]) -> None:
        """Figures of merit with what each means."""
        shown = "".join(
            f'<div class="card"><b class="{cell.css}">{escape(cell.text)}</b><span>{escape(meaning)}</span></div>'
            for cell, meaning in cards
        )
        self._parts.append(f'<div class="cards">{shown}</div>')

    def section(self, heading: str, *paragraphs: str) -> None:
        """A heading and plain text; `code` stands between backticks."""
        self._parts.append(f"<h2>{escape(heading)}</h2>" + "".join(f"<p>{_inline(text)}</p>" for text in paragraphs))

    def table(self, table: DataTable) -> None:
        """A table."""
        sides = ["" if i < table.num_text_columns else "num" for i in range(len(table.columns))]
        head = "".join(
            f'<th class="{side}">{escape(name)}</th>' for side, name in zip(sides, table.columns, strict=True)
        )
        body = ""
        for row in table.cells():
            shown = (f'<td class="{s} {c.css}">{escape(c.text)}</td>' for s, c in zip(sides, row, strict=True))
            body += f"<tr>{''.join(shown)}</tr>"
        self._parts.append(
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        )

    def picture(self, png: bytes, description: str) -> None:
        """A picture, kept inside the page; `description` is read out where it cannot be seen."""
        data = base64.b64encode(png).decode()
        self._parts.append(f'<figure><img alt="{escape(description)}" src="data:image/png;base64,{data}"></figure>')

    def render(self, footer: str) -> str:
        """The whole document."""
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            f"<title>{escape(self.title)}</title><style>{CSS}</style></head><body><main>"
            f'<h1>{escape(self.title)}</h1><p class="lead">{_inline(self.lead)}</p>'
            f"{''.join(self._parts)}<footer>{_inline(footer)}</footer></main></body></html>\n"
        )


def _inline(text: str) -> str:
    """Escapes text and marks what stands between backticks as code."""
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if i % 2 else piece for i, piece in enumerate(pieces))
