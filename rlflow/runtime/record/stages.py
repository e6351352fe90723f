"""What a start does, told while it is done: a spinner on a terminal, plain lines elsewhere.

`telling` says who looks on. `stage` marks what is done, anywhere inside of it; where nobody
looks on, as in the processes of a run, it is silent. Everything goes to standard error.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

WORTH_A_LINE = 1.0

_SHOWN: ContextVar[Stages | None] = ContextVar("rlflow_stages", default=None)


@contextmanager
def telling(console: Console, *, quiet: bool = False) -> Iterator[None]:
    """Show the stages inside on the console, unless `quiet`."""
    before = _SHOWN.set(None if quiet else Stages(console))
    try:
        yield
    finally:
        _SHOWN.reset(before)


@contextmanager
def stage(doing: str) -> Iterator[None]:
    """Show what is done inside, with its time; also a decorator. What it raises goes through."""
    shown = _SHOWN.get()
    if shown is None:
        yield
        return
    with shown.stage(doing):
        yield


class Stages:
    """Stages on one console; one within another is a second line of the live view."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None

    @contextmanager
    def stage(self, doing: str) -> Iterator[None]:
        """On a terminal a line that lives, and one that stays if it lasted; else a plain line."""
        if not self._console.is_interactive:
            self._say(doing)
            yield
            return
        began = time.perf_counter()
        with self._live() as progress:
            task = progress.add_task(doing, total=None)
            try:
                yield
            finally:
                progress.remove_task(task)
            seconds = time.perf_counter() - began
            if seconds >= WORTH_A_LINE:
                self._say(f"{doing}: {seconds:.1f} s")

    @contextmanager
    def _live(self) -> Iterator[Progress]:
        """The live view: started by the outermost stage, and cleared when that ends."""
        if self._progress is not None:
            yield self._progress
            return
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        # Standard output is never redirected: it is for results, and a run keeps what is printed.
        live = Progress(*columns, console=self._console, transient=True, redirect_stdout=False)
        try:
            with live:
                self._progress = live
                yield live
        finally:
            self._progress = None

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
