"""One iteration as a Gantt chart: a row per device, a bar per action, as plain svg.

Actions that overlap on a device get lanes of their own. Bars have the colour of their
model, inserted actions that of their kind. This file knows spans and no run directory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlflow.runtime.spans import Span
from rlflow.scheduler.text import duration
from rlflow.viz.look import (
    ACTION_STYLES,
    FAINT,
    INK,
    LINE,
    NO_MODEL,
    POOL_FILL,
    SOFT_INK,
    SVG_FONT,
    Document,
    escape,
    graph_colours,
    shorten,
    tint,
)
from rlflow.viz.runfiles import device_label, iteration_windows

WIDTH = 1040
LEFT = 96
RIGHT = 14
LANE = 26
ROW_GAP = 10
TOP = 30
BOTTOM = 26
LEGEND = 26
CHARACTER = 6.3
TICKS = 8
FAINT_SHARE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Paint:
    """Fill, line and ink of a bar."""

    fill: str
    line: str
    ink: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Seconds since the run's start to pixels."""

    start: float
    end: float

    def x(self, seconds: float) -> float:
        """The place of a moment, kept within the chart."""
        share = (seconds - self.start) / max(self.end - self.start, 1e-9)
        return LEFT + min(1.0, max(0.0, share)) * (WIDTH - LEFT - RIGHT)


def gantt_svg(
    spans: Sequence[Span], iteration: int, plan: Document | None, graph: Document | None
) -> str:
    """The chart of one iteration; spans of others that reach into it are drawn faint.

    KeyError if no whole iteration of that number is in `spans`.
    """
    start, end = _reach(spans, iteration)
    scale = Scale(start=start, end=end)
    shown = [s for s in spans if s.start < end and s.end > start]
    rows = {
        device: lanes_of([span for span in shown if device in span.devices])
        for device in sorted({device for span in shown for device in span.devices})
    }
    height = TOP + BOTTOM + LEGEND + sum(len(lanes) * LANE + ROW_GAP for lanes in rows.values())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="{SVG_FONT}" font-size="11" role="img">',
        f"<title>iteration {iteration}</title>",
        *_axis(scale, height - BOTTOM - LEGEND),
    ]
    top = float(TOP)
    for device, lanes in rows.items():
        parts += _row(device_label(device, plan), lanes, top, scale, iteration, graph)
        top += len(lanes) * LANE + ROW_GAP
    parts += _legend(shown, height - LEGEND + 2, graph)
    return "\n".join([*parts, "</svg>"])


def _reach(spans: Sequence[Span], iteration: int) -> tuple[float, float]:
    """What the chart covers: the devices' part, and the host's up to as long before and after."""
    start, end = iteration_windows(spans)[iteration]
    length = end - start
    own = [span for span in spans if span.iteration == iteration]
    near = [s for s in own if s.start >= start - length and s.end <= end + length]
    return min(span.start for span in near), max(span.end for span in near)


def lanes_of(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans dealt into as few lanes as hold no overlap, in order of their start."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: (s.start, s.end, s.action)):
        for lane in lanes:
            if lane[-1].end <= span.start:
                lane.append(span)
                break
        else:
            lanes.append([span])
    return lanes


def paint_of(span: Span, graph: Document | None) -> Paint:
    """The colours of a span's bar: by kind if it was inserted, by model if it has one."""
    if span.kind in ACTION_STYLES:
        style = ACTION_STYLES[span.kind]
        return Paint(fill=style.fill, line=style.line, ink=style.ink)
    model = _model_of(span, graph)
    if graph is None or model is None:
        return Paint(fill="#E4E7EB", line=NO_MODEL, ink=INK)
    colour = graph_colours(graph)[model]
    return Paint(fill=tint(colour, 0.35), line=colour, ink=INK)


def _model_of(span: Span, graph: Document | None) -> str | None:
    models: Mapping[str, str | None] = {
        node["name"]: node["model"] for node in (graph["nodes"] if graph else ())
    }
    return models.get(span.node)


def _axis(scale: Scale, bottom: float) -> list[str]:
    parts = []
    whole = scale.end - scale.start
    spacing = tick_spacing(whole)
    for index in range(int(whole / spacing + 1e-9) + 1):
        x = scale.x(scale.start + index * spacing)
        label = tick_label(index * spacing)
        anchor = "end" if x > WIDTH - RIGHT - 20 else "middle"
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{bottom:.0f}" '
            f'stroke="{LINE}" stroke-width="0.7"/>'
        )
        parts.append(
            f'<text x="{x:.1f}" y="{TOP - 13}" fill="{FAINT}" font-size="10" '
            f'text-anchor="{anchor}">{label}</text>'
        )
    return parts


