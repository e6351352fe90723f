"""What one tracker is sent: a bounded queue and a thread, which no run ever waits for.

The thread alone calls the tracker. What finds the queue full is dropped, what the tracker refuses
is lost, and both are counted. A tracker that hangs is left behind when the run ends.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

# Iterations that wait at most, and refusals in a row after which a tracker is given up.
CAPACITY = 1000
PATIENCE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Some rows of a node's output of one iteration: text and numbers, by column."""

    iteration: int
    node: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str | float | int | None]]


class Tracker(Protocol):
    """A run as a tracker keeps it; only the thread of its feed calls it."""

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of an iteration."""

    def write_table(self, iteration: int, table: Table) -> None:
        """Add rows of an iteration."""

    def close(self) -> None:
        """Hand on what is buffered, and end the tracker's run."""


@dataclass(frozen=True, slots=True)
class Point:
    """The metrics of one iteration on their way to a tracker."""

    iteration: int
    metrics: Mapping[str, float]


class Feed:
    """Hands points to the tracker that `opened` opens, in a thread of its own.

    `tables` finds recorded rows that the tracker has not had, the newest ones with True, at the
    end. `said` is told, once each, what goes wrong.
    """

    def __init__(
        self,
        name: str,
        opened: Callable[[], Tracker],
        said: Callable[[str], None],
        *,
        tables: Callable[[bool], Sequence[Table]] = lambda _: (),
        capacity: int = CAPACITY,
    ) -> None:
        self.name = name
        self.dropped = 0
        self.lost = 0
        self._opened = opened
        self._said = said
        self._tables = tables
        self._capacity = capacity
        self._waiting: deque[Point] = deque()
        self._ready = threading.Condition()
        self._ending = False
        self._over = False
        self._busy = False
        self._thread = threading.Thread(target=self._feed, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, point: Point) -> None:
        """Queue a point, or drop it where the queue is full; never waits for the tracker."""
        with self._ready:
            if self._over or len(self._waiting) >= self._capacity:
                self.dropped += 1
                return
            self._waiting.append(point)
            self._ready.notify()

    def end(self) -> None:
        """Say that nothing more comes."""
        with self._ready:
            self._ending = True
            self._ready.notify()

    def join(self, seconds: float) -> None:
        """Wait so long for the tracker to take what waits; then say what it has not taken."""
        self._thread.join(max(seconds, 0.0))
        with self._ready:
            late = self._thread.is_alive() and not self._over
            self._over = True
            dropped = self.dropped + len(self._waiting) + (late and self._busy)
        if late:
            self._said(f"tracker {self.name} does not answer and is left behind")
        if dropped or self.lost:
            self._said(
                f"tracker {self.name} is without {dropped + self.lost} iterations of this run: "
                f"{dropped} dropped, {self.lost} refused; metrics.jsonl has them all"
            )

    def _feed(self) -> None:
        try:
            tracker = self._opened()
        except BaseException as error:  # SystemExit too: it would end this thread unsaid
            self._give_up(f"cannot be opened: {_words(error)}")
            return
        refusals = 0
        while (point := self._next()) is not None:
            refusals = 0 if self._took(tracker, point, first=not self.lost) else refusals + 1
            if refusals >= PATIENCE:
                self._give_up(f"has refused {refusals} iterations in a row")
                break
        try:
            if refusals < PATIENCE:
                self._send_tables(tracker, last=True)
            tracker.close()
        except BaseException as error:
            self._say(f"was not closed: {_words(error)}")

    def _took(self, tracker: Tracker, point: Point, *, first: bool) -> bool:
        """Whether the tracker has taken a point; of refusals the first is told."""
        try:
            tracker.write(point.iteration, point.metrics)
            self._send_tables(tracker, last=False)
        except BaseException as error:
            self.lost += 1
            if first:
                self._say(f"refused iteration {point.iteration}: {_words(error)}")
            return False
        return True

    def _send_tables(self, tracker: Tracker, *, last: bool) -> None:
        for table in self._tables(last):
            tracker.write_table(table.iteration, table)

    def _next(self) -> Point | None:
        """The next point; None at the end, and once this thread was left behind."""
        with self._ready:
            self._busy = False
            while not self._waiting and not self._ending:
                self._ready.wait()
            if self._over or not self._waiting:
                return None
            self._busy = True
            return self._waiting.popleft()

    def _give_up(self, why: str) -> None:
        with self._ready:
            left, self._over = self._over, True
        if not left:
            self._said(f"tracker {self.name} {why}; the run goes on without it")

    def _say(self, what: str) -> None:
        with self._ready:
            left = self._over
        if not left:
            self._said(f"tracker {self.name} {what}")


def _words(error: BaseException) -> str:
    """An error in one short line."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:300]}" if said else type(error).__name__
