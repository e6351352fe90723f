"""The executor: one event loop for every mode of every plan.

A run is a sequence of segments, each from one checkpoint to the next. Within a segment it goes
turn by turn: in turn t an action runs iteration t + its `ahead`. An instance, an action in one
turn, starts when its dependencies have finished. An instance that is not due, or whose iteration
is outside of the segment, is over as soon as its dependencies are. Each action runs its turns in
order, so one number an action says what is finished. No action is more than `AHEAD` turns in
front of the first unfinished turn: what a free-running action such as the prompts makes early
would only wait in memory. Nothing here knows of algorithms, placements or asynchrony; a backend
does the work.
"""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rlflow.contract.values import Stat
from rlflow.graph.rules.nesting import keeps_surplus
from rlflow.runtime.execute.segments import Segment, closing_actions
from rlflow.runtime.execute.stats import join_metrics, logged_as
from rlflow.scheduler.plan.plan import Action, Plan, Trip
from rlflow.scheduler.plan.turns import refilled, serving


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The end of an action instance: seconds on the backend's clock, and its metrics or an error.

    `moved` is the bytes sent between processes; None where the backend does not count them.
    `devices` has figures of each device meanwhile, by name.
    """

    action: str
    iteration: int
    start: float
    end: float
    metrics: Mapping[str, float | Stat] = field(default_factory=dict)
    moved: int | None = None
    devices: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """A request to end after the iterations that have begun."""


Event = Completion | Stop

# A wait in seconds, after which signals are looked at. A signal that comes between the
# interpreter's last look and the wait itself does not end the wait.
TICK = 0.5


class Events(Protocol):
    """Where completions and requests to stop come in, from any thread."""

    def put(self, event: Event, /) -> None:
        """Bring an event."""

    def get(self, *, timeout: float) -> Event:
        """The next event; raises queue.Empty when none came in so many seconds."""


class Backend(Protocol):
    """Carries out action instances, each on the devices of its action."""

    def submit(self, action: Action, iteration: int, done: Callable[[Completion], None]) -> None:
        """Start an action instance; `done` is called from any thread when it has ended."""

    def skip(self, action: Action, iteration: int) -> None:
        """Leave out an action instance: its loop is over in this iteration."""

    def drop_surplus(self) -> None:
        """Drop the surplus rows of loops, so that no later iteration uses them."""

    def close(self, *, wait: bool = True) -> None:
        """Release the devices, after what runs has ended unless told not to wait."""


class Listener(Protocol):
    """Hears what the executor does, in the thread that runs it."""

    def started(self, action: Action, iteration: int) -> None:
        """An action instance was handed to the backend."""

    def finished(self, action: Action, completion: Completion) -> None:
        """An action instance has ended well."""

    def iteration_done(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """All actions of an iteration have finished; of a segment's last one, everything has."""


