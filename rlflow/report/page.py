"""Pieces of a page: its style, sections, tables, tiles and bars, as HTML text.

Everything that comes from a run is escaped here. This file does not know what a run is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlflow.report.charts.look import FAINT, INK, LINE, PALETTE, POOL_FILL, SOFT_INK, escape

STYLE = f"""
:root {{ color-scheme: light; }}
body {{ margin: 0; background: #fff; color: {INK};
  font: 14px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }}
main {{ max-width: 1080px; margin: 0 auto; padding: 32px 24px 64px; }}
h1 {{ font-size: 26px; margin: 0 0 2px; }}
h2 {{ font-size: 17px; margin: 40px 0 10px; padding-bottom: 5px; border-bottom: 1px solid {LINE}; }}
p.facts {{ color: {SOFT_INK}; margin: 2px 0; }}
p.note {{ color: {FAINT}; margin: 6px 0; font-size: 13px; }}
p.sign {{ border-left: 4px solid #D55E00; background: #FFF4EC; margin: 6px 0; padding: 6px 12px; }}
code, pre {{ font: 12.5px/1.5 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }}
pre {{ background: {POOL_FILL}; border: 1px solid {LINE}; border-radius: 6px; padding: 10px 12px;
  overflow-x: auto; margin: 8px 0; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }}
th {{ text-align: left; color: {FAINT}; font-weight: 500; font-size: 12px; }}
th, td {{ padding: 4px 14px 4px 0; border-bottom: 1px solid #EDF0F3; vertical-align: top; }}
th:last-child, td:last-child {{ padding-right: 0; }}
td.number, th.number {{ text-align: right; white-space: nowrap; }}
td.name {{ white-space: nowrap; }}
td.long {{ color: {SOFT_INK}; }}
tr.inserted td {{ background: #FFFBEA; }}
.tiles {{ display: flex; flex-wrap: wrap; gap: 12px; margin: 20px 0 4px; }}
.tile {{ border: 1px solid {LINE}; border-radius: 8px; padding: 10px 16px; min-width: 150px; }}
.tile b {{ display: block; font-size: 20px; font-weight: 600; }}
.tile span {{ color: {SOFT_INK}; font-size: 12.5px; }}
.bar {{ display: inline-block; height: 9px; border-radius: 2px; background: {PALETTE[0]}; }}
td.bars {{ width: 34%; }}
figure {{ margin: 12px 0; overflow-x: auto; }}
figure svg {{ max-width: 100%; height: auto; display: block; margin: 0 auto; }}
details summary {{ cursor: pointer; color: {SOFT_INK}; margin: 8px 0; }}
.wide {{ overflow-x: auto; }}
p.facts, p.note, p.sign, h1 {{ overflow-wrap: anywhere; }}
@media (max-width: 640px) {{
  main {{ padding: 16px 12px 40px; }}
  .tile {{ flex: 1 1 130px; min-width: 0; }}
  td.long {{ min-width: 260px; }}
  td.bars {{ min-width: 90px; }}
}}
@media print {{ main {{ max-width: none; }} h2 {{ break-after: avoid; }} }}
"""


def section(title: str, *parts: str) -> str:
    """A headed section; nothing where all parts are empty."""
    body = "\n".join(part for part in parts if part)
    return f"<h2>{escape(title)}</h2>\n{body}" if body else ""


def html_table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Iterable[int] = (),
    long: Iterable[int] = (),
    marked: Iterable[int] = (),
) -> str:
    """A table of plain text; `numbers` and `long` are columns, `marked` rows of another colour."""
    kinds = dict.fromkeys(numbers, "number") | dict.fromkeys(long, "long")
    set_apart = set(marked)

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f'<{tag} class="{kinds.get(column, "name")}">{escape(cell)}</{tag}>'
            for column, cell in enumerate(row)
        )

    body = "\n".join(
        f'<tr class="inserted">{cells("td", row)}</tr>'
        if place in set_apart
        else f"<tr>{cells('td', row)}</tr>"
        for place, row in enumerate(rows)
    )
    drawn = f"<table>\n<tr>{cells('th', headings)}</tr>\n{body}\n</table>"
    return f'<div class="wide">{drawn}</div>' if rows else ""


def bars(headings: Sequence[str], rows: Sequence[tuple[Sequence[str], float]]) -> str:
    """A table of which each row ends with a bar as long as its share, 0 to 1."""
    if not rows:
        return ""
    longest = max(share for _, share in rows) or 1.0
    head = "".join(f'<th class="{_column(i)}">{escape(h)}</th>' for i, h in enumerate(headings))
    lines = [f'<div class="wide"><table>\n<tr>{head}<th></th></tr>']
    for row, share in rows:
        cells = "".join(f'<td class="{_column(i)}">{escape(c)}</td>' for i, c in enumerate(row))
        width = 100 * share / longest
        lines.append(
            f'<tr>{cells}<td class="bars"><span class="bar" '
            f'style="width:{width:.1f}%"></span></td></tr>'
        )
    return "\n".join([*lines, "</table></div>"])


def _column(place: int) -> str:
    return "number" if place else "name"


def tiles(facts: Sequence[tuple[str, str]]) -> str:
    """Key figures: (figure, what it is)."""
    if not facts:
        return ""
    drawn = (
        f"<div class='tile'><b>{escape(value)}</b><span>{escape(what)}</span></div>"
        for value, what in facts
    )
    return f'<div class="tiles">{"".join(drawn)}</div>'


def figure(svg: str, caption: str = "") -> str:
    """An svg element in the page, with a line below it."""
    note = f'<p class="note">{escape(caption)}</p>' if caption else ""
    return f"<figure>{svg}{note}</figure>"
