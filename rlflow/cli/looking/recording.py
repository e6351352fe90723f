"""What a run is asked to record: by `--record`, else by its pipeline, else the default."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlflow.cli.commands import Planned
from rlflow.errors import UsageError
from rlflow.graph.user.recording import read_rules
from rlflow.runtime.record.edges.choice import Recording, recording_of
from rlflow.runtime.record.edges.keeping import Tells
from rlflow.runtime.record.rundir import RunDir


def recording_asked(planned: Planned, options: Mapping[str, Any], run: Path) -> Recording:
    """What a run in a directory records.

    Raises UsageError E318 and E319 for what cannot be recorded.
    """
    rules = read_rules(options["record"], UsageError)
    if rules is None:
        rules = planned.declared.pipeline.record
    return recording_of(
        planned.compiled.plan.graph,
        rules,
        run.resolve(),
        int(options["record_cap"] * 1e9),
        planned.declared.graph,
    )


def recording_noted(
    planned: Planned, options: Mapping[str, Any], directory: RunDir, display: Tells
) -> Recording:
    """What a run records, told to the user and noted in its run.json."""
    recording = recording_asked(planned, options, directory.path)
    display.say(f"  {recording.line()}")
    directory.note(record=[*recording.rules()])
    return recording
