"""What is kept of a run for the estimates of later plans: read from its directory, added up.

Knows a run directory and a plan; when to keep anything is said elsewhere.
"""

from __future__ import annotations

from pathlib import Path

from rlflow.errors import RunDirError
from rlflow.runtime.record.metrics import read_metrics
from rlflow.runtime.record.rundir import RunDir
from rlflow.runtime.record.spans import read_spans
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.devices.measured import Origin, add_to_file
from rlflow.scheduler.observed import Found, samples
from rlflow.scheduler.plan.plan import Plan


def observed(
    plan: Plan, costs: Costs, directory: RunDir, *, begun: int, origin: Origin
) -> list[Found]:
    """The samples of a session that began with iteration `begun`. Raises RunDirError."""
    spans = read_spans(directory.spans)
    figures = [(line.iteration, line.metrics) for line in read_metrics(directory.metrics)]
    return samples(plan, costs, spans, figures, begun=begun, origin=origin)


def write_back(
    plan: Plan, costs: Costs, directory: RunDir, path: Path, *, begun: int, origin: Origin
) -> str:
    """Add a session's samples to the file of measured costs; what went wrong, `` if nothing.

    A run is never lost to its measurements: what the disk refuses is said and left.
    """
    try:
        found = observed(plan, costs, directory, begun=begun, origin=origin)
        if found:
            add_to_file(path, found)
    except (OSError, RunDirError) as error:
        return f"measured costs are not kept: {error}"
    return ""
