"""What a replay reads and computes: which edges come from the record, and what came of it.

The run that it makes is an ordinary one, of a part of the graph and of one iteration.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import click

from rlflow.cli.commands import Planned, Target, compile_target
from rlflow.cli.continuing import in_the_same_chunks
from rlflow.cli.options import read_run
from rlflow.cli.running import run_as_asked
from rlflow.cli.stages.changed import changed_since, notes_of
from rlflow.cli.stages.replayable import (
    ReplayedEdges,
    checkpoint_before,
    edges_read,
    require_done,
)
from rlflow.graph.graph import Node
from rlflow.graph.roles import Learning, Recorded
from rlflow.report.compared.update import Replayed, figures_beside, rows_beside
from rlflow.runtime.record.identity.documents import read_document
from rlflow.runtime.record.manifest import checkpoint_name
from rlflow.runtime.record.replaying.present import whole_edges
from rlflow.runtime.record.rundir import RunDir, words_again

BAND = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A replay before it runs: whose, of which iteration, what it reads and where it writes."""

    directory: RunDir
    iteration: int
    reading: ReplayedEdges
    begin: Path | None
    written: Path
    planned: Planned


def replayed(
    run: Path,
    iteration: int,
    *,
    starts: Sequence[str] = (),
    settings: Sequence[str] = (),
    written: str | None = None,
    **changed: Any,
) -> Replayed:
    """Compute the updates of an iteration again, in a run directory of its own.

    `changed` are options of `rlflow run` that are to be others. Raises UsageError E346 where the
    run has not come so far or trains nothing in the iteration, E347 where it does not keep the
    checkpoint from before it, E335 where what was sampled is not recorded whole, E330 for a node
    that is none, E348 where it was sampled with other weights; and what a run raises.
    """
    directory = RunDir.view(run)
    said = read_run(words_again(directory.read_run())[1:])
    options = {**said, **{name: value for name, value in changed.items() if value is not None}}
    options["settings"] = (*said["settings"], *settings)
    target = Target(**{key: options[key] for key in options.keys() & Target.__slots__})
    planned = compile_target(target)
    plan = planned.compiled.plan
    require_done(directory, plan.graph, iteration)
    begin = checkpoint_before(directory, plan, iteration)
    reading = edges_read(planned, directory, iteration, starts, begin)
    if changed.get("placement") is None:
        same = in_the_same_chunks(planned.declared, target, run)
        options |= {"stream": same.stream, "groups": same.groups}
    asked = _Asked(
        directory=directory,
        iteration=iteration,
        reading=reading,
        begin=begin if isinstance(begin, Path) else None,
        written=Path(written) if written else _fresh(run, iteration),
        planned=planned,
    )
    click.echo(f"computing iteration {iteration} again in {asked.written}", err=True)
    outcome = run_as_asked(**_options(asked, options))
    assert outcome.planned is not None, "what is no dry run was planned"
    return _beside(asked, outcome.planned)


def _options(asked: _Asked, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the run that computes the iteration again."""
    noted = asked.directory.read_run().get("weights")
    return {
        **options,
        "only": asked.reading.updates,
        "from_": tuple(f"{run}:{node}" for node, run in asked.reading.read.items()),
        "record": asked.reading.again or ("none",),
        "iterations": asked.iteration + 1,
        "run_dir": str(asked.written),
        "begin": asked.begin,
        "from_weights": noted if asked.begin is None else None,
        "replayed": sys.argv[1:],
        "resume": None,
        "allow_changes": None,
        "dry_run": False,
        "quiet": True,
        "as_json": False,
        "keep_best": None,
        "save_every": "50",
        "track": ("none",),
        "profile_actions": (),
        "profile_iterations": None,
    }


def _beside(asked: _Asked, now: Planned) -> Replayed:
    """Both updates side by side; weights are read, and where they differ tokens are scored."""
    from rlflow.runtime.record.replaying.weights import weights_moved

    run, iteration = asked.directory.path, asked.iteration
    after = asked.directory.checkpoints / checkpoint_name(iteration + 1)
    kept = after if after.is_dir() else None
    made = asked.written / "checkpoints" / checkpoint_name(iteration + 1)
    noted = asked.directory.read_run().get("weights")
    before = asked.begin or (None if noted is None else Path(str(noted)))
    weights = weights_moved(before, kept, made)
    differ = {each.model for each in weights if each.same is False}
    graph = now.compiled.plan.graph
    nodes = [node for node in graph.nodes if kept is not None and node.model in differ]
    scored = [_ratios(asked, now, node, (kept, made)) for node in nodes]
    begin = "the models as they are loaded" if before is None else str(before)
    return Replayed(
        run=str(run),
        replay=str(asked.written),
        iteration=iteration,
        begin=begin,
        read=asked.reading.read,
        computed=[node.name for node in graph.nodes if _computes(node)],
        changed=changed_since(asked.directory, asked.planned),
        figures=figures_beside(run, asked.written, iteration),
        rows=rows_beside(run, asked.written, iteration),
        weights=weights,
        ratios=[each for each in scored if each is not None],
        notes=[*asked.reading.notes, *notes_of(run, now.compiled.plan, kept, iteration)],
    )


def _computes(node: Node) -> bool:
    return node.role(Recorded) is None and bool(node.op.outputs or node.op.use)


def _ratios(asked: _Asked, now: Planned, node: Node, checkpoints: tuple[Path | None, Path]) -> Any:
    """What both updates made of the tokens of a node; None of one that reads no such tokens."""
    from rlflow.runtime.record.replaying.ratios import FIELDS, token_ratios

    after, again = checkpoints
    learning, graph = node.role(Learning), now.compiled.plan.graph
    places = {bound.name: bound for bound in node.inputs if bound.name in FIELDS}
    if after is None or learning is None or node.model is None or set(places) != set(FIELDS):
        return None
    own = whole_edges(asked.written, asked.iteration)
    where = {}
    for name, bound in places.items():
        record = asked.reading.read.get(bound.source)
        if record is None and bound.source not in own:
            return None
        where[name] = (Path(record or asked.written), bound.source, bound.field.name)
    model = graph.model(node.model)
    spec = (read_document(asked.directory.path / "graph.json") or {}).get("models", [])
    was = next((each["dtype"] for each in spec if each["name"] == model.name), model.dtype)
    return token_ratios(
        (model.model_copy(update={"dtype": was}), model),
        where,
        asked.iteration,
        (after, again),
        near=now.declared.pipeline.path,
        seed=now.declared.config.seed,
        temperature=learning.temperature or 1.0,
        band=BAND,
    )


def _fresh(run: Path, iteration: int) -> Path:
    """A directory for a replay that nobody has yet."""
    name = run / "replays" / checkpoint_name(iteration)
    names = (name if n == 1 else name.with_name(f"{name.name}-{n}") for n in count(1))
    return next(each for each in names if not each.exists())
