"""Which span let each one of a run start, by the dependencies of its plan.

A span starts after those of the actions that its own waits for, and after the one before it on its
devices. The last of them to end released it. This file draws and prints nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence

from rlflow.report.charts.look import Document, document_lane
from rlflow.runtime.record.spans import Span

CLOCKS = 1e-3
"""Seconds by which the clocks of two processes of a run may differ."""
MOST_SKIPPED = 8


def released_by(spans: Sequence[Span], plan: Document | None) -> list[int | None]:
    """For every span the place in `spans`, which are by start, of the one that let it start.

    None where nothing that it waits for is among them. Without a plan only devices are waited for.
    """
    instances = _Instances(spans, plan)
    before: dict[tuple[int, str], int] = {}
    found: list[int | None] = []
    for place, span in enumerate(spans):
        slots = [(device, instances.lanes.get(span.action, "compute")) for device in span.devices]
        candidates = [*instances.waited_for(span.action, span.iteration, span.start)]
        candidates += [before[slot] for slot in slots if slot in before]
        over = [n for n in candidates if n < place and spans[n].end <= span.start + CLOCKS]
        found.append(max(over, key=lambda n: spans[n].end, default=None))
        for slot in slots:
            if slot not in before or spans[before[slot]].end <= span.end:
                before[slot] = place
    return found


class _Instances:
    """The spans of each action instance, and the instances that another one waits for."""

    def __init__(self, spans: Sequence[Span], plan: Document | None) -> None:
        actions = {action["id"]: action for action in plan["actions"]} if plan else {}
        self.lanes: dict[str, str] = {
            name: document_lane(action) for name, action in actions.items()
        }
        self.deps = {
            name: [
                (dep["action"], dep["distance"] + action["ahead"] - actions[dep["action"]]["ahead"])
                for dep in action["after"]
                if dep["action"] in actions
            ]
            for name, action in actions.items()
        }
        self.spans = spans
        self.moves = {name for name, action in actions.items() if action["kind"] != "run"}
        self.places: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.of_action: dict[str, list[int]] = defaultdict(list)
        for place, span in enumerate(spans):
            self.places[span.action, span.iteration].append(place)
            self.of_action[span.action].append(place)

    def waited_for(
        self, action: str, iteration: int, start: float, skipped: int = 0
    ) -> Iterator[int]:
        """The places of what an instance waits for.

        What was not due is not there; what that would have waited for is waited for instead. A
        move of memory or weights has an iteration near its own: the last one before counts.
        """
        for name, distance in self.deps.get(action, ()):
            exact = self.places.get((name, iteration - distance))
            if exact:
                yield from exact
            elif name in self.moves:
                yield from self._last_before(name, start)
            elif skipped < MOST_SKIPPED and iteration - distance >= 0:
                yield from self.waited_for(name, iteration - distance, start, skipped + 1)

    def _last_before(self, action: str, start: float) -> list[int]:
        """The last span of an action that began before a moment, if there is one."""
        places = self.of_action.get(action, [])
        at = bisect_right(places, start, key=lambda place: self.spans[place].start)
        return places[at - 1 : at]
