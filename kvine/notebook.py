"""Self-contained HTML for notebooks: tables and bars without scripts, images or outside styles.

Whatever is not `Html` already is escaped: a token may be `<script>`. Numbers stand beside their bars, as text, so that
a screen reader or a copy into another document loses nothing.
"""

from collections.abc import Iterable, Sequence
from html import escape

_STYLE = """<style>
.kvine { font-family: system-ui, sans-serif; line-height: 1.4; }
.kvine table { border-collapse: collapse; margin: 0.5em 0 1em; font-variant-numeric: tabular-nums; }
.kvine caption { text-align: left; font-weight: 600; padding: 0.3em 0; }
.kvine th, .kvine td { text-align: left; font-weight: 400; padding: 0.1em 0.7em; border-bottom: 1px solid #8886; }
.kvine thead th { font-weight: 600; }
.kvine .number { text-align: right; }
.kvine .bar { display: inline-block; height: 0.7em; background: #4878cf; margin-left: 0.6em; }
</style>"""

BAR_WIDTH_EM = 16.0


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


Cell = str | int | float | None


def page(*parts: str) -> str:
    """Parts as one `div`, with the style that they need; text that is no `Html` becomes paragraphs."""
    inner = "\n".join(part if isinstance(part, Html) else f"<p>{escape(part)}</p>" for part in parts)
    return f'{_STYLE}\n<div class="kvine">\n{inner}\n</div>'


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Html:
    """A table; the first cell of a row names it. Numbers are aligned to the right, None leaves a cell empty."""
    rows = list(rows)
    numeric = [any(isinstance(row[i], int | float) for row in rows) for i in range(len(columns))]
    head = "".join(_cell("th", name, right, "col") for name, right in zip(columns, numeric, strict=True))
    body = "\n".join(
        f"<tr>{_cell('th', row[0], numeric[0], 'row')}"
        + "".join(_cell("td", cell, right) for cell, right in zip(row[1:], numeric[1:], strict=True))
        + "</tr>"
        for row in rows
    )
    return Html(
        f"<table>\n<caption>{escape(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n"
        "</table>"
    )


def bar(share: float, text: str) -> Html:
    """A number as `text`, and beside it a bar whose length is `share` (0 to 1) of the longest."""
    width = BAR_WIDTH_EM * min(max(share, 0.0), 1.0)
    return Html(f'{escape(text)}<span class="bar" aria-hidden="true" style="width:{width:.2f}em"></span>')


def _cell(tag: str, value: Cell, right: bool, scope: str | None = None) -> str:
    if value is None:
        text = ""
    elif isinstance(value, int):
        text = f"{value:,}"
    elif isinstance(value, float):
        text = f"{value:.4g}"
    else:
        text = value if isinstance(value, Html) else escape(value)
    attributes = (f' scope="{scope}"' if scope else "") + (' class="number"' if right else "")
    return f"<{tag}{attributes}>{text}</{tag}>"
