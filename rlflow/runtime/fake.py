"""The `fake` backend: instances that take virtual seconds and fail where they are told to.

Nothing runs and no thread is started: whoever waits for the next event moves the clock to the
instance that ends first. A run on it is the same each time, whatever the machine does. This
file knows neither devices nor weights; `Monitor` watches those.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import deque
from collections.abc import Callable, Collection

from rlflow.runtime.execute.executor import Completion, Event
from rlflow.scheduler.plan.plan import Action
from rlflow.scheduler.plan.turns import Seconds, estimated

Instance = tuple[str, int]
SCALES = (0.0, 0.1, 1.0, 4.0)
POWERS = (0.0, 0.5, 1.0, 3.0)


class FakeError(RuntimeError):
    """What an instance raises that was told to fail."""


class VirtualEvents:
    """The executor's queue of events: empty, it lets the backend's clock go on."""

    def __init__(self, more: Callable[[], None]) -> None:
        self._more = more
        self._waiting: deque[Event] = deque()

    def put(self, event: Event, /) -> None:
        """Bring an event."""
        self._waiting.append(event)

    def get(self, *, timeout: float = 0.0) -> Event:
        """The next event; RuntimeError where nothing runs that could bring one."""
        if not self._waiting:
            self._more()
        return self._waiting.popleft()


class FakeBackend:
    """A backend on a virtual clock: `now` in seconds, moved by `events` alone.

    `seconds` tells how long an instance takes, `fails` which ones raise `FakeError` at their
    end. Of instances that end at one moment the one that was submitted first is heard first.
    """

    def __init__(
        self, *, seconds: Seconds = estimated, fails: Collection[Instance] = frozenset()
    ) -> None:
        self.events = VirtualEvents(self._advance)
        self.now = 0.0
        self.failed = False
        self.closed = False
        self._seconds = seconds
        self._fails = frozenset(fails)
        self._count = 0
        self._running: list[
            tuple[float, int, Action, int, float, Callable[[Completion], None]]
        ] = []

    def submit(self, action: Action, iteration: int, done: Callable[[Completion], None]) -> None:
        """Start an instance. AssertionError once one has failed, or the backend is closed."""
        assert not self.closed, f"{action.id}@{iteration} starts on a closed backend"
        assert not self.failed, f"{action.id}@{iteration} starts after a failure"
        end = self.now + self._seconds(action, iteration)
        heapq.heappush(self._running, (end, self._count, action, iteration, self.now, done))
        self._count += 1

    def drop_surplus(self) -> None:
        """Nothing is kept here."""

    def skip(self, action: Action, iteration: int) -> None:
        """Note nothing: the monitor hears of what starts."""

    def close(self, *, wait: bool = True) -> None:
        """Take no more instances."""
        self.closed = True

    @property
    def running(self) -> list[Instance]:
        """What runs, in the order of its ends."""
        return [(action.id, iteration) for _, _, action, iteration, _, _ in sorted(self._running)]

    def _advance(self) -> None:
        """Go on to the moment at which the next instance ends, and end it."""
        if not self._running:
            raise RuntimeError("the executor waits, and nothing runs")
        self.now, _, action, iteration, start, done = heapq.heappop(self._running)
        error = None
        if (action.id, iteration) in self._fails:
            self.failed = True
            error = FakeError(f"{action.id} of iteration {iteration} was told to fail")
        done(
            Completion(
                action=action.id,
                iteration=iteration,
                start=start,
                end=self.now,
                metrics={} if error else _metrics(action, iteration),
                error=error,
            )
        )


def _metrics(action: Action, iteration: int) -> dict[str, float]:
    """The numbers of an instance; a gate reaches some part of its loop's goal, or all of it."""
    if action.trip is None or not action.trip.gate:
        return {"n": float(iteration)}
    share = 1.5 * _uniform(f"{action.id} {iteration} reached")
    return {"reached": action.trip.goal * min(share, 1.0)}


def random_seconds(seed: int) -> Seconds:
    """Latencies that follow from a seed, an action and an iteration: even, noisy or with a tail.

    Some actions take no time at all, so that several instances end at one moment. The others
    take a power of an exponential variate, which stretches its tail.
    """
    shapes: dict[str, tuple[float, float]] = {}

    def seconds(action: Action, iteration: int) -> float:
        if action.id not in shapes:
            scale, power = _uniform(f"{seed} {action.id} scale"), _uniform(f"{seed} {action.id}")
            chosen = SCALES[int(scale * len(SCALES))], POWERS[int(power * len(POWERS))]
            shapes[action.id] = chosen
        scale, power = shapes[action.id]
        drawn = -math.log(1.0 - _uniform(f"{seed} {action.id} {iteration}"))
        return scale * math.pow(drawn, power)

    return seconds


def _uniform(text: str) -> float:
    """A number from 0 up to 1 that follows from a text, the same in every process."""
    digest = hashlib.blake2b(text.encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48
