"""Recorded samples as tables for a tracker: some of the newest iteration, now and then."""

from __future__ import annotations

import time
from pathlib import Path

from rlflow.errors import RunDirError
from rlflow.report.interactive.samples import plain_rows
from rlflow.report.samples.joined import load_samples
from rlflow.runtime.record.edges.reading import recorded
from rlflow.runtime.record.trackers.feed import Table

MOST_ROWS = 64
# Seconds from one table to the next.
APART = 60.0


class TrackedSamples:
    """Finds what one tracker has not had of a run's samples; only its thread calls it."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._due = 0.0
        self._sent = -1

    def __call__(self, last: bool) -> list[Table]:
        """The samples of the newest iteration that all nodes have, a minute after those before.

        `last` ones come at once.
        """
        if not last and time.monotonic() < self._due:
            return []
        newest = min((found[-1] for found in recorded(self._run).values()), default=-1)
        if newest <= self._sent:
            return []
        try:
            found = load_samples(self._run, None, [newest])
        except RunDirError:
            return []
        columns, rows = plain_rows(found.samples[:MOST_ROWS])
        self._due, self._sent = time.monotonic() + APART, newest
        return [Table(iteration=newest, node=found.node, columns=columns, rows=rows)]
