"""What a run is asked to record: by `--record`, else by its pipeline, else the default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlflow.cli.commands import Planned
from rlflow.errors import UsageError
from rlflow.graph.rules.nesting import declared_name
from rlflow.graph.user.recording import RecordRule, read_rules
from rlflow.runtime.record.edges.choice import Recording, recording_of
from rlflow.runtime.record.edges.keeping import Tells
from rlflow.runtime.record.rundir import RunDir


def recording_asked(planned: Planned, options: Mapping[str, Any], run: Path) -> Recording:
    """What a run in a directory records: of nodes that `--only` names, all rows, for those to come.

    Raises UsageError E318 and E319 for what cannot be recorded.
    """
    said = read_rules(options["record"], UsageError)
    rules = planned.declared.pipeline.record if said is None else said
    graph, cap = planned.compiled.plan.graph, int(options["record_cap"] * 1e9)
    found = recording_of(graph, rules, run.resolve(), cap, planned.declared.graph)
    if said is not None:
        return found
    making = {declared_name(node.name) for node in graph.nodes if node.op.outputs}
    named = [RecordRule(edge=name) for name in planned.target.only if name in making]
    whole = recording_of(graph, named, run.resolve(), cap, planned.declared.graph)
    return replace(found, chosen=tuple({**found.by_node, **whole.by_node}.values()))


def recording_noted(
    planned: Planned, options: Mapping[str, Any], directory: RunDir, display: Tells
) -> Recording:
    """What a run records, told to the user and noted in its run.json."""
    recording = recording_asked(planned, options, directory.home)
    display.say(f"  {recording.line()}")
    directory.note(record=[*recording.rules()])
    return recording
