"""Which run goes on, how far, in which chunks, and what of it has changed. Loads no model."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rlflow.cli.commands import Declared, Planned, Target
from rlflow.cli.config import named_placement
from rlflow.cli.options import run_words
from rlflow.runtime.record.changes import identity_of
from rlflow.runtime.record.checkpoint import Found, list_checkpoints
from rlflow.runtime.record.durable import JSON
from rlflow.runtime.record.identity.documents import read_document
from rlflow.runtime.record.resuming import (
    changes_since,
    checkpoint_at,
    newest,
    require_more,
    require_saved,
    weights_of,
)
from rlflow.runtime.record.rundir import RunDir, latest_run

LAUNCHED = "RLFLOW_LAUNCHED"
"""The variable in which a launch tells its run how it was launched: the words after `rlflow`."""


def launched_words() -> list[str]:
    """The words after `rlflow` that launched this run; none of a run that one typed."""
    return shlex.split(os.environ.get(LAUNCHED, ""))


def words_of_run(options: Mapping[str, Any], placement: str) -> tuple[str, ...]:
    """The words after `rlflow` that say all options but those of one start of a run.

    `placement` is the name of the plan's; one of a file is known by the file alone. The cluster of
    a launched run is gone when the run is: nothing that is done again may wait for its address.
    """
    typed = options["placement"]
    if isinstance(typed, str) and typed.endswith(".py"):
        placement = typed
    once: dict[str, Any] = {"dry_run": False, "run_dir": None, "resume": None, "iterations": None}
    once |= {"from_weights": None, "allow_changes": None}
    once |= {"profile_action": (), "profile_iterations": None}
    if launched_words():
        once |= {"address": None, "wait": None}
    return ("run", *run_words({**options, **once, "placement": placement}))


def iterations_of(planned: Planned, existing: Path | None) -> int:
    """How many iterations there are in all where none are said: a run's own, or the config's."""
    before = read_document(existing / "config.json") if existing is not None else None
    said = (before or {}).get("iterations")
    return said if isinstance(said, int) and said > 0 else planned.declared.config.iterations


def existing_run(resume: str, run_dir: str | None, pipeline: str) -> Path:
    """The run that `--resume` names; without a name `--run-dir`, or else the latest one."""
    if resume != "latest":
        return Path(resume)
    return Path(run_dir) if run_dir else latest_run(pipeline=pipeline)


def in_the_same_chunks(declared: Declared, target: Target, existing: Path) -> Target:
    """The target with the chunks of the run that goes on, where they are chosen by estimates.

    Another number, or groups for rows, would be as right, but sums would be of other bits. Steps
    in the background are chunks whatever `stream` is; those begin no chain. So it is with the
    shares of pools that help, which say of older rows how old they are.
    """
    target = replace(target, shares=_shares(existing))
    _, placement = named_placement(declared.pipeline, target.placement)
    said = target.stream or str(placement.stream)
    plan = read_document(existing / "plan.json")
    if plan is None:
        return target
    begun = [action["chunk"] for action in plan["actions"] if action.get("begins")]
    chunks = [chunk for chunk in begun if chunk is not None]
    if chunks:
        target = replace(target, groups=any(chunk["by"] == "groups" for chunk in chunks))
    count = max((chunk["count"] for chunk in chunks), default=1)
    return replace(target, stream=str(count)) if said == "auto" else target


def _shares(existing: Path) -> tuple[tuple[str, int], ...]:
    """How many prompts of each rollout a pool that helps draws, in a run whose rows are older."""
    nodes = (read_document(existing / "graph.json") or {}).get("nodes", [])
    said = [node["params"] for node in nodes if node["params"].get("helps") == "True"]
    return tuple(
        (each["portion_of"], int(each["to_prompt"]) - int(each["from_prompt"])) for each in said
    )


def weights_to_begin(options: Mapping[str, Any], directory: RunDir) -> Found | None:
    """Where a run begins that does not go on: the weights of another, or a checkpoint with states.

    As asked, or as before where none are saved; a replay has the path of its checkpoint in `begin`.
    Raises RunDirError E314 where they are not there.
    """
    if options.get("begin"):
        return checkpoint_at(Path(options["begin"]))
    asked_for = options["from_weights"]
    if asked_for:
        found = weights_of(asked_for)
        directory.note(weights=str(found.path.resolve()))
        return found
    noted = directory.read_run().get("weights")
    again = options["resume"] and noted and not list_checkpoints(directory.checkpoints)
    return weights_of(str(noted)) if again else None


def first_iteration(begun: Mapping[str, JSON] | None, begins: Found | None) -> int:
    """The iteration that a start of a run is to do first: of one that goes on, or begins so."""
    if begun is not None:
        return int(str(begun["iteration"]))
    return 0 if begins is None else begins.iteration


def goes_on(
    planned: Planned,
    directory: RunDir,
    *,
    iterations: int,
    save_every: int,
    allowed: tuple[str, ...],
    digests: Mapping[str, str],
) -> dict[str, JSON] | None:
    """What run.json is to say of a run that goes on; None of one without a checkpoint.

    Raises E721, E727 and E755 before a model is loaded.
    """
    require_saved(directory)
    saved = newest(directory)
    if saved is None:
        return None
    plan, config = planned.compiled.plan, planned.declared.config
    now = identity_of(
        plan,
        seed=config.seed,
        threads=planned.cluster.threads,
        save_every=save_every,
        torch=version("torch"),
        digests=digests,
    )
    changes = changes_since(directory, saved.identity, now, plan.graph, allowed)
    require_more(directory, saved.iteration, iterations)
    return {
        "command": ["rlflow", *sys.argv[1:]],
        "iteration": saved.iteration,
        "iterations": iterations,
        "changes": {change.path: [change.before, change.now] for change in changes},
        "identity": [dict(saved.identity), now],
    }
