"""Where a run begins: after a checkpoint of its own, or on the weights of another run.

Compares what was saved with what goes on, and finds the weights that a new run starts from.
Loads no tensor.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.errors import CheckpointError, Finding, RunDirError
from rlflow.graph.cut.whole import whole_rollouts
from rlflow.runtime.record.changes import Change, changes_of, require_allowed
from rlflow.runtime.record.checkpoint import (
    LATEST,
    Found,
    find_checkpoint,
    list_checkpoints,
    stored_files,
)
from rlflow.runtime.record.edges.secrets import hidden_values
from rlflow.runtime.record.identity.digests import comparable
from rlflow.runtime.record.manifest import MANIFEST, Manifest, read_manifest, verify_checkpoint
from rlflow.runtime.record.rundir import RUN_FILE, RunDir
from rlflow.runtime.worker.node_states import SAVED

if TYPE_CHECKING:
    from rlflow.graph.graph import Graph
    from rlflow.graph.model import Model
    from rlflow.scheduler.plan.plan import Plan

# In the counters of an optimizer: its moments are not those of the file, they begin at zero.
FRESH = "fresh"


def changes_since(
    directory: RunDir,
    saved: Mapping[str, str],
    now: Mapping[str, str],
    graph: Graph,
    allowed: Sequence[str],
) -> tuple[Change, ...]:
    """What has changed since a checkpoint, all of it allowed: now, or when an earlier start was.

    Raises CheckpointError E721 otherwise.
    """
    pair = list(comparable(saved, now))
    if pair[0] == pair[1]:
        return ()
    before = next((g for known, g in _graphs(directory) if known == saved.get("graph")), None)
    here = hidden_values(whole_rollouts(graph).to_json())
    graphs = None if before is None else (before, json.loads(json.dumps(here)))
    found = changes_of(saved, now, graphs)
    known = directory.read_run().get("resumed")
    entries = known if isinstance(known, list) else []
    if not any(_of_the_same(entry, saved, now) for entry in entries):
        require_allowed(str(directory.path), found, allowed)
    return found


def _of_the_same(entry: object, saved: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Whether an earlier start went on from the same to the same, digests where both have them."""
    pair = entry.get("identity") if isinstance(entry, dict) else None
    if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(p, dict) for p in pair):
        return False
    then, there = pair
    return all(one == other for one, other in (comparable(then, saved), comparable(there, now)))


def has_begun(directory: RunDir) -> bool:
    """Whether a run has begun in a directory, so that there is something to continue."""
    return (directory.home / "plan.json").exists()


def newest(directory: RunDir) -> Manifest | None:
    """What the newest checkpoint with a whole manifest says; its other files are not read."""
    for path in reversed(list_checkpoints(directory.checkpoints)):
        try:
            return read_manifest(path)
        except CheckpointError:
            continue
    return None


def require_saved(directory: RunDir) -> None:
    """Raise CheckpointError E727 where a run has saved, and nothing of it is left.

    To begin again would cut its metrics, silently.
    """
    root = directory.checkpoints
    here = list_checkpoints(root) or (root / LATEST).is_symlink() or (root / LATEST).exists()
    if not here and directory.read_run().get("saved") is True:
        raise CheckpointError(
            Finding(
                code="E727",
                what=f"{directory.path} has saved checkpoints, and {root} has none",
                got=f"{directory.metrics.name} and run.json of a run that saved",
                expected="the checkpoints as they were saved",
                fix="put them back, or begin anew with another --run-dir",
            ),
            summary="Nothing was started, nothing was changed.",
        )


def require_more(directory: RunDir, done: int, iterations: int) -> None:
    """A run that is past its end would lose its last evaluation and do nothing: RunDirError."""
    if done > iterations:
        raise RunDirError(
            Finding(
                code="E755",
                what=f"{directory.path} has done {done} iterations already",
                got=f"--iterations {iterations}",
                expected=f"{done} or more",
                fix=f"--iterations {done}",
            )
        )


def require_models(found: Found, plan: Plan) -> None:
    """Raise CheckpointError E753 where a checkpoint lacks a model that a plan trains."""
    for instance in plan.instances:
        if instance.trained:
            _require_model(found, plan.graph.model(instance.model))


def _require_model(found: Found, model: Model) -> None:
    """Raise CheckpointError where a checkpoint lacks a model that the plan trains or averages."""
    name = model.name
    if not {name, *(() if model.averaged else (f"{name}.optimizer",))} <= set(found.files):
        raise CheckpointError(
            Finding(
                code="E753",
                what=f"checkpoint {found.path} has no model {name!r}",
                got=", ".join(sorted(found.files)),
            )
        )


def without_changed(found: Found, changes: Sequence[Change]) -> Found:
    """A checkpoint without what nodes keep whose values have changed: they begin anew."""
    states = found.state.get(SAVED, {})
    assert isinstance(states, dict)
    kept = {
        node: state
        for node, state in states.items()
        if not any(change.path.startswith(f"{node}.") for change in changes)
    }
    return replace(found, state={**found.state, SAVED: kept})


def checkpoint_at(path: Path) -> Found:
    """The checkpoint in a directory, with its states; raises CheckpointError if it is damaged."""
    manifest = verify_checkpoint(path)
    return Found(
        iteration=manifest.iteration,
        files=stored_files(path, manifest),
        state=manifest.state,
        identity=manifest.identity,
        path=path,
        rejected=(),
    )


def weights_of(text: str) -> Found:
    """The weights of a run's newest checkpoint, or of the checkpoint in a directory.

    A copy with the iteration 0 and without states: a run that starts from it is a new one.
    Raises RunDirError E314 for what is neither.
    """
    path = Path(text)
    if (path / MANIFEST).is_file():
        return replace(checkpoint_at(path), iteration=0, state={}, identity={})
    found = find_checkpoint(path / "checkpoints") if (path / RUN_FILE).is_file() else None
    if found is None:
        raise RunDirError(
            Finding(
                code="E314",
                what=f"--from-weights {text}: there is no checkpoint",
                got="no such directory" if not path.exists() else "no checkpoint in it",
                expected="a run directory, or one of its checkpoints, runs/demo/checkpoints/"
                "iteration-000050; weights in Hugging Face form are a model's path in the pipeline",
            ),
            summary="Nothing was started.",
        )
    return replace(found, iteration=0, state={}, identity={})


def _graphs(directory: RunDir) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The graph of a run, then those that it had before: its hash, and what that is made of.

    A graph whose keys are hidden says its hash; that of another is found.
    """
    for text in directory.graphs():
        try:
            graph = json.loads(text)
        except ValueError:
            continue
        # What headlines a run is written beside the graph for reports; it decides no number.
        graph.pop("headline", None)
        known = graph.pop("hash", None)
        yield known or _hash(graph), graph


def _hash(graph: Mapping[str, Any]) -> str:
    blob = json.dumps(graph, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(blob.encode()).hexdigest()


def require_weights(text: str | None) -> None:
    """Raise what `weights_of` raises for weights that a run is to begin with, where it says any."""
    if text:
        weights_of(text)
