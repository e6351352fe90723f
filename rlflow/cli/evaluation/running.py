"""An evaluation from its words to its numbers: the terms, a snapshot of the weights, one run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from rlflow.cli.commands import Declared, Target, declare
from rlflow.cli.door.events import RunWatch
from rlflow.cli.evaluation.declared import Counted, evaluation_graph, ks_of
from rlflow.cli.evaluation.shown import Evaluated
from rlflow.cli.evaluation.terms import Terms, answer_named, changed_terms, terms_of
from rlflow.cli.evaluation.weights import NamedWeights, snapshot_of
from rlflow.cli.options import read_run
from rlflow.cli.running import Outcome, run_as_asked
from rlflow.errors import Finding, RunDirError, UsageError, printable
from rlflow.graph.cut.part import GraphPart
from rlflow.graph.graph import Graph
from rlflow.modelfiles.directories import model_directory
from rlflow.ops.evaluating.passing import PassRule
from rlflow.runtime.record.rundir import RUN_FILE, RunDir
from rlflow.runtime.record.stages import telling

EVALS = Path("evals")
TARGET_OPTIONS = ("devices", "threads", "host_memory", "reserve", "backend", "engine")
RUN_OPTIONS = (*TARGET_OPTIONS, "address", "deadline", "run_dir", "dry_run", "quiet", "no_color")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What is evaluated, on which terms, and what the command line says of the run."""

    named: NamedWeights
    target: Target
    declared: Declared
    terms: Terms
    counted: Counted
    options: Mapping[str, Any]

    @property
    def parent(self) -> Path:
        """Where the directory of the evaluation lies, and its weights while it runs."""
        said = self.options["run_dir"]
        return Path(said).parent if said else EVALS

    @property
    def text(self) -> str:
        """Which weights these are."""
        return self.named.text(self.terms.model.name)


def evaluate_named(
    named: NamedWeights,
    again: tuple[str, ...],
    options: Mapping[str, Any],
    *,
    watch: RunWatch | None = None,
) -> Evaluated | None:
    """Evaluate what is named, by the options of `rlflow eval`; None of a dry run.

    `again` are the words after `rlflow` that do so; a program that looks on is told by `watch`.
    Raises what is wrong with the words before any weight is read, then what `rlflow run` raises.
    """
    asked = _asked(named, options)
    # A plan is the same for any weights of a model: a dry run writes none.
    sampled = replace(named, checkpoint=None) if options["dry_run"] else named
    near, quiet = asked.declared.pipeline.path, options["quiet"] or options["as_json"]
    with (
        telling(Console(stderr=True), quiet=quiet),
        snapshot_of(sampled, asked.terms.model, near, asked.parent) as model,
    ):
        graph = evaluation_graph(asked.declared.whole, asked.terms, model, asked.counted)
        outcome = _launched(asked, graph, again, watch)
    if outcome.run_dir is None:
        click.echo(printable(outcome.text))
        return None
    kept = asked.named.path or asked.terms.model.path  # what stays of the snapshot: a tokenizer
    with RunDir.open(outcome.run_dir) as directory:
        directory.note(evaluated=asked.text, tokenizer=str(model_directory(kept, near) or kept))
    return Evaluated(
        weights=asked.text,
        checkpoint=asked.named.checkpoint,
        terms=asked.terms,
        counted=asked.counted,
        seed=options["seed"],
        run_dir=outcome.run_dir,
        metrics=outcome.metrics,
    )


def _asked(named: NamedWeights, options: Mapping[str, Any]) -> _Asked:
    """Everything that can be known, and be wrong, before weights are read."""
    _require_free(options["run_dir"])
    rule, ks = PassRule.parse(options["passes"]), ks_of(options["n"], options["ks"])
    own = options["pipeline"] in (None, named.pipeline)
    target = Target(
        pipeline=options["pipeline"] or named.pipeline or _no_pipeline(named),
        placement=options["placement"] or (named.placement if own else None),
        settings=(*(named.settings if own else ()), *options["settings"]),
        config=options.get("config"),
        **{key: options[key] for key in TARGET_OPTIONS},
    )
    declared = declare(target)
    terms = terms_of(declared.whole, options["node"], options["model"], options["n"])
    names = getattr(declared.pipeline.function, "__globals__", {})
    answer = answer_named(options["answer"], names)
    terms = changed_terms(terms, options)
    findings = terms.data.check()
    if findings:
        raise UsageError(*findings, summary="Nothing was started.")
    return _Asked(
        named=named,
        target=target,
        declared=declared,
        terms=terms,
        counted=Counted(n=options["n"], ks=ks, rule=rule, answer=answer),
        options=options,
    )


def _launched(
    asked: _Asked, graph: Graph, again: tuple[str, ...], watch: RunWatch | None
) -> Outcome:
    """Run the graph once, with all of its rows recorded, as `rlflow run` would."""
    options, whole = asked.options, asked.declared
    rollout = next(node.name for node in graph.nodes if node.op.name == "rollout")
    config = whole.config.model_copy(update={"seed": options["seed"], "iterations": 1})
    part = GraphPart(graph=graph, notes=(("part", f"evaluated: {asked.text}"),))
    said = {
        **read_run([asked.target.named]),
        **{key: options[key] for key in RUN_OPTIONS},
        "placement": asked.target.placement,
        "settings": asked.target.settings,
        "iterations": 1,
        "track": ("none",),
        "record": (rollout, "reward"),
        "declared": replace(whole, config=config, part=part),
        "parent": asked.parent,
        "again": again,
    }
    return run_as_asked(**{**said, "as_json": options["as_json"]}, watch=watch)


def _no_pipeline(named: NamedWeights) -> str:
    raise UsageError(
        Finding(
            code="E367",
            what=f"{named.said} does not say on which data and by which reward it is evaluated",
            expected="a pipeline that does: its first ops.evaluate, or its rollout and reward",
            fix=f"rlflow eval {named.said} --pipeline FILE.py",
        ),
        summary="Nothing was started.",
    )


def _require_free(run_dir: str | None) -> None:
    """Raise RunDirError where the directory of an evaluation holds a run already."""
    if run_dir and (Path(run_dir) / RUN_FILE).is_file():
        raise RunDirError(
            Finding(
                code="E368",
                what=f"{run_dir} holds a run already, and an evaluation is a new one",
                fix="another --run-dir, or none",
            )
        )
