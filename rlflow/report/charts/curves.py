"""The learning curves of a run as a picture: reward while training, accuracy held out.

Raw values faint, their moving mean strong, evaluations as marked points. matplotlib is
imported when it is used, with the Agg backend; no window is ever opened.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlflow.report.charts.look import FAINT, INK, LINE, PALETTE, SOFT_INK
from rlflow.report.runfiles import Point, RunFiles, headline_of

TRAIN_COLOUR, HELD_OUT_COLOUR = PALETTE[0], PALETTE[1]
SMOOTHEST = 15
PNG_DPI = 160
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "rlflow",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.edgecolor": LINE,
    "axes.labelcolor": SOFT_INK,
    "axes.titlecolor": INK,
    "xtick.color": SOFT_INK,
    "ytick.color": SOFT_INK,
}


def smooth(values: Sequence[float], window: int) -> list[float]:
    """The mean of the up to `window` values around each one, fewer at the ends."""
    half = window // 2
    means = []
    for place in range(len(values)):
        near = values[max(0, place - half) : place + half + 1]
        means.append(sum(near) / len(near))
    return means


def window_for(count: int) -> int:
    """How many of `count` values are averaged: an odd fifteenth of them, 3 to 15."""
    return min(SMOOTHEST, max(3, count // 15)) // 2 * 2 + 1


def draw_curves(files: RunFiles) -> tuple[bytes, bytes] | None:
    """The curves as (png, svg); None where the run logged nothing to draw."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = headline_of(files)
    train = {key: files.curve(key) for key in shown.training}
    held_out = {key: files.curve(key) for key in shown.held_out}
    panels = [panel for panel in (train, held_out) if panel]
    if not panels:
        return None
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.2 * len(panels), 3.4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        if train:
            _train_panel(axes[0], train)
        if held_out:
            _held_out_panel(axes[-1], held_out)
        png, svg = io.BytesIO(), io.BytesIO()
        figure.savefig(png, format="png", dpi=PNG_DPI)
        figure.savefig(svg, format="svg", metadata={"Date": None})
    return png.getvalue(), bare_svg(svg.getvalue())


def write_curves(files: RunFiles) -> None:
    """Write curves.png and curves.svg into the run's directory, if there is something to draw."""
    drawn = draw_curves(files)
    if drawn is not None:
        png, svg = drawn
        (files.path / "curves.png").write_bytes(png)
        (files.path / "curves.svg").write_bytes(svg)


def _train_panel(axes: Any, curves: Mapping[str, Sequence[Point]]) -> None:
    """Each curve faint, and its moving mean strong in the colour of its name."""
    for key, points, colour in _coloured(curves, TRAIN_COLOUR):
        iterations = [iteration for iteration, _ in points]
        values = [value for _, value in points]
        window = window_for(len(values))
        raw: dict[str, Any] = {"marker": "o", "markersize": 2.2, "linewidth": 0.9, "alpha": 0.28}
        raw["label"] = "each iteration" if len(curves) == 1 else None
        axes.plot(iterations, values, color=colour, **raw)
        mean = f"mean of {window}" if len(curves) == 1 else f"{key}, mean of {window}"
        axes.plot(iterations, smooth(values, window), color=colour, linewidth=2.0, label=mean)
    axes.legend(frameon=False, fontsize=9, loc="best", labelcolor=SOFT_INK)
    title, number = _title(curves)
    _finish(axes, f"{title}, training", number if "loss" in number else "reward")


def _held_out_panel(axes: Any, curves: Mapping[str, Sequence[Point]]) -> None:
    """Each curve as marked points, its first and last one with its figure."""
    for key, points, colour in _coloured(curves, HELD_OUT_COLOUR):
        iterations = [iteration for iteration, _ in points]
        values = [value for _, value in points]
        axes.plot(
            iterations, values, color=colour, linewidth=1.8, marker="o", markersize=5, label=key
        )
        for place in sorted({0, len(points) - 1}):
            neighbour = place - 1 if place else min(1, len(points) - 1)
            above = values[place] >= values[neighbour]
            axes.annotate(
                f"{values[place]:.2f}",
                (iterations[place], values[place]),
                textcoords="offset points",
                xytext=(0, 7 if above else -15),
                ha="center",
                fontsize=9,
                color=INK,
            )
    if len(curves) > 1:
        axes.legend(frameon=False, fontsize=9, loc="best", labelcolor=SOFT_INK)
    axes.margins(x=0.06, y=0.18)
    _finish(axes, f"{_title(curves)[0]}, held out", "mean reward")


def _coloured(
    curves: Mapping[str, Sequence[Point]], only: str
) -> Iterator[tuple[str, Sequence[Point], str]]:
    """Each curve with its colour: of one alone that of its panel."""
    for place, (key, points) in enumerate(curves.items()):
        yield key, points, only if len(curves) == 1 else PALETTE[place % len(PALETTE)]


def _title(curves: Mapping[str, Sequence[Point]]) -> tuple[str, str]:
    """The name that stands for all curves of a panel, and that of their number."""
    first, *others = curves
    return f"{first} and {len(others)} more" if others else first, first.rpartition("/")[2]


def _finish(axes: Any, title: str, ylabel: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel("iteration")
    axes.set_ylabel(ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.grid(axis="y", color=LINE, linewidth=0.6, alpha=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=3, color=FAINT)


def bare_svg(svg: bytes) -> bytes:
    """An svg without the block that names vocabularies on the net."""
    return re.sub(rb"\s*<metadata>.*?</metadata>", b"", svg, flags=re.DOTALL)
