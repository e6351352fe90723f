"""What a run says while it goes: a live line on a terminal, plain lines elsewhere.

Everything goes to standard error; results go to standard output by whoever asked. This
file knows the names of numbers and not what they mean.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from rlflow.errors import printable
from rlflow.scheduler.plan.plan import Action

SECONDS_BETWEEN_LINES = 2.0
SHOWN_SUFFIXES = ("/sft_loss", "/value_loss", "/kl", "/length")


class Looking(Protocol):
    """A program that looks on at a run."""

    def ready(self) -> None:
        """The first iteration begins."""

    def iteration(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """An iteration is done, its metrics are written. What this raises ends the run."""


class Display:
    """Reports a run on the console; `quiet` leaves warnings only.

    `headline` are the metrics that come first on its lines. A program that looks on is told too.
    """

    def __init__(
        self,
        console: Console,
        *,
        quiet: bool = False,
        headline: Sequence[str] = (),
        watch: Looking | None = None,
    ) -> None:
        self.watch = watch
        self.console = console
        self.headline = headline
        self.quiet = quiet
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._busy: dict[str, float] = {}
        self._began = time.perf_counter()
        self._last_line = 0.0
        self._last_done = 0
        self._end = 0

    def say(self, text: str) -> None:
        """A plain line."""
        if not self.quiet:
            self.console.print(printable(text), highlight=False, markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """A line that is shown in any case; where it has several, the others stand below it."""
        shown = printable(text).replace("\n", "\n  ")
        self.console.print(
            f"warning: {shown}", style="yellow", highlight=False, markup=False, soft_wrap=True
        )

    @contextmanager
    def running(self, start: int, end: int) -> Iterator[None]:
        """A progress bar while a terminal looks on."""
        self._last_done, self._end = start, end
        self._began = time.perf_counter()
        if self.watch is not None:
            self.watch.ready()
        if self.quiet or not self.console.is_terminal:
            yield
            return
        columns = (
            TextColumn("{task.description:<22.22}"),
            BarColumn(bar_width=30),
            TextColumn("{task.completed}/{task.total}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"),
        )
        with Progress(*columns, console=self.console, transient=True) as progress:
            self._progress = progress
            self._task = progress.add_task("starting", total=end, completed=start, numbers="")
            try:
                yield
            finally:
                self._progress = None

    def started(self, action: Action, iteration: int) -> None:
        """Show what runs now."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=action.id)

    def finished(self, action: Action, seconds: float) -> None:
        """Add up where the time goes."""
        self._busy[action.id] = self._busy.get(action.id, 0.0) + seconds

    def iteration(self, iteration: int, metrics: Mapping[str, float], now: float) -> None:
        """Report an iteration: at once where it brings an evaluation, else every two seconds."""
        if self.watch is not None:
            self.watch.iteration(iteration, metrics)
        numbers = chosen_numbers(metrics, self.headline)
        if self._progress is not None and self._task is not None:
            completed = min(iteration + 1, self._end)
            self._progress.update(self._task, completed=completed, numbers=numbers)
        evaluated = any(name.startswith("eval") for name in metrics)
        clock = time.perf_counter()
        if not metrics or not (evaluated or clock - self._last_line >= SECONDS_BETWEEN_LINES):
            return
        passed = max(iteration + 1 - self._last_done, 1)
        each = (clock - max(self._last_line, self._began)) / passed
        self.say(f"iter {iteration:<5} {each:7.3f} s  {_shares(self._busy)}  {numbers}")
        self._last_line, self._last_done = clock, iteration + 1
        self._busy = {}


def _shares(busy: Mapping[str, float]) -> str:
    """The three actions that took most of the time, in percent of all action time."""
    total = sum(busy.values())
    if not total:
        return ""
    largest = sorted(busy.items(), key=lambda item: (-item[1], item[0]))[:3]
    return "  ".join(f"{name} {100 * seconds / total:.0f} %" for name, seconds in largest)


def chosen_numbers(metrics: Mapping[str, float], headline: Sequence[str]) -> str:
    """The numbers worth a place on one line, those of the headline first."""
    names = [name for name in headline if name in metrics]
    names += [
        name
        for name in sorted(metrics)
        if name.endswith(SHOWN_SUFFIXES) and name not in names and not name.startswith("eval")
    ]
    return "  ".join(f"{name} {metrics[name]:.3f}" for name in names[:4])
