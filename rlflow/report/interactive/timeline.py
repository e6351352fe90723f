"""The spans of a run as columns, rows of devices, and the gaps between with their causes.

Plain data that a browser draws: seconds since the start of the run in whole microseconds, actions
and rows by their places in lists. This file knows no picture.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.report.charts.look import Document, document_lane
from rlflow.report.interactive.causes import released_by
from rlflow.report.runfiles import RunFiles, device_label, iteration_windows, median_iteration
from rlflow.runtime.record.devices.log import DEVICE_LOG, read_device_lines
from rlflow.runtime.record.spans import Span
from rlflow.scheduler.simulate.blame import waited_for

MOST_SPANS = 60_000
SHORTEST_GAP = 0.002
"""A shorter gap, as a share of an iteration of median length, is not told."""
MOST_CAUSES = 4
OUTSIDE = -1
"""Stands for time in which no action ran that was waited for."""

MEMORY = {"peak": "by the device's allocator", "peak_rss": "the most of its process until then"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """Devices that ran the same spans, by their places in the list of all."""

    label: str
    devices: tuple[int, ...]
    places: tuple[int, ...]


def timeline(files: RunFiles, wanted: int | None = None) -> dict[str, Any]:
    """Rows, spans and gaps of a run, and the iteration to begin with; empty without spans."""
    windows = iteration_windows(files.spans)
    spans, left_out = _bounded(files.spans, windows)
    groups = device_groups_of(spans, files.plan)
    names = list(dict.fromkeys(span.action for span in spans))
    causes = _Gaps(spans, files.plan, {name: n for n, name in enumerate(names)}, not left_out)
    middle = median_iteration(files.spans)
    shortest = 0.0
    if middle is not None:
        shortest = SHORTEST_GAP * (windows[middle][1] - windows[middle][0])
    held, figure = _memory(files, spans)
    return {
        "names": names,
        "rows": [_row(group, files.plan) for group in groups],
        "spans": _columns(spans, groups, names, causes.released) | {"held": held},
        "gaps": [causes.of(group, shortest) for group in groups],
        "iterations": [[i, _micro(start), _micro(end)] for i, (start, end) in windows.items()],
        "begin": middle if wanted is None else wanted,
        "memory": MEMORY.get(figure, ""),
        "left_out": left_out,
    }


def _micro(seconds: float) -> int:
    """Seconds as whole microseconds."""
    return round(seconds * 1e6)


def device_groups_of(spans: Sequence[Span], plan: Document | None) -> list[DeviceGroup]:
    """Devices joined where they ran the same spans, in the order of their numbers; host last."""
    ran: dict[int, list[int]] = defaultdict(list)
    for place, span in enumerate(spans):
        for device in span.devices:
            ran[device].append(place)
    joined: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    for device in sorted(ran, key=lambda d: (d < 0, d)):
        pool = device_label(device, plan).partition("[")[0]
        joined[pool, tuple(ran[device])].append(device)
    return [
        DeviceGroup(label=_label(pool, devices), devices=tuple(devices), places=places)
        for (pool, places), devices in joined.items()
    ]


def _label(pool: str, devices: Sequence[int]) -> str:
    """`host`, `train[0]`, `train[0:4]`, `gen[1,3]`, as a simulation prints them."""
    first, last = devices[0], devices[-1]
    if first < 0:
        return pool
    whole = len(devices) > 1 and list(devices) == list(range(first, last + 1))
    return f"{pool}[{f'{first}:{last + 1}' if whole else ','.join(map(str, devices))}]"


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


class _Gaps:
    """Times in which devices ran nothing, and what they waited for.

    Where iterations are left out, so are the gaps from one iteration to another.
    """

    def __init__(
        self, spans: Sequence[Span], plan: Document | None, place: Mapping[str, int], whole: bool
    ) -> None:
        self.spans, self.place, self.whole = spans, place, whole
        self.released = released_by(spans, plan)
        copies = {a["id"] for a in plan["actions"] if document_lane(a) == "copy"} if plan else set()
        self.computing = [span.action not in copies for span in spans]

    def of(self, group: DeviceGroup, shortest: float) -> list[Any]:
        """[start, end, place of the span after it, [[action, microseconds], ...]] of each gap."""
        found: list[Any] = []
        if group.devices[0] < 0:
            return found
        own = [place for place in group.places if self.computing[place]]
        free, turn = (self.spans[own[0]].start, self.spans[own[0]].iteration) if own else (0.0, 0)
        for place in own:
            span = self.spans[place]
            if span.start - free > shortest and (self.whole or span.iteration == turn):
                causes = self._causes(place, free)
                found.append([_micro(free), _micro(span.start), place, causes])
            free, turn = max(free, span.end), span.iteration
        return found

    def _causes(self, place: int, free: float) -> list[list[int]]:
        """The actions waited for with their microseconds, the longest first, small ones dropped."""
        seconds: dict[int, float] = defaultdict(float)
        for at, start, end in waited_for(self.spans, self.released, place, free):
            cause = OUTSIDE if at is None else self.place[self.spans[at].action]
            seconds[cause] += end - start
        ranked = sorted(seconds.items(), key=lambda item: (-item[1], item[0]))
        return [[cause, _micro(length)] for cause, length in ranked[:MOST_CAUSES]]
