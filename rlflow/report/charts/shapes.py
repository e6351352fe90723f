"""Charts as boxes, lines and words at places, and the two ways to write them: svg and pixels.

Places are in pixels from the top left. The svg is plain text; png and pdf are drawn by
matplotlib, which is imported when it is used. This file does not know what is drawn.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlflow.report.charts.look import FONT, SVG_FONT, escape

Anchor = Literal["start", "middle", "end"]

FONT_SIZE = 11
PNG_DPI = 144
POINTS = 72
BASELINE = 0.36


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A filled rectangle; without a `line` it has no border."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    line: str = ""
    rounded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A vertical line."""

    x: float
    top: float
    bottom: float
    colour: str
    width: float = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """A line of text whose baseline is at `y`."""

    x: float
    y: float
    text: str
    ink: str
    anchor: Anchor = "start"
    size: float = FONT_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeGroup:
    """Shapes that share what is told when they are pointed at."""

    shapes: tuple[Box | Words, ...]
    tip: str


Shape = Box | Rule | Words | ShapeGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Shapes on a sheet of so many pixels, the lowest first."""

    title: str
    width: float
    height: float
    shapes: tuple[Shape, ...]

    def svg(self) -> str:
        """The chart as an svg element."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" '
                f'viewBox="0 0 {self.width:g} {self.height:g}" '
                f'font-family="{SVG_FONT}" font-size="{FONT_SIZE}" role="img">',
                f"<title>{escape(self.title)}</title>",
                *(_svg(shape) for shape in self.shapes),
                "</svg>",
            ]
        )


def _svg(shape: Shape) -> str:
    if isinstance(shape, ShapeGroup):
        inner = "".join(_svg(each) for each in shape.shapes)
        return f"<g><title>{escape(shape.tip)}</title>{inner}</g>"
    if isinstance(shape, Box):
        rounded = ' rx="2"' if shape.rounded else ""
        line = f' stroke="{shape.line}" stroke-width="1.2"' if shape.line else ""
        return (
            f'<rect x="{shape.x:.2f}" y="{shape.y:.1f}" width="{shape.width:.2f}" '
            f'height="{shape.height:.1f}"{rounded} fill="{shape.fill}"{line}/>'
        )
    if isinstance(shape, Rule):
        return (
            f'<line x1="{shape.x:.1f}" x2="{shape.x:.1f}" y1="{shape.top:.1f}" '
            f'y2="{shape.bottom:.1f}" stroke="{shape.colour}" stroke-width="{shape.width:g}"/>'
        )
    size = f' font-size="{shape.size:g}"' if shape.size != FONT_SIZE else ""
    anchor = f' text-anchor="{shape.anchor}"' if shape.anchor != "start" else ""
    return (
        f'<text x="{shape.x:.1f}" y="{shape.y:.1f}" fill="{shape.ink}"{size}{anchor}>'
        f"{escape(shape.text)}</text>"
    )


def picture(chart: Chart, form: str) -> bytes:
    """The chart as svg, png (144 dots an inch) or pdf."""
    if form == "svg":
        return chart.svg().encode() + b"\n"
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context({"font.family": FONT}):
        figure = Figure(figsize=(chart.width / POINTS, chart.height / POINTS))
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_xlim(0, chart.width)
        axes.set_ylim(chart.height, 0)
        axes.set_axis_off()
        _paint(axes, chart.shapes)
        out = io.BytesIO()
        metadata = {"Software": None} if form == "png" else {"Creator": None, "CreationDate": None}
        figure.savefig(out, format=form, dpi=PNG_DPI, metadata=metadata)
    return out.getvalue()


def _paint(axes: Any, shapes: Sequence[Shape]) -> None:
    from matplotlib.patches import Rectangle

    for shape in shapes:
        if isinstance(shape, ShapeGroup):
            _paint(axes, shape.shapes)
        elif isinstance(shape, Box):
            patch = Rectangle(
                (shape.x, shape.y),
                shape.width,
                shape.height,
                facecolor=shape.fill,
                edgecolor=shape.line or "none",
                linewidth=1.2 if shape.line else 0,
            )
            axes.add_patch(patch).set_zorder(2)
        elif isinstance(shape, Rule):
            axes.plot(
                [shape.x, shape.x],
                [shape.top, shape.bottom],
                color=shape.colour,
                linewidth=shape.width,
                zorder=2,
            )
        else:
            side = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
            axes.text(
                shape.x,
                shape.y,
                shape.text,
                color=shape.ink,
                fontsize=shape.size,
                ha=side,
                va="baseline",
                zorder=2,
                parse_math=False,
            )
