"""What a run tells a program: an event an iteration, kept from the first; what callbacks raise.

Filled in the thread of the run, read in others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from rlflow.cli.config import own_traceback
from rlflow.errors import CallbackError, Finding
from rlflow.scheduler.plan.plan import Plan

if TYPE_CHECKING:
    from rlflow.runtime.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationDone:
    """An iteration of a run that is done.

    `iteration` counts from 0, of `iterations` in all; `metrics` are its figures by name, and
    `seconds` what passed since the one before, or since the run began. `run_dir` is the run's
    directory; `stop()` ends the run after what has begun.
    """

    iteration: int
    iterations: int
    metrics: Mapping[str, float]
    seconds: float
    run_dir: Path
    stop: Callable[[], None]


Callback = Callable[[IterationDone], object]


class RunWatch:
    """Looks on at one run: its events from the first, its directory, and how it ended."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = tuple(callbacks)
        self.changed = threading.Condition()
        self.events: list[IterationDone] = []
        self.plan: Plan | None = None
        self.directory: Path | None = None
        self.error: BaseException | None = None
        self.begun = False
        self.over = False
        self.stopping = False
        self._run: Run | None = None
        self._last = time.monotonic()

    def take(self, run: Run, directory: Path) -> None:
        """The run that is looked at, with its models loaded."""
        self._run, self.directory, self.plan = run, directory, run.plan

    def ready(self) -> None:
        """The first iteration begins; a stop that was asked for before is passed on."""
        assert self._run is not None
        with self.changed:
            self.begun, self._last = True, time.monotonic()
            if self.stopping:
                self._run.stop()
            self.changed.notify_all()

    def iteration(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Keep the event of an iteration and hand it to the callbacks, in their order.

        Raises CallbackError where one raises; the run ends with it, and can be resumed.
        """
        assert self._run is not None
        assert self.directory is not None
        if iteration >= self._run.settings.iterations:
            return  # closing actions of an iteration past the end
        now = time.monotonic()
        event = IterationDone(
            iteration=iteration,
            iterations=self._run.settings.iterations,
            metrics=MappingProxyType(dict(metrics)),
            seconds=now - self._last,
            run_dir=self.directory,
            stop=self.stop,
        )
        self._last = now
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()
        for callback in self.callbacks:
            try:
                callback(event)
            except Exception as error:
                raise callback_error(callback, event, error) from error

    def stop(self) -> None:
        """Ask the run to end after what has begun."""
        with self.changed:
            if self._run is not None and self.begun and not self.stopping and not self.over:
                self._run.stop()
            self.stopping = True

    def interrupted(self) -> None:
        """Ctrl-C came to whoever waits: end after what has begun, and the second time at once."""
        with self.changed:
            if self.stopping and self._run is not None and self.begun and not self.over:
                self._run.interrupt()
        self.stop()

    def end(self, error: BaseException | None) -> None:
        """The run is over, well or with an error."""
        with self.changed:
            self.error, self.over = error, True
            self.changed.notify_all()


def callback_error(callback: Callback, event: IterationDone, error: Exception) -> CallbackError:
    """What a callback raised, told apart from what a run raises."""
    name = getattr(callback, "__qualname__", type(callback).__name__)
    return CallbackError(
        Finding(
            code="E821",
            what=f"callback {name} raised {type(error).__name__} after iteration "
            f"{event.iteration}: {error}",
            got=own_traceback(Path(), error),
            expected="a function of one IterationDone; the run itself has not failed",
        )
    )
