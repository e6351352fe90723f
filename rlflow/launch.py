"""`rlflow run`: from a command line to a run, with everything checked before it starts.

The one door from the command line to the runtime: torch is imported here, once the
graph and the plan are known to be right.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.commands import (
    NOTHING,
    Declared,
    Planned,
    Target,
    costs_of,
    data_findings,
    declare,
    plan_declared,
)
from rlflow.errors import Finding, Interrupted, UsageError
from rlflow.graph.engine_options import EngineOptions
from rlflow.graph.graph import Graph
from rlflow.interpreters import engine_python, missing_engine
from rlflow.runtime.rundir import RunDir, latest_run
from rlflow.scheduler.measured import Origin, costs_path
from rlflow.scheduler.plan import Plan
from rlflow.scheduler.text import plan_text

if TYPE_CHECKING:
    from rlflow.runtime.display import Display


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
class Asked:
    """What the command line asks of a run, besides the plan."""

    iterations: int
    run_dir: str | None
    existing: Path | None
    save_every: int
    quiet: bool
    address: str | None
    check_sync: bool
    deadline: float
    origin: Origin


def launch(
    *,
    dry_run: bool,
    iterations: int | None,
    run_dir: str | None,
    resume: str | None,
    save_every: int,
    quiet: bool,
    as_json: bool,
    no_color: bool,
    address: str | None,
    check_sync: bool,
    deadline: float,
    origin: Origin = "run",
    **options: Any,
) -> Outcome:
    """Compile, check, and run; or compile and check only.

    A run whose `origin` is `profile` saves no weights.
    """
    if address is not None:
        options["backend"] = _joining(options.get("backend"), address)
    target = Target(**options)
    declared = declare(target)
    findings = data_findings(declared.graph, remote=True)
    if findings:
        raise UsageError(*findings, summary=NOTHING)
    if address is not None:
        target = replace(target, rooms=_rooms(address, target))
    existing = _existing_run(resume, run_dir, target.pipeline) if resume else None
    if existing is not None:
        target = in_the_same_chunks(declared, target, existing)
    planned = plan_declared(declared, target)
    plan = planned.compiled.plan
    _require_one_kind(planned)
    _require_engines(plan, address)
    count = iterations or planned.declared.config.iterations
    if dry_run:
        _preflight(plan.graph, planned)
        said = f"  dry run: {count} iterations would run; nothing was started"
        text = "" if as_json else f"{plan_text(plan)}\n\n{said}"
        return Outcome(run_dir=None, iterations=0, metrics={}, text=text)
    if no_color:
        os.environ["NO_COLOR"] = "1"
    asked = Asked(
        iterations=count,
        run_dir=run_dir,
        existing=existing,
        save_every=save_every,
        quiet=quiet or as_json,
        address=address,
        check_sync=check_sync,
        deadline=deadline,
        origin=origin,
    )
    return _execute(planned, asked)


def _require_one_kind(planned: Planned) -> None:
    """Raise UsageError for devices of several kinds: they are planned for, and not reserved."""
    if planned.cluster.groups:
        raise UsageError(
            Finding(
                code="E235",
                what=f"a run takes devices of one kind, --devices {planned.target.devices} has "
                f"{len(planned.cluster.groups)}",
                expected="one kind; plan, simulate and tune take several",
            )
        )


def _require_engines(plan: Plan, address: str | None) -> None:
    """Raise UsageError where an engine's interpreter has no engine; on other machines, they say."""
    wanted: dict[tuple[type[EngineOptions], str], list[str]] = {}
    for instance in plan.instances if address is None else ():
        if instance.options is not None and instance.options.packages:
            kind = type(instance.options)
            python = engine_python(kind, instance.options.python)
            wanted.setdefault((kind, python), []).append(instance.name)
    found = [missing_engine(names, *where) for where, names in wanted.items()]
    findings = [finding for finding in found if finding is not None]
    if findings:
        raise UsageError(*findings, summary=NOTHING)


def _joining(backend: str | None, address: str) -> str:
    """The backend of a run that joins a cluster."""
    if backend == "local":
        raise UsageError(
            Finding(
                code="E222",
                what=f"--address {address} joins a Ray cluster, --backend local uses none",
                fix="leave out one of the two",
            )
        )
    return "ray"


def _rooms(address: str, target: Target) -> tuple[int, ...]:
    """How many devices each node of a running cluster has room for."""
    from rlflow.runtime.on_ray.pools import rooms
    from rlflow.runtime.on_ray.session import Session

    kind = (target.devices or "cpu").partition(":")[0]
    with closing(Session.start(address=address, cpus=0)) as session:
        return rooms(session, kind=kind, threads=target.threads or 1)


def _existing_run(resume: str, run_dir: str | None, pipeline: str) -> Path:
    """The run that `--resume` names; without a name `--run-dir`, or else the latest one."""
    if resume != "latest":
        return Path(resume)
    return Path(run_dir) if run_dir else latest_run(pipeline=pipeline)


def in_the_same_chunks(declared: Declared, target: Target, existing: Path) -> Target:
    """The target with the chunks of the run that goes on, where they are chosen by estimates.

    Another number would be as right, but sums of ragged rows would be of other bits. Steps in the
    background are chunks whatever `stream` is; those begin no chain.
    """
    _, placement = declared.pipeline.placement(target.placement)
    said = target.stream or str(placement.stream)
    try:
        actions = json.loads((existing / "plan.json").read_text(encoding="utf-8"))["actions"]
    except (OSError, ValueError, KeyError):
        return target
    chunks = [action["chunk"]["count"] for action in actions if action.get("begins")]
    return replace(target, stream=str(max(chunks, default=1))) if said == "auto" else target


