"""The spans of a run as columns, rows of devices, and the gaps between with their causes.

Plain data that a browser draws: seconds since the start of the run in whole microseconds, actions
and rows by their places in lists. This file knows no picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlflow.report.charts.look import Document
from rlflow.report.runfiles import RunFiles, iteration_windows, median_iteration
from rlflow.report.waiting.gaps import SHORTEST_GAP, DeviceGaps, DeviceGroup, device_groups_of
from rlflow.runtime.record.devices.log import DEVICE_LOG, read_device_lines
from rlflow.runtime.record.spans import Span

MOST_SPANS = 60_000
OUTSIDE = -1
"""Stands for time in which no action ran that was waited for."""

MEMORY = {"peak": "by the device's allocator", "peak_rss": "the most of its process until then"}


def timeline(files: RunFiles, wanted: int | None = None) -> dict[str, Any]:
    """Rows, spans and gaps of a run, and the iteration to begin with; empty without spans."""
    windows = iteration_windows(files.spans)
    spans, left_out = _bounded(files.spans, windows)
    groups = device_groups_of(spans, files.plan)
    names = list(dict.fromkeys(span.action for span in spans))
    place = {name: n for n, name in enumerate(names)}
    gaps = DeviceGaps(spans, files.plan, whole=not left_out)
    middle = median_iteration(files.spans)
    shortest = 0.0
    if middle is not None:
        shortest = SHORTEST_GAP * (windows[middle][1] - windows[middle][0])
    held, figure = _memory(files, spans)
    return {
        "names": names,
        "rows": [_row(group, files.plan) for group in groups],
        "spans": _columns(spans, groups, names, gaps.released) | {"held": held},
        "gaps": [_told(gaps, group, shortest, place) for group in groups],
        "iterations": [[i, _micro(start), _micro(end)] for i, (start, end) in windows.items()],
        "begin": middle if wanted is None else wanted,
        "memory": MEMORY.get(figure, ""),
        "left_out": left_out,
    }


def _micro(seconds: float) -> int:
    """Seconds as whole microseconds."""
    return round(seconds * 1e6)


def _row(group: DeviceGroup, plan: Document | None) -> dict[str, Any]:
    """A row of the chart: its devices, their budget, and the most that the plan proves."""
    budgets, peaks = (plan["budgets"], plan["peaks"]) if plan else ({}, {})
    known = [str(device) for device in group.devices]
    return {
        "label": group.label,
        "host": group.devices[0] < 0,
        "devices": len(group.devices),
        "budget": min((budgets[device] for device in known if device in budgets), default=None),
        "peak": max((peaks[device] for device in known if device in peaks), default=None),
    }


def _bounded(
    spans: Sequence[Span], windows: Mapping[int, tuple[float, float]]
) -> tuple[list[Span], int]:
    """At most `MOST_SPANS` spans: every n-th iteration of a long run, and how many are left out."""
    every = -(-len(spans) // MOST_SPANS)
    if every <= 1:
        return list(spans), 0
    numbers = sorted({span.iteration for span in spans})
    kept = set(numbers[::every])
    return [span for span in spans if span.iteration in kept], len(windows.keys() - kept)


def _columns(
    spans: Sequence[Span],
    groups: Sequence[DeviceGroup],
    names: Sequence[str],
    released: Sequence[int | None],
) -> dict[str, Any]:
    """A list for each figure of a span; `rows` are bits, of which row n has 2 ** n."""
    place = {name: n for n, name in enumerate(names)}
    rows = [0] * len(spans)
    for n, group in enumerate(groups):
        for at in group.places:
            rows[at] |= 1 << n
    sets = sorted(set(rows))
    return {
        "action": [place[span.action] for span in spans],
        "iteration": [span.iteration for span in spans],
        "chunk": [span.chunk for span in spans],
        "start": [_micro(span.start) for span in spans],
        "length": [_micro(span.end - span.start) for span in spans],
        "place": [sets.index(bits) for bits in rows],
        "places": [[n for n in range(len(groups)) if bits >> n & 1] for bits in sets],
        "failed": [n for n, span in enumerate(spans) if not span.ok],
        "released": [-1 if at is None else at for at in released],
    }


def _memory(files: RunFiles, spans: Sequence[Span]) -> tuple[list[int | None], str]:
    """The most bytes measured on a device of each span, and by which figure; None where unknown."""
    lines = [line for line in read_device_lines(files.path / DEVICE_LOG) if line.device >= 0]
    figure = next((name for name in MEMORY if any(name in line.figures for line in lines)), "")
    most: dict[tuple[str, int], float] = {}
    for line in lines:
        if figure in line.figures:
            key = line.action, line.iteration
            most[key] = max(most.get(key, 0.0), line.figures[figure])
    found = (most.get((span.action, span.iteration)) for span in spans)
    return [None if held is None else int(held) for held in found], figure


def _told(
    gaps: DeviceGaps, group: DeviceGroup, shortest: float, place: Mapping[str, int]
) -> list[list[Any]]:
    """[start, end, place of the span after it, [[action, microseconds], ...]] of each gap.

    The actions waited for are in the order of time, so that a part of a gap has its own.
    """
    return [
        [
            _micro(gap.start),
            _micro(gap.end),
            gap.place,
            [
                [OUTSIDE if name is None else place[name], _micro(seconds)]
                for name, seconds in gap.pieces
            ],
        ]
        for gap in gaps.of(group, shortest)
    ]
