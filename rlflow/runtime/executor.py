"""The executor: one event loop for every mode of every plan.

A run goes from checkpoint to checkpoint in segments, and within one turn by turn: in turn t
an action runs iteration t + its `ahead`. An instance starts when what it comes after has
finished; one whose iteration is none of the segment's, or is not due, is over when what it
comes after is over. Each action runs its turns in order, so what is finished is one number an
action. No action is more than `AHEAD` turns in front of the first unfinished one: what a
free-running action (the prompts, say) makes early would only wait in memory. Nothing here
knows of algorithms, placements or asynchrony; a backend does the work.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rlflow.ops.body import Stat
from rlflow.runtime.stats import join
from rlflow.scheduler.plan import Action, Plan, Trip
from rlflow.scheduler.trips import keeps_surplus


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """An action instance that has ended: seconds on the backend's clock, numbers, or an error.

    `moved` is bytes that went from one process to another, None where nobody counts them.
    """

    action: str
    iteration: int
    start: float
    end: float
    metrics: Mapping[str, float | Stat] = field(default_factory=dict)
    moved: int | None = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """A request to end after the iterations that have begun."""


Event = Completion | Stop

AHEAD = 2


class Events(Protocol):
    """Where completions and requests to stop come in, from any thread."""

    def put(self, event: Event, /) -> None:
        """Bring an event."""

    def get(self) -> Event:
        """The next event, waiting for it."""


class Backend(Protocol):
    """Carries out action instances, each on the devices of its action."""

    def submit(self, action: Action, iteration: int, done: Callable[[Completion], None]) -> None:
        """Start an action instance; `done` is called from any thread when it has ended."""

    def skip(self, action: Action, iteration: int) -> None:
        """An action instance of a loop will not run: that is over in this iteration."""

    def drop_surplus(self) -> None:
        """Nothing that loops have left over may be used any more."""

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


@dataclass(slots=True)
class Segment:
    """Iterations `start` to `end` between two checkpoints, and how far its turns have come.

    `first` is its first turn and `turns[action]` the next one of each action. `opening` are
    the reshards that bring version `start` to where nothing brought it before, `refilled` those
    whose targets are emptied in every turn, so that they have to be filled in every turn too. In a
    `closing` segment no other runs are due than the closing ones.
    """

    start: int
    end: int
    first: int
    opening: frozenset[str]
    refilled: frozenset[str]
    closing: bool
    turns: dict[str, int]
    left: dict[int, int] = field(default_factory=dict)
    whole: int = 0

    def due(self, action: Action) -> bool:
        """Whether the next turn of an action does something; sleeps and wakes do in every one.

        The first turn of a segment with an opening has nothing else: it is before all others.
        """
        if action.part is not None:
            return True
        turn = self.turns[action.id]
        iteration = turn + action.ahead
        if action.id in self.opening and turn == self.first:
            return True
        within = self.start <= iteration < self.end
        if action.kind == "reshard" and (self.closing or not within):
            return action.id in self.refilled
        if not within:
            return False
        return action.closing if self.closing else action.due(iteration)

    def done_for(self, action: Action) -> int:
        """The iteration that the next turn of an action is done for, where it is due.

        A sleep or wake is of no iteration: it gets one of the segment. A reshard beyond the
        segment brings the version with which that begins, or ends.
        """
        iteration = self.turns[action.id] + action.ahead
        if action.part is not None:
            return min(max(iteration, self.start), self.end - 1)
        if action.kind == "reshard":
            last = self.start - 1 if self.closing else self.end - 1
            return min(max(iteration, self.start - 1), last)
        return iteration

    def ready(self, action: Action) -> bool:
        """Whether all that the next turn of an action comes after is over."""
        turn = self.turns[action.id]
        if turn >= self.end or turn >= self.whole + AHEAD:
            return False
        return all(
            self.turns[dep.action] > turn - dep.distance or turn - dep.distance < self.first
            for dep in action.after
        )

    def finish(self, name: str) -> bool:
        """Count a turn of an action as over; whether that ends a turn of all."""
        turn = self.turns[name]
        self.turns[name] = turn + 1
        self.left[turn] = self.left.get(turn, len(self.turns)) - 1
        before = self.whole
        while self.left.get(self.whole) == 0:
            del self.left[self.whole]
            self.whole += 1
        return self.whole > before


class Executor:
    """Runs iterations `start` to `end` of a plan, then the closing actions on the last weights.

    After every multiple of `barrier` iterations everything is over before more begins: a
    listener that hears of that iteration may save a checkpoint. `events` is where a backend's
    completions come in.
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
    ) -> None:
        self.actions = {action.id: action for action in plan.actions}
        self.backend = backend
        self.listener = listener
        self.start = start
        self.end = end
        self.barrier = barrier
        self.events: Events = queue.SimpleQueue() if events is None else events
        self.stopped = False
        self._most = max((action.ahead for action in plan.actions), default=0)
        self._closing = closing_actions(plan)
        self._refilled = refilled(plan)
        self._running: set[str] = set()
        self._metrics: dict[int, dict[str, list[Mapping[str, float | Stat]]]] = {}
        self._reached: dict[tuple[str, int], float] = {}
        self._last: dict[tuple[str, int], int] = {}
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

    def run(self) -> int:
        """Run until the end, a stop or an error; returns the iterations that are done.

        Raises the error of the first action that failed, after waiting for the others.
        """
        start = self.start
        while start < self.end:
            if self._keeps:
                self.backend.drop_surplus()
            end = min((start // self.barrier + 1) * self.barrier, self.end)
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
        return Segment(start, end, first, opening, self._refilled, closing, turns, whole=first)

    def _opening(self, start: int, closing: bool) -> frozenset[str]:
        """The reshards whose targets lack the weights that a segment begins with.

        A resumed run has loaded only what is trained; what closing actions read may have
        been filled a few iterations ago.
        """
        resumed = start == self.start > 0
        found = []
        for action in self.actions.values():
            if action.kind != "reshard" or start == 0:
                continue
            late = resumed or not action.due(start - 1)
            wanted = action.id in self._closing if closing else action.due(start - 1)
            if late and wanted:
                found.append(action.id)
        return frozenset(found)

    def _run(self, segment: Segment) -> int:
        """Run a segment; returns the iteration that follows it."""
        self._advance(segment, list(self.actions))
        while self._running:
            event = self.events.get()
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
        self._report(segment.end)
        return segment.end

    def _advance(self, segment: Segment, candidates: list[str]) -> None:
        """Start what is ready among the candidates; phantoms finish at once."""
        while candidates:
            action = self.actions[candidates.pop()]
            if action.id in self._running or not segment.ready(action):
                continue
            due = segment.due(action)
            iteration = segment.done_for(action) if due else 0
            if due and action.trip is not None and self._over(action.trip, iteration):
                self.backend.skip(action, iteration)
                due = False
            if due:
                self._running.add(action.id)
                self._begun = max(self._begun, iteration)
                self.listener.started(action, iteration)
                self.backend.submit(action, iteration, self.events.put)
            else:
                candidates += self._complete(segment, action, {})

    def _pass(self, trip: Trip, event: Completion) -> None:
        """Add up what a trip has reached of its loop's goal; it is the last one if that is all."""
        found = event.metrics["reached"]
        value = found.value if isinstance(found, Stat) else found
        key = (trip.loop, event.iteration)
        self._reached[key] = self._reached.get(key, 0.0) + value
        if self._reached[key] >= trip.goal:
            self._last.setdefault(key, trip.index)

    def _over(self, trip: Trip, iteration: int) -> bool:
        """Whether the trips before one have reached their loop's goal.

        What its own gate says is not asked: others of the last trip may start after that.
        """
        return self._last.get((trip.loop, iteration), trip.index) < trip.index

    def _complete(
        self, segment: Segment, action: Action, metrics: Mapping[str, float | Stat]
    ) -> list[str]:
        """Count an instance as over; returns the actions that may have become ready."""
        iteration = segment.turns[action.id] + action.ahead
        if action.part is None and segment.start <= iteration < segment.end:
            if metrics and not (action.trip is not None and action.trip.gate):
                found = self._metrics.setdefault(iteration, {})
                trip = metrics if action.trip is None else _of_one_trip(metrics)
                found.setdefault(_logged_as(action), []).append(trip)
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
                self._last.pop(key, None)
            metrics = {
                f"{node}/{name}": value
                for node, found in parts.items()
                for name, value in join(found).items()
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
            event = self.events.get()
            if isinstance(event, Completion):
                self._running.discard(event.action)


def _of_one_trip(metrics: Mapping[str, float | Stat]) -> dict[str, float | Stat]:
    """Numbers to be joined with those of other trips: of plain ones the mean."""
    return {
        name: value if isinstance(value, Stat) else Stat(kind="mean", total=value, count=1.0)
        for name, value in metrics.items()
    }


def _logged_as(action: Action) -> str:
    """The name that its numbers have: those of all trips through a loop are joined."""
    name = action.node or action.id
    return name if action.trip is None else name.partition("#")[0]


def closing_actions(plan: Plan) -> frozenset[str]:
    """The closing actions, and the reshards that fill what they read."""
    read = {name for action in plan.actions if action.closing for name, _ in action.reads}
    return frozenset(
        action.id for action in plan.actions if action.closing or read.intersection(action.targets)
    )


def refilled(plan: Plan) -> frozenset[str]:
    """The reshards into weights that are discarded in every turn."""
    emptied = {action.instance for action in plan.actions if action.mode == "discard"}
    return frozenset(a.id for a in plan.actions if emptied.intersection(a.targets))
