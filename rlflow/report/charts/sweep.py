"""A sweep as a picture: throughput and cost over cluster size, a line a family, and who wins.

matplotlib is imported when it is used, with the Agg backend.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from textwrap import fill
from typing import Any, Literal

from rlflow.report.charts.curves import PNG_DPI, STYLE, bare_svg
from rlflow.report.charts.look import FAINT, INK, LINE, PALETTE, SOFT_INK
from rlflow.scheduler.search.sweep import Crossover, Sweep, SweepSize

# Letters of the title that the figure has room for in a line.
TITLE_WIDTH = 100
# Points of a panel, and of a letter and the height of a label in it.
PANEL_WIDTH, LETTER_WIDTH, LABEL_HEIGHT = 290, 4.4, 12


def sweep_picture(sweep: Sweep, title: str, form: str, price: float | None = None) -> bytes:
    """The picture as png, svg or pdf. `price` is of a device hour; device hours where None."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sizes = [size for size in sweep.sizes if size.tuned is not None]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10.4, 4.4), layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(fill(title, TITLE_WIDTH), fontsize=11.5, x=0.01, ha="left", color=INK)
        left, right = figure.subplots(1, 2)
        _throughput(left, sizes, sweep)
        _costs(right, sizes, sweep, price)
        handles, labels = left.get_legend_handles_labels()
        figure.legend(
            handles,
            labels,
            loc="outside lower left",
            ncols=len(handles),
            frameon=False,
            fontsize=9,
            labelcolor=SOFT_INK,
        )
        drawn = io.BytesIO()
        if form == "png":
            figure.savefig(drawn, format="png", dpi=PNG_DPI)
        else:
            date = {"Date": None} if form == "svg" else {"CreationDate": None}
            figure.savefig(drawn, format=form, metadata=date)
    return bare_svg(drawn.getvalue()) if form == "svg" else drawn.getvalue()


def _throughput(axes: Any, sizes: list[SweepSize], sweep: Sweep) -> None:
    for family, colour in zip(sweep.families, _colours(sweep), strict=True):
        points = [(s.devices, s.samples_per_second(family)) for s in sizes if family in s.families]
        _line(axes, points, colour, family)
    _marked(axes, [(s.devices, s.samples_per_second(s.winner)) for s in sizes])
    first = sizes[0]
    base = first.samples_per_second(first.winner) / first.devices
    ideal = [size.devices for size in sizes]
    axes.plot(
        ideal,
        [base * devices for devices in ideal],
        color=FAINT,
        linewidth=1.0,
        linestyle=(0, (2, 3)),
        label=f"linear from {first.devices}",
    )
    axes.set_yscale("log")
    _finished(axes, "Throughput", "samples trained on, a second", sizes, sweep)


def _costs(axes: Any, sizes: list[SweepSize], sweep: Sweep, price: float | None) -> None:
    times = 1.0 if price is None else price
    for family, colour in zip(sweep.families, _colours(sweep), strict=True):
        points = [
            (s.devices, s.hours_per_million(family) * times) for s in sizes if family in s.families
        ]
        _line(axes, points, colour, family)
    _marked(axes, [(s.devices, s.hours_per_million(s.winner) * times) for s in sizes])
    unit, title = ("device hours", "Device hours") if price is None else ("cost", "Cost")
    title += "" if price is None else f", at {price:g} a device hour"
    axes.set_yscale("log")
    _finished(axes, title, f"{unit} a million response tokens", sizes, sweep)


def label_places(
    crossovers: Sequence[Crossover], sizes: Sequence[int]
) -> list[tuple[int, Literal["left", "right"]]]:
    """Of each crossover's label the row from the top, and which of its ends is at the crossing.

    The first row where it is beside the others; to the left where there is no room to the right.
    """
    octaves = math.log2(max(sizes) / min(sizes)) or 1.0
    rows: list[list[tuple[float, float]]] = []
    places: list[tuple[int, Literal["left", "right"]]] = []
    for crossover in crossovers:
        at = math.log2(_middle(crossover) / min(sizes)) / octaves * PANEL_WIDTH
        wide = LETTER_WIDTH * len(_label(crossover))
        side: Literal["left", "right"] = "left" if at + wide <= PANEL_WIDTH else "right"
        start = at if side == "left" else at - wide
        free = (all(start >= b or start + wide <= a for a, b in row) for row in rows)
        row = next((number for number, is_free in enumerate(free) if is_free), len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append((start, start + wide))
        places.append((row, side))
    return places


def _label(crossover: Crossover) -> str:
    return f"{crossover.family} from {crossover.devices}"


def _middle(crossover: Crossover) -> float:
    return math.sqrt(crossover.before * crossover.devices)


def _colours(sweep: Sweep) -> list[str]:
    return [PALETTE[place % len(PALETTE)] for place in range(len(sweep.families))]


def _line(axes: Any, points: list[tuple[int, float]], colour: str, family: str) -> None:
    xs, ys = zip(*points, strict=True)
    axes.plot(xs, ys, color=colour, linewidth=1.8, marker="o", markersize=4, label=family)


def _marked(axes: Any, points: list[tuple[int, float]]) -> None:
    """Rings around what wins."""
    xs, ys = zip(*points, strict=True)
    axes.plot(
        xs,
        ys,
        linestyle="none",
        marker="o",
        markersize=9,
        markerfacecolor="none",
        markeredgecolor=INK,
        markeredgewidth=1.1,
        label="wins",
    )


def _finished(axes: Any, title: str, ylabel: str, sizes: list[SweepSize], sweep: Sweep) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log", base=2)
    asked = [size.devices for size in sizes if not size.between]
    axes.xaxis.set_major_locator(FixedLocator(asked))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    places = label_places(sweep.crossovers, [size.devices for size in sizes])
    for crossover, (row, side) in zip(sweep.crossovers, places, strict=True):
        middle = _middle(crossover)
        axes.axvline(middle, color=FAINT, linewidth=0.9, linestyle=(0, (4, 3)))
        axes.annotate(
            _label(crossover),
            (middle, 1),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            xytext=(4 if side == "left" else -4, -4 - row * LABEL_HEIGHT),
            va="top",
            ha=side,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
            fontsize=8.5,
            color=SOFT_INK,
        )
    axes.margins(x=0.06, y=0.12 + 0.08 * max((row for row, _ in places), default=0))
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel(f"{sweep.kind} devices")
    axes.set_ylabel(ylabel)
    axes.grid(axis="y", color=LINE, linewidth=0.6, alpha=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=3, color=FAINT)
