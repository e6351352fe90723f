"""The observer of a run: every tracker hears of it, and none can stop it or slow it down.

Each tracker has a feed of its own, so that one which hangs does not hold the others. The ids under
which trackers know the run are kept in its directory, for the day on which it goes on.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

from rlflow.contract.trackers import (
    DEFAULT_TRACKERS,
    INSTALL,
    TRACKERS,
    tracker_findings,
    tracker_names,
    tracker_of,
)
from rlflow.errors import Finding, UsageError, error_text
from rlflow.runtime.record.durable import register_atomic_faults, write_atomic
from rlflow.runtime.record.identity.documents import read_document
from rlflow.runtime.record.trackers.facts import RunFacts, read_facts
from rlflow.runtime.record.trackers.feed import Feed, Point, Table, Tracker

FILE = "trackers.json"
# How long all trackers together may take to end, once the run has.
CLOSE_SECONDS = 60.0
# How long they wait for the last rows to be written.
RECORD_SECONDS = 10.0
FILE_POINTS = register_atomic_faults("trackers:file")

CLASSES = {
    "tensorboard": "to_tensorboard:TensorBoardLog",
    "wandb": "to_wandb:WandbTracker",
    "trackio": "to_trackio:TrackioTracker",
    "mlflow": "to_mlflow:MlflowTracker",
    "swanlab": "to_swanlab:SwanlabTracker",
}

Opened = Callable[[RunFacts, Callable[[str], None]], Tracker]
Tables = Callable[[bool], Sequence[Table]]


class Observer:
    """Sends what a run in a directory logs to the trackers of that name, as `opened` opens them.

    A name may say a project: `wandb=mine`. `picture` makes the graph as PNG, once, in the thread of
    whoever needs it first; `tables` makes for each tracker what finds the recorded rows for it.
    """

    def __init__(
        self,
        path: Path,
        *,
        names: Sequence[str] = DEFAULT_TRACKERS,
        picture: Callable[[], bytes] = bytes,
        tables: Callable[[], Tables] | None = None,
        opened: Callable[[str], Opened] | None = None,
    ) -> None:
        self.names = tuple(names)
        self._path = path
        self._said: Callable[[str], None] = _nobody
        self._picture = picture
        self._tables = tables
        self._opened = opened or _opened
        self._feeds: list[Feed] = []
        self._lock = threading.Lock()
        self._drawn: bytes | None = None

    def begin(self, said: Callable[[str], None], *, after: int | None = None) -> None:
        """Start the trackers; `after` is the iteration that a resumed run continues.

        `said` is told what goes wrong, from any thread.
        """
        self._said = said
        for name in self.names:
            opening = partial(self._open, name, after)
            found = self._tables() if self._tables is not None else _no_tables
            self._feeds.append(Feed(tracker_of(name), opening, said, tables=found))

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Hand on the metrics of an iteration; returns at once."""
        point = Point(iteration, dict(metrics))
        for feed in self._feeds:
            feed.put(point)

    def close(
        self, seconds: float = CLOSE_SECONDS, *, record: Callable[[float], object] | None = None
    ) -> None:
        """Wait so long, in all, for trackers to take what waits; the rest is said and left.

        With no seconds nobody waits, and nothing is said.
        `record` has rows written that wait, in so many seconds, for those who have tables of them.
        """
        until = time.monotonic() + seconds
        if record is not None and seconds and self._tables is not None and self._feeds:
            with contextlib.suppress(Exception):  # the run's own end tells of it
                record(RECORD_SECONDS)
        for feed in self._feeds:
            feed.end()
        for feed in self._feeds if seconds else ():
            feed.join(until - time.monotonic())
        self._feeds = []

    def _open(self, said: str, after: int | None) -> Tracker:
        """Open a tracker on the run that it knows already, or on a new one; in its own thread."""
        name, project = tracker_of(said), said.partition("=")[2]
        make = self._opened(name)
        with self._lock:
            known = read_ids(self._path).get(name)
            facts = read_facts(self._path, known=known, after=after, picture=self._graph())
        if project:
            facts = replace(facts, project=project)
        return make(facts, partial(self._keep, name))

    def _graph(self) -> bytes:
        if self._drawn is None:
            try:
                self._drawn = self._picture()
            except Exception as error:  # a tracker without the picture is better than none
                self._said(f"trackers are without the picture of the graph: {error}")
                self._drawn = b""
        return self._drawn

    def _keep(self, name: str, known: str) -> None:
        """Note the id under which a tracker knows the run."""
        with self._lock:
            ids = read_ids(self._path) | {name: known}
            write_atomic(self._path / FILE, json.dumps(ids, indent=1).encode(), FILE_POINTS)


def read_ids(path: Path) -> dict[str, str]:
    """The ids of a run in the directory `path`, by tracker; none where none was noted."""
    found = read_document(path / FILE) or {}
    return {str(name): str(known) for name, known in found.items()}


def chosen_trackers(asked: Sequence[str], declared: Sequence[str]) -> tuple[str, ...]:
    """The trackers of a run: those that the command line names, else the pipeline's.

    Raises UsageError E340 for a name that is none, E341 where one is not installed.
    """
    findings = tracker_findings(asked, "--track")
    if findings:
        raise UsageError(*findings, summary="Nothing was started.")
    names = tracker_names(asked) if asked else tuple(declared)
    used = [tracker_of(name) for name in names]
    missing = [name for name in used if find_spec(TRACKERS[name]) is None]
    if missing:
        raise UsageError(*map(_missing, missing), summary="Nothing was started.")
    return names


def _nobody(text: str) -> None:
    """Nobody is told before a run begins."""


def _no_tables(last: bool) -> Sequence[Table]:
    """No rows for trackers of a run whose rows nobody finds."""
    return ()


def _missing(name: str) -> Finding:
    return Finding(
        code="E341",
        what=f"tracker {name!r} is not installed",
        got=f"no package {TRACKERS[name]!r} in this environment",
        fix=f"{INSTALL[name]}   or another tracker, or none: --track none",
    )


def _opened(name: str) -> Opened:
    """What opens a tracker; it is loaded in the thread that needs it.

    Raises ImportError for a package that is there and fails while it is imported, in any way.
    """
    try:
        import_module(TRACKERS[name])
    except BaseException as error:  # SystemExit too: of a package, this is no end of a run
        what = f"package {TRACKERS[name]!r} is installed and fails at import"
        raise ImportError(f"{what} ({error_text(error)}): {INSTALL[name]}") from error
    found: Opened = resolve_name(f"rlflow.runtime.record.trackers.{CLASSES[name]}")
    return found
