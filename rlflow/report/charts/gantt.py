"""Action instances over time as a chart: a row per device, a bar per action.

Actions that overlap on a device get lanes of their own. Bars have the colour of their
model, inserted actions that of their kind. What is drawn was played on a virtual clock; the
timeline of a run is drawn in its page. This file knows spans and no run directory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlflow.report.charts.look import (
    ACTION_STYLES,
    FAINT,
    INK,
    LINE,
    NO_MODEL,
    POOL_FILL,
    SOFT_INK,
    Document,
    graph_colours,
    shorten,
    tint,
)
from rlflow.report.charts.shapes import Box, Chart, Rule, Shape, ShapeGroup, Words
from rlflow.runtime.record.spans import Span
from rlflow.scheduler.plan.text import duration
from rlflow.scheduler.simulate.play import Played
from rlflow.scheduler.simulate.simulate import Simulation
from rlflow.scheduler.simulate.text import lane_rows, typical_turn

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
TURNS = 2


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartRow:
    """A labelled row of the chart, and the spans in it."""

    label: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What all bars of a chart share: the scale, and how one is told from another."""

    scale: Scale
    graph: Document | None


def simulated_chart(found: Simulation) -> Chart:
    """`TURNS` turns of a plan that was played: a row for devices with equal schedules."""
    first, start, end = typical_turn(found)
    end = start + TURNS * (end - start)
    shown = [span for span in found.spans if span.start < end and span.end > start]
    rows: dict[str, list[Span]] = {}
    for row in lane_rows(found.plan, shown):
        lane = rows.setdefault(row.label.removesuffix(" copies"), [])
        lane += [_span_of(span) for span in row.spans]
    scene = Scene(scale=Scale(start=start, end=end), graph=found.plan.graph.to_json())
    title = f"{found.plan.graph.name}, {found.plan.placement}: {TURNS} turns from turn {first} on"
    drawn = [ChartRow(label=label, spans=tuple(spans)) for label, spans in rows.items()]
    return _chart(drawn, scene, title)


def _span_of(played: Played) -> Span:
    """A simulated instance in the form of a measured one."""
    action = played.action
    return Span(
        action=action.id,
        node=action.node or "",
        kind=action.kind,
        iteration=played.iteration,
        chunk=action.chunk.index if action.chunk else 0,
        pool=action.pool,
        devices=action.devices,
        start=played.start,
        end=played.end,
        predicted=None,
        bytes=action.cost.moved,
        process="simulated",
        ok=True,
    )


def _chart(rows: Sequence[ChartRow], scene: Scene, title: str) -> Chart:
    lanes = [lanes_of(row.spans) for row in rows]
    height = TOP + BOTTOM + LEGEND + sum(max(1, len(each)) * LANE + ROW_GAP for each in lanes)
    shapes: list[Shape] = [*_axis(scene.scale, height - BOTTOM - LEGEND)]
    top = float(TOP)
    for row, dealt in zip(rows, lanes, strict=True):
        shapes += _row(row.label, dealt, top, scene)
        top += max(1, len(dealt)) * LANE + ROW_GAP
    spans = [span for row in rows for span in row.spans]
    shapes += _legend(spans, height - LEGEND + 2, scene.graph)
    return Chart(title=title, width=WIDTH, height=height, shapes=tuple(shapes))


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


def _axis(scale: Scale, bottom: float) -> list[Shape]:
    shapes: list[Shape] = []
    whole = scale.end - scale.start
    spacing = tick_spacing(whole)
    for index in range(int(whole / spacing + 1e-9) + 1):
        x = scale.x(scale.start + index * spacing)
        late = x > WIDTH - RIGHT - 20
        shapes.append(Rule(x=x, top=TOP - 8, bottom=bottom, colour=LINE))
        shapes.append(
            Words(
                x=x,
                y=TOP - 13,
                text=tick_label(index * spacing),
                ink=FAINT,
                anchor="end" if late else "middle",
                size=10,
            )
        )
    return shapes


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


def _row(label: str, lanes: Sequence[Sequence[Span]], top: float, scene: Scene) -> list[Shape]:
    height = max(1, len(lanes)) * LANE
    shapes: list[Shape] = [
        Box(x=LEFT, y=top, width=WIDTH - LEFT - RIGHT, height=height, fill=POOL_FILL),
        Words(
            x=LEFT - 8,
            y=top + height / 2 + 4,
            text=shorten(label, 14),
            ink=SOFT_INK,
            anchor="end",
        ),
    ]
    for number, lane in enumerate(lanes):
        starts = [scene.scale.x(span.start) for span in lane]
        for place, span in enumerate(lane):
            free = starts[place + 1] if place + 1 < len(lane) else float(WIDTH - RIGHT)
            shapes.append(_bar(span, top + number * LANE, free, scene))
    return shapes


def _bar(span: Span, top: float, free: float, scene: Scene) -> ShapeGroup:
    """A bar, with its name inside where it fits, else beside it up to `free`, else nowhere."""
    paint = paint_of(span, scene.graph)
    left = scene.scale.x(span.start)
    width = max(1.5, scene.scale.x(span.end) - left)
    left = min(left, WIDTH - RIGHT - width)
    bar = Box(
        x=left,
        y=top + 3,
        width=width,
        height=LANE - 6,
        fill=paint.fill,
        line=paint.line,
        rounded=True,
    )
    named = _name_beside(span, bar, free, scene, paint)
    return ShapeGroup(
        shapes=(bar, named) if named else (bar,),
        tip=f"{span.action}, iteration {span.iteration}: {duration(span.seconds)}",
    )


def _name_beside(span: Span, bar: Box, free: float, scene: Scene, paint: Paint) -> Words | None:
    """The name of a bar, where there is room for it."""
    names = [span.action, span.action.rpartition(".")[2]]
    if span.kind not in ("sleep", "wake"):
        names = [*(f"{name} {span.iteration}" for name in names), *names]
    y = bar.y - 3 + LANE / 2 + 4
    for name in names:
        if _room(name) <= bar.width:
            middle = bar.x + bar.width / 2
            return Words(x=middle, y=y, text=name, ink=paint.ink, anchor="middle")
    for name in names:
        if bar.x + bar.width + _room(name) <= free:
            return Words(x=bar.x + bar.width + 4, y=y, text=name, ink=SOFT_INK)
    return None


def _room(name: str) -> float:
    return len(name) * CHARACTER + 8


def _legend(spans: Sequence[Span], top: float, graph: Document | None) -> list[Shape]:
    """A swatch for every model, then the host, then every inserted kind that is in the chart."""
    entries: dict[tuple[int, str], Paint] = {}
    for span in spans:
        paint = paint_of(span, graph)
        model = _model_of(span, graph)
        if span.kind in ACTION_STYLES:
            entries.setdefault((2, ACTION_STYLES[span.kind].word), paint)
        else:
            entries.setdefault((1, "no model") if model is None else (0, model), paint)
    shapes: list[Shape] = []
    left = float(LEFT)
    for (_, word), paint in sorted(entries.items(), key=lambda entry: entry[0][0]):
        swatch = Box(
            x=left, y=top, width=12, height=12, fill=paint.fill, line=paint.line, rounded=True
        )
        shapes += [swatch, Words(x=left + 17, y=top + 10, text=word, ink=SOFT_INK)]
        left += 17 + len(word) * (CHARACTER + 0.6) + 18
    return shapes