def tick_spacing(seconds: float) -> float:
    """A round spacing, 1, 2 or 5 times a power of ten, that gives at most 8 ticks."""
    scale = 1e-6
    while True:
        for step in (1.0, 2.0, 5.0):
            if seconds / (step * scale) <= TICKS:
                return step * scale
        scale *= 10


def tick_label(seconds: float) -> str:
    """A moment on the axis: `0`, `500 ms`, `1.5 s`."""
    if seconds == 0:
        return "0"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"


def _row(
    label: str,
    lanes: Sequence[Sequence[Span]],
    top: float,
    scale: Scale,
    iteration: int,
    graph: Document | None,
) -> list[str]:
    height = len(lanes) * LANE
    parts = [
        f'<rect x="{LEFT}" y="{top:.1f}" width="{WIDTH - LEFT - RIGHT}" height="{height}" '
        f'fill="{POOL_FILL}"/>',
        f'<text x="{LEFT - 8}" y="{top + height / 2 + 4:.1f}" fill="{SOFT_INK}" '
        f'text-anchor="end">{escape(shorten(label, 14))}</text>',
    ]
    for number, lane in enumerate(lanes):
        starts = [scale.x(span.start) for span in lane]
        for place, span in enumerate(lane):
            free = starts[place + 1] if place + 1 < len(lane) else float(WIDTH - RIGHT)
            parts += _bar(span, top + number * LANE, free, scale, iteration, graph)
    return parts


def _bar(
    span: Span, top: float, free: float, scale: Scale, iteration: int, graph: Document | None
) -> list[str]:
    """A bar, with its name inside where it fits, else beside it up to `free`, else nowhere."""
    paint = paint_of(span, graph)
    left = scale.x(span.start)
    width = max(1.5, scale.x(span.end) - left)
    faint = f' opacity="{FAINT_SHARE}"' if span.iteration != iteration else ""
    predicted = f", predicted {duration(span.predicted)}" if span.predicted is not None else ""
    failed = "" if span.ok else ", failed"
    tip = f"{span.action}, iteration {span.iteration}: {duration(span.seconds)}{predicted}{failed}"
    parts = [
        f'<g{faint}><title>{escape(tip)}</title><rect x="{left:.2f}" y="{top + 3:.1f}" '
        f'width="{width:.2f}" height="{LANE - 6}" rx="2" fill="{paint.fill}" '
        f'stroke="{paint.line}" stroke-width="1.2"/>'
    ]
    names = (span.action, span.action.rpartition(".")[2])
    inside = next((name for name in names if _room(name) <= width), None)
    beside = next((name for name in names if left + width + _room(name) <= free), None)
    if inside is not None:
        parts.append(
            f'<text x="{left + width / 2:.1f}" y="{top + LANE / 2 + 4:.1f}" '
            f'text-anchor="middle" fill="{paint.ink}">{escape(inside)}</text>'
        )
    elif beside is not None:
        parts.append(
            f'<text x="{left + width + 4:.1f}" y="{top + LANE / 2 + 4:.1f}" '
            f'fill="{SOFT_INK}">{escape(beside)}</text>'
        )
    return [*parts, "</g>"]


def _room(name: str) -> float:
    return len(name) * CHARACTER + 8


def _legend(spans: Sequence[Span], top: float, graph: Document | None) -> list[str]:
    """A swatch for every model, then the host, then every inserted kind that is in the chart."""
    entries: dict[tuple[int, str], Paint] = {}
    for span in spans:
        paint = paint_of(span, graph)
        model = _model_of(span, graph)
        if span.kind in ACTION_STYLES:
            entries.setdefault((2, ACTION_STYLES[span.kind].word), paint)
        else:
            entries.setdefault((1, "no model") if model is None else (0, model), paint)
    parts = []
    left = float(LEFT)
    for (_, word), paint in sorted(entries.items(), key=lambda entry: entry[0][0]):
        parts.append(
            f'<rect x="{left:.1f}" y="{top:.0f}" width="12" height="12" rx="2" '
            f'fill="{paint.fill}" stroke="{paint.line}" stroke-width="1.2"/>'
        )
        parts.append(
            f'<text x="{left + 17:.1f}" y="{top + 10:.0f}" fill="{SOFT_INK}">{escape(word)}</text>'
        )
        left += 17 + len(word) * (CHARACTER + 0.6) + 18
    return parts
