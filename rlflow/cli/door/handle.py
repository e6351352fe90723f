"""A run of a program: iterated over, asked for its figures, stopped.

The run goes on in a thread of its own; what it raises is raised where one waits for it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rlflow.cli.door.events import IterationDone, RunWatch
from rlflow.cli.door.shown import CompiledPlan, as_kind
from rlflow.errors import Finding, Interrupted, UsageError

if TYPE_CHECKING:
    import pandas as pd


class RunHandle:
    """A run that has begun. `for done in run:` yields an `IterationDone` for every iteration.

    Iterating begins with the first iteration of this start, whenever it is asked for, and ends
    with the run; it raises what the run has raised, and so does `wait`. In a `with` block the run
    is stopped where the block is left.
    """

    def __init__(self, watch: RunWatch, thread: threading.Thread) -> None:
        self._watch = watch
        self._thread = thread

    @property
    def directory(self) -> Path:
        """The run directory, as the commands take it."""
        assert self._watch.directory is not None
        return self._watch.directory

    @property
    def plan(self) -> CompiledPlan:
        """The plan that runs."""
        assert self._watch.plan is not None
        return as_kind(CompiledPlan, self._watch.plan)

    @property
    def done(self) -> bool:
        """Whether the run is over: to its end, stopped, or failed."""
        return self._watch.over

    @property
    def metrics(self) -> pd.DataFrame:
        """The figures of every iteration so far, a row each, those before a resume as well.

        Columns are metrics, the index is `iteration`. UsageError E822 where pandas is missing.
        """
        from rlflow.runtime.record.metrics import read_metrics

        pandas = _pandas("run.metrics")
        lines = read_metrics(self.directory / "metrics.jsonl")
        index = pandas.Index([line.iteration for line in lines], name="iteration", dtype="int64")
        return pandas.DataFrame([dict(line.metrics) for line in lines], index=index)

    def samples(
        self, iterations: Collection[int] | None = None, *, node: str | None = None
    ) -> pd.DataFrame:
        """The recorded rows so far, of some `iterations` or all, as `rlflow samples` joins them.

        Columns are `iteration`, `row` and the recorded fields: numbers, text, and lists of one
        number a token. `node` takes rows that another node than the rollout numbers. UsageError
        E822 where pandas is missing, RunDirError E734 where nothing of it is recorded.
        """
        return samples_frame(self.directory, iterations, node=node, asked="run.samples()")

    def stop(self, *, wait: bool = True) -> None:
        """End after what has begun, and `wait` for it; the run directory can be resumed.

        Raises what the run has raised otherwise. Within a callback `IterationDone.stop` does it.
        """
        self._watch.stop()
        if wait:
            self.wait()

    def wait(self, timeout: float | None = None) -> Self:
        """Wait for the end of the run, or `timeout` seconds; raise what it has raised.

        Ctrl-C stops the run after what has begun, a second one at once.
        """
        try:
            self._thread.join(timeout)
        except KeyboardInterrupt:
            self._watch.interrupted()
            raise
        self._raise()
        return self

    def report(self, path: str | Path | None = None) -> Path:
        """Write the report of the run so far, `report.html` in its directory; returns its path."""
        from rlflow.report.report import write_report

        return write_report(self.directory, Path(path) if path else None)

    def __iter__(self) -> Iterator[IterationDone]:
        """Events from the first on, each once it is there."""
        seen, watch = 0, self._watch
        while True:
            try:
                with watch.changed:
                    while len(watch.events) <= seen and not watch.over:
                        watch.changed.wait()
                    if len(watch.events) <= seen:
                        break
            except KeyboardInterrupt:
                watch.interrupted()
                raise
            yield watch.events[seen]
            seen += 1
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._watch.stop()
        try:
            self._thread.join()
        except KeyboardInterrupt:
            self._watch.interrupted()
            raise
        if error is None:
            self._raise()

    def __repr__(self) -> str:
        """Where it is and how far."""
        watch = self._watch
        state = "running" if not watch.over else "failed" if self._failed() else "over"
        return f"<RunHandle {self.directory}: {state}, {len(watch.events)} iterations>"

    def _failed(self) -> BaseException | None:
        error = self._watch.error
        return None if isinstance(error, Interrupted) and self._watch.stopping else error

    def _raise(self) -> None:
        error = self._failed() if self._watch.over else None
        if error is not None:
            raise error


def samples_frame(
    directory: Path, iterations: Collection[int] | None, *, asked: str, node: str | None = None
) -> pd.DataFrame:
    """The rows that a run has recorded, as `rlflow samples` joins them; `asked` is said in E822."""
    from rlflow.report.samples.joined import load_samples

    pandas = _pandas(asked)
    rows = [
        {"iteration": each.iteration, "row": each.row}
        | {name: each.value(name) for name in each.fields()}
        for each in load_samples(directory, node, iterations).samples
    ]
    return pandas.DataFrame(rows)


_going_on: dict[threading.Thread, RunWatch] = {}
# Seconds for what computes to end, of a run that was stopped at once.
PATIENCE = 10.0


@atexit.register
def _leave() -> None:
    """End the process where the interpreter cannot: its threads would take it along by SIGABRT.

    Python waits for runs that go on before it comes here, unless Ctrl-C has cut that short.
    """
    from rlflow.cli.shell.early import STOPPED

    stopping = sys.modules.get("rlflow.runtime.stopping")
    until = time.monotonic() + PATIENCE
    with contextlib.suppress(KeyboardInterrupt):
        for thread in stopping.LEFT_BEHIND if stopping and not _going_on else ():
            thread.join(max(0.0, until - time.monotonic()))
        if not _going_on and not (stopping and any(t.is_alive() for t in stopping.LEFT_BEHIND)):
            return
    for watch in [*_going_on.values()]:
        sys.stderr.write(f"stopped at once; continue with: resume={str(watch.directory)!r}\n")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(STOPPED)


def started(watch: RunWatch, work: Callable[[], object]) -> RunHandle:
    """Start a run in a thread, and wait until its first iteration can begin.

    Raises what it raises until then: nothing was started.
    """

    def follow() -> None:
        error: BaseException | None = None
        try:
            work()
        except BaseException as raised:  # handed to whoever waits for the run
            error = raised
        _going_on.pop(thread, None)
        watch.end(error)

    thread = threading.Thread(target=follow, name="rlflow-run")
    _going_on[thread] = watch
    thread.start()
    try:
        with watch.changed:
            while not watch.begun and not watch.over:
                watch.changed.wait()
    except KeyboardInterrupt:
        watch.interrupted()
        raise
    if not watch.begun and watch.error is not None:
        thread.join()
        raise watch.error
    return RunHandle(watch, thread)


def _pandas(asked: str) -> Any:
    """The module pandas; UsageError E822 for what is asked where it is not installed."""
    try:
        import pandas
    except ImportError:
        raise UsageError(
            Finding(
                code="E822",
                what=f"{asked} is a pandas DataFrame, and pandas is not installed",
                got=sys.executable,
                expected="pandas; metrics.jsonl and `rlflow samples --json` do without it",
                fix='pip install "rlflow-engine[notebook]"',
            )
        ) from None
    return pandas
