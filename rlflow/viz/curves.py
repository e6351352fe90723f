"""The learning curves of a run as a picture: reward while training, accuracy held out.

Raw values faint, their moving mean strong, evaluations as marked points. matplotlib is
imported when it is used, with the Agg backend; no window is ever opened.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

from rlflow.viz.draw import inline_svg
from rlflow.viz.look import FAINT, INK, LINE, PALETTE, SOFT_INK
from rlflow.viz.runfiles import HELD_OUT, Point, RunFiles, training_key

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

    key = training_key(files)
    train = files.curve(key) if key else []
    held_out = files.curve(HELD_OUT)
    panels = [panel for panel in (train, held_out) if panel]
    if not panels:
        return None
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.2 * len(panels), 3.4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        if train:
            _train_panel(axes[0], str(key), train)
        if held_out:
            _held_out_panel(axes[-1], held_out)
        png, svg = io.BytesIO(), io.BytesIO()
        figure.savefig(png, format="png", dpi=PNG_DPI)
        figure.savefig(svg, format="svg", metadata={"Date": None})
    return png.getvalue(), _bare_svg(svg.getvalue())


def write_curves(files: RunFiles) -> str | None:
    """Write curves.png and curves.svg into the run's directory; the svg for a page, or None."""
    drawn = draw_curves(files)
    if drawn is None:
        return None
    png, svg = drawn
    (files.path / "curves.png").write_bytes(png)
    (files.path / "curves.svg").write_bytes(svg)
    return inline_svg(svg)


def _train_panel(axes: Any, key: str, points: Sequence[Point]) -> None:
    iterations = [iteration for iteration, _ in points]
    values = [value for _, value in points]
    window = window_for(len(values))
    axes.plot(
        iterations,
        values,
        color=TRAIN_COLOUR,
        alpha=0.28,
        linewidth=0.9,
        marker="o",
        markersize=2.2,
        label="each iteration",
    )
    axes.plot(
        iterations,
        smooth(values, window),
        color=TRAIN_COLOUR,
        linewidth=2.0,
        label=f"mean of {window}",
    )
    axes.legend(frameon=False, fontsize=9, loc="best", labelcolor=SOFT_INK)
    _finish(axes, f"{key}, training", key.rpartition("/")[2] if "loss" in key else "reward")


def _held_out_panel(axes: Any, points: Sequence[Point]) -> None:
    iterations = [iteration for iteration, _ in points]
    values = [value for _, value in points]
    axes.plot(iterations, values, color=HELD_OUT_COLOUR, linewidth=1.8, marker="o", markersize=5)
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
    axes.margins(x=0.06, y=0.18)
    _finish(axes, f"{HELD_OUT}, held out", "mean reward")


def _finish(axes: Any, title: str, ylabel: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel("iteration")
    axes.set_ylabel(ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.grid(axis="y", color=LINE, linewidth=0.6, alpha=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=3, color=FAINT)


def _bare_svg(svg: bytes) -> bytes:
    """An svg without the block that names vocabularies on the net."""
    return re.sub(rb"\s*<metadata>.*?</metadata>", b"", svg, flags=re.DOTALL)
