"""The record of a whole run: what is left of it, how large it may be, and what went wrong.

A thread of the process that controls the run looks every few seconds. It sees names and sizes of
files, and no rows. Beyond the cap the oldest iterations go first, with all their edges.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rlflow.runtime.record.durable import is_leftover
from rlflow.runtime.record.edges.choice import Recording
from rlflow.runtime.record.edges.names import RECORDS, iteration_of

if TYPE_CHECKING:
    from rlflow.runtime.record.edges.recorder import Notes

LOOK_SECONDS = 5.0
# A look takes no more than this share of the time.
SHARE = 0.002
FINISH_SECONDS = 30.0
# What is left where the cap was passed, so that not every look drops something.
KEPT = 0.9

Ask = Callable[[float | None], Sequence["Notes"]]


class RecordKeeper:
    """Keeps a run's record within its cap, and tells what became of it.

    `ask` gives the notes of every process; with seconds they finish what waits, in so many at
    most. `warn` takes a line for the user, from any thread.
    """

    def __init__(self, recording: Recording, ask: Ask, warn: Callable[[str], None]) -> None:
        self._recording = recording
        self._ask = ask
        self._warn = warn
        self._said: set[str] = set()
        self._dropped: list[int] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="record cap", daemon=True)

    def begin(self, start: int) -> None:
        """Forget what is recorded from iteration `start` on, for those run again; then look on."""
        for path, iteration in _files(self._recording.run):
            if iteration is None or iteration >= start:
                _remove(path)
        if self._recording.chosen:
            self._thread.start()

    def end(self, seconds: float = FINISH_SECONDS) -> str:
        """Have everything written that waits; what there is, as a line, "" for no record."""
        self._closed.set()
        if not self._recording.chosen:
            return ""
        with contextlib.suppress(RuntimeError):  # a run that failed before it began
            self._thread.join(seconds)
        self._look(seconds)
        kept = list(_files(self._recording.run))
        size = sum(_size(path) for path, _ in kept)
        count = len({iteration for _, iteration in kept})
        line = f"recorded: {count} iterations, {size / 1e6:,.1f} MB"
        if self._dropped:
            first, last = min(self._dropped), max(self._dropped)
            dropped = len(set(self._dropped))
            line += f"; {dropped} of iterations {first} to {last} dropped for the cap"
        return f"{line}   look: rlflow samples {self._recording.run}"

    def _look_on(self) -> None:
        pause = LOOK_SECONDS
        while not self._closed.wait(pause):
            began = time.perf_counter()
            with contextlib.suppress(Exception):  # processes of a run that ends are asked in vain
                self._look(None)
            pause = max(LOOK_SECONDS, (time.perf_counter() - began) / SHARE)

    def _look(self, seconds: float | None) -> None:
        notes = self._ask(seconds)
        failed = sum(each.failed for each in notes)
        if failed:
            problem = next(each.problem for each in notes if each.problem)
            self._say("failed", f"rows were not recorded: {problem}; the run goes on")
        late = sum(each.dropped for each in notes)
        if late:
            text = "rows come faster than they are recorded: some are dropped; record fewer with "
            self._say("late", f"{text}--record NODE=every:N or first:N")
        if seconds is not None and failed + late > 1:
            self._say("count", f"{failed + late} files of the record are missing")
        self._within_cap()

    def _within_cap(self) -> None:
        """Remove whole iterations, the oldest first, where the record is larger than it may be."""
        by_iteration: dict[int, list[tuple[Path, int]]] = {}
        for path, iteration in _files(self._recording.run):
            if iteration is not None:
                by_iteration.setdefault(iteration, []).append((path, _size(path)))
        total = sum(size for files in by_iteration.values() for _, size in files)
        cap = self._recording.cap
        if total <= cap:
            return
        self._say(
            "cap",
            f"the record has reached {cap / 1e9:g} GB: the oldest iterations are dropped from it "
            "(--record-cap)",
        )
        for iteration in sorted(by_iteration):
            if total <= KEPT * cap:
                break
            for path, size in by_iteration[iteration]:
                _remove(path)
                total -= size
            self._dropped.append(iteration)

    def _say(self, about: str, text: str) -> None:
        """Warn of something once."""
        if about not in self._said:
            self._said.add(about)
            self._warn(text)


class Tells(Protocol):
    """Where a run's lines go."""

    def say(self, text: str) -> None:
        """A plain line."""

    def warn(self, text: str) -> None:
        """A line that is shown in any case."""


@contextmanager
def record_kept(recording: Recording, ask: Ask, start: int, display: Tells) -> Iterator[None]:
    """Keep the record of the run inside, which begins at iteration `start`."""
    keeper = RecordKeeper(recording, ask, display.warn)
    keeper.begin(start)
    try:
        yield
    except KeyboardInterrupt:
        keeper.end(1.0)
        raise
    except BaseException:
        keeper.end()
        raise
    if line := keeper.end():
        display.say(line)


def _files(run: Path) -> Iterator[tuple[Path, int | None]]:
    """The files of a record with their iterations; those that a writer left have none."""
    for directory in (run / RECORDS).glob("*/"):
        for path in directory.iterdir():
            iteration = iteration_of(path.name)
            if iteration is not None or is_leftover(path.name):
                yield path, iteration


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
