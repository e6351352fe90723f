"""The frame of a DOT picture: the title above it, the legend below it.

Both are HTML-like labels made of table rows. This file does not know what is drawn
between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlflow.report.charts.look import (
    FAINT,
    FONT,
    INK,
    LINE,
    MODEL_TINT,
    NO_MODEL,
    SOFT_INK,
    Style,
    escape,
    tint,
)

Row = tuple[str, Sequence[str]]

FEWEST_COLUMNS = 4
EMPTY_CELL = '<td border="0"></td>'


def font(text: str, *, size: int, colour: str = INK, bold: bool = False) -> str:
    """Text in a size and colour; `text` is escaped here."""
    shown = f"<b>{escape(text)}</b>" if bold else escape(text)
    return f'<font point-size="{size}" color="{colour}">{shown}</font>'


def stacked(lines: Iterable[str]) -> str:
    """An HTML-like label of lines, one below the other."""
    rows = "".join(f"<tr><td>{line}</td></tr>" for line in lines)
    return f'<<table border="0" cellborder="0" cellspacing="0" cellpadding="1">{rows}</table>>'


def edge_label(lines: Iterable[str]) -> str:
    """An HTML-like label of an edge: lines on white, kept off the edge's own stroke."""
    rows = "".join(f'<tr><td align="left">{line}</td></tr>' for line in lines)
    return (
        '<<table border="0" cellborder="0" cellspacing="0" cellpadding="1"><tr><td width="4">'
        '</td><td><table border="0" cellborder="0" cellspacing="0" cellpadding="0" '
        f'bgcolor="white">{rows}</table></td></tr></table>>'
    )


def left_stacked(lines: Iterable[str]) -> str:
    """An HTML-like label of lines aligned on the left, for clusters."""
    rows = "".join(f'<tr><td align="left">{line}</td></tr>' for line in lines)
    return f'<<table border="0" cellborder="0" cellspacing="0" cellpadding="2">{rows}</table>>'


def title_label(name: str, facts: str, notes: Iterable[str] = ()) -> str:
    """The label above a picture: the pipeline's name, what it is, and notes, left-aligned."""
    heading = font(name, size=20, bold=True) + font(f"   {facts}", size=11, colour=SOFT_INK)
    return left_stacked([heading, *(font(note, size=10, colour=SOFT_INK) for note in notes)])


def swatch(style: Style, *, line: str | None = None) -> str:
    """A legend cell: a filled box with the style's word in it."""
    return (
        f'<td bgcolor="{style.fill}" color="{line or style.line}" border="1" cellpadding="4">'
        f"{font(style.word, size=10, colour=style.ink)}</td>"
    )


def model_swatch(name: str, colour: str) -> str:
    """A legend cell: a model's name in a box of its colour."""
    return (
        f'<td bgcolor="{tint(colour, MODEL_TINT)}" color="{colour}" border="2" cellpadding="4">'
        f"{font(name, size=10, bold=True)}</td>"
    )


def line_sample(stroke: str, word: str, colour: str = INK) -> str:
    """A legend cell: a line drawn with characters, and what it means."""
    drawn = f'<font point-size="11" color="{colour}">{stroke}</font>'
    return f'<td border="0" cellpadding="4">{drawn} {font(word, size=10, colour=SOFT_INK)}</td>'


def legend_label(rows: Sequence[Row], samples: Sequence[str]) -> str:
    """The label below a picture: rows of swatches on one grid, line samples across it."""
    columns = max(FEWEST_COLUMNS, *(len(cells) for _, cells in rows))
    drawn = "".join(
        f"<tr>{_heading(heading)}{''.join(cells)}{EMPTY_CELL * (columns - len(cells))}</tr>"
        for heading, cells in rows
        if cells
    )
    lines = (
        f'<tr>{_heading("edges")}<td border="0" align="left" colspan="{columns}"><table '
        f'border="0" cellspacing="0" cellpadding="0"><tr>{"".join(samples)}</tr></table></td></tr>'
    )
    return (
        f'<<table border="1" color="{LINE}" cellborder="0" cellspacing="5" cellpadding="2" '
        f'style="rounded">{drawn}{lines}</table>>'
    )


def _heading(word: str) -> str:
    return f'<td border="0" align="right">{font(word, size=10, colour=FAINT)}</td>'


GRAPH_ATTRIBUTES = {
    "fontname": FONT,
    "bgcolor": "white",
    "pad": "0.25",
    "labelloc": "b",
    "labeljust": "l",
    "compound": "true",
}
NODE_ATTRIBUTES = {
    "fontname": FONT,
    "fontsize": "11",
    "fontcolor": INK,
    "color": NO_MODEL,
    "margin": "0.16,0.09",
}
EDGE_ATTRIBUTES = {
    "fontname": FONT,
    "fontsize": "9",
    "fontcolor": SOFT_INK,
    "color": SOFT_INK,
    "arrowsize": "0.7",
}
