"""What a run has measured of its actions, kept for the plans of later ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rlflow.cli.commands import Planned, costs_of
from rlflow.cli.shell.leaving import unless_stopped
from rlflow.errors import Interrupted
from rlflow.runtime.record.calibration import write_back
from rlflow.runtime.record.rundir import RunDir
from rlflow.scheduler.devices.measured import Origin, costs_path

if TYPE_CHECKING:
    from rlflow.runtime.display import Display


@contextmanager
def costs_kept(
    planned: Planned, directory: RunDir, display: Display, *, begun: int, origin: Origin
) -> Iterator[None]:
    """Keep what the run inside took, where it ends well or is stopped."""

    def keep() -> None:
        path = costs_path()
        if path is None:
            return
        plan, costs = planned.compiled.plan, costs_of(planned)
        problem = write_back(plan, costs, directory, path, begun=begun, origin=origin)
        if problem:
            display.warn(problem)

    unless_stopped()
    try:
        yield
    except Interrupted:
        keep()
        raise
    keep()
