"""The executor: one event loop for every mode of every plan.

An action instance (action, iteration) starts when what it comes after has finished.
Each action runs its iterations in order, so what is finished is one number an action.
No action runs ahead of the first unfinished iteration by more than the plan's staleness and
one more: what a free-running action (the prompts, say) makes early would only wait in memory,
and a stop would have to carry it all out. Nothing here knows of algorithms, placements or
asynchrony; a backend does the work.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rlflow.scheduler.plan import Action, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """An action instance that has ended: seconds on the backend's clock, numbers, or an error.

    `moved` is bytes that went from one process to another, None where nobody counts them.
    """

    action: str
    iteration: int
    start: float
    end: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    moved: int | None = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """A request to end after the iterations that have begun."""


Event = Completion | Stop

AHEAD = 2


class Backend(Protocol):
    """Carries out action instances, each on the devices of its action."""

    def submit(self, action: Action, iteration: int, done: Callable[[Completion], None]) -> None:
        """Start an action instance; `done` is called from any thread when it has ended."""

    def close(self, *, wait: bool = True) -> None:
        """Release the devices, after what runs has ended unless told not to wait."""


class Listener(Protocol):
    """Hears what the executor does, in the thread that runs it."""

    def started(self, action: Action, iteration: int) -> None:
        """An action instance was handed to the backend."""

    def finished(self, action: Action, completion: Completion) -> None:
        """An action instance has ended well."""

    def iteration_done(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """All actions of an iteration have finished; nothing later has passed a barrier."""


class Executor:
    """Runs iterations `start` to `end` of a plan, then the closing actions on the last weights.

    With a `barrier` of n, no action of a later iteration starts before every n-th
    iteration is done and its listener has returned. At most `AHEAD` iterations, and the
    plan's staleness more, are under way at a time.
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
    ) -> None:
        self.actions = {action.id: action for action in plan.actions}
        self.backend = backend
        self.listener = listener
        self.start = start
        self.end = end
        self.barrier = barrier
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.closing = closing_actions(plan)
        self._done = dict.fromkeys(self.actions, start)
        self._running: set[str] = set()
        self._left: dict[int, int] = {}
        self._metrics: dict[int, dict[str, float]] = {}
        self._begun = start
        self._reported = start
        self._window = AHEAD + plan.staleness
        self._limit = self._next_barrier(start)
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
        self._advance(list(self.actions))
        while self._running:
            event = self.events.get()
            if isinstance(event, Stop):
                self._stop_after_begun()
                continue
            self._running.discard(event.action)
            if event.error is not None:
                self._drain()
                raise event.error
            action = self.actions[event.action]
            self.listener.finished(action, event)
            self._finish(action, event.metrics)
        return min(self._reported, self.end)

    def _advance(self, candidates: list[str]) -> None:
        """Start what is ready among the candidates; skipped instances finish at once."""
        while candidates:
            action = self.actions[candidates.pop()]
            iteration = self._done[action.id]
            if action.id in self._running or not self._ready(action, iteration):
                continue
            if self._due(action, iteration):
                self._running.add(action.id)
                self._begun = max(self._begun, iteration)
                self.listener.started(action, iteration)
                self.backend.submit(action, iteration, self.events.put)
            else:
                candidates += self._complete(action, {})

    def _finish(self, action: Action, metrics: Mapping[str, float]) -> None:
        self._advance(self._complete(action, metrics))

    def _complete(self, action: Action, metrics: Mapping[str, float]) -> list[str]:
        """Count an instance as finished; returns the actions that may have become ready."""
        iteration = self._done[action.id]
        self._done[action.id] = iteration + 1
        prefix = action.node or action.id
        found = self._metrics.setdefault(iteration, {})
        found.update({f"{prefix}/{name}": value for name, value in metrics.items()})
        self._left[iteration] = self._left.get(iteration, len(self.actions)) - 1
        followers = self._followers[action.id]
        if self._report_done():
            return list(self.actions)
        return list(followers)

    def _report_done(self) -> bool:
        """Report iterations that are whole, in order; True if there was one."""
        before = self._reported
        while self._left.get(self._reported) == 0:
            iteration = self._reported
            del self._left[iteration]
            self._reported += 1
            self.listener.iteration_done(iteration, self._metrics.pop(iteration))
            if self._reported >= self._limit:
                self._limit = self._next_barrier(self._reported)
        return self._reported > before

    def _ready(self, action: Action, iteration: int) -> bool:
        if iteration > self.end or iteration >= min(self._limit, self._reported + self._window):
            return False
        return all(
            self._done[dep.action] > iteration - dep.distance
            or iteration - dep.distance < self.start
            for dep in action.after
        )

    def _due(self, action: Action, iteration: int) -> bool:
        """Whether the action does something in this iteration; the one past the end is closing."""
        if iteration == self.end:
            return action.id in self.closing
        return iteration >= action.first and iteration % action.every == 0

    def _next_barrier(self, done: int) -> int:
        """Iterations below this one may start: up to the next multiple of the barrier."""
        if done >= self.end:
            return self.end + 1
        return min((done // self.barrier + 1) * self.barrier, self.end)

    def _stop_after_begun(self) -> None:
        """Let nothing start in iterations that no action has begun; closing ones go on."""
        if self._begun >= self.end:
            return
        self.end = self._begun + 1
        self._limit = min(self._limit, self.end)
        self.closing = frozenset()

    def _drain(self) -> None:
        """Wait for everything that runs; later errors are those of a run that has failed."""
        while self._running:
            event = self.events.get()
            if isinstance(event, Completion):
                self._running.discard(event.action)


def closing_actions(plan: Plan) -> frozenset[str]:
    """The closing actions, and the reshards, wakes and sleeps that come before the last of them."""
    places = [index for index, action in enumerate(plan.actions) if action.closing]
    if not places:
        return frozenset()
    before = plan.actions[: places[-1] + 1]
    read = {name for action in before if action.closing for name, _ in action.reads}
    return frozenset(
        action.id
        for action in before
        if action.closing
        or action.kind in ("sleep", "wake")
        or (action.kind == "reshard" and read.intersection(action.targets))
    )
