"""The record of a whole run: what is left of it, how large it may be, and what went wrong.

A thread of the process that controls the run looks every few seconds. It sees names and sizes of
files. Beyond the cap the oldest iterations go first, with all their edges; rows are read only
where a file has some iterations that go and some that stay.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rlflow.data.paths import shown
from rlflow.runtime.record.durable import is_leftover
from rlflow.runtime.record.edges.choice import Recording
from rlflow.runtime.record.edges.names import RECORDS, recorded_span
from rlflow.runtime.record.edges.writing import keep_iterations

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
        for path, span in _files(self._recording.run):
            _keep(path, span, range(start))
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
        count = len({iteration for _, span in kept for iteration in span or ()})
        line = f"recorded: {count} iterations, {size / 1e6:,.1f} MB"
        if self._dropped:
            first, last = min(self._dropped), max(self._dropped)
            dropped = len(set(self._dropped))
            line += f"; {dropped} of iterations {first} to {last} dropped for the cap"
        return f"{line}   look: rlflow samples {shown(self._recording.run)}"

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
        found = [(path, span, _size(path)) for path, span in _files(self._recording.run) if span]
        total = sum(size for _, _, size in found)
        cap = self._recording.cap
        if total <= cap:
            return
        self._say(
            "cap",
            f"the record has reached {cap / 1e9:g} GB: the oldest iterations are dropped from it "
            "(--record-cap)",
        )
        before = 0
        for _, span, size in sorted(found, key=lambda file: file[1][-1]):
            if total <= KEPT * cap and span[-1] >= before:
                break
            before, total = span[-1] + 1, total - size
        for path, span, _ in found:
            self._dropped += [iteration for iteration in span if iteration < before]
            _keep(path, span, range(before, span[-1] + 1))

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


def _files(run: Path) -> Iterator[tuple[Path, range | None]]:
    """The files of a record with their iterations; those that a writer left have none."""
    for directory in (run / RECORDS).glob("*/"):
        for path in directory.iterdir():
            span = recorded_span(path.name)
            if span is not None or is_leftover(path.name):
                yield path, span


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _keep(path: Path, span: range | None, kept: range) -> None:
    """Leave of a file what lies in a range of iterations, without a word where the disk refuses."""
    stays = [iteration for iteration in span or () if iteration in kept]
    with contextlib.suppress(OSError):
        if not stays:
            path.unlink()
        elif len(stays) < len(span or ()):
            keep_iterations(path, kept)
