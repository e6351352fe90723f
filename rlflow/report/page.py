"""Pieces of a page: its style, sections, tables, tiles and bars, as HTML text.

Everything that comes from a run is escaped here. This file does not know what a run is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from rlflow.report.charts.look import escape

STYLE = Path(__file__).with_name("interactive") / "assets" / "report.css"


@cache
def style() -> str:
    """The style sheet of all pages."""
    return STYLE.read_text(encoding="utf-8")


def wrapped_section(name: str, title: str, content: str) -> str:
    """A headed section that links and screen readers find by its name."""
    return (
        f'<section id="{name}" aria-labelledby="{name}-title">\n'
        f'<h2 id="{name}-title">{escape(title)}</h2>\n{content}\n</section>'
    )


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
    chosen: Sequence[str] = (),
    choosing: int = 0,
) -> str:
    """A table of plain text; `numbers` and `long` are columns, `marked` rows of another colour.

    `chosen` names the action of each row, which the button in its column `choosing` selects.
    """
    kinds = dict.fromkeys(numbers, "number") | dict.fromkeys(long, "long")
    set_apart = set(marked)

    def cell(tag: str, column: int, text: str, action: str) -> str:
        scope = ' scope="col"' if tag == "th" else ""
        inside = escape(text)
        if action and column == choosing:
            inside = f'<button type="button" class="link">{inside}</button>'
        return f'<{tag} class="{kinds.get(column, "name")}"{scope}>{inside}</{tag}>'

    def line(tag: str, row: Sequence[str], action: str = "", kind: str = "") -> str:
        cells = "".join(cell(tag, column, text, action) for column, text in enumerate(row))
        of = f' data-action="{escape(action)}"' if action else ""
        return f"<tr{kind}{of}>{cells}</tr>"

    actions = [*chosen, *[""] * (len(rows) - len(chosen))]
    body = "\n".join(
        line("td", row, actions[place], ' class="inserted"' if place in set_apart else "")
        for place, row in enumerate(rows)
    )
    head = line("th", headings)
    drawn = f"<table>\n<thead>{head}</thead>\n<tbody>{body}</tbody>\n</table>"
    return scrolled(drawn) if rows else ""


def scrolled(content: str) -> str:
    """What may be wider than the page, in a box that the keyboard scrolls."""
    return f'<div class="wide" tabindex="0">{content}</div>'


def bars(headings: Sequence[str], rows: Sequence[tuple[Sequence[str], float]]) -> str:
    """A table of which each row ends with a bar as long as its share, 0 to 1."""
    if not rows:
        return ""
    longest = max(share for _, share in rows) or 1.0
    names = "".join(
        f'<th scope="col" class="{_column(i)}">{escape(h)}</th>' for i, h in enumerate(headings)
    )
    lines = [f"<table>\n<thead><tr>{names}<td></td></tr></thead>\n<tbody>"]
    for row, share in rows:
        cells = "".join(f'<td class="{_column(i)}">{escape(c)}</td>' for i, c in enumerate(row))
        width = 100 * share / longest
        lines.append(
            f'<tr data-action="{escape(row[0])}">{cells}<td class="bars"><span class="bar" '
            f'style="width:{width:.1f}%"></span></td></tr>'
        )
    return scrolled("\n".join([*lines, "</tbody></table>"]))


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
    return f'<figure><div class="picture" tabindex="0">{svg}</div>{note}</figure>'