def _preflight(graph: Graph, planned: Planned) -> None:
    from rlflow.runtime.preflight import check_prompts, check_rewards

    check_prompts(graph, planned.declared.pipeline.path)
    check_rewards(graph)


def _execute(planned: Planned, asked: Asked) -> Outcome:
    os.environ.setdefault("OMP_NUM_THREADS", str(planned.cluster.threads))
    from rich.console import Console

    from rlflow.runtime.display import Display
    from rlflow.runtime.metrics import read_metrics
    from rlflow.runtime.run import Run, Settings

    plan, near = planned.compiled.plan, planned.declared.pipeline.path
    config = planned.declared.config
    display = Display(Console(stderr=True), quiet=asked.quiet)
    with _directory(planned, asked) as directory:
        _preflight(plan.graph, planned)
        display.say(plan_text(plan))
        settings = Settings(
            seed=config.seed,
            iterations=asked.iterations,
            threads=planned.cluster.threads,
            save_every=asked.save_every,
            near=near,
            resume_line=resume_line(planned, asked, directory.path),
        )
        with _machine(planned, asked) as machine:
            ranks = "\n".join(["", *machine.device_map()])
            display.say(f"{ranks}\nrun directory: {directory.path}")
            directory.write_config(config.model_dump(mode="json"))
            directory.write_graph(plan.graph.to_json())
            directory.write_plan(f"{plan_text(plan)}\n{ranks}", plan.to_json())
            run = Run(plan, settings, machine, directory, display)
            if asked.origin == "profile":
                run.saved = asked.iterations
            with _measured(planned, directory, display, begun=run.start, origin=asked.origin):
                done = run.execute()
    lines = read_metrics(directory.metrics)
    return Outcome(
        run_dir=directory.path,
        iterations=done,
        metrics=dict(lines[-1].metrics) if lines else {},
        text="" if asked.quiet else _summary(directory.path),
        planned=planned,
    )


@contextmanager
def _measured(
    planned: Planned, directory: RunDir, display: Display, *, begun: int, origin: Origin
) -> Iterator[None]:
    """Keep what the run inside took, for later plans, where it ends well or is stopped."""
    from rlflow.runtime.calibration import write_back

    def keep() -> None:
        path = costs_path()
        if path is None:
            return
        plan, costs = planned.compiled.plan, costs_of(planned)
        problem = write_back(plan, costs, directory, path, begun=begun, origin=origin)
        if problem:
            display.warn(problem)

    try:
        yield
    except Interrupted:
        keep()
        raise
    keep()


@contextmanager
def _directory(planned: Planned, asked: Asked) -> Iterator[RunDir]:
    """The run directory, locked; a new one in which no run began is removed again."""
    if asked.existing:
        with RunDir.open(asked.existing) as directory:
            yield directory
        return
    with RunDir.create(
        Path(asked.run_dir) if asked.run_dir else None,
        planned.compiled.plan.graph.name,
        pipeline=planned.target.pipeline,
        command=["rlflow", *sys.argv[1:]],
    ) as directory:
        try:
            yield directory
        finally:
            if not (directory.path / "plan.json").exists():
                directory.remove()


@contextmanager
def _machine(planned: Planned, asked: Asked) -> Iterator[Any]:
    """Where the plan runs, with its models loaded; closed whatever happens."""
    from rlflow.runtime.allocator import keep_freed_memory
    from rlflow.runtime.durable import check_armed

    plan, near = planned.compiled.plan, planned.declared.pipeline.path
    seed, threads = planned.declared.config.seed, planned.cluster.threads
    machine: Any
    if plan.backend == "local":
        from rlflow.runtime.local import LocalMachine
        from rlflow.runtime.worker import Worker

        check_armed()
        keep_freed_memory()
        machine = LocalMachine(
            plan, Worker(plan, seed=seed, near=near, check_sync=asked.check_sync), threads=threads
        )
    else:
        from rlflow.runtime.on_ray.machine import Options, RayMachine

        check_armed()
        machine = RayMachine(
            plan,
            Options(
                kind=planned.cluster.kind.name,
                threads=threads,
                seed=seed,
                near=near,
                deadline=asked.deadline,
                check_sync=asked.check_sync,
                address=asked.address,
            ),
        )
    try:
        yield machine
    finally:
        machine.close()


def resume_line(planned: Planned, asked: Asked, path: Path) -> str:
    """The command that continues a run."""
    target = planned.target
    words = ["rlflow", "run", target.pipeline]
    words += ["--placement", planned.compiled.plan.placement]
    for setting in target.settings:
        words += ["--set", setting]
    words += ["--devices", target.devices] if target.devices else []
    words += ["--threads", str(target.threads)] if target.threads else []
    words += ["--backend", target.backend] if target.backend else []
    words += ["--staleness", str(target.staleness)] if target.staleness is not None else []
    words += ["--pause-at", str(target.pause_at)] if target.pause_at is not None else []
    words += ["--stream", target.stream] if target.stream else []
    words += ["--optimize", f"{target.optimize:g}"] if target.optimize else []
    words += ["--address", asked.address] if asked.address else []
    words += ["--check-sync"] if asked.check_sync else []
    words += ["--iterations", str(asked.iterations), "--save-every", str(asked.save_every)]
    return shlex.join([*words, "--resume", str(path)])


def _summary(path: Path) -> str:
    from rlflow.viz.report import summary_text

    return summary_text(path)
