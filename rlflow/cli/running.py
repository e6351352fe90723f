"""`rlflow run`: from a command line to a run, with everything checked before it starts.

The one door from the command line to the runtime: torch is imported here, once the
graph and the plan are known to be right.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.cli.commands import (
    NOTHING,
    Planned,
    Target,
    data_findings,
    declare,
    peaks_of,
    plan_declared,
)
from rlflow.cli.continuing import (
    existing_run,
    first_iteration,
    goes_on,
    in_the_same_chunks,
    iterations_of,
    launched_words,
    weights_to_begin,
    words_of_run,
)
from rlflow.cli.looking.recording import recording_asked, recording_noted
from rlflow.cli.machines import (
    backend_joining,
    machine_of,
    require_engines,
    require_one_kind,
    rooms_at,
)
from rlflow.cli.planning.missing_models import hub_findings
from rlflow.cli.shell.leaving import said_if_ended, unless_stopped
from rlflow.cli.stages.parts import require_trained
from rlflow.cli.tracing.costs import costs_kept
from rlflow.cli.tracing.observing import check_observed, observer_of, profiled_actions
from rlflow.errors import Finding, GraceOver, Interrupted, Preempted, UsageError
from rlflow.graph.cut.whole import whole_rollouts
from rlflow.graph.headline import graph_document, headline
from rlflow.runtime.record.changes import drains
from rlflow.runtime.record.edges.keeping import record_kept
from rlflow.runtime.record.identity.digests import digests_of
from rlflow.runtime.record.metrics import final_metrics
from rlflow.runtime.record.resuming import has_begun, require_weights
from rlflow.runtime.record.rundir import RUN_FILE, RUNS, RunDir, fresh_path
from rlflow.runtime.record.saves import SaveRule, parse_rule
from rlflow.runtime.record.spans import read_spans
from rlflow.runtime.record.stages import stage, telling
from rlflow.runtime.refusals import require_addresses
from rlflow.scheduler.devices.machine import chosen_text, machine_gpus
from rlflow.scheduler.devices.measured import Origin
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.plan.text import plan_text

if TYPE_CHECKING:
    from rich.console import Console

    from rlflow.cli.door.events import RunWatch
    from rlflow.cli.elastic.attempts import Growth
    from rlflow.runtime.record.checkpoint import Found
    from rlflow.runtime.run import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended, for standard output."""

    run_dir: Path | None
    iterations: int
    text: str
    metrics: dict[str, float]
    planned: Planned | None = None

    def as_json(self) -> dict[str, Any]:
        """The outcome as plain data."""
        return {
            "run_dir": str(self.run_dir) if self.run_dir else None,
            "iterations": self.iterations,
            "metrics": self.metrics,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What the command line asks of a run, besides the plan: `options` as `rlflow run` has them.

    `again` are the words after `rlflow` that go on in the same way, but for run and iterations.
    """

    options: Mapping[str, Any]
    again: tuple[str, ...]
    iterations: int
    existing: Path | None
    quiet: bool
    origin: Origin
    saves: SaveRule
    watch: RunWatch | None = None

    @property
    def allowed(self) -> tuple[str, ...]:
        """The names of values that may be others than those that were saved."""
        names = (self.options["allow_changes"] or "").split(",")
        return tuple(name.strip() for name in names if name.strip())

    def resume_line(self, path: Path) -> str:
        """The command that continues the run in a directory."""
        if self.options.get("replayed"):
            return shlex.join(["rlflow", *self.options["replayed"]])
        if self.watch is not None and self.again[0] == "run":
            return f'rf.run(..., resume="{path}")'
        if self.again[0] != "run":
            return shlex.join(["rlflow", *self.again])
        words = ["--iterations", str(self.iterations), "--resume", str(path)]
        return shlex.join(["rlflow", *(launched_words() or self.again), *words])


def run_as_asked(
    *, as_json: bool, origin: Origin = "run", watch: RunWatch | None = None, **options: Any
) -> Outcome:
    """Compile, check, and run; or compile and check only. Takes the options of `rlflow run`.

    Another command may say what is `declared`, the `parent` of the run directory and the words that
    do it `again`; such a run saves no weights.

    A program that looks on is told by `watch`, and keeps its standard output. A run whose `origin`
    is `profile` saves no weights. What it does until the first iteration is told on standard error.
    """
    from rich.console import Console

    if options["no_color"]:
        os.environ["NO_COLOR"] = "1"
    console = Console(stderr=True)
    attempt = partial(_run, console, as_json=as_json, origin=origin, watch=watch)
    with telling(console, quiet=options["quiet"] or as_json):
        if not options.get("elastic") or options["dry_run"]:
            return attempt(options=options)
        from rlflow.cli.elastic.attempts import run_elastic
        from rlflow.runtime.display import Display

        return run_elastic(attempt, options, Display(console).say)


def _run(
    console: Console,
    *,
    as_json: bool,
    origin: Origin,
    watch: RunWatch | None,
    options: dict[str, Any],
) -> Outcome:
    require_addresses()
    address = options["address"]
    if address is not None:
        options["backend"] = backend_joining(options.get("backend"), address)
    target = Target(**{key: options[key] for key in options.keys() & Target.__slots__})
    options["pipeline"] = target.named
    declared = options.get("declared") or declare(target)
    with stage("reading data"):
        findings = data_findings(declared.graph, remote=True)
    if findings:
        raise UsageError(*findings, summary=NOTHING)
    if address is not None:
        target = replace(target, rooms=rooms_at(address, target, wait=options["wait"] or 0.0))
    resume = options["resume"]
    existing = existing_run(resume, options["run_dir"], target.named) if resume else None
    if existing is not None:
        RunDir.view(existing)
        target = in_the_same_chunks(declared, target, existing)
    missing = hub_findings(declared.graph, declared.pipeline.path, needed=True)
    if missing:
        raise UsageError(*missing, summary=NOTHING)
    with stage("planning"):
        planned = plan_declared(declared, target)
    plan = planned.compiled.plan
    require_one_kind(planned)
    require_engines(plan, address)
    count = options["iterations"] or iterations_of(planned, existing)
    saves = _checked_options(options, plan)
    check_observed(planned, options)
    recording = recording_asked(planned, options, Path(options["run_dir"] or "."))
    if options["dry_run"]:
        _preflight(planned, count)
        require_weights(options["from_weights"])
        said = f"  {recording.line()}\n  dry run: {count} iterations would run; nothing was started"
        text = "" if as_json else f"{plan_text(plan)}\n\n{said}"
        return Outcome(run_dir=None, iterations=0, metrics={}, text=text)
    asked = _Asked(
        options=options,
        again=options.get("again") or words_of_run({**options, "as_json": as_json}, plan.placement),
        iterations=count,
        existing=existing,
        quiet=options["quiet"] or as_json,
        origin=origin,
        saves=saves,
        watch=watch,
    )
    return _execute(planned, asked, console)


def _checked_options(options: Mapping[str, Any], plan: Plan) -> SaveRule:
    """When checkpoints are due; UsageError for options of `rlflow run` that do not go together."""
    if options["from_weights"] and options["resume"]:
        what = "--resume continues a run on its own weights, --from-weights starts a new one"
        raise UsageError(Finding(code="E315", what=what, fix="leave out one of the two"))
    if options["allow_changes"] and not options["resume"]:
        what = "--allow-changes: nothing was saved by a run that starts"
        raise UsageError(Finding(code="E315", what=what, fix="--resume RUN, or leave it out"))
    require_trained(options["from_weights"], plan)
    return parse_rule(options["save_every"], drains=drains(plan))


def _preflight(planned: Planned, count: int, start: int = 0) -> None:
    """Look at all that the iterations from `start` to `count` will read."""
    from rlflow.runtime.preflight import check_prompts, check_rewards
    from rlflow.runtime.record.replaying.present import require_recorded

    unless_stopped()
    graph = planned.compiled.plan.graph
    require_recorded(graph, range(start, count))
    check_prompts(graph, planned.declared.pipeline.path)
    check_rewards(graph)


def _execute(planned: Planned, asked: _Asked, console: Console) -> Outcome:
    os.environ.setdefault("OMP_NUM_THREADS", str(planned.cluster.threads))
    from rlflow.report.report import summary_text
    from rlflow.runtime.display import Display
    from rlflow.runtime.record.printed import FILE, PrintedLog, printed_apart

    with stage("importing torch"):
        from rlflow.runtime.run import Run
    plan, looking = planned.compiled.plan, asked.watch
    names = headline(plan.graph).names
    display = Display(console, quiet=asked.quiet, headline=names, watch=looking)
    with (
        _interrupted(asked, plan.graph.name) as where,
        _directory(planned, asked, where) as directory,
        chdir("."),  # which functions may leave
        printed_apart(PrintedLog(directory.logs / FILE, display.say), looking is None),
    ):
        weights = weights_to_begin(asked.options, directory)
        digests = digests_of(plan.graph, planned.declared.pipeline.path)
        begun = goes_on(
            planned,
            directory,
            iterations=asked.iterations,
            save_every=asked.saves.every,
            allowed=asked.allowed,
            digests=digests,
        )
        _preflight(planned, asked.iterations, first_iteration(begun, weights))
        display.say(plan_text(plan))
        if planned.target.devices is None:
            display.say(f"GPUs: {chosen_text(machine_gpus())}")
        settings = _settings(planned, asked, directory, weights, digests)
        profiled = profiled_actions(planned, asked.options, directory.home)
        recording = recording_noted(planned, asked.options, directory, display)
        with machine_of(planned, asked.options, profiled, recording) as machine:
            ranks = "\n".join(["", *machine.device_map()])
            display.say(f"{ranks}\nrun directory: {directory.path}")
            run = Run(plan, settings, machine, directory, display)
            if begun is not None:
                directory.note_resumed(begun, asked.again)
            _write_plan(planned, asked, directory, ranks)
            if asked.origin == "profile" or "declared" in asked.options:
                run.saved = asked.iterations
            if looking is not None:
                looking.take(run, directory.path)
            growth: Growth | None = asked.options.get("growth")
            if growth is not None:
                growth.take(run, directory.path)
            with (
                costs_kept(planned, directory, display, begun=run.start, origin=asked.origin),
                record_kept(recording, machine.record_notes, run.start, display),
            ):
                done = run.execute()
    return Outcome(
        run_dir=directory.path,
        iterations=done,
        metrics=final_metrics(directory.metrics),
        text="" if asked.quiet else summary_text(directory.path),
        planned=planned,
    )


def _write_plan(planned: Planned, asked: _Asked, directory: RunDir, ranks: str) -> None:
    """Write what runs into the run directory: config, graph, plan, peaks, and where ranks are."""
    plan, said = planned.compiled.plan, planned.declared.config.model_dump(mode="json")
    directory.write_config(said | {"iterations": asked.iterations})
    directory.write_graph(graph_document(whole_rollouts(plan.graph)))
    directory.write_peaks(peaks_of(planned))
    directory.write_plan(f"{plan_text(plan)}\n{ranks}", plan.to_json())


def _settings(
    planned: Planned,
    asked: _Asked,
    directory: RunDir,
    weights: Found | None,
    digests: Mapping[str, str],
) -> Settings:
    """What a run needs besides its plan, as the command line says it."""
    from rlflow.runtime.run import Settings

    return Settings(
        seed=planned.declared.config.seed,
        iterations=asked.iterations,
        threads=planned.cluster.threads,
        save_every=asked.saves.every,
        save_seconds=asked.saves.seconds,
        keep=asked.options["keep"],
        best=asked.options["keep_best"] or "",
        allowed=asked.allowed,
        weights=weights,
        near=planned.declared.pipeline.path,
        resume_line=asked.resume_line(directory.path),
        strict=asked.options["strict"],
        grace=asked.options.get("grace"),
        observer=observer_of(planned, asked.options, directory.home),
        digests=digests,
    )


@contextmanager
def _directory(planned: Planned, asked: _Asked, where: Path) -> Iterator[RunDir]:
    """The run directory, locked; a new one in which no run began is removed again."""
    if asked.existing:
        with RunDir.open(where) as directory:
            read_spans(directory.spans)  # what the run says in the end: damage is told now
            yield directory
        return
    with RunDir.create(
        where,
        pipeline=planned.target.named,
        name=planned.compiled.plan.graph.name,
        command=["rf.run"] if asked.watch else ["rlflow", *sys.argv[1:]],
        again=asked.again,
    ) as directory:
        try:
            yield directory
        finally:
            if not has_begun(directory):
                directory.remove()


@contextmanager
def _interrupted(asked: _Asked, name: str) -> Iterator[Path]:
    """Where the run is to be; from here on a Ctrl-C that stops at once says what it has left."""
    wanted = asked.existing or asked.options["run_dir"]
    where = Path(wanted or fresh_path(asked.options.get("parent", RUNS), name))
    file, again = where.absolute() / RUN_FILE, f"continue with: {asked.resume_line(where)}"

    def left() -> str:
        return again if file.exists() else f"no iteration had begun, so {where} was removed"

    try:
        with said_if_ended(left):
            yield where
    except KeyboardInterrupt as stopped:
        kind = Preempted if isinstance(stopped, GraceOver) else Interrupted
        raise kind(summary=f"stopped at once; {left()}") from None