class Executor:
    """Runs iterations `start` to `end` of a plan, then the closing actions on the last weights.

    After every multiple of `barrier` iterations (0: never) everything finishes before more begins.
    The same holds for the iterations that have begun when a listener calls `pause`. A listener
    that hears of iteration `edge` - 1 may therefore save a checkpoint. A backend puts completions
    into `events`. With `brought` the trained weights are not those of the models' files, so the
    first segment begins with reshards that bring them to all other instances.
    """

    def __init__(
        self,
        plan: Plan,
        backend: Backend,
        listener: Listener,
        *,
        start: int,
        end: int,
        barrier: int,
        events: Events | None = None,
        brought: bool = False,
    ) -> None:
        self.actions = {action.id: action for action in plan.actions}
        self.backend = backend
        self.listener = listener
        self.start = start
        self.end = end
        self.barrier = barrier
        self.edge = end
        self._brought = brought or start > 0
        self._pausing = False
        self._interrupted = False
        self.events: Events = queue.SimpleQueue() if events is None else events
        self.stopped = False
        self._most = max((action.ahead for action in plan.actions), default=0)
        self._closing = closing_actions(plan)
        self._refilled = refilled(plan)
        self._serving = serving(plan)
        self._running: set[str] = set()
        self._metrics: dict[int, dict[str, list[Mapping[str, float | Stat]]]] = {}
        self._reached: dict[tuple[str, int], float] = {}
        self._ended: dict[int, dict[str, int]] = defaultdict(dict)
        self._keeps = keeps_surplus(plan.graph)
        self._missing: dict[int, int] = {}
        self._counted = sum(action.part is None for action in plan.actions)
        self._begun = start
        self._reported = start
        self._followers: dict[str, list[str]] = {name: [] for name in self.actions}
        for action in plan.actions:
            for name in dict.fromkeys((action.id, *(dep.action for dep in action.after))):
                self._followers[name].append(action.id)

    def stop(self) -> None:
        """Ask to end once the iterations that have begun are done; safe in a signal handler."""
        self.events.put(Stop())

    def interrupt(self) -> None:
        """Give up at once; for a signal handler, which raises KeyboardInterrupt itself.

        The interpreter drops what a handler raises within a destructor, so `run` raises it too.
        """
        self._interrupted = True

    def pause(self) -> None:
        """Finish what has begun before more begins; for a listener, in its thread."""
        self._pausing = True

    def run(self) -> int:
        """Run until the end, a stop or an error; returns the iterations that are done.

        Raises the error of the first action that failed, after waiting for the others.
        """
        start = self.start
        while start < self.end:
            if self._keeps:
                self.backend.drop_surplus()
            barrier = self.barrier or self.end
            end = min((start // barrier + 1) * barrier, self.end)
            start = self._run(self._segment(start, end))
        if not self.stopped and self._closing:
            self._run(self._segment(self.end, self.end + 1))
        return min(self._reported, self.end)

    def _segment(self, start: int, end: int) -> Segment:
        """The next segment; past the end of the run it is that of the closing actions."""
        closing = start >= self.end
        opening = self._opening(start, closing)
        first = start - self._most - (1 if opening else 0)
        turns = dict.fromkeys(self.actions, first)
        known = self._refilled, closing, turns, self._serving
        return Segment(start, end, first, opening, *known, whole=first)

    def _opening(self, start: int, closing: bool) -> frozenset[str]:
        """The reshards whose targets lack the weights that a segment begins with.

        A resumed run has loaded trained instances only. Targets of closing actions may be older.
        """
        resumed = start == self.start and self._brought
        found = []
        for action in self.actions.values():
            if action.kind != "reshard" or (start == 0 and not resumed):
                continue
            late = resumed or not action.due(start - 1)
            wanted = action.id in self._closing if closing else self._read_before_due(action, start)
            if (late if closing else resumed) and wanted:
                found.append(action.id)
        return frozenset(found)

    def _read_before_due(self, reshard: Action, start: int) -> bool:
        """Whether, from `start` on, a reshard's targets are read before the reshard is due."""
        fills = set(reshard.targets)
        readers = [a for a in self.actions.values() if fills.intersection(dict(a.reads))]
        for iteration in range(start, self.end):
            if any(reader.due(iteration) for reader in readers):
                return True
            if reshard.due(iteration):
                return False
        return False

    def _run(self, segment: Segment) -> int:
        """Run a segment; returns the iteration that follows it."""
        self.edge = segment.end
        self._advance(segment, list(self.actions))
        while self._running:
            event = self._next_event()
            if isinstance(event, Stop):
                self._stop_after_begun(segment)
                continue
            self._running.discard(event.action)
            if event.error is not None:
                self._drain()
                raise event.error
            action = self.actions[event.action]
            self.listener.finished(action, event)
            if action.trip is not None and action.trip.gate:
                self._pass(action.trip, event)
            self._advance(segment, self._complete(segment, action, event.metrics))
            if self._pausing:
                self._pause(segment)
        self._report(segment.end)
        self._missing.clear()
        return segment.end

    def _next_event(self) -> Event:
        """Wait for the next event; raises KeyboardInterrupt once the run is interrupted."""
        while not self._interrupted:
            try:
                return self.events.get(timeout=TICK)
            except queue.Empty:
                continue
        raise KeyboardInterrupt

    def _pause(self, segment: Segment) -> None:
        """End the segment after the iterations that have begun, one unfinished one at least."""
        self._pausing = False
        if not segment.closing:
            begun = max(self._begun, self._reported)
            self.edge = segment.end = min(begun + 1, segment.end)

    def _advance(self, segment: Segment, candidates: list[str]) -> None:
        """Start what is ready among the candidates; phantoms finish at once."""
        while candidates:
            action = self.actions[candidates.pop()]
            if action.id in self._running or not segment.ready(action):
                continue
            due = segment.due(action)
            iteration = segment.done_for(action) if due else 0
            if due and action.trip is not None and action.trip.is_over(self._ended[iteration]):
                self.backend.skip(action, iteration)
                due = False
            if due:
                self._running.add(action.id)
                self._begun = max(self._begun, iteration if action.part is None else self.start)
                self.listener.started(action, iteration)
                self.backend.submit(action, iteration, self.events.put)
            else:
                candidates += self._complete(segment, action, {})

    def _pass(self, trip: Trip, event: Completion) -> None:
        """Add up what trips have reached of their loop's goal; the trip that reaches it is last."""
        found = event.metrics["reached"]
        value = found.value if isinstance(found, Stat) else found
        key = (trip.loop, event.iteration)
        self._reached[key] = self._reached.get(key, 0.0) + value
        if self._reached[key] >= trip.goal:
            self._ended[event.iteration].setdefault(trip.loop, trip.index)

    def _complete(
        self, segment: Segment, action: Action, metrics: Mapping[str, float | Stat]
    ) -> list[str]:
        """Count an instance as over; returns the actions that may have become ready."""
        iteration = segment.turns[action.id] + action.ahead
        if action.part is None and segment.start <= iteration < segment.end:
            if metrics and not (action.trip is not None and action.trip.gate):
                found = self._metrics.setdefault(iteration, {})
                trip = metrics if action.trip is None else _of_one_trip(metrics)
                found.setdefault(logged_as(action), []).append(trip)
            missing = self._missing.get(iteration, self._counted) - 1
            self._missing[iteration] = missing
        turned = segment.finish(action.id)
        self._report(segment.end - 1)
        return list(self.actions) if turned else list(self._followers[action.id])

    def _report(self, end: int) -> None:
        """Report iterations below `end` that are whole, in order."""
        while self._reported < end and self._missing.get(self._reported, 1) == 0:
            iteration = self._reported
            del self._missing[iteration]
            self._reported += 1
            parts = self._metrics.pop(iteration, {})
            for key in [key for key in self._reached if key[1] == iteration]:
                del self._reached[key]
            self._ended.pop(iteration, None)
            metrics = {
                f"{node}/{name}": value
                for node, found in parts.items()
                for name, value in join_metrics(found).items()
            }
            self.listener.iteration_done(iteration, metrics)

    def _stop_after_begun(self, segment: Segment) -> None:
        """Let nothing start in iterations that no action has begun; closing ones go on."""
        if segment.closing:
            return
        self.stopped = True
        self.end = segment.end = min(self._begun + 1, segment.end)

    def _drain(self) -> None:
        """Wait for everything that runs; later errors are those of a run that has failed."""
        while self._running:
            event = self._next_event()
            if isinstance(event, Completion):
                self._running.discard(event.action)


def _of_one_trip(metrics: Mapping[str, float | Stat]) -> dict[str, float | Stat]:
    """Metrics that can be joined with those of other trips; plain numbers are averaged."""
    return {
        name: value if isinstance(value, Stat) else Stat(kind="mean", total=value, count=1.0)
        for name, value in metrics.items()
    }
