"""Times in which the devices of a run ran nothing, and the actions that they waited for.

Seconds since the start of the run. This file draws and prints nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rlflow.report.charts.look import Document, document_lane
from rlflow.report.runfiles import device_label
from rlflow.report.waiting.causes import released_by
from rlflow.runtime.record.spans import Span
from rlflow.scheduler.simulate.blame import waited_for

SHORTEST_GAP = 0.002
"""A shorter gap, as a share of an iteration of median length, is not told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """Devices that ran the same spans, by their places in the list of all."""

    label: str
    devices: tuple[int, ...]
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGap:
    """A time in which devices ran nothing before the span at `place`, None where no more came.

    `pieces` are the actions waited for with their seconds, in the order of time; None stands for
    time in which no action ran that was waited for. They add up to the gap.
    """

    start: float
    end: float
    place: int | None
    pieces: tuple[tuple[str | None, float], ...]

    @property
    def seconds(self) -> float:
        """How long nothing ran."""
        return self.end - self.start

    @property
    def causes(self) -> list[tuple[str | None, float]]:
        """The actions waited for with their seconds in sum, the longest first."""
        return ranked(self.pieces)


def ranked(pieces: Iterable[tuple[str | None, float]]) -> list[tuple[str | None, float]]:
    """Seconds added up by action, the longest first."""
    sums: dict[str | None, float] = defaultdict(float)
    for name, seconds in pieces:
        sums[name] += seconds
    return sorted(sums.items(), key=lambda item: (-item[1], item[0] or ""))


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


class DeviceGaps:
    """The gaps of a run's spans, which are by start.

    `released` has for each span the place of the one that let it start. Where iterations are left
    out of the spans (`whole` is false), so are the gaps from one iteration to another.
    """

    def __init__(self, spans: Sequence[Span], plan: Document | None, *, whole: bool = True) -> None:
        self.spans, self.whole = spans, whole
        self.released = released_by(spans, plan)
        actions = plan["actions"] if plan else ()
        self._copies = {a["id"] for a in actions if document_lane(a) == "copy"}

    def of(self, group: DeviceGroup, shortest: float = 0.0) -> Iterator[DeviceGap]:
        """The gaps of devices that are longer than `shortest` seconds; none of the host.

        The first one is from the first span on any device.
        """
        if group.devices[0] < 0:
            return
        began = (span for span in self.spans if max(span.devices, default=-1) >= 0)
        first = next(began, None)
        free, turn = (first.start, first.iteration) if first is not None else (0.0, 0)
        for place in self._computing(group):
            span = self.spans[place]
            if span.start - free > shortest and (self.whole or span.iteration == turn):
                yield self._gap(place, free, span.start, self._before(place, free))
            free, turn = max(free, span.end), span.iteration

    def within(self, group: DeviceGroup, start: float, end: float) -> Iterator[DeviceGap]:
        """What is of the gaps of devices between two moments, the time after their last span too.

        After that they wait for whatever ends last until `end`.
        """
        for gap in self.of(group):
            pieces = self._before(gap.place, gap.start) if gap.place is not None else ()
            if gap.start < end and gap.end > start:
                yield self._gap(gap.place, max(gap.start, start), min(gap.end, end), pieces)
        own = self._computing(group)
        free = max((self.spans[place].end for place in own), default=start)
        if own and free < end:
            others = [n for n, span in enumerate(self.spans) if free < span.end <= end]
            last = max(others, key=lambda n: self.spans[n].end)
            ran = (last, self.spans[last].start, self.spans[last].end)
            yield self._gap(None, max(free, start), end, [ran, *self._before(last, free)])

    def _computing(self, group: DeviceGroup) -> list[int]:
        return [n for n in group.places if self.spans[n].action not in self._copies]

    def _before(self, place: int, free: float) -> Iterable[tuple[int | None, float, float]]:
        return waited_for(self.spans, self.released, place, free)

    def _gap(
        self,
        place: int | None,
        start: float,
        end: float,
        pieces: Iterable[tuple[int | None, float, float]],
    ) -> DeviceGap:
        found: list[tuple[str | None, float]] = []
        for at, began, ended in reversed([*pieces]):
            inside = min(ended, end) - max(began, start)
            if inside > 0:
                found.append((None if at is None else self.spans[at].action, inside))
        return DeviceGap(start=start, end=end, place=place, pieces=tuple(found))
